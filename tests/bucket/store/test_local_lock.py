"""Tests the lock of a local store when the process forks while a thread holds it, as a DataLoader with workers does."""

import os
import signal
from pathlib import Path

from raycheck.bucket.store import open_store
from raycheck.bucket.store.local import LocalStore


def test_a_process_that_was_forked_during_a_swap_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    assert isinstance(store, LocalStore)
    store.put_if_absent("latest", b"1")
    with store._locked():
        forked = os.fork()
        if not forked:
            signal.pause()
    try:
        written = store.put_if_match("latest", b"2", store.get("latest").version)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)

    assert store.get("latest") is not None
    assert written.version == store.get("latest").version
