"""Merges the script's SaveSettings with the Trainer's arguments. The script's settings win.

The Trainer's control flow decides when to save unless SaveSettings has a trigger. Then callbacks may still ask for a
save, but save_strategy may not. Retention is always raycheck's; the Trainer's limits apply where SaveSettings leaves
them open.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from raycheck.adapters import SaveSettings
from raycheck.errors import ConfigError

_TRIGGERS = (
    "every_s",
    "every_tokens",
    "every_epochs",
    "at_steps",
    "when",
    "rolling_every_steps",
    "rolling_every_s",
    "overhead",
)
_DEFAULTS = {spec.name: spec.default for spec in fields(SaveSettings)}


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSettings:
    """The resulting settings and the decisions behind them.

    settings: those for the Checkpointer. follows_strategy: whether the Trainer's save_strategy decides when to save.
    said: for the log, what was taken from the arguments. contradictions: for the log, arguments that are ignored.
    """

    settings: SaveSettings
    follows_strategy: bool
    said: tuple[str, ...]
    contradictions: tuple[str, ...]


def joined_settings(given: SaveSettings | None, args: Any) -> JoinedSettings:
    """Merge SaveSettings with the Trainer's arguments. Raises ConfigError where the two contradict each other."""
    settings = given or SaveSettings()
    said: list[str] = []
    against: list[str] = []
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    own = [name for name in _TRIGGERS if getattr(settings, name) != _DEFAULTS[name]]
    if settings.every_steps not in (_DEFAULTS["every_steps"], None):
        own.append("every_steps")
    if own:
        if strategy != "steps" or args.save_steps != 500:  # both are defaults, which the user need not have given
            asked = f"save_strategy={strategy!r}" + (f", save_steps={args.save_steps}" if strategy == "steps" else "")
            against.append(f"{asked}: SaveSettings({', '.join(own)}) says when to save")
    else:
        settings = replace(settings, every_steps=None)
        said.append(f"saves by save_strategy={strategy!r}" + (_every(args) if strategy == "steps" else ""))
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
        against.append("ignore_data_skip=True: training resumes with the next sample, and no data is read again")
    return JoinedSettings(settings=settings, follows_strategy=not own, said=tuple(said), contradictions=tuple(against))


def best_metric(args: Any) -> str:
    """Return the name under which the Trainer logs its metric_for_best_model."""
    name = str(args.metric_for_best_model)
    return name if name.startswith("eval_") else f"eval_{name}"


def _with_best(settings: SaveSettings, args: Any, said: list[str]) -> SaveSettings:
    metric = best_metric(args)
    mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
    own = settings.keep_best
    if own is None:
        settings = replace(settings, keep_best={"metric": metric, "mode": mode, "count": 1})
        said.append(f"metric_for_best_model as keep_best={settings.keep_best}")
    elif args.load_best_model_at_end and (own["metric"], own["mode"]) != (metric, mode):
        raise ConfigError(
            f"load_best_model_at_end=True needs the best by {metric} ({mode}), and SaveSettings(keep_best={own}) would "
            f"delete it: give keep_best={ {**own, 'metric': metric, 'mode': mode} }, or none"
        )
    return settings


def _every(args: Any) -> str:
    return f" every {args.save_steps} steps" if args.save_steps >= 1 else f" every {args.save_steps:.0%} of the steps"
