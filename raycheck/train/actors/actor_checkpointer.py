"""A Checkpointer for a group of Ray actors that a driver leads, without Ray Train.

Each actor is one rank: the Checkpointer inside it (actor_rank.py) works as in a Ray Train worker. The driver
alone decides when to save, so that no collective is needed. Its own objects and the states of other actors are taken at
the same step, and saved by rank 0 in the same checkpoint.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, replace
from threading import Thread
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import ray
from ray.actor import ActorHandle

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import with_settings
from raycheck.errors import ConfigError
from raycheck.settings import SaveSettings, function_name
from raycheck.shards.entries.object_entry import ObjectEntry
from raycheck.shards.entries.plain_value_entry import InPlace
from raycheck.shards.entries.random_generators import GeneratorState, is_generator
from raycheck.shards.state.random_state import DriverRandomState
from raycheck.storage_settings import StorageSettings
from raycheck.train.actors.actor_rank import RankDecision, hear, join, leave, node_of, restore
from raycheck.train.actors.actor_state import RemoteState
from raycheck.train.coordinator.messages import OnCorrupt
from raycheck.train.fit import checked_resume
from raycheck.train.group import Group, same, start_coordinator
from raycheck.train.log import logger, show_log
from raycheck.train.ray_api.calls import results, run_in
from raycheck.train.ray_api.train_context import drain_deadline
from raycheck.train.worker.checkpointer import RESTORE_FIRST
from raycheck.train.worker.group_restore import RestoreResult
from raycheck.train.worker.periodic import Periodic, start_alone
from raycheck.train.worker.save_status import SaveStatus
from raycheck.train.worker.save_triggers import SaveKind, SaveTriggers, due_of
from raycheck.train.worker.step_metrics import detached, numbers_of
from raycheck.train.worker.training_clock import TrainingClock
from raycheck.train.worker.training_progress import ProgressCounter

LEAVE_S = 35.0
NOTICE_PAUSE_S = 1.0
DRIVER_RNG = "driver_rng"
_owners: dict[tuple[str, str | int], str] = {}
"""As whom this driver leads a run that it was told to resume so: with its actors made anew it goes on as the same."""


class ActorCheckpointer:
    """Saves and restores what Ray actors hold, and what the driver holds, as one run at `uri`.

    actors: handles, in order of rank. state_of: called in each actor with the actor's instance, returns its state as
    a Checkpointer takes it: what is alike on all ranks is saved once, sharded tensors by all. state: what exists once:
    the driver's objects with state_dict/load_state_dict, dicts of plain values, Batches, and handles of other actors
    with these two methods. settings: see SaveSettings; a notice that an actor's node is about to go brings a save,
    and training goes on whatever on_preempt says. resume, storage: see `fit`.

    Use as a context manager, in the driver. Every method waits for the actors' earlier calls: call them between steps.
    An actor that died raises Ray's RayActorError: kill the others, which may wait for it, make all anew, and another
    ActorCheckpointer with them. The same `resume` in the same driver binds the first one only. Raises ConfigError,
    naming the entry, for a state that cannot be saved, and for a run that `resume` forbids.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        state_of: Callable[[Any], Mapping[str, object]],
        uri: str,
        settings: SaveSettings | None = None,
        *,
        state: Mapping[str, object] | None = None,
        resume: str | int = "auto",
        storage: StorageSettings | None = None,
    ) -> None:
        show_log()
        if not actors:
            raise ConfigError("there are no actors; give the handles of those that hold the model")
        self._actors = list(actors)
        self._uri = uri if storage is None else with_settings(uri, storage)
        self._settings = settings or SaveSettings()
        self._owners = {name: _owner(name, value) for name, value in (state or {}).items()}
        self._owners[DRIVER_RNG] = DriverRandomState()
        self._position = ProgressCounter((state or {}).values())
        self._store = open_store(self._uri)
        self._rhythm = SaveTriggers(self._settings, Group.alone())
        self._pace = TrainingClock()
        self._standing = SaveStatus()
        self._told: list[Any] = []
        self._metrics: Mapping[str, object] = {}
        self._is_restored = self._is_closed = False
        if not self._settings.enabled:
            logger.warning("run %s: raycheck is turned off: nothing is saved, and nothing is restored", self._uri)
            return
        group = uuid4().hex[:16]
        me = _owners.get((self._uri, resume))
        told = checked_resume(resume, self._store, storage) if me is None else "auto"
        me = _owners.setdefault((self._uri, resume), me or uuid4().hex[:16])
        self._coordinator = start_coordinator(self._uri, owner=me, resume=told, suffix=f":{group}")
        nodes = results([run_in(actor, node_of) for actor in self._actors])
        place = Group(
            id=group,
            uri=self._uri,
            rank=0,
            world_size=1,
            coordinator=self._coordinator,
            broadcast=same,
            notice=_Notices(nodes),
        )
        self._rhythm = SaveTriggers(self._settings, place)
        self._join(place, nodes, state_of)

    def restore(
        self,
        *,
        strict: bool = True,
        only: Iterable[str] | None = None,
        skip: Iterable[str] = (),
        on_corrupt: OnCorrupt = "previous",
        cast: bool = False,
        then: Callable[[Any, RestoreResult], object] | None = None,
    ) -> RestoreResult:
        """Claim the run for these actors and put the newest checkpoint into them and into the driver's objects.

        As Checkpointer.restore, on all actors; returns what rank 0 was told. What the driver holds and the checkpoint
        does not have stays as it is, and `at.report.fresh` names it. then: called in each actor with its instance once
        all have restored, also in a fresh run: here a policy hands its weights to the actors that generate.
        """
        options = {
            "strict": strict,
            "only": None if only is None else tuple(only),
            "skip": tuple(skip),
            "on_corrupt": on_corrupt,
            "cast": cast,
        }
        if not self._settings.enabled:
            return self._begin_without(then)
        for name, owner in self._owners.items():
            ObjectEntry(name, owner).gather()  # what could not be saved later is said now
        found = results([run_in(actor, restore, self._uri, options) for actor in self._actors])
        at: RestoreResult = found[0][0]
        states: dict[str, Any] = found[0][1]
        for name, state in states.items():
            self._owners[name].load_state_dict(deepcopy(state))  # Ray's arrays are read-only
        counts = {name: getattr(at, name) for name in (spec.name for spec in fields(Progress))}
        self._position.start_at(Progress(**counts))
        claims = [attempt.claimed_at for attempt in read_latest(self._store).attempts]
        self._rhythm.start_at(self._position.progress, claims)
        if then is not None:
            results([run_in(actor, then, mine) for actor, (mine, _) in zip(self._actors, found, strict=True)])
        for owner in self._owners.values():
            if isinstance(owner, Periodic):
                owner.start(lambda: (self._position.progress, self._rhythm.clock_s))
        self._is_restored = True
        self._pace.go()
        if self._settings.at_start and not self._position.step:
            self._say("save", save="keep")  # the actors know whether a checkpoint has this state already
        return replace(at, **asdict(self._position.progress))

    def _begin_without(self, then: Callable[[Any, RestoreResult], object] | None) -> RestoreResult:
        """By SaveSettings(enabled=False), at step 0."""
        self._position.start_at(self._position.progress)
        at = RestoreResult(**asdict(self._position.progress), attempt=1)
        if then is not None:
            results([run_in(actor, then, at) for actor in self._actors])
        periodics = [owner for owner in self._owners.values() if isinstance(owner, Periodic)]
        start_alone(periodics, lambda: self._position.progress, world_size=1)
        self._is_restored = True
        return at

    def end_step(self, metrics: Mapping[str, object] | None = None, *, tokens: int = 0, episodes: int = 0) -> None:
        """One optimizer step is complete on all actors. Saves when due. As Checkpointer.end_step."""
        self._pace.stop()
        self._hear()
        now = self._standing  # at the end of the last step
        busy_s = max(0.0, (now.busy_s or 0.0) - self._pace.step_s)
        self._rhythm.trained(self._pace.step_s, is_saving=now.busy_s is not None)
        self._position.end_step(tokens=tokens, episodes=episodes)
        self._metrics = detached(metrics or {})
        due = None
        if self._settings.enabled:
            due = self._rhythm.is_due(
                self._position.progress, is_busy=now.is_busy, busy_s=busy_s, metrics=self._metrics
            )
        self._say("step", save=due)
        self._pace.go()

    def end_epoch(self) -> None:
        """An epoch is complete, with what the script does at its end. As Checkpointer.end_epoch."""
        self._hear()
        self._position.end_epoch()
        self._say("epoch", save=self._rhythm.is_epoch_due(self._position.progress, is_busy=self._standing.is_busy))

    def save(
        self, metrics: Mapping[str, object] | None = None, *, is_rolling: bool = False, export: bool = False
    ) -> None:
        """Begin a save of the state as it stands. As Checkpointer.save."""
        self._metrics = detached(metrics or self._metrics)
        self._say("save", save=due_of(self._settings, is_rolling=is_rolling, export=export))

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save begun so far is committed. As Checkpointer.wait."""
        self._say("wait", save=None, timeout_s=timeout_s)
        self._hear()

    def close(self) -> None:
        """Save the last step if it is not saved, and wait for the commit. Raises what kept it from being one."""
        if self._is_closed:
            return
        try:
            if self._is_restored:
                self._say("close", save="keep")
        except BaseException:
            self._leave()
            raise
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # Nothing new is saved: the state may be half-way through a step.
        self._leave()

    def _say(
        self,
        at: Literal["step", "epoch", "save", "wait", "close"],
        *,
        save: SaveKind | None,
        timeout_s: float | None = None,
    ) -> None:
        """Tell the actors where training is, and wait for them where they save: until they have copied their state."""
        self._hear()
        if not self._settings.enabled:
            return
        began = time.monotonic()
        word = RankDecision(
            at=at,
            progress=self._position.progress,
            save=save,
            is_hurried=self._rhythm.is_hurried,
            timeout_s=timeout_s,
        )
        states: dict[str, Any] = {}
        if save:
            word = replace(word, metrics=numbers_of(self._metrics))
            states = {name: owner.state_dict() for name, owner in self._owners.items()}
        words = [replace(word, states=states), *[word] * (len(self._actors) - 1)]
        self._told = [run_in(actor, hear, self._uri, mine) for actor, mine in zip(self._actors, words, strict=True)]
        if save:
            said_s = time.monotonic() - began
            self._hear()
            self._rhythm.saved(said_s + self._standing.blocked_s, self._position.progress, save, began=began)
            self._pace.skip(time.monotonic() - began)

    def _hear(self) -> None:
        if not self._settings.enabled and not self._is_restored:  # else the actors say so
            raise ConfigError(RESTORE_FIRST)
        told, self._told = self._told, []
        if told:
            self._standing = SaveStatus.joined(results(told))
            self._rhythm.committed(None, save_s=self._standing.save_s)

    def _leave(self) -> None:
        """What is in flight is whole, and may end."""
        if not self._is_closed and self._settings.enabled:
            leaving = [run_in(actor, leave, self._uri) for actor in self._actors]
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        if self._settings.enabled:
            ray.kill(self._coordinator)

    def _join(self, place: Group, nodes: Sequence[str], state_of: Callable[[Any], Mapping[str, object]]) -> None:
        joining, settings = [], settings_for_actors(self._settings)
        for rank, (actor, node) in enumerate(zip(self._actors, nodes, strict=True)):
            mine = replace(
                place,
                rank=rank,
                world_size=len(nodes),
                broadcast=None,
                notice=None,
                is_first_on_node=node not in nodes[:rank],
            )
            joining.append(run_in(actor, join, state_of, tuple(self._owners), settings, mine))
        results(joining)


def settings_for_actors(settings: SaveSettings) -> SaveSettings:
    """What actors are told. The user's own function is asked in the driver alone, and may hold what cannot travel; only
    its name goes along, for the manifests."""
    return settings if settings.when is None else replace(settings, when=_AskedInDriver(function_name(settings.when)))


class _AskedInDriver:
    """Stands for a function of the driver's, under its name."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self, *asked: object) -> bool:
        raise AssertionError(f"the driver decides when to save, and no actor that was told {asked}")


class _Notices:
    """When the first of these nodes is to go, see Group; Ray is asked once a second."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = frozenset(nodes)
        self._asked_at = float("-inf")
        self._told: float | None = None
        self._asking = Thread()

    def __call__(self) -> float | None:
        """The newest answer: Ray gives none while its head is away."""
        if not self._asking.is_alive() and time.monotonic() - self._asked_at > NOTICE_PAUSE_S:
            self._asked_at = time.monotonic()
            self._asking = Thread(target=self._ask, name="raycheck-notices", daemon=True)
            self._asking.start()
        return self._told

    def _ask(self) -> None:
        self._told = drain_deadline(self._nodes)


def _owner(name: str, value: Any) -> Any:
    """What has the entry's state_dict and load_state_dict."""
    if isinstance(value, ActorHandle):
        return RemoteState(value, name)
    if type(value) is dict:
        return InPlace(value)
    if is_generator(value):
        return GeneratorState(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return value
    raise ConfigError(
        f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict; the driver's state takes "
        "objects and actors that have them, and dicts of plain values"
    )
