"""Host memory for a shard: touched before it is needed, kept from children, refused where there is too little."""

import ctypes
import os
import resource

import pytest

from raycheck.transfer.stage import host_buffer as buffer_module
from raycheck.transfer.stage.host_buffer import HostBuffer

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
