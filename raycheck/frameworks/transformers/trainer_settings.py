"""Makes one SaveSettings of the script's own and of the Trainer's arguments. What the script's own say wins.

The Trainer's own flow decides when to save unless SaveSettings has a trigger: then its callbacks may still ask for a
save, but not save_strategy. Retention is always raycheck's, with the Trainer's limits where SaveSettings are silent.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from raycheck.adapters import SaveSettings
from raycheck.errors import ConfigError

_TRIGGERS = (
    "every_seconds",
    "every_tokens",
    "every_epochs",
    "at_steps",
    "when",
    "rolling_every_steps",
    "rolling_every_seconds",
    "overhead",
)
_DEFAULTS = {spec.name: spec.default for spec in fields(SaveSettings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSettings:
    """Holds the settings that result, and what was decided on the way.

    settings: for the Checkpointer. follows_strategy: whether save_strategy of the Trainer's arguments says when to
    save. said: for the log, what was taken from the arguments. contradictions: for the log, arguments that are not
    obeyed.
    """

    settings: SaveSettings
    follows_strategy: bool
    said: tuple[str, ...]
    contradictions: tuple[str, ...]


def joined_settings(given: SaveSettings | None, args: Any) -> JoinedSettings:
    """Join SaveSettings with the Trainer's arguments. Raises ConfigError where no order of the two could make sense."""
    settings = given or SaveSettings()
    said: list[str] = []
    against: list[str] = []
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    own = [name for name in _TRIGGERS if getattr(settings, name) != _DEFAULTS[name]]
    if settings.every_steps not in ("default", None):
        own.append("every_steps")
    if own:
        if strategy != "steps" or args.save_steps != 500:  # the default of both, which nobody has to have given
            asked = f"save_strategy={strategy!r}" + (f", save_steps={args.save_steps}" if strategy == "steps" else "")
            against.append(f"{asked}: SaveSettings({', '.join(own)}) says when to save")
    else:
        settings = replace(settings, every_steps=None)
        said.append(f"saves as save_strategy={strategy!r} says" + (_every(args) if strategy == "steps" else ""))
    if args.save_total_limit is not None:
        limit = args.save_total_limit if args.save_total_limit > 0 else None
        if settings.keep_last == _DEFAULTS["keep_last"]:
            settings = replace(settings, keep_last=limit)
            said.append(f"save_total_limit={args.save_total_limit} as keep_last")
        elif settings.keep_last != limit:
            against.append(f"save_total_limit={args.save_total_limit}: SaveSettings(keep_last={settings.keep_last})")
    if args.metric_for_best_model is not None:
        settings = _with_best(settings, args, said)
    if args.ignore_data_skip:
        against.append("ignore_data_skip=True: the data goes on with the next sample, and nothing is read again")
    return JoinedSettings(settings=settings, follows_strategy=not own, said=tuple(said), contradictions=tuple(against))


def best_metric(args: Any) -> str:
    """Returns the name under which the Trainer logs its metric_for_best_model."""
    name = str(args.metric_for_best_model)
    return name if name.startswith("eval_") else f"eval_{name}"


def _with_best(settings: SaveSettings, args: Any, said: list[str]) -> SaveSettings:
    metric, mode = best_metric(args), "max" if args.greater_is_better else "min"
    if settings.keep_best is None:
        said.append(f"metric_for_best_model as keep_best=({metric!r}, {mode!r}, 1)")
        return replace(settings, keep_best=(metric, "max" if args.greater_is_better else "min", 1))
    if args.load_best_model_at_end and settings.keep_best[:2] != (metric, mode):
        raise ConfigError(
            f"load_best_model_at_end=True needs the best by {metric} ({mode}), and SaveSettings(keep_best="
            f"{settings.keep_best!r}) would let it go: give keep_best=({metric!r}, {mode!r}, 1), or none"
        )
    return settings


def _every(args: Any) -> str:
    return f" every {args.save_steps} steps" if args.save_steps >= 1 else f" every {args.save_steps:.0%} of the steps"
