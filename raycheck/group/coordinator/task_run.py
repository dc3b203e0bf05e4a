"""One task that follows a commit, on one checkpoint, as the processes that run it know it."""

import operator
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.group.coordinator.export_task import ExportTask, Note, WriteFiles
from raycheck.settings import BuiltIn, HFExport, Publish


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRun:
    """One task on one checkpoint, in a form for the processes that run it.

    uri: the run's root. name: the task's. task: a built-in one, or a pickled function. nodes: see `CommitTasks`.
    """

    uri: str
    name: str
    task: BuiltIn | bytes
    entry: Entry
    progress: Progress
    nodes: Sequence[str]

    @property
    def export(self) -> ExportTask:
        assert isinstance(self.task, HFExport), "only an export has files to write"
        return ExportTask(uri=self.uri, entry=self.entry, progress=self.progress, settings=self.task)

    def run(self, write: "WriteFiles | None" = None, call: "Callable[..., object]" = operator.call) -> list[Note]:
        """Run the task in this process. Return what the log should say.

        write: writes the large files of an export. call: calls a function with arguments.
        """
        if isinstance(self.task, HFExport):
            return self.export.run(write)
        if isinstance(self.task, Publish):
            return [self._publish(self.task)]
        function = pickle.loads(self.task)  # noqa: S301  a rank of this training has sent it
        call(function, self.uri, self.entry.key)
        return [Note(text=f"{self.name} of {self.entry.key} is done")]

    def _publish(self, options: Publish) -> Note:
        from raycheck.published.publish import publish

        done = publish(Checkpoint(open_store(self.uri), self.entry), options, by_training=True)
        if done is None:
            return Note(text=f"did not publish {self.entry.key}: it is the newest version already")
        what = "whole" if done.version.is_whole else "as a patch"
        text = f"published {self.entry.key} as version {done.version.number}, {what}"
        return Note(text=text, fields={"bytes": done.bytes_written, "whole_bytes": done.version.whole_bytes})
