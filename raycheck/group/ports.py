"""The ports of a group's ranks: what they need of the system that started them, without knowing which one it is.

Here are the protocols of a save's sinks, and what is used without Ray; raycheck/on_ray has the rest. The other ports
are raycheck/host.py, which finds what has started a process, and coordinator/cluster.py, which a coordinator needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.manifest import Manifest
from raycheck.group.coordinator.messages import Outcome

if TYPE_CHECKING:  # imports torch, and this file is read in processes that must not
    from raycheck.transfer.incremental_upload import StagedState

NO_AGENTS = "there is no Ray that could start an actor"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionNotice:
    """A notice that nodes of the group are about to be taken away.

    at: when the first of them is, in unix seconds; inf when that is not known. ranks: the ranks on these nodes.
    """

    at: float
    ranks: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreportedCommit:
    """A commit that the host has not been told of. metrics: rank 0's at its step, with its step and epoch."""

    key: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Reporter:
    """The reporter of commits to whoever started the ranks. This one reports to nobody.

    is_heard: the reports reach somebody. pointed: the newest commit that the host can be told of.
    """

    is_heard = False
    pointed: UnreportedCommit | None = None

    def point_to(self, commit: UnreportedCommit) -> None:
        """Make this commit one that the host can be told of. Called in the save thread, and when that has ended."""

    def committed(self) -> None:
        """Take over the newest commit that the host can be told of. An older unreported one is dropped."""

    def can_report_soon(self, chosen: str | None) -> bool:
        """Return whether the host can soon be told of a save that begins now.

        chosen: the commit that the newest decision names.
        """
        del chosen
        return False

    def choose(self, now: float, *, is_last: bool = False) -> UnreportedCommit | None:
        """Choose the commit that rank 0 names in its next decision; None when the host is to be told of none.

        now: by time.monotonic. is_last: training is over, so that no pause is needed between two reports.
        """
        del now, is_last
        return None

    def report(self, key: str | None) -> None:
        """Tell the host of the commit that rank 0's decision names, if any. Every rank calls it at every step."""

    def restored(self, manifest: Manifest | None) -> None:
        """Warn when the host would have the script restore another checkpoint. manifest: None in a fresh run."""


class Sink(Protocol):
    """A place for a rank's staged saves: the bucket, or a process of the rank's node."""

    def save(self, staged: "StagedState", report: Report, deadline: float) -> Outcome | None:
        """Have a staged save kept and reported, and wait for the outcome. deadline: by time.monotonic.

        Return None when this sink does not take it.
        """


class NodeSink(Sink, Protocol):
    """A process of the rank's node that takes staged saves, and outlives the ranks."""

    @property
    def is_given_up(self) -> bool:
        """Return whether no process of the node takes saves any more."""

    def prepare(self) -> None:
        """Have the process started, before the first save needs it."""

    def hurry(self, attempt: int) -> None:
        """Have an attempt's memory checkpoints copied to other nodes without pauses from now on."""


class NoNodeSink:
    """The sink where no process of the node can be started. It takes nothing."""

    is_given_up = True

    def __init__(self, given_up: Callable[[str], object]) -> None:
        """given_up: called with the reason."""
        self._given_up = given_up

    def save(self, staged: "StagedState", report: Report, deadline: float) -> None:
        del staged, report, deadline

    def prepare(self) -> None:
        self._given_up(NO_AGENTS)

    def hurry(self, attempt: int) -> None:
        del attempt
