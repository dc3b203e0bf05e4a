"""Periodic exports: behind the training, from the bucket into the bucket, one at a time, in the coordinator.

An export that fails costs a warning and nothing else: its checkpoint is committed, and `raycheck export-hf` can do it
again.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from raycheck.bucket import layout
from raycheck.bucket.catalog import Checkpoint
from raycheck.train.log import logger


class Exports:
    """Checkpoints on their way to Hugging Face directories under `exports/`."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-export")
        self._running: dict[tuple[str, ...], Future[None]] = {}  # by what each reads

    def start(self, checkpoint: Checkpoint) -> None:
        names = (checkpoint.entry.key, *checkpoint.entry.refs)
        self._running[names] = self._thread.submit(self._export, checkpoint)

    @property
    def keys(self) -> frozenset[str]:
        """Checkpoints that are still being read, so that nothing of them may be deleted."""
        return frozenset(name for names, future in list(self._running.items()) if not future.done() for name in names)

    def wait(self, timeout_s: float) -> int:
        """Wait for what is under way; returns how many are left at the deadline."""
        return len(wait(list(self._running.values()), timeout=timeout_s).not_done)

    def _export(self, checkpoint: Checkpoint) -> None:
        from raycheck.shards.export import export_hf  # torch, which a coordinator needs for nothing else

        key = checkpoint.entry.key
        began = time.monotonic()
        try:
            done = export_hf(checkpoint, checkpoint.store, prefix=layout.exports_prefix(key))
        except Exception as error:  # noqa: BLE001  whatever it was, it is this export that failed, and nothing else
            logger.warning("run %s: %s was not exported: %s: %s", self._uri, key, type(error).__name__, error)
        else:
            seconds = time.monotonic() - began
            logger.info("run %s: exported %s, %.1f MB in %.1f s", self._uri, key, done.size_bytes / 1e6, seconds)
