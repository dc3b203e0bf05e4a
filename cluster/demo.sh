#!/bin/sh
# The demo with embedded defaults: train on Ray, save to a bucket, lose a worker, resume. Options: --help
extras=train,demo
. "$(dirname "$0")/bootstrap.sh"
exec "$python" -m raycheck demo "$@"
