"""Memory of a node is claimed once, whoever looks at it meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raycheck.errors import ConfigError
from raycheck.transfer.stage import memory_claims
from raycheck.transfer.stage.host_buffer import HostBuffer
from raycheck.transfer.stage.memory_claims import MemoryClaim, available_bytes, unclaimed_bytes

MIB = 1024 * 1024
GIB = 1024 * MIB
SLACK = 512 * MIB
"""By so much the machine's other programs may change what is available meanwhile."""
CLAIMANT = """
import sys, time
from raycheck.transfer.stage.memory_claims import MemoryClaim
claims = [MemoryClaim(int(size)) for size in sys.argv[1:]]
print("claimed", flush=True)
for line in sys.stdin:
    time.sleep(float(line))
    claims.pop().end()
    print("ended", flush=True)
"""


@contextmanager
def claimant(*sizes: int) -> Iterator["subprocess.Popen[str]"]:
    """Another process that has claimed memory; it ends a claim for each line, so many seconds later."""
    command = [sys.executable, "-c", CLAIMANT, *map(str, sizes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "claimed\n"
            yield process
        finally:
            process.kill()


def end_one(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("0\n")
    process.stdin.flush()
    assert process.stdout.readline() == "ended\n"


def claimed_bytes() -> int:
    left, available = unclaimed_bytes(), available_bytes()
    assert left is not None
    assert available is not None
    return available - left


def test_what_other_processes_have_claimed_is_left_to_them() -> None:
    assert claimed_bytes() < SLACK
    with claimant(2 * GIB, 3 * GIB, 5) as first, claimant(GIB):
        assert abs(claimed_bytes() - 6 * GIB) < SLACK
        with pytest.raises(ConfigError, match="bytes of host memory"):
            MemoryClaim((available_bytes() or 0) - 4 * GIB)
        end_one(first)
        end_one(first)
        assert abs(claimed_bytes() - 3 * GIB) < SLACK
        kept = MemoryClaim((available_bytes() or 0) - 4 * GIB)
        assert (unclaimed_bytes() or 0) < GIB + SLACK
        kept.end()
        kept.end()
        assert abs(claimed_bytes() - 3 * GIB) < SLACK


def test_unequal_ranks_and_other_runs_of_a_node_all_get_what_fits_and_no_more() -> None:
    """A share of what is left, by the ranks of a run on the node, would do neither: it refuses the large rank its six
    tenths, and gives half of the node to a rank of the other run."""
    tenth = (available_bytes() or 0) // 10
    with claimant(6 * tenth), claimant(tenth), claimant(tenth):  # two ranks of a run, and one of another
        assert abs(claimed_bytes() - 8 * tenth) < SLACK
        with pytest.raises(ConfigError, match="bytes of host memory"):
            MemoryClaim(5 * tenth)
        MemoryClaim(tenth).end()


def test_a_process_that_dies_has_claimed_nothing() -> None:
    with claimant(4 * GIB) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()

        assert claimed_bytes() < SLACK


def test_a_claim_that_nobody_holds_any_more_is_over() -> None:
    claim = MemoryClaim(4 * GIB)
    assert claimed_bytes() > 4 * GIB - SLACK

    del claim

    assert claimed_bytes() < SLACK


def test_a_fork_has_no_claims_of_its_parent_and_ends_none() -> None:
    claim = MemoryClaim(4 * GIB)

    child = os.fork()
    if child == 0:
        own = MemoryClaim(GIB)
        is_right = abs(claimed_bytes() - 5 * GIB) < SLACK  # the parent's is another process's
        claim.end()
        is_right &= abs(claimed_bytes() - 5 * GIB) < SLACK
        own.end()
        os._exit(0 if is_right and abs(claimed_bytes() - 4 * GIB) < SLACK else 1)
    _, status = os.waitpid(child, 0)

    assert status == 0
    assert abs(claimed_bytes() - 4 * GIB) < SLACK
    claim.end()


def test_what_other_claims_are_in_the_way_of_waits_for_them() -> None:
    wanted = (available_bytes() or 0) - 2 * GIB
    with claimant(4 * GIB) as other:
        with pytest.raises(ConfigError, match="bytes of host memory"):
            MemoryClaim(wanted)
        assert other.stdin is not None
        other.stdin.write("1\n")
        other.stdin.flush()

        MemoryClaim(wanted, patience_s=30.0).end()


def test_what_can_never_fit_waits_for_nobody() -> None:
    with (
        claimant(GIB),
        pytest.raises(ConfigError, match=rf"needs {1 << 50} bytes of host memory, and \d+ are available"),
    ):
        MemoryClaim(1 << 50, patience_s=3600.0)  # this test may not take as long


def test_what_is_touched_is_not_claimed_any_more() -> None:
    claim = MemoryClaim(4 * GIB)
    claim.shrink(GIB)
    assert abs(claimed_bytes() - 3 * GIB) < SLACK
    with claimant(GIB) as other:  # it sees the rest
        assert abs(claimed_bytes() - 4 * GIB) < SLACK
        end_one(other)
        script = "from raycheck.transfer.stage.memory_claims import *; print(available_bytes() - unclaimed_bytes())"
        seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
        assert abs(int(seen.stdout) - 3 * GIB) < SLACK

    claim.shrink(5 * GIB)

    assert claimed_bytes() < SLACK
    claim.end()


def test_a_process_that_stopped_while_it_claimed_holds_nobody_up_for_long() -> None:
    script = """
import sys, time
from raycheck.transfer.stage.memory_claims import _claims
with _claims._alone():
    print("claiming", flush=True)
    time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as stopped:
        try:
            assert stopped.stdout is not None
            assert stopped.stdout.readline() == "claiming\n"
            began = time.monotonic()

            MemoryClaim(GIB).end()

            assert time.monotonic() - began > memory_claims._GUARD_S - 0.1
        finally:
            stopped.kill()


def test_an_address_space_has_own_claims_in_it_already() -> None:
    script = """
import resource
from pathlib import Path
from raycheck.transfer.stage.host_buffer import HostBuffer
from raycheck.transfer.stage.memory_claims import unclaimed_bytes
here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (here + (1 << 30), here + (1 << 30)))
buffer = HostBuffer(600 << 20, pinned=False)
print(unclaimed_bytes() >> 20)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)

    assert 300 < int(found.stdout) < 430


def test_a_buffer_is_claimed_until_it_is_touched() -> None:
    buffer = HostBuffer(GIB, pinned=False)
    assert claimed_bytes() > GIB - SLACK
    buffer.fault_in()
    buffer._thread.join(60)
    assert claimed_bytes() < SLACK

    untouched = HostBuffer(GIB, pinned=False)
    assert claimed_bytes() > GIB - SLACK
    untouched.touched()
    assert claimed_bytes() < SLACK

    with pytest.raises(ConfigError, match=rf"needs {1 << 50} bytes.*\d+ are available"):
        HostBuffer(1 << 50, pinned=False)
    assert claimed_bytes() < SLACK


def system(root: Path, *, group: str, files: dict[str, str]) -> Path:
    files |= {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n", "proc/self/cgroup": group}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def limits(folder: str, most: str, used: int, cache: int) -> dict[str, str]:
    return {
        f"{folder}/memory.max": most,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon 1\ninactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8000 * 1024),
        (limits("sys/fs/cgroup", "max\n", 500, 0), 8000 * 1024),
        (limits("sys/fs/cgroup/a/b", "1000", 500, 200), 700),
        (limits("sys/fs/cgroup/a", "1000", 500, 0) | limits("sys/fs/cgroup/a/b", "max", 500, 0), 500),
        (limits("sys/fs/cgroup/a", "1000", 5000, 0), 0),
    ],
)
def test_the_tightest_control_group_decides(tmp_path: Path, files: dict[str, str], expected: int):
    assert available_bytes(system(tmp_path, group="0::/a/b\n", files=files)) == expected


def test_the_older_control_groups_are_read_as_well(tmp_path: Path):
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "300",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 100\n",
    }

    assert available_bytes(system(tmp_path, group="5:devices:/\n4:cpu,memory:/job\n0::/\n", files=files)) == 800


def test_a_system_that_says_nothing_refuses_nothing(tmp_path: Path):
    assert available_bytes(tmp_path) is None
