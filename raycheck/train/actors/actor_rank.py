"""One rank of a group of actors: the half of an ActorCheckpointer that lives in the actor."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.settings import SaveSettings
from raycheck.shards.entries.per_rank_entries import RankZero
from raycheck.train.group import Group
from raycheck.train.ray_api.calls import this_node
from raycheck.train.worker.checkpointer import Checkpointer
from raycheck.train.worker.group_restore import RestoreResult
from raycheck.train.worker.save_status import SaveStatus
from raycheck.train.worker.save_triggers import SaveKind
from raycheck.train.worker.training_progress import ProgressCounter

_members: dict[str, "ActorRank"] = {}
"""Of this process, by the run's URI."""


class _Held:
    """What the driver holds: given for a save, and taken after a restore."""

    def __init__(self) -> None:
        self.state: Any = {}
        self.is_restored = False

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state, self.is_restored = state, True


class _Told(ProgressCounter):
    """Where the driver says that training is."""

    decides = False
    told = Progress()

    def end_step(self, *, tokens: int = 0, episodes: int = 0) -> None:
        del tokens, episodes
        for data in self.data:
            data.end_step()
        self.go_to(self.told)

    def end_epoch(self) -> None:
        for data in self.data:
            data.end_epoch()
        self.go_to(self.told)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDecision:
    """The driver's, at one place of its loop. progress: where training is now. save: whether and as what to save.
    is_hurried: a node is about to go. metrics, states: for that save; the latter of what the driver holds, for rank
    0. timeout_s: of a wait."""

    at: Literal["step", "epoch", "save", "wait", "close"]
    progress: Progress
    save: SaveKind | None
    is_hurried: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


class ActorRank:
    """Calls come from the driver, one after the other. held: names of the entries that the driver holds."""

    def __init__(self, state: Mapping[str, object], held: Sequence[str], settings: SaveSettings, group: Group) -> None:
        if both := sorted(set(state) & set(held)):
            raise ConfigError(f"state[{both[0]!r}] is in the actors' state and in the driver's; rename one of them")
        self._held = {name: _Held() for name in held}
        self._position = _Told(state.values())
        entries = {**state, **{name: RankZero(owner) for name, owner in self._held.items()}}
        self._ckpt = Checkpointer(entries, settings, group=group, position=self._position)

    def restore(self, options: Mapping[str, Any]) -> tuple[RestoreResult, dict[str, Any]]:
        """Also the states that the driver has to take back; on rank 0."""
        at = self._ckpt.restore(**options)
        states = {name: held.state for name, held in self._held.items() if held.is_restored}
        self._let_go(states)
        return at, states

    def hear(self, word: RankDecision) -> SaveStatus:
        self._position.told, self._position.is_hurried = word.progress, word.is_hurried
        for name, state in word.states.items():
            self._held[name].state = state
        if word.at == "step":
            self._ckpt.end_step(word.metrics)
        if word.at == "epoch":
            self._ckpt.end_epoch()
        if word.save:
            self._ckpt.save_as(word.save, word.metrics)
        if word.at == "wait":
            self._ckpt.wait(word.timeout_s)
        if word.at == "close":
            self._ckpt.close()
        self._let_go(word.states)
        return self._ckpt.standing

    def _let_go(self, names: Iterable[str]) -> None:
        """What the driver holds need not lie here too."""
        for name in names:
            self._held[name].state = {}

    def leave(self) -> None:
        """Save nothing more; a save in flight may end."""
        gone = ConfigError("the driver has left")
        self._ckpt.__exit__(type(gone), gone, None)


def join(
    actor: Any,
    state_of: Callable[[Any], Mapping[str, object]],
    held: Sequence[str],
    settings: SaveSettings,
    group: Group,
) -> None:
    """Make this actor a member, in the place of what it was in the same run."""
    before = _members.pop(group.uri, None)
    if before is not None:
        before.leave()
    _members[group.uri] = ActorRank(state_of(actor), held, settings, group)


def restore(actor: Any, uri: str, options: Mapping[str, Any]) -> tuple[RestoreResult, dict[str, Any]]:
    del actor
    return _members[uri].restore(options)


def hear(actor: Any, uri: str, word: RankDecision) -> SaveStatus:
    del actor
    standing = _members[uri].hear(word)
    if word.at == "close":
        del _members[uri]
    return standing


def leave(actor: Any, uri: str) -> None:
    del actor
    if member := _members.pop(uri, None):
        member.leave()


def node_of(actor: Any) -> str:
    """The id of the actor's node."""
    del actor
    return this_node()
