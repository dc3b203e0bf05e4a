"""Checkpoints a group of Ray actors that a driver leads, without Ray Train.

Each actor is one rank: the Checkpointer inside it (actor_rank.py) works as in a Ray Train worker. The driver alone
decides when to save, so no collective is needed. The driver's own objects and the states of other actors
(driver_state.py) are captured at the same step, and rank 0 saves them in the same checkpoint.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

import ray

from raycheck.bucket.assembly.role import roles_of
from raycheck.bucket.format.label import NO_LABEL, Label, NoteValue, label_of
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.resume import AUTO
from raycheck.bucket.reading import read_newest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import with_settings
from raycheck.errors import ConfigError
from raycheck.group.coordinator.messages import OnCorrupt
from raycheck.group.group import alone, same
from raycheck.group.worker.checkpointer import RESTORE_FIRST
from raycheck.group.worker.group_restore import RestoreResult
from raycheck.group.worker.metric_values import checked, numbers_of
from raycheck.group.worker.periodic import start_alone
from raycheck.group.worker.save_handle import CheckpointInfo, SaveHandle, check_timeout
from raycheck.group.worker.save_kind import SaveKind, kind_asked_for
from raycheck.group.worker.save_queue import SaveStatus
from raycheck.group.worker.save_triggers import SaveTriggers
from raycheck.group.worker.step_metrics import StepMetrics
from raycheck.group.worker.training_progress import ProgressCounter, TrainingClock
from raycheck.log import event, logger, show_log
from raycheck.on_ray.actors.actor_rank import (
    DriverDecision,
    follow,
    is_done_and_committed,
    join,
    leave,
    meet,
    restore,
    result_of,
)
from raycheck.on_ray.actors.driver_state import DriverState
from raycheck.on_ray.api.calls import results, run_in
from raycheck.on_ray.api.preemption_notices import PreemptionNotices
from raycheck.on_ray.fit import settle_resume
from raycheck.on_ray.ray_group import RayGroup, start_coordinator
from raycheck.settings import SaveSettings, function_name
from raycheck.state.restore_result import RestoreReport
from raycheck.storage_settings import StorageSettings

LEAVE_S = 45.0
"""How long the actors may take to leave: the saves in flight may end, and the last metrics are written."""
_driver_ids: dict[tuple[str, str | int], str] = {}
"""The id under which this driver owns a run, by its URI and `resume`. A new group of actors reuses it."""


class ActorCheckpointer:
    """The object that saves and restores the state of Ray actors, and of their driver, as one run at `uri`.

    actors: their handles, in rank order; an actor that is given twice is one rank. state_of: called in each actor with
    the actor's instance; returns its state in the form that a Checkpointer takes. What is equal on all ranks is saved
    once, sharded tensors by all ranks. Actors of several roles, such as a policy's and a critic's, each return the
    state of their role, under names that the other roles do not have: one checkpoint has all of them. state:
    what exists only once: the driver's objects with state_dict and load_state_dict, dicts of plain values, Batches, and
    handles of other actors with these two methods. settings: see SaveSettings; a notice that an actor's node will be
    preempted triggers a save, and training continues whatever on_preempt is. resume, storage: see `fit`.

    Use it as a context manager, in the driver. Every method waits for the actors' earlier calls: call them between
    steps. When an actor dies, Ray's RayActorError is raised: kill the other actors, which may be waiting for it, create
    all of them again, and create another ActorCheckpointer with them. The same `resume` in the same driver applies only
    to the first of these.

    Raises ConfigError, naming the entry, for a state that cannot be saved, for a run that `resume` forbids, and for
    memory_every_steps. `restore` also raises it for a place that `raycheck doctor` calls wrong, in its words.
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
            raise ConfigError("there are no actors; pass the handles of those that hold the model")
        if settings is not None and settings.memory_every_steps is not None:
            raise ConfigError(
                f"memory_every_steps={settings.memory_every_steps}: ActorCheckpointer makes no memory checkpoints; "
                "rolling_every_steps=... saves often and keeps little"
            )
        self._actors = list(dict.fromkeys(actors))
        self._uri = uri if storage is None else with_settings(uri, storage)
        self._settings = settings or SaveSettings()
        self._state = DriverState(state or {})
        self._counter = ProgressCounter((state or {}).values())
        self._store = open_store(self._uri)
        self._triggers = SaveTriggers(self._settings, alone())
        self._clock = TrainingClock()
        self._status = SaveStatus()
        self._answers: list[Any] = []  # Ray's references to the actors' replies to the last decision
        self._metrics: Mapping[str, object] = {}
        self._step_metrics = StepMetrics()  # of the steps since rank 0 was last given some
        self._is_restored = self._is_closed = False
        if not self._settings.enabled:
            logger.warning(event("raycheck is turned off: nothing is saved, and nothing is restored", run=self._uri))
            return
        group_id = uuid4().hex[:16]
        driver_id = _driver_ids.get((self._uri, resume))
        wish = settle_resume(resume, self._store, storage) if driver_id is None else AUTO
        driver_id = _driver_ids.setdefault((self._uri, resume), driver_id or uuid4().hex[:16])
        self._coordinator = start_coordinator(
            self._uri, owner=driver_id, resume=wish, suffix=f":{group_id}", examines=True
        )
        self._coordinator.prepare.remote()  # while the actors answer
        met = results([run_in(actor, meet, self._uri, state_of) for actor in self._actors])
        nodes = [node for node, _ in met]
        self._roles = roles_of([entries for _, entries in met])
        group = RayGroup(
            id=group_id,
            uri=self._uri,
            rank=0,
            world_size=1,
            coordinator=self._coordinator,
            broadcast=same,
            notice=PreemptionNotices(nodes),
        )
        self._triggers = SaveTriggers(self._settings, group)
        self._join(group, nodes)

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
        """Claim the run for these actors, and restore a checkpoint into them and into the driver's objects.

        It is the one that the constructor's `resume` names; by default, the newest.

        strict, only, skip, on_corrupt, cast: as for Checkpointer.restore, on all actors. The driver's objects that are
        not in the checkpoint are left unchanged, and the report lists them under `fresh`. then: called in each actor
        with its instance and its RestoreResult once all have restored, also in a run without a checkpoint; a policy can
        hand its weights to the generating actors here.

        Return rank 0's RestoreResult. Raises as Checkpointer.restore does.
        """
        options = {
            "strict": strict,
            "only": None if only is None else tuple(only),
            "skip": tuple(skip),
            "on_corrupt": on_corrupt,
            "cast": cast,
        }
        if not self._settings.enabled:
            return self._start_turned_off(then)
        self._state.check()
        found = results([run_in(actor, restore, self._uri, options) for actor in self._actors])
        at: RestoreResult = found[0][0]
        self._state.load(found[0][1])
        self._counter.start_at(Progress(**{spec.name: getattr(at, spec.name) for spec in fields(Progress)}))
        claims = [attempt.claimed_at for attempt in read_newest(self._store).attempts]
        self._triggers.start_at(self._counter.progress, claims)
        if then is not None:
            results([run_in(actor, then, mine) for actor, (mine, _) in zip(self._actors, found, strict=True)])
        for periodic in self._state.periodics:
            periodic.start(lambda: (self._counter.progress, self._triggers.clock_s))
        self._is_restored = True
        self._clock.go()
        if self._settings.at_start and not self._counter.step:
            self._tell("save", save="keep")  # the actors know whether a checkpoint already has this state
        firsts = [mine.report for role, (mine, _) in zip(self._roles, found, strict=True) if not role.place.rank]
        return replace(at, report=joined(firsts), **asdict(self._counter.progress))

    def _start_turned_off(self, then: Callable[[Any, RestoreResult], object] | None) -> RestoreResult:
        """Start at step 0 without restoring anything, for SaveSettings(enabled=False)."""
        self._counter.start_at(self._counter.progress)
        at = RestoreResult(**asdict(self._counter.progress), attempt=1)
        if then is not None:
            results([run_in(actor, then, at) for actor in self._actors])
        start_alone(self._state.periodics, lambda: self._counter.progress, world_size=1)
        self._is_restored = True
        return at

    def end_step(self, metrics: Mapping[str, object] | None = None, *, tokens: int = 0, episodes: int = 0) -> None:
        """Call this when an optimizer step is complete on all actors. It saves when a save is due.

        The arguments and errors are those of Checkpointer.end_step.
        """
        values = checked(metrics or {})
        self._clock.stop()
        self._take_answers()
        status = self._status  # at the end of the last step
        busy_s = max(0.0, (status.busy_s or 0.0) - self._clock.step_s)
        self._triggers.trained(self._clock.step_s, is_saving=status.busy_s is not None)
        self._counter.end_step(tokens=tokens, episodes=episodes)
        self._metrics = values
        kind = None
        if self._settings.enabled:
            self._step_metrics.add(self._counter.step, values)
            kind = self._triggers.decide_at_step(
                self._counter.progress, is_busy=status.is_busy, busy_s=busy_s, metrics=self._metrics
            )
        self._tell("step", save=kind, tasks=self._triggers.tasks)
        self._clock.go()

    def end_epoch(self) -> None:
        """Call this when an epoch is complete, including what the script does at its end. See
        Checkpointer.end_epoch.
        """
        self._take_answers()
        self._counter.end_epoch()
        kind = self._triggers.decide_at_epoch_end(self._counter.progress, is_busy=self._status.is_busy)
        self._tell("epoch", save=kind, tasks=self._triggers.tasks)

    def save(
        self,
        metrics: Mapping[str, object] | None = None,
        *,
        step: int | None = None,
        is_rolling: bool = False,
        after_commit: str | Sequence[str] = (),
        name: str | None = None,
        note: Mapping[str, NoteValue] | None = None,
        expire_after_s: float | None = None,
        overwrite: bool = False,
    ) -> "ActorSaveHandle | SaveHandle":
        """Start a save of the current state. The arguments, the handle and errors are those of Checkpointer.save.

        The handle asks rank 0's actor, after the earlier calls of that actor.
        """
        label = label_of(name, note, expire_after_s, overwrite=overwrite)
        self._metrics = checked(metrics or self._metrics)
        kind, tasks = kind_asked_for(self._settings, is_rolling=is_rolling, after_commit=after_commit)
        if step is not None:
            self._counter.count_to(step)
        save_id = uuid4().hex
        self._tell("save", save=kind, tasks=tasks, label=label, save_id=save_id)
        if not self._settings.enabled:
            return SaveHandle.committed(uri="", key="", progress=self._counter.progress)
        return ActorSaveHandle(self._actors[0], self._uri, save_id)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until every save started so far is committed. timeout_s and errors are those of Checkpointer.wait."""
        self._tell("wait", save=None, timeout_s=timeout_s)
        self._take_answers()

    def close(self) -> None:
        """Save the last step if it is not saved, and wait for the commit. Raises whatever prevented the commit.

        Leaving the context without an exception calls it.
        """
        if self._is_closed:
            return
        try:
            if self._is_restored:
                self._tell("close", save="keep")
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
        # Nothing new is saved: the state may be in the middle of a step.
        self._leave()

    def _tell(
        self,
        at: Literal["step", "epoch", "save", "wait", "close"],
        *,
        save: SaveKind | None,
        tasks: Sequence[str] = (),
        timeout_s: float | None = None,
        label: Label = NO_LABEL,
        save_id: str = "",
    ) -> None:
        """Send the actors the position of training and what to do there.

        If they save, wait until they have copied their state.
        """
        self._take_answers()
        if not self._settings.enabled:
            return
        began = time.monotonic()
        decision = DriverDecision(
            at=at,
            progress=self._counter.progress,
            save=save,
            tasks=tuple(tasks),
            is_preempted=self._triggers.is_preempted,
            leaving=self._triggers.leaving if at == "step" else None,
            timeout_s=timeout_s,
            label=label,
            save_id=save_id,
        )
        states: dict[str, Any] = {}
        if save:
            decision = replace(decision, metrics=numbers_of(self._metrics))
            states = self._state.state_dicts()
        rows = self._step_metrics.take() if save or self._step_metrics.are_many else {}
        decisions = [replace(decision, states=states, rows=rows), *[decision] * (len(self._actors) - 1)]
        self._answers = [
            run_in(actor, follow, self._uri, mine) for actor, mine in zip(self._actors, decisions, strict=True)
        ]
        if save:
            told_s = time.monotonic() - began
            self._take_answers()
            self._triggers.saved(
                told_s + self._status.blocked_s, self._counter.progress, save, began=began, tasks=tasks
            )
            self._clock.skip(time.monotonic() - began)

    def _take_answers(self) -> None:
        """Wait for the actors' replies to the last decision. Raises what an actor has raised."""
        if not self._settings.enabled and not self._is_restored:  # when it is enabled, the actors raise this
            raise ConfigError(RESTORE_FIRST)
        answers, self._answers = self._answers, []
        if answers:
            self._status = SaveStatus.of_slowest(results(answers))
            self._triggers.committed(self._status.save_s)

    def _leave(self) -> None:
        """Have the actors leave. The saves in flight are complete, and may end."""
        if not self._is_closed and self._settings.enabled:
            rows = self._step_metrics.take()
            leaving = [run_in(actor, leave, self._uri, {} if rank else rows) for rank, actor in enumerate(self._actors)]
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
            self._end()

    def _end(self) -> None:
        self._is_closed = True
        if self._settings.enabled:
            ray.kill(self._coordinator)

    def _join(self, group: RayGroup, nodes: Sequence[str]) -> None:
        joining, settings = [], settings_for_actors(self._settings)
        for rank, (actor, node) in enumerate(zip(self._actors, nodes, strict=True)):
            mine = replace(
                group,
                rank=rank,
                world_size=len(nodes),
                role=self._roles[rank],
                broadcast=None,
                notice=None,
                is_first_on_node=node not in nodes[:rank],
            )
            joining.append(run_in(actor, join, self._state.names, settings, mine))
        results(joining)


class ActorSaveHandle:
    """A handle on one save of a group of actors, like SaveHandle for a rank's. It asks rank 0's actor."""

    def __init__(self, actor: Any, uri: str, save_id: str) -> None:
        self._actor = actor
        self._uri = uri
        self._save_id = save_id

    @property
    def is_done(self) -> bool:
        """Return whether the save has ended, committed or not."""
        return self._state()[0]

    @property
    def is_committed(self) -> bool:
        """Return whether the save is committed."""
        return self._state()[1]

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Wait until the save is committed. timeout_s and errors are those of SaveHandle.result."""
        check_timeout("result", timeout_s)
        info: CheckpointInfo
        (info,) = results([run_in(self._actor, result_of, self._uri, self._save_id, timeout_s)])
        return info

    def _state(self) -> tuple[bool, bool]:
        state: tuple[bool, bool]
        (state,) = results([run_in(self._actor, is_done_and_committed, self._uri, self._save_id)])
        return state


def joined(reports: Sequence[RestoreReport]) -> RestoreReport:
    """Return one report of all roles."""
    columns = {spec.name: [getattr(report, spec.name) for report in reports] for spec in fields(RestoreReport)}
    return RestoreReport(**{name: tuple(dict.fromkeys(chain.from_iterable(of))) for name, of in columns.items()})


def settings_for_actors(settings: SaveSettings) -> SaveSettings:
    """Return the settings for the actors: they can be pickled, whatever the user's own function refers to.

    Only the driver calls that function; the actors get its name, for the manifests.
    """
    return settings if settings.when is None else replace(settings, when=_AskedInDriver(function_name(settings.when)))


class _AskedInDriver:
    """A stand-in for a function that only the driver can call, with the function's name."""

    def __init__(self, name: str) -> None:
        self.__qualname__ = name

    def __call__(self, *asked: object) -> bool:
        raise AssertionError(f"the driver decides when to save, but an actor asked with {asked}")
