"""Settings of a training run: when it saves, what runs after a commit, and which checkpoints and exports stay.

They are plain data, checked as a whole at construction. Each class documents its own fields.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, Self, TypedDict, get_args
from urllib.parse import urlsplit

from raycheck.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Default(Enum):
    """The value of a setting that nobody has given, where the default depends on what else is given."""

    DEFAULT = "default"

    def __repr__(self) -> str:
        return self.name


DEFAULT: Final = Default.DEFAULT
KEEP_LAST = 10


class KeepBest(TypedDict):
    """The best checkpoints that stay.

    metric: the metric by which they are compared.
    mode: whether its lowest ("min") or highest ("max") values are best.
    count: how many stay.
    """

    metric: str
    mode: Literal["min", "max"]
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """The rules for which committed checkpoints stay: those that any rule keeps, or all if there is no rule.

    The head and pinned checkpoints always stay. Each field is a rule; None, the default, means that there is no such
    rule.

    keep_last: keep this many of the newest commits.
    keep_every_steps: keep the first checkpoint at or after each multiple of this many steps.
    keep_every_s: keep the first commit of each span of this many seconds, by the store's clock. Spans are counted
        from 1970, so that 3600 keeps one per hour of the day.
    keep_best: keep the best checkpoints by a metric given to `end_step`, such as
        {"metric": "loss", "mode": "min", "count": 3}.
    expire_after_s: this many seconds after its commit, by the store's clock, a checkpoint expires: no rule keeps it.
    rolling_keep_last: keep this many of the newest rolling checkpoints; None keeps all. The other rules neither keep
        nor count rolling checkpoints.

    Raises ConfigError when a value cannot work.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_every_s: float | None = None
    keep_best: KeepBest | None = None
    expire_after_s: float | None = None
    rolling_keep_last: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "keep_last", "keep_every_steps", "rolling_keep_last")
        _check_seconds(self, "keep_every_s", "expire_after_s")
        match self.keep_best:
            case None:
                pass
            case {"metric": str(metric), "mode": "min" | "max", "count": int(count), **others} if (
                metric and count >= 1 and type(count) is int and not others
            ):
                pass
            case _:
                raise ConfigError(f"keep_best={self.keep_best!r}: {_BEST_ADVICE}")

    @property
    def metric(self) -> str | None:
        """Return the metric by which keep_best chooses; `latest` repeats it, since later decisions need it."""
        return self.keep_best["metric"] if self.keep_best else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """The contents of an exported Hugging Face directory.

    entry: the model's name in the state. None: the one entry that has a Hugging Face configuration.
    files: the tokenizers and processors to include, by their names in the state. None: all of them.
    merge_lora: write a PEFT model as a plain model with its adapter merged. False: write the adapter alone.
    dtype: the type to which floating-point weights are converted, such as "bfloat16". None: as saved.
    config_from: a folder, or its URI, with the config.json of a model that was saved without one.
    max_shard_bytes: the largest size of a weights file, in bytes. None: 5 GB, and less for a small model, so that
        several writers can share the work.
    """

    entry: str | None = None
    files: Sequence[str] | None = None
    merge_lora: bool = False
    dtype: "torch.dtype | str | None" = None
    config_from: str | None = None
    max_shard_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HFExport(ExportOptions):
    """The Hugging Face directories that a training run writes.

    name, to, keep_last: see AfterCommit.export.
    """

    name: str = "{checkpoint}"
    to: str | None = None
    keep_last: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "keep_last", "max_shard_bytes")
        _check_contents(self)
        if not any(found.startswith(("{step}", "{step:", "{checkpoint}")) for found in _FIELD.findall(self.name)):
            raise ConfigError(f"name={self.name!r} does not tell steps apart; {_NAME_ADVICE}")
        for segment in _FIELD.sub("0", self.name).split("/"):
            if not _SEGMENT.fullmatch(segment):
                raise ConfigError(f"name={self.name!r}: {segment!r} cannot be a directory; {_NAME_ADVICE}")

    def directory(self, checkpoint: str, *, step: int, epoch: int, epoch_step: int) -> str:
        """Return the name of the directory for the export of `checkpoint`."""
        return self.name.format(checkpoint=checkpoint, step=step, epoch=epoch, epoch_step=epoch_step)


MOST_KEPT = 256
"""Of published versions: the list of them must stay small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish(ExportOptions):
    """How a run's weights are published.

    to, keep_last, whole_every, cache: see AfterCommit.publish. whole: make this version whole and without a patch.
    """

    to: str | None = None
    keep_last: int = 4
    whole_every: int = 16
    cache: str | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        _check_counts(self, "max_shard_bytes")
        for name in ("keep_last", "whole_every"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST_KEPT:
                raise ConfigError(f"{name}={value!r}: give a whole number from 1 to {MOST_KEPT}")
        _check_contents(self)
        if self.cache is not None and not self.cache.startswith("/"):
            raise ConfigError(f"cache={self.cache!r}: give the absolute path of a folder")


BuiltIn = HFExport | Publish
"""The tasks after commits that raycheck has itself."""
BUILT_IN = (HFExport, Publish)


@dataclass(frozen=True, slots=True)
class AfterCommit:
    """A task that runs on committed checkpoints while training continues, and the triggers that select them.

    `AfterCommit(evaluate, every_steps=500)` calls your function; `AfterCommit.export(every_steps=1000)` writes the
    model as a Hugging Face directory; `AfterCommit.publish(every_steps=1)` publishes it to samplers.

    task: a function, called as `evaluate(uri, key)` with the run's URI and the checkpoint's key, or a Ray remote
        function with the resources that it needs. It runs in a Ray task; under torchrun it runs in a thread of rank 0's
        process. In it, `raycheck.open_run(uri)` gives access to the checkpoint and stores its scores. Ray may call it
        twice for one checkpoint. If it raises, a warning is logged, and training continues. If it is an object with
        a method `check`, rank 0 calls that before the first step: it raises what makes the task impossible.
    every_steps, every_s, every_epochs: save and run the task this often, as in SaveSettings; several may be
        given. None, the default of each: no such trigger.
    every_save: also run it on every other checkpoint that is saved, except rolling ones. Default: False.
    at_end: also run it on the last checkpoint. Default: True.
    mode: whether training waits. "async": it continues; if the task is due again before it has started, the earlier
        checkpoint is skipped. "auto", the default: it continues, and waits only if the task is due again before it has
        ended. "sync": it always waits. In every mode, the end of training waits for all tasks. No wait is longer than
        an hour.

    The checkpoint's objects are not deleted while a task uses them. Raises ConfigError when a value cannot work.
    """

    task: Callable[[str, str], object] | BuiltIn
    _: KW_ONLY
    every_steps: int | None = None
    every_s: float | None = None
    every_epochs: int | None = None
    every_save: bool = False
    at_end: bool = True
    mode: Literal["auto", "async", "sync"] = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.task, BUILT_IN) and not callable(self.task):
            raise ConfigError(
                f"AfterCommit({self.task!r}): give a function of (uri, key), or use AfterCommit.export or .publish"
            )
        check_triggers(self)
        _check_choice(self, "every_save", False, True)
        _check_choice(self, "mode", "auto", "async", "sync")

    @classmethod
    def export(
        cls,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        every_epochs: int | None = None,
        at_end: bool = True,
        mode: Literal["auto", "async", "sync"] = "auto",
        name: str = "{checkpoint}",
        to: str | None = None,
        keep_last: int | None = None,
        entry: str | None = None,
        files: Sequence[str] | None = None,
        merge_lora: bool = False,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
    ) -> Self:
        """Return the task that writes the model as a Hugging Face directory, for evaluation or for publishing.

        The directory includes the tokenizers and processors in the state.

        every_steps, every_s, every_epochs, at_end, mode: as for any task.
        name: the directory's name, as a format of `checkpoint`, `step`, `epoch` and `epoch_step`, such as
            "epoch{epoch}/step{step:06d}". The default is the checkpoint's name; it contains step, attempt and save, so
            it is always unique. A complete export that already has the name is left unchanged.
        to: a URI or absolute path below which the directories are written. None: `exports/` in the run.
        keep_last: keep the exports of this many of the newest checkpoints, and those of pinned and named ones. Other
            exports that training in this run wrote there are deleted after the next export. None: all stay.
        entry, files, merge_lora, dtype, max_shard_bytes: the contents of the directory, see ExportOptions.

        Raises ConfigError when a value cannot work.
        """
        made = HFExport(
            name=name,
            to=to,
            keep_last=keep_last,
            entry=entry,
            files=files,
            merge_lora=merge_lora,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        return cls(
            made,
            every_steps=every_steps,
            every_s=every_s,
            every_epochs=every_epochs,
            at_end=at_end,
            mode=mode,
        )

    @classmethod
    def publish(
        cls,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        every_epochs: int | None = None,
        every_save: bool = False,
        at_end: bool = True,
        mode: Literal["auto", "async", "sync"] = "auto",
        to: str | None = None,
        keep_last: int = 4,
        whole_every: int = 16,
        cache: str | None = None,
        entry: str | None = None,
        files: Sequence[str] | None = None,
        merge_lora: bool = False,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
    ) -> Self:
        """Return the task that publishes the model, as a patch of the version before, for `raycheck.follow`.

        every_steps, every_s, every_epochs, every_save, at_end, mode: as for any task.
        to: a URI or absolute path where the versions are. None: `published/` in the run.
        keep_last: keep this many of the newest versions, and what a new reader needs to have the oldest of them. A
            reader's lease keeps what leads from its version to the newest one.
        whole_every: make a version whole when it is this many versions after the last whole one. It becomes whole
            earlier when the patches since then are larger than it.
        cache: a folder on the node where the task runs, for the newest version. None: one below the temporary folder.
        entry, files, merge_lora, dtype, max_shard_bytes: the contents of a version, see ExportOptions.

        Raises ConfigError when a value cannot work.
        """
        made = Publish(
            to=to,
            keep_last=keep_last,
            whole_every=whole_every,
            cache=cache,
            entry=entry,
            files=files,
            merge_lora=merge_lora,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        return cls(
            made,
            every_steps=every_steps,
            every_s=every_s,
            every_epochs=every_epochs,
            every_save=every_save,
            at_end=at_end,
            mode=mode,
        )

    @property
    def name(self) -> str:
        """Return the name by which `save` requests the task: "export", "publish", "publish to s3://bucket/models/mine",
        or the function's own name."""
        if isinstance(self.task, Publish):
            return "publish" if self.task.to is None else f"publish to {self.task.to}"
        if isinstance(self.task, HFExport):
            return "export"
        return function_name(self.task).rpartition(".")[2]

    @property
    def chosen(self) -> str:
        """Return these settings as text, without defaults."""
        triggers = _chosen(self)[1:]  # the first field is the task
        if isinstance(self.task, BUILT_IN):
            return f"AfterCommit.{self.name}({', '.join((*triggers, *_chosen(self.task)))})"
        return f"AfterCommit({', '.join((function_name(self.task), *triggers))})"

    @property
    def without_triggers(self) -> "AfterCommit":
        """Return this task without triggers, for a rank that is told when to run it."""
        return replace(self, every_steps=None, every_s=None, every_epochs=None)


AlertKind = Literal["attempt_died", "run_silent", "save_failed", "saves_failing", "run_finished"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alerts:
    """Whom to tell what happens to a run, at most once for each thing that happens.

    webhook: an http or https URL. It gets a POST of JSON, {"text": "..."}, as Slack's webhooks and compatible ones do.
        It is a secret: raycheck shows and stores it nowhere. None: no webhook.
    command: a program and its arguments, which the coordinator runs: on the driver's node, or under torchrun on rank
        0's. It gets the alert as JSON in its standard input, and in the environment as RAYCHECK_ALERT, RAYCHECK_RUN and
        RAYCHECK_TEXT. It has 30 s. None: no command.
    on: the kinds to tell of; by default all. "attempt_died": an attempt has ended before the end of training, or the
        driver has given up the run. "run_silent": there was no commit for long; only `raycheck watch` finds this out.
        "save_failed": a save has failed. "saves_failing": the next failed save ends the training, by
        `SaveSettings(max_failed_saves=...)`. "run_finished": the run has come to the end of training.

    Raises ConfigError when a value cannot work.
    """

    webhook: str | None = field(default=None, repr=False)
    command: Sequence[str] | None = field(default=None, repr=False)
    on: Sequence[AlertKind] = get_args(AlertKind)

    def __post_init__(self) -> None:
        if self.webhook is None and self.command is None:
            raise ConfigError("Alerts(): give webhook=..., command=..., or both")
        if self.webhook is not None and not _is_webhook(str(self.webhook)):
            raise ConfigError(  # it is a secret
                "Alerts(webhook=...): this is not an http or https URL to which a request can be sent; copy it again. "
                "It needs a host, may have a port from 1 to 65535, and has no user, password or non-ASCII character"
            )
        command = self.command
        if command is not None:
            is_list = isinstance(command, Sequence) and not isinstance(command, str) and len(command) > 0
            if not is_list or not all(isinstance(word, str) and word and "\0" not in word for word in command):
                raise ConfigError('Alerts(command=...): give a program and its arguments: ["notify", "me"]')
            object.__setattr__(self, "command", tuple(command))
        kinds = (self.on,) if isinstance(self.on, str) else tuple(self.on)
        unknown = [kind for kind in kinds if kind not in get_args(AlertKind)]
        if unknown or not kinds:
            wrong = repr(unknown[0]) if unknown else "nothing"
            raise ConfigError(f"Alerts(on={wrong}): give some of {', '.join(get_args(AlertKind))}")
        object.__setattr__(self, "on", kinds)

    @property
    def chosen(self) -> str:
        """Return these settings as text, without what may be secret."""
        ways = [name for name in ("webhook", "command") if getattr(self, name) is not None]
        kinds = () if self.on == get_args(AlertKind) else (f"on={list(self.on)}",)
        return f"Alerts({', '.join((*ways, *kinds))})"


_WEBHOOK = re.compile(r"https?://[^\s/?#]+[!-~]*")


def _is_webhook(url: str) -> bool:
    """Return whether Python can send a request to this URL."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        return bool(_WEBHOOK.fullmatch(url) and host and parts.port != 0 and parts.username is None)
    except ValueError:  # also what idna raises
        return False


_BEST_ADVICE = 'give a metric, "min" or "max", and a count: {"metric": "loss", "mode": "min", "count": 3}'
_FIELD = re.compile(r"\{(?:checkpoint|(?:step|epoch|epoch_step)(?::0[1-9]d)?)\}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}")
_NAME_ADVICE = (
    "give letters, digits, '_.=+-' and {step} or {checkpoint}; {epoch}, {epoch_step} and '/' may be there too, and "
    "numbers with leading zeros: {step:06d}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSettings:
    """The settings of a run: when to save, what to keep, where to write, and how to react to failures.

    When to save. A save is due when any of these triggers fires, and None means that there is no such trigger:

    every_steps: save after this many optimizer steps. The default is 100 when none of every_s, every_tokens,
        every_epochs, at_steps, when and overhead is given, otherwise None.
    every_s: save this many seconds after the start of the last save.
    every_tokens: save after this many tokens since the last save, as counted by `end_step(tokens=...)`.
    every_epochs: save each time this many epochs have ended: at `end_epoch`, or, with Batches in the state, after the
        first step of the next epoch.
    at_steps: save after each of these optimizer steps. Default: none.
    at_start: also save at step 0, at the end of a `restore` that finds nothing, or that restores only a part and starts
        at step 0. Default: False.
    when: a function that decides at the end of each step. It is called on rank 0 only, with the step and the metrics of
        `end_step`, and returns True to save now; a small broadcast at each step sends the result to all ranks. An error
        in it, or a result that is not a bool, ends the run with a ConfigError that names it.
    overhead: the share of training time that saves may cost, such as 0.02. The interval is then computed from the cost
        of a save and the rate of failures (Young and Daly), and is never longer than every_s.
    rolling_every_steps, rolling_every_s: save at these times too, but keep only a few: see rolling_keep_last.
    memory_every_steps: make a memory checkpoint after this many optimizer steps: the nodes' actors keep it in memory,
        and each node copies its part to another node of the group. The next attempt of the same driver restores the
        newest one if it is newer than the newest in the bucket. It survives the loss of the workers and of any single
        node, but not of the driver: only checkpoints in the bucket do. Needs upload_by="node", and for each rank four
        times the memory of its shard: two buffers, and two copies of other nodes' shards. Default: None.
    when_busy: what happens when a save is due while another is in progress. "wait", the default, blocks training until
        that one has finished. "skip" omits this save (one due by every_s is made up for later); a save before a
        preemption always waits. "copy" makes a second copy of the state in host memory, and blocks training only when
        two saves are in progress. If there is memory for only one copy, a warning is logged, and the save waits.
    enabled: False turns a Checkpointer off: it neither accesses the bucket nor needs a coordinator, `restore` starts at
        step 0, and `end_step` only counts.

    What to keep:

    keep_last, keep_every_steps, keep_every_s, keep_best, expire_after_s: which checkpoints stay, see Retention.
        The default keeps the newest 10, or what Ray's CheckpointConfig asks for; that is refused if it contradicts
        keep_last or keep_best. The others leave `latest` when a newer checkpoint is committed, in the same write, and
        their objects are deleted after a grace period for readers.
    rolling_keep_last: of the checkpoints that only the rolling triggers requested, this many of the newest stay; older
        ones are dropped once a newer one is committed. Default: 1.
    after_commit: tasks that run on committed checkpoints while training continues, such as an evaluation or an export:
        one AfterCommit or several. Default: none.

    Where to write:

    upload_by: which process uploads. "rank", the default: the training process, in a thread. "node": an actor on each
        node that has ranks, which shares the memory of each rank's staged copy. Then uploading takes no time from the
        training's interpreter, and a save that all ranks have staged is completed and committed even if they die, as
        long as their nodes and the driver live; the next attempt waits for it. Needs `raycheck.fit` and Linux. A rank
        that cannot share its memory with its node's actor uploads its shard itself, and a warning says why.
    base: the URI of another run in the same bucket, such as an import, that has the frozen parameters of this run.
        Before the first step of a run that has not saved them yet, they are compared bit for bit. If they are equal,
        this run's checkpoints refer to the base's and upload none; otherwise a warning says why they are uploaded.
        None, the default: every run uploads its own once.

    How to react to failures:

    on_preempt: what happens after the save that a preemption notice triggers. "continue", the default, keeps training
        until the node is gone and Ray restarts the workers. "restart" restarts them elsewhere immediately, which uses
        one of Ray's max_failures.
    on_drift: what happens when ranks that should have equal values, as under DDP, do not. "refuse", the default: the
        save fails, and names the tensor and the ranks. "keep_first": the lowest rank that has a tensor writes it, so
        one whole replica is saved; the difference is logged once, and the checkpoint is marked. In this mode the
        writing of replicas is not shared among their ranks.
    save_timeout_s: seconds from the start of a save to its commit after which it counts as failed. A restore fails
        after the same time, but not before a minute. It has more, in proportion, on a rank that reads more than the
        largest rank has saved, and always enough for 10 MB/s. Default: 600.
    max_failed_saves: training ends with SaveFailedError after this many failed saves in a row. Fewer only warn.
        Default: 3.
    alerts: whom to tell when an attempt dies, saves fail, or the run finishes, see Alerts. Default: nobody.

    Raises ConfigError when a value cannot work.
    """

    every_steps: int | Default | None = DEFAULT
    every_s: float | None = None
    every_tokens: int | None = None
    every_epochs: int | None = None
    at_steps: Sequence[int] = ()
    at_start: bool = False
    when: Callable[[int, Mapping[str, object]], bool] | None = None
    overhead: float | None = None
    rolling_every_steps: int | None = None
    rolling_every_s: float | None = None
    memory_every_steps: int | None = None
    when_busy: Literal["wait", "skip", "copy"] = "wait"
    enabled: bool = True
    keep_last: int | Default | None = DEFAULT
    keep_every_steps: int | None = None
    keep_every_s: float | None = None
    keep_best: KeepBest | None = None
    expire_after_s: float | None = None
    rolling_keep_last: int = 1
    after_commit: AfterCommit | Sequence[AfterCommit] = ()
    upload_by: Literal["rank", "node"] = "rank"
    base: str | None = None
    on_preempt: Literal["continue", "restart"] = "continue"
    on_drift: Literal["refuse", "keep_first"] = "refuse"
    save_timeout_s: float = 600.0
    max_failed_saves: int = 3
    alerts: Alerts | None = None

    def __post_init__(self) -> None:
        is_place = isinstance(self.base, str) and ("://" in self.base or self.base.startswith("/"))
        if self.base is not None and not is_place:
            raise ConfigError(f"base={self.base!r}: give the URI of another run, or its absolute path")
        if self.every_steps is not DEFAULT:
            _check_counts(self, "every_steps")
        if self.overhead is not None and not (isinstance(self.overhead, int | float) and 0 < self.overhead < 1):
            raise ConfigError(f"overhead={self.overhead!r}: give a share of training time, such as 0.02")
        _check_counts(
            self, "every_tokens", "every_epochs", "rolling_every_steps", "max_failed_saves", "memory_every_steps"
        )
        _check_seconds(self, "every_s", "rolling_every_s", "save_timeout_s")
        _check_choice(self, "when_busy", "wait", "skip", "copy")
        _check_choice(self, "on_preempt", "continue", "restart")
        _check_choice(self, "upload_by", "rank", "node")
        _check_choice(self, "on_drift", "refuse", "keep_first")
        if self.memory_every_steps is not None and self.upload_by != "node":
            hint = 'give upload_by="node" too, since the actors of the nodes hold memory checkpoints'
            raise ConfigError(f"memory_every_steps={self.memory_every_steps}: {hint}")
        for name in ("enabled", "at_start"):
            if type(getattr(self, name)) is not bool:  # the text "false" would count as true
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        object.__setattr__(self, "at_steps", _steps(self.at_steps))
        if self.when is not None and not callable(self.when):
            raise ConfigError(f"when={self.when!r}: give a function of (step, metrics) that returns True or False")
        if self.alerts is not None and not isinstance(self.alerts, Alerts):
            raise ConfigError("SaveSettings(alerts=...): give raycheck.Alerts(...)")
        object.__setattr__(self, "after_commit", _tasks(self.after_commit))
        _ = self.retention

    @property
    def chosen(self) -> tuple[str, ...]:
        """Return the settings that differ from their defaults, as text."""
        return _chosen(self)

    @property
    def step_trigger(self) -> int | None:
        """Return the steps between two saves: `every_steps`, or its default, which depends on the other triggers."""
        if self.every_steps is not DEFAULT:
            return self.every_steps
        others = (self.every_s, self.every_tokens, self.every_epochs, self.overhead, self.when)
        return 100 if not self.at_steps and all(trigger is None for trigger in others) else None

    @property
    def buffers(self) -> Literal[1, 2]:
        """Return how many saves may be in progress at a time. Each needs its own host memory."""
        return 2 if self.when_busy == "copy" else 1

    @property
    def without_triggers(self) -> "SaveSettings":
        """Return these settings without triggers, for a rank that is told when to save."""
        return replace(
            self,
            every_steps=None,
            every_s=None,
            every_tokens=None,
            every_epochs=None,
            at_steps=(),
            at_start=False,
            when=None,
            rolling_every_steps=None,
            rolling_every_s=None,
            memory_every_steps=None,
            overhead=None,
            after_commit=tuple(task.without_triggers for task in self.tasks.values()),
            when_busy="copy" if self.when_busy == "copy" else "wait",
        )

    @property
    def tasks(self) -> Mapping[str, AfterCommit]:
        """Return the tasks that run after commits, by name."""
        given = (self.after_commit,) if isinstance(self.after_commit, AfterCommit) else self.after_commit
        return {task.name: task for task in given}

    @property
    def retention(self) -> Retention:
        """Return the rules by which checkpoints stay."""
        rules = {spec.name: getattr(self, spec.name) for spec in fields(Retention)}
        return Retention(**rules | ({"keep_last": KEEP_LAST} if self.keep_last is DEFAULT else {}))

    def keeping(self, given: Retention, source: str) -> "SaveSettings":
        """Return these settings with keep_last and keep_best as `given` has them.

        source: what has given them, for the error. Raises ConfigError when these settings say something else.
        """
        for name in ("keep_last", "keep_best"):
            said, rule = getattr(self, name), getattr(given, name)
            if said not in (DEFAULTS[name], rule):
                raise ConfigError(f"{source} and SaveSettings({name}={said!r}) contradict each other; give one of them")
        return replace(self, keep_last=given.keep_last, keep_best=given.keep_best)


DEFAULTS = {spec.name: spec.default for spec in fields(SaveSettings)}


def _chosen(settings: SaveSettings | AfterCommit | BuiltIn) -> tuple[str, ...]:
    texts = []
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if spec.name == "after_commit":
            texts += [f"{spec.name}={task.chosen}" for task in value]
        elif isinstance(value, Alerts):
            texts.append(f"{spec.name}={value.chosen}")
        elif callable(value):  # its repr differs between processes
            texts.append(f"{spec.name}={function_name(value)}")
        elif spec.name in ("base", "to") and isinstance(value, str):  # settings in a query are not for others to read
            texts.append(f"{spec.name}={value.partition('?')[0]!r}")
        elif value != spec.default:
            texts.append(f"{spec.name}={value!r}")
    return tuple(texts)


def function_name(function: object) -> str:
    """Return the name of a function, or of a callable object's class. It is equal in all processes."""
    function = getattr(function, "remote", function)  # that of a Ray remote function has the function's name
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def check_triggers(settings: object) -> None:
    """Raise ConfigError when one of every_steps, every_s and every_epochs cannot work."""
    _check_counts(settings, "every_steps", "every_epochs")
    _check_seconds(settings, "every_s")


def _tasks(given: object) -> tuple[AfterCommit, ...]:
    tasks = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    if odd := [task for task in tasks if not isinstance(task, AfterCommit)]:
        raise ConfigError(f"after_commit={odd[0]!r}: give AfterCommit(...), or a list of them")
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"after_commit=...: two tasks have the name {twice[0]!r}; name their functions differently")
    return tasks


def _steps(given: object) -> tuple[int, ...]:
    if isinstance(given, Sequence | set | frozenset) and not isinstance(given, str | bytes):
        steps = tuple(given)
        if all(type(step) is int and step >= 1 for step in steps):
            return tuple(sorted(set(steps)))
    raise ConfigError(
        f"at_steps={given!r}: give whole numbers of at least 1: [100, 250]; at_start=True saves at step 0"
    )


def _check_choice(settings: object, name: str, *choices: object) -> None:
    value = getattr(settings, name)
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: give {' or '.join(map(repr, choices))}")


def _check_contents(options: HFExport | Publish) -> None:
    _check_choice(options, "dtype", None, "float32", "bfloat16", "float16", "float64")
    if isinstance(options.files, str):
        raise ConfigError(f"files={options.files!r}: give a list of entries' names")
    if options.to is not None and "://" not in options.to and not options.to.startswith("/"):
        raise ConfigError(f"to={options.to!r}: give a URI or an absolute path")


def _check_counts(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r}: give a whole number of at least 1")


def _check_seconds(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < float("inf")):
            raise ConfigError(f"{name}={value!r}: give a number of seconds above 0")
