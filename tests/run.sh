#!/bin/sh
# Every check of the project. `--all` adds the long profiles; anything else goes to pytest.
extras=train,demo,dev
. "$(dirname "$0")/../cluster/bootstrap.sh"
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
case " $* " in *" --all "*) # made once
    for made in ministack_server ceph_server oldest_ray; do "$python" -m "tests.support.$made"; done ;;
esac
# Two at a time: the Ray tests wait most of the time, and must not meet a second Ray. 5: none of them was asked for.
"$python" -m pytest -m "not ray" "$@" &
others=$!
status=0
"$python" -m pytest -m ray "$@" || status=$?
wait "$others" || { rest=$?; [ "$rest" = 5 ] || status=$rest; }
[ "$status" = 5 ] && status=0
exit "$status"
