"""Runs the tasks that follow a commit as Ray tasks, so that they take neither memory nor time from the training
processes.

One Ray task leads a job. Other tasks on the ranks' nodes write the large files of an export, at most one per rank; if a
node is lost, only its task is repeated.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.bucket.format import object_keys
from raycheck.bucket.store import Store, open_store
from raycheck.errors import NotFoundError, StoreError
from raycheck.group.coordinator.export_task import Note
from raycheck.group.coordinator.task_run import TaskRun
from raycheck.on_ray.api.calls import results
from raycheck.on_ray.version_copies import RayVersionCopies
from raycheck.published.publish import series_of
from raycheck.settings import Publish

if TYPE_CHECKING:
    from raycheck.huggingface.export import ExportFiles


def run_in_ray(job: TaskRun) -> list[Note]:
    """Run a job in Ray tasks. Return what to log."""
    if isinstance(job.task, Publish):
        series = series_of(open_store(job.uri), job.task)
        RayVersionCopies(series.uri).start(job.nodes[0])
    notes: list[Note] = results([_on(job.nodes[0], _lead).remote(job)])[0]
    return notes


@ray.remote(num_cpus=0)
def _lead(job: TaskRun) -> list[Note]:
    """Run a job in this process, and have other tasks write the large files of an export."""

    def write(files: "ExportFiles", store: Store, place: str) -> Mapping[str, int]:
        shares = _dealt(files.sizes, _spread(job.nodes)[: len(files.heads)])
        if len(shares) == 1:
            return files.write(store, place, list(files.files))
        writing = [_on(node, _write).remote(job, names) for node, names in shares]
        ray.wait(writing, num_returns=len(writing))  # also after one has failed, so that no task is left running
        written = {file: size for share in results(writing) for file, size in share.items()}
        for file, size in written.items():
            _check_there(store, object_keys.export_key(place, file), size)
        return written

    return job.run(write, _call)


def _call(function: Any, *args: object) -> object:
    """Call a function, or run one of Ray's remote functions."""
    if hasattr(function, "remote"):
        return results([function.remote(*args)])[0]
    return function(*args)


@ray.remote(num_cpus=0)
def _write(job: TaskRun, files: Sequence[str]) -> Mapping[str, int]:
    """Write some files of an export. Their contents follow from the checkpoint, so their names are enough."""
    from raycheck.huggingface.export import lay_out

    export = job.export
    return lay_out(export.checkpoint, export.settings).write(export.dest, export.prefix, files)


def _check_there(store: Store, key: str, size: int) -> None:
    """Raise StoreError if this node does not see what another node wrote."""
    with suppress(NotFoundError):
        if store.head(key) == size:
            return
    raise StoreError(f"{store}: {key} is not there as another node wrote it; a folder must be shared between all nodes")


def _spread(nodes: Sequence[str]) -> list[str]:
    """Return the nodes in an order in which each occurs once before any occurs twice."""
    turns = [nodes[:number].count(node) for number, node in enumerate(nodes)]
    return [nodes[number] for number in sorted(range(len(nodes)), key=lambda number: (turns[number], number))]


def _dealt(sizes: Mapping[str, int], nodes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return, for each node, the files that it writes: about the same number of bytes on each.

    Files are assigned from the largest to the smallest, each to the node with the fewest bytes so far.
    """
    shares: list[tuple[str, list[str]]] = [(node, []) for node in nodes]
    given = [0] * len(shares)
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        least = given.index(min(given))
        shares[least][1].append(file)
        given[least] += sizes[file]
    return shares


def _on(node: str, task: Any) -> Any:
    """Return the task with a preference for that node; it runs on another one if that node is gone."""
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True) if node else "SPREAD")
