#!/bin/sh
# Every check of the project. `--all` adds the long profiles; anything else goes to pytest.
extras=train,demo,dev
. "$(dirname "$0")/../cluster/bootstrap.sh"
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
case " $* " in *" --all "*) "$python" -m tests.bucket.ministack; "$python" -m tests.bucket.ceph ;; esac # made once
exec "$python" -m pytest "$@"
