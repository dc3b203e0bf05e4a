"""Host memory for a shard: touched before it is needed, kept from children, refused where there is too little."""

import ctypes
import os
import resource
from pathlib import Path

import pytest

from raycheck.errors import ConfigError
from raycheck.shards.transfer import host_buffer as buffer_module
from raycheck.shards.transfer.host_buffer import HostBuffer, available_bytes, check_fits

SIZE = 64 * 1024 * 1024


def faults_of_writing(buffer: HostBuffer) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(buffer.tensor.data_ptr(), 1, buffer.size_bytes)  # in this thread alone
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def touched(size: int) -> HostBuffer:
    buffer = HostBuffer(size, pinned=False)
    buffer.fault_in()
    buffer._thread.join()
    buffer.stop_faulting_in()
    return buffer


def test_the_first_write_faults_no_page_in_any_more():
    assert faults_of_writing(touched(SIZE)) < 100
    assert faults_of_writing(HostBuffer(SIZE, pinned=False)) > 100


def test_a_kernel_that_cannot_populate_gets_its_pages_touched_one_by_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffer_module, "_populate", lambda: None)

    buffer = touched(SIZE + 5)

    assert not buffer.tensor.any()
    assert faults_of_writing(buffer) < 100


def test_nothing_is_written_behind_the_caller_once_it_is_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffer_module, "_populate", lambda: None)
    buffer = HostBuffer(SIZE, pinned=False)
    buffer.fault_in()
    thread = buffer._thread

    buffer.stop_faulting_in()

    assert not thread.is_alive()
    buffer.tensor.fill_(7)
    assert bool((buffer.tensor == 7).all())


def test_a_forked_child_does_not_share_the_pages():
    """Sharing them would make the next save fault each of them in again."""
    buffer = touched(SIZE)
    buffer.tensor.fill_(1)
    view = memoryview(buffer.tensor.numpy())
    reader, writer = os.pipe()

    child = os.fork()
    if child == 0:
        os.write(writer, view[:1])
        os.read(reader, 1 << 20)
        os._exit(0)
    faults = faults_of_writing(buffer)
    os.kill(child, 9)
    os.waitpid(child, 0)

    assert faults < 100
    os.close(reader)
    os.close(writer)


def test_more_than_there_is_is_refused_with_both_numbers():
    available = available_bytes()
    assert available is not None

    with pytest.raises(ConfigError, match=rf"needs {1 << 50} bytes.*\d+ are available"):
        HostBuffer(1 << 50, pinned=False)

    check_fits(10, 10)
    check_fits(10, None)
    with pytest.raises(ConfigError, match="needs 11 bytes of host memory, and 10 are available"):
        check_fits(11, 10)


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
