#!/bin/sh
# Every check of the project, for two cores:
#   sh tests/run.sh --quick   before a commit: no Ray, no server, no enumeration
#   sh tests/run.sh           before a merge
#   sh tests/run.sh --all     the long profiles, too
# Anything else goes to pytest, a path for example.
extras=train,demo,dev
. "$(dirname "$0")/../cluster/bootstrap.sh"
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
case " $* " in *" --all "*) # made once
    for made in ministack_server ceph_server chromium oldest_ray tinker_cookbook tinker_oldest_sdk; do "$python" -m "tests.support.$made"; done ;;
esac

# Two processes at a time, so one thread of torch's is enough for each. 5 is pytest's status when none of its tests was asked for.
export OMP_NUM_THREADS=1
tests() { "$python" -m pytest --durations=25 "$@" || [ $? = 5 ]; }
status=0
case " $* " in
*" --quick "*)
    if [ $# = 1 ]; then
        tests --quick tests/shards &
        beside=$!
        tests --quick --ignore=tests/shards || status=1
    else
        tests "$@" &
        beside=$!
    fi
    "$python" -m mypy || status=1 ;;
*) # the Ray tests wait much of the time, and must not meet a second Ray; what comes after them evens out the two
    case "$*" in ""|--all) last=tests/frameworks ;; *) last= ;; esac
    tests -m "not ray" ${last:+--ignore=$last} "$@" &
    beside=$!
    tests -m ray "$@" || status=1
    [ -z "$last" ] || tests -m "not ray" "$last" "$@" || status=1
    "$python" -m mypy || status=1 ;;
esac
wait "$beside" || status=1
exit "$status"
