"""Staged copies in shared memory: another process uploads the same bytes, also when their owner is dead."""

import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.host_buffer import HostBuffer
from raycheck.transfer.stage.shared_memory import MemoryPlace, SharedMemory, open_memory, open_to_read
from tests.support.processes.fork_server import fork_server, run_code

OWNER = """
import sys, time
from raycheck.transfer.stage.shared_memory import SharedMemory
memory = SharedMemory(5_000_000)
memory.pages[:5] = b"bytes"
print(memory.place, flush=True)
time.sleep(600)
"""


def state() -> dict[str, object]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 7))
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad])
    model(torch.ones(3, 30)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": {"text": "a value", "number": 3}}


def upload(uri: str, pickled: bytes, answer) -> None:
    """Uploads, in another process, what it is told of."""
    staged = pickle.loads(pickled).open()
    staged.upload(open_store(uri), "step-000000003-a1-s2")
    answer.send_bytes(pickle.dumps((staged.section(), staged.records)))


def test_another_process_uploads_the_same_bytes_and_rows(tmp_path) -> None:
    uri = f"file://{tmp_path}/run"
    train = TrainState(state(), rank=0, world_size=1, is_shared=True)
    staged = train.stage(Progress(step=3))
    shared = pickle.dumps(staged.to_share())
    ours, theirs = fork_server().Pipe()
    other = fork_server().Process(target=upload, args=(uri, shared, theirs))
    other.start()
    try:
        assert ours.poll(60)
        section, records = pickle.loads(ours.recv_bytes())
    finally:
        other.kill()
        other.join()
    store = open_store(uri)

    staged.upload(store, "step-000000003-a1-s1")

    assert len(staged.staged) == 2, "train, and what is frozen"
    for shard in staged.staged:
        there = store.get(shard_key("step-000000003-a1-s2", shard.name.component, 0)).data
        assert there == store.get(shard_key("step-000000003-a1-s1", shard.name.component, 0)).data
    assert section == staged.section()
    assert records == staged.records


def test_shared_memory_stays_when_its_owner_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        try:
            place = eval(owner.stdout.readline(), {"MemoryPlace": MemoryPlace})
            pages, here = open_memory(place)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait(30)

    assert bytes(pages[:5]) == b"bytes"
    with pytest.raises(OSError, match=str(place.pid)):
        open_memory(place)
    assert bytes(open_to_read(here)[:5]) == b"bytes", "who has it mapped hands it on"
    assert open_to_read(here).readonly
    del pages
    with pytest.raises(OSError):
        open_to_read(here)


def test_other_memory_in_the_same_place_is_refused() -> None:
    memory = SharedMemory(4096)

    with pytest.raises(OSError, match="no longer has this memory"):
        open_memory(replace(memory.place, inode=memory.place.inode + 1))


def test_nothing_is_left_open_when_the_memory_is_gone() -> None:
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir()))

    for _ in range(20):
        HostBuffer(1 << 20, pinned=False, shared=True).stop_faulting_in()

    assert len(list(open_files.iterdir())) == before


def test_a_buffer_that_somebody_may_still_read_is_not_staged_into_again() -> None:
    train = TrainState(state(), rank=0, world_size=1, is_shared=True)
    first = train.stage(Progress(step=1))
    seen = open_to_read(first.to_share().shards[0].place)
    copy = bytes(seen)

    first.keep_buffers_apart()
    second = train.stage(Progress(step=2))

    assert bytes(seen) == copy
    assert second.to_share().shards[0].place != first.to_share().shards[0].place


def refused(name: str) -> int:
    raise PermissionError(13, f"{name} is refused here")


@pytest.mark.parametrize(
    "refuse", [{"name": "CAN_SHARE", "value": False}, {"name": "os.memfd_create", "value": refused}]
)
def test_a_system_without_such_memory_shares_none(monkeypatch: pytest.MonkeyPatch, refuse) -> None:
    monkeypatch.setattr(f"raycheck.transfer.stage.shared_memory.{refuse['name']}", refuse["value"])

    staged = TrainState(state(), rank=0, world_size=1, is_shared=True).stage(Progress(step=1))

    assert staged.to_share() is None
    assert sum(len(part) for part in staged.staged[0].parts(1 << 20)) == staged.staged[0].size_bytes


FORKED = """
import gc, mmap, os, sys
from raycheck.transfer.stage.host_buffer import HostBuffer
buffer = HostBuffer(64 << 20, pinned=False, shared=True)
file = os.stat(f"/proc/self/fd/{buffer.place.fd}")
child = os.fork()
if child == 0:  # as a data loader's worker does, which lives on and maps memory
    kept = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    assert not [name for name in kept if os.path.samestat(os.stat(f"/proc/self/fd/{name}"), file)], "keeps the file"
    own = [mmap.mmap(-1, 1 << 20) for _ in range(200)]
    buffer = None
    gc.collect()
    assert not any(bytes(pages).strip(bytes(1)) for pages in own)  # it dies here if the buffer took them with it
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_neither_keeps_shared_memory_nor_frees_what_lies_in_its_place() -> None:
    done = run_code(FORKED, timeout_s=60)

    assert done.returncode == 0, done.stderr


FORKED_WHILE_READING = """
import os, sys
from raycheck.transfer.stage.shared_memory import SharedMemory, open_to_read
memory = SharedMemory(1 << 20)
memory.pages[:5] = b"bytes"
seen = open_to_read(memory.place)
maps = lambda: open("/proc/self/maps").read().count("memfd:raycheck")
assert maps() == 2, "what it has made, and what it reads"
child = os.fork()
if not child:
    os._exit(maps())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bytes(seen[:5]) == b"bytes"
del seen
assert maps() == 1
"""


def test_a_forked_child_has_nothing_of_what_its_parent_reads_there() -> None:
    done = run_code(FORKED_WHILE_READING, timeout_s=60)

    assert done.returncode == 0, done.stderr
