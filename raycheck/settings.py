"""When a user's training saves and exports, and what stays: plain data, checked whole at construction."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from raycheck.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Which committed checkpoints stay: one stays when any rule keeps it, and all stay when there is none.

    keep_last: the newest so many commits. keep_every_steps: the first at or after each multiple of so many steps.
    keep_every_seconds: the first commit of each span of so many seconds by the store's clock, spans counted from 1970:
    3600 keeps one per hour of the day.
    keep_best: (metric, "min" or "max", how many), by the metrics given to `end_step`. rolling_keep_last: the newest so
    many of those saved as rolling, None for all; other rules do not count these. expire_after_s: seconds after its
    commit, by the store's clock, from which no rule keeps a checkpoint any more. The head and pinned ones always stay.

    Raises ConfigError when a value cannot work.
    """

    keep_last: int | None = None
    keep_every_steps: int | None = None
    keep_every_seconds: float | None = None
    keep_best: tuple[str, Literal["min", "max"], int] | None = None
    expire_after_s: float | None = None
    rolling_keep_last: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "keep_last", "keep_every_steps", "rolling_keep_last")
        _check_seconds(self, "keep_every_seconds", "expire_after_s")
        match self.keep_best:
            case None:
                pass
            case (str(metric), "min" | "max", int(count)) if metric and count >= 1 and type(count) is int:
                pass
            case _:
                raise ConfigError(
                    f'keep_best={self.keep_best!r}: give a metric, "min" or "max", and a count: ("loss", "min", 3)'
                )

    @property
    def metric(self) -> str | None:
        """The metric that later decisions will need."""
        return self.keep_best[0] if self.keep_best else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSettings:
    """When training writes its model as a Hugging Face directory, from a checkpoint that it saves then: for evaluation
    and for publishing, with the tokenizers and processors in the state.

    every_steps, every_seconds, every_epochs: as in SaveSettings, any of them. at_end: also the last step.
    mode: training goes on meanwhile ("async"; one that has not begun when the next is due is given up), and waits when
        the next is due before one has ended ("auto"), or always ("sync"). Its end waits for all. No wait is longer
        than an hour.
    name: of the directory, a format of `checkpoint` (step, attempt and save, so that it is never there already),
        `step`, `epoch` and `epoch_step`: "epoch{epoch}/step{step:06d}". A whole one of that name stays as it is.
    to: a URI below which the directories lie; None: `exports/` in the run.
    keep_last: of those that trainings of this run wrote there, the ones of the newest so many checkpoints stay, and
        those of pinned ones; the others are deleted after the next export. None: all stay.
    entry, files, merge_lora, dtype, max_shard_bytes: see export_hf.

    Raises ConfigError when a value cannot work.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    every_epochs: int | None = None
    at_end: bool = True
    mode: Literal["auto", "async", "sync"] = "auto"
    name: str = "{checkpoint}"
    to: str | None = None
    keep_last: int | None = None
    entry: str | None = None
    files: Sequence[str] | None = None
    merge_lora: bool = False
    dtype: str | None = None
    max_shard_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "every_steps", "every_epochs", "keep_last", "max_shard_bytes")
        _check_seconds(self, "every_seconds")
        _check_choice(self, "mode", "auto", "async", "sync")
        _check_choice(self, "dtype", None, "float32", "bfloat16", "float16", "float64")
        if isinstance(self.files, str):
            raise ConfigError(f"files={self.files!r}: give a list of entries' names")
        if self.to is not None and "://" not in self.to and not self.to.startswith("/"):
            raise ConfigError(f"to={self.to!r}: give a URI or an absolute path")
        if not any(found.startswith(("{step}", "{step:", "{checkpoint}")) for found in _FIELD.findall(self.name)):
            raise ConfigError(f"name={self.name!r} does not tell steps apart; {_NAME_ADVICE}")
        for segment in _FIELD.sub("0", self.name).split("/"):
            if not _SEGMENT.fullmatch(segment):
                raise ConfigError(f"name={self.name!r}: {segment!r} cannot be a directory; {_NAME_ADVICE}")

    def directory(self, checkpoint: str, *, step: int, epoch: int, epoch_step: int) -> str:
        """The name of what is exported there."""
        return self.name.format(checkpoint=checkpoint, step=step, epoch=epoch, epoch_step=epoch_step)

    @property
    def without_triggers(self) -> "ExportSettings":
        """The same for a rank that is told when to export."""
        return replace(self, every_steps=None, every_seconds=None, every_epochs=None)


_FIELD = re.compile(r"\{(?:checkpoint|(?:step|epoch|epoch_step)(?::0[1-9]d)?)\}")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,199}")
_NAME_ADVICE = (
    "give letters, digits, '_.=+-' and {step} or {checkpoint}; {epoch}, {epoch_step} and '/' may be there too, and "
    "numbers with leading zeros: {step:06d}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSettings:
    """When to save, what to keep, and how long to wait.

    enabled: False turns a Checkpointer off: it neither touches the bucket nor needs a coordinator, `restore` begins at
        step 0, and `end_step` counts.
    every_steps: save after so many optimizer steps. every_seconds: so long after the last save began. every_tokens:
        once so many were trained on since then, as `end_step(tokens=...)` says. every_epochs: at every so many calls
        of `end_epoch`, or after the first step that Batches in the state give of the next epoch. None: never.
        every_steps is 100 where none of these, at_steps, when or overhead is given, else None.
    at_steps: save after these optimizer steps. at_start: save at step 0 too, at the end of a `restore` that finds
        nothing, or takes only a part and begins at step 0.
    when: is called at the end of each step with the step and rank 0's metrics of `end_step`, and says whether to save
        now. It is asked on rank 0 alone, whose answer all ranks are told in a small broadcast at each step. What it
        raises, and an answer that is no bool, ends the run with a ConfigError that names it.
    rolling_every_steps, rolling_every_seconds: save at these moments too, cheaply to keep: of the checkpoints that only
        these asked for the newest rolling_keep_last stay, and older ones go once a newer one is committed.
    overhead: the share of training time that saves may cost, such as 0.02. The interval follows from what saves cost
        and how often the run was hurt (young_daly.py), and is never longer than every_seconds.
    exports: when and where the model is written as a Hugging Face directory too; None: never.
    keep_last, keep_every_steps, keep_every_seconds, keep_best, expire_after_s: which checkpoints stay, see Retention.
        The others leave `latest` in the same swap that commits a newer one, and their objects are deleted after a grace
        for readers.
    buffers, when_busy: how many saves may be under way, each in host memory of its own; a trigger while all of them are
        has to "wait", which holds up training, or may "skip" (every_seconds: comes later). Preemption always waits.
    on_preempt: after the save that a preemption notice brings, "continue" until the node goes and Ray restarts the
        workers, or "restart" them at once elsewhere, which costs one of Ray's max_failures.
    save_timeout_s: how long a save may take from its start to the commit before it counts as failed.
    max_failed_saves: so many failed saves in a row end the training with SaveFailedError; fewer are logged.

    Raises ConfigError when a value cannot work.
    """

    enabled: bool = True
    every_steps: int | Literal["default"] | None = "default"
    every_seconds: float | None = None
    every_tokens: int | None = None
    every_epochs: int | None = None
    at_steps: Sequence[int] = ()
    at_start: bool = False
    when: Callable[[int, Mapping[str, object]], bool] | None = None
    rolling_every_steps: int | None = None
    rolling_every_seconds: float | None = None
    rolling_keep_last: int = 1
    overhead: float | None = None
    exports: ExportSettings | None = None
    keep_last: int | None = 10
    keep_every_steps: int | None = None
    keep_every_seconds: float | None = None
    keep_best: tuple[str, Literal["min", "max"], int] | None = None
    expire_after_s: float | None = None
    buffers: Literal[1, 2] = 1
    when_busy: Literal["wait", "skip"] = "wait"
    on_preempt: Literal["continue", "restart"] = "continue"
    save_timeout_s: float = 600.0
    max_failed_saves: int = 3

    def __post_init__(self) -> None:
        if self.every_steps != "default":
            _check_counts(self, "every_steps")
        if self.overhead is not None and not (isinstance(self.overhead, int | float) and 0 < self.overhead < 1):
            raise ConfigError(f"overhead={self.overhead!r}: give a share of training time, such as 0.02")
        _check_counts(self, "every_tokens", "every_epochs", "rolling_every_steps", "max_failed_saves")
        _check_seconds(self, "every_seconds", "rolling_every_seconds", "save_timeout_s")
        _check_choice(self, "when_busy", "wait", "skip")
        _check_choice(self, "buffers", 1, 2)
        _check_choice(self, "on_preempt", "continue", "restart")
        for name in ("enabled", "at_start"):
            if type(getattr(self, name)) is not bool:  # the text "false" would count as true
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        object.__setattr__(self, "at_steps", _steps(self.at_steps))
        if self.when is not None and not callable(self.when):
            raise ConfigError(f"when={self.when!r}: give a function of (step, metrics) that returns True or False")
        if not isinstance(self.exports, ExportSettings | None):
            raise ConfigError(f"exports={self.exports!r}: give ExportSettings")
        _ = self.retention

    @property
    def chosen(self) -> tuple[str, ...]:
        """What is not as it would be by itself, in words."""
        return _chosen(self)

    @property
    def step_trigger(self) -> int | None:
        """`every_steps`, or what it is where nothing is said."""
        if self.every_steps != "default":
            return self.every_steps
        others = (self.every_seconds, self.every_tokens, self.every_epochs, self.overhead, self.when)
        return 100 if not self.at_steps and all(trigger is None for trigger in others) else None

    @property
    def without_triggers(self) -> "SaveSettings":
        """The same for a rank that is told when to save."""
        return replace(
            self,
            every_steps=None,
            every_seconds=None,
            every_tokens=None,
            every_epochs=None,
            at_steps=(),
            at_start=False,
            when=None,
            rolling_every_steps=None,
            rolling_every_seconds=None,
            overhead=None,
            exports=self.exports and self.exports.without_triggers,
            when_busy="wait",
        )

    @property
    def retention(self) -> Retention:
        return Retention(**{spec.name: getattr(self, spec.name) for spec in fields(Retention)})


def _chosen(settings: "SaveSettings | ExportSettings") -> tuple[str, ...]:
    texts = []
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if isinstance(value, ExportSettings):
            texts.append(f"{spec.name}=ExportSettings({', '.join(_chosen(value))})")
        elif callable(value):  # its repr would be another one in each process
            texts.append(f"{spec.name}={function_name(value)}")
        elif value != spec.default:
            texts.append(f"{spec.name}={value!r}")
    return tuple(texts)


def function_name(function: object) -> str:
    """The name of a function or of the class of a callable object, the same in each process."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


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


def _check_counts(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r}: give a whole number of at least 1")


def _check_seconds(settings: object, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
            raise ConfigError(f"{name}={value!r}: give a number of seconds above 0")
