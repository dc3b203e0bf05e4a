"""Registers checkpoints with TensorBoard: each is one event file, created whole or not at all.

The file's name is that of the checkpoint, so a listing shows what is registered, and put-if-absent keeps two drivers
from writing one twice. The names are in the order of commits, as TensorBoard wants to read them.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from raycheck.bucket.store import Store
from raycheck.bucket.store.open import open_near
from raycheck.errors import ConfigError, ConflictError
from raycheck.loggers.checkpoint_list import CheckpointList, TrackedRun, identity_of, name_of
from raycheck.run import CommittedCheckpoint, Run


@dataclass(frozen=True, kw_only=True)
class TensorBoard(CheckpointList):
    """A log directory of TensorBoard. See raycheck.loggers.tensorboard."""

    log_dir: str

    package: ClassVar[str] = "tensorboard"

    def __post_init__(self) -> None:
        if not isinstance(self.log_dir, str) or not ("://" in self.log_dir or self.log_dir.startswith("/")):
            raise ConfigError(f"log_dir={self.log_dir!r}: give an absolute path that all nodes share, or a URI")

    @contextmanager
    def opened(self, run: Run) -> Iterator["TensorBoardRun"]:
        yield TensorBoardRun(open_near(self.log_dir, run.uri).below(name_of(run)), run.run_id[:8])


class TensorBoardRun(TrackedRun):
    """The folder of one training run in a log directory."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._names = {item.key for item in store.list_objects("") if f".{run_id}." in item.key}

    def has(self, checkpoint: CommittedCheckpoint) -> bool:
        return self._name(checkpoint) in self._names

    def add(self, checkpoint: CommittedCheckpoint) -> None:
        is_new = not any(f".step-{checkpoint.step:09d}-" in name for name in self._names)
        name = self._name(checkpoint)
        with suppress(ConflictError):  # another driver's task was faster
            self._store.put_if_absent(name, _event_file(checkpoint, has_metrics=is_new))
        self._names.add(name)

    def _name(self, checkpoint: CommittedCheckpoint) -> str:
        return f"events.out.tfevents.{int(checkpoint.committed_at):010d}.{self._run_id}.{identity_of(checkpoint)}"


def _event_file(checkpoint: CommittedCheckpoint, *, has_metrics: bool) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    at, step = checkpoint.committed_at, checkpoint.step
    metrics = checkpoint.metrics if has_metrics else {}
    values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
    events = [
        Event(wall_time=at, file_version="brain.Event:2"),
        Event(wall_time=at, step=step, summary=Summary(value=[*values, _text(checkpoint)])),
    ]
    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    for event in events:
        writer.write(event.SerializeToString())
    return buffer.getvalue()


def _text(checkpoint: CommittedCheckpoint) -> Any:
    """Return the checkpoint as a text of TensorBoard's plugin for texts, which renders Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    facts = {"address": checkpoint.address, "digest": checkpoint.digest, "size_bytes": checkpoint.size_bytes}
    words = "\n".join(f"- {name}: `{value}`" for name, value in facts.items())
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    return Summary.Value(
        tag="checkpoint",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(dtype="DT_STRING", string_val=[words.encode()], tensor_shape=shape),
    )
