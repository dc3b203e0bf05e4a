#!/bin/sh
# The main job on embedded defaults: train on Ray, save to a bucket, lose a worker, go on. Options: --help
extras=train,demo
. "$(dirname "$0")/bootstrap.sh"
exec "$python" -m raycheck demo "$@"
