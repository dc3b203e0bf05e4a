#!/bin/sh
# Every check of the project, for two cores:
#   sh tests/run.sh --quick   before a commit: no Ray, no server, no enumeration
#   sh tests/run.sh           before a merge
#   sh tests/run.sh --all     the long profiles, too
#   sh tests/run.sh --search MINUTES   the property tests with new inputs, again and again for that time
#   sh tests/run.sh --newest  what breaks with the newest of all packages, in an environment of its own
# Anything else goes to pytest, a path for example.
extras=train,demo,dev
. "$(dirname "$0")/../cluster/bootstrap.sh"
cd "$root"
case "${1:-}" in --search)
    shift
    export OMP_NUM_THREADS=1
    exec "$python" -m tests.long.search "$@" ;;
--newest)
    shift
    exec "$python" -m tests.long.newest "$@" ;;
esac
status=0
{ "$python" -m ruff check . && "$python" -m ruff format --check .; } || status=1
[ "$status" = 0 ] || [ -n "${RAYCHECK_PYTHON:-}" ] || exit 1 # another ruff may have other rules
case " $* " in *" --all "*) # made once
    for made in servers.ministack_server servers.seaweed_server servers.ceph_server servers.chromium processes.oldest_ray \
        frameworks.tinker_cookbook frameworks.tinker_oldest_sdk frameworks.deepspeed_training \
        frameworks.megatron_training frameworks.rl_frameworks frameworks.model_streamer \
        frameworks.trackers frameworks.vllm_engine frameworks.sglang_engine; do "$python" -m "tests.support.$made"; done ;;
esac

# Up to six processes at a time: they wait much of the time, and one thread of torch's is enough for each. 5 is
# pytest's status when none of its tests was asked for.
export OMP_NUM_THREADS=1
priority=
unset PYTHONDONTWRITEBYTECODE # or each process that a test starts compiles raycheck anew, for up to half a second
case " $* " in *" --all "*) ;; *) export PYTHONHASHSEED=0 ;; esac # sets have one order; with --all any
tests() { $priority "$python" -m pytest --durations=25 "$@" || [ $? = 5 ]; }
bucket="tests/bucket"
catalog="tests/catalog tests/views tests/page"
training="tests/transfer tests/group"
frameworks="tests/frameworks tests/cli tests/data tests/huggingface"
others() { # every test outside of these folders
    ignored=
    for folder in $bucket $catalog $training $frameworks; do ignored="$ignored --ignore=$folder"; done
    tests $ignored "$@"
}
beside=
case " $* " in
" --quick ")
    tests --quick tests/transfer tests/state &
    beside=$!
    tests --quick --ignore=tests/transfer --ignore=tests/state || status=1
    "$python" -m mypy || status=1 ;;
*" --quick "*)
    tests "$@" &
    beside=$!
    "$python" -m mypy || status=1 ;;
"  " | " --all ") # the Ray tests are one process: they must not meet a second Ray
    tests -m "not ray" $training "$@" & # waits much, as the Ray tests do: both have precedence
    beside=$!
    priority="nice -n 5"
    for folders in "$frameworks" "$bucket" "$catalog"; do
        tests -m "not ray" $folders "$@" &
        beside="$beside $!"
    done
    others -m "not ray" "$@" &
    beside="$beside $!"
    priority=
    tests -m ray "$@" || status=1
    "$python" -m mypy || status=1 ;;
*)
    tests -m "not ray" "$@" &
    beside=$!
    tests -m ray "$@" || status=1
    "$python" -m mypy || status=1 ;;
esac
for process in $beside; do wait "$process" || status=1; done
exit "$status"
