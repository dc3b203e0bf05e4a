"""The actor's half of an ActorCheckpointer: it makes the actor one rank of the group.

The functions at the end run in the actor, called by the driver one after the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raycheck.bucket.format.label import NO_LABEL, Label
from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.group.group import Group
from raycheck.group.worker.checkpointer import Checkpointer
from raycheck.group.worker.group_restore import RestoreResult
from raycheck.group.worker.save_handle import CheckpointInfo, SaveHandle
from raycheck.group.worker.save_kind import SaveKind
from raycheck.group.worker.save_queue import SaveStatus
from raycheck.group.worker.step_metrics import Columns
from raycheck.group.worker.training_progress import ProgressCounter
from raycheck.on_ray.api.calls import this_node
from raycheck.settings import SaveSettings
from raycheck.state.entries.per_rank_entries import RankZero

_ranks: dict[str, "ActorRank"] = {}
"""The ranks in this process, by the run's URI."""
_states: dict[str, Mapping[str, object]] = {}
"""The states of the actors in this process that have met and not joined yet, by the run's URI."""
_handles: dict[str, dict[str, SaveHandle]] = {}
"""The saves of the newest group that its driver can ask for, by the run's URI and the driver's id of the save."""


class _DriverEntry:
    """A relay for the state of one of the driver's entries: to a save, and from a restore."""

    def __init__(self) -> None:
        self.state: Any = {}
        self.is_restored = False

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state, self.is_restored = state, True


class _LedCounter(ProgressCounter):
    """A progress counter that copies the driver's counts.

    next_progress: the driver's counts at the end of this step.
    """

    decides = False
    next_progress = Progress()

    def end_step(self, *, tokens: int = 0, episodes: int = 0) -> None:
        del tokens, episodes
        for data in self.data:
            data.end_step()
        self.go_to(self.next_progress)

    def end_epoch(self) -> None:
        for data in self.data:
            data.end_epoch()
        self.go_to(self.next_progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverDecision:
    """The driver's position in its loop, and what it has decided there, for a rank.

    progress: the counts now. save: the kind of save to start, None for none; tasks: the tasks after its commit.
    is_preempted: a node of the group will be preempted. leaving: the ranks on such nodes, if that is the reason for the
    save. metrics, states: for that save; states are those of the driver's entries. rows: the metrics of steps that the
    driver has kept for the history. Only rank 0 gets states and rows. timeout_s: how long to wait for saves. label: the
    label of that save. save_id: the id by which the driver's handle asks for that save; "" without a handle.
    """

    at: Literal["step", "epoch", "save", "wait", "close"]
    progress: Progress
    save: SaveKind | None
    tasks: tuple[str, ...] = ()
    is_preempted: bool = False
    leaving: frozenset[int] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    rows: Columns = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    label: Label = NO_LABEL
    save_id: str = ""


class ActorRank:
    """One actor's rank, which follows the driver's decisions.

    driver_names: names of the entries that the driver holds.
    """

    def __init__(
        self, state: Mapping[str, object], driver_names: Sequence[str], settings: SaveSettings, group: Group
    ) -> None:
        if both := sorted(set(state) & set(driver_names)):
            raise ConfigError(f"state[{both[0]!r}] is in the actors' state and in the driver's; rename one of them")
        self._driver_entries = {name: _DriverEntry() for name in driver_names}
        self._counter = _LedCounter(state.values())
        entries = {**state, **{name: RankZero(entry) for name, entry in self._driver_entries.items()}}
        self._checkpointer = Checkpointer(entries, settings, group=group, position=self._counter)

    def restore(self, options: Mapping[str, Any]) -> tuple[RestoreResult, dict[str, Any]]:
        """Restore this rank. Return, on rank 0, also the states that the driver has to load."""
        result = self._checkpointer.restore(**options)
        states = {name: entry.state for name, entry in self._driver_entries.items() if entry.is_restored}
        self._forget_states(states)
        return result, states

    def follow(self, decision: DriverDecision) -> SaveStatus:
        """Carry out the driver's decision. Return the status of this rank's saves afterwards."""
        self._counter.next_progress, self._counter.is_preempted = decision.progress, decision.is_preempted
        for name, state in decision.states.items():
            self._driver_entries[name].state = state
        if decision.rows:
            self._checkpointer.keep_rows(decision.rows)
        if decision.at == "step":
            self._checkpointer.end_step(decision.metrics)
        if decision.at == "epoch":
            self._checkpointer.end_epoch()
        if decision.save:
            handle = self._checkpointer.save_as(
                decision.save,
                decision.metrics,
                decision.label,
                tasks=decision.tasks,
                leaving=decision.leaving,
                step=decision.progress.step if decision.at == "save" else None,
            )
            if decision.save_id:
                _handles[self._checkpointer.uri][decision.save_id] = handle
        if decision.at == "wait":
            self._checkpointer.wait(decision.timeout_s)
        if decision.at == "close":
            self._checkpointer.close()
        self._forget_states(decision.states)
        return self._checkpointer.save_status

    def _forget_states(self, names: Iterable[str]) -> None:
        """Free the driver's states: the driver has them."""
        for name in names:
            self._driver_entries[name].state = {}

    def leave(self, rows: Columns) -> None:
        """Stop saving; a save in flight may end. rows: see DriverDecision."""
        if rows:
            self._checkpointer.keep_rows(rows)
        reason = ConfigError("the driver has left")
        self._checkpointer.__exit__(type(reason), reason, None)


def meet(actor: Any, uri: str, state_of: Callable[[Any], Mapping[str, object]]) -> tuple[str, frozenset[str]]:
    """Take the actor's state. Return the id of its node, and the names of its entries."""
    _states[uri] = state_of(actor)
    return this_node(), frozenset(_states[uri])


def join(actor: Any, driver_names: Sequence[str], settings: SaveSettings, group: Group) -> None:
    """Make this actor a rank of the group, replacing the rank that it was in the same run before."""
    del actor
    before = _ranks.pop(group.uri, None)
    if before is not None:
        before.leave({})
    _handles[group.uri] = {}
    _ranks[group.uri] = ActorRank(_states.pop(group.uri), driver_names, settings, group)


def restore(actor: Any, uri: str, options: Mapping[str, Any]) -> tuple[RestoreResult, dict[str, Any]]:
    del actor
    return _ranks[uri].restore(options)


def follow(actor: Any, uri: str, decision: DriverDecision) -> SaveStatus:
    del actor
    status = _ranks[uri].follow(decision)
    if decision.at == "close":
        del _ranks[uri]
    return status


def result_of(actor: Any, uri: str, save_id: str, timeout_s: float | None) -> CheckpointInfo:
    return handle_of(actor, uri, save_id).result(timeout_s)


def is_done_and_committed(actor: Any, uri: str, save_id: str) -> tuple[bool, bool]:
    handle = handle_of(actor, uri, save_id)
    return handle.is_done, handle.is_committed


def handle_of(actor: Any, uri: str, save_id: str) -> SaveHandle:
    del actor
    if save_id not in _handles.get(uri, {}):
        raise ConfigError("this save's handle is of an earlier ActorCheckpointer: its actors belong to another one now")
    return _handles[uri][save_id]


def leave(actor: Any, uri: str, rows: Columns) -> None:
    del actor
    if rank := _ranks.pop(uri, None):
        rank.leave(rows)
