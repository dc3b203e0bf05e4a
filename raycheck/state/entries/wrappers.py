"""Removes the wrappers that Accelerate and Ray Train put around optimizers, schedulers and loaders, or refuses them.

A wrapper is recognized by module and name, without importing its library. An unknown wrapper is refused, because it may
have its own state (a Lookahead's slow weights, a sharded optimizer's master weights) that would silently be lost.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from raycheck.errors import ConfigError
from raycheck.state.entries.engines import refuse_engine

INNER = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("accelerate.scheduler", "AcceleratedScheduler"): "scheduler",
    ("ray.train.torch.train_loop_utils", "_WrappedOptimizer"): "optimizer",
}
"""Stateless wrappers, and the public attribute that contains what they wrap."""
LOADERS = "accelerate.data_loader"


def unwrapped(name: str, value: Any) -> Any:
    """Return what `value` wraps, or `value` itself.

    Raises ConfigError, naming entry and class, for a wrapper that cannot be saved.
    """
    while (inner := INNER.get(_kind(value))) is not None:
        value = getattr(value, inner)
    refuse_engine(f"state[{name!r}]", value)
    modules = [base.__module__ for base in type(value).__mro__]
    what = f"state[{name!r}] is a {type(value).__module__}.{type(value).__qualname__}"
    if LOADERS in modules:
        raise ConfigError(
            f"{what}, whose state does not record which epoch's order it is in. Use raycheck.Batches(dataset, "
            "global_batch=..., seed=...) instead, get the batches from its loader(epoch), and do not prepare it"
        )
    if any(module == "accelerate" or module.startswith("accelerate.") for module in modules):
        raise ConfigError(
            f"{what}, a wrapper that raycheck does not know. Use what you passed to Accelerate's prepare(): the model, "
            "the optimizer, the scheduler, and accelerator.scaler if there is one"
        )
    if isinstance(value, Optimizer) and not hasattr(value, "_optimizer_state_dict_pre_hooks"):
        raise ConfigError(
            f"{what}, which is not a torch optimizer itself: it never called torch.optim.Optimizer's __init__. If it "
            "wraps one and has no state besides, use the one that it wraps"
        )
    return value


def check_scalers(state: Mapping[str, object], entries: Iterable[object]) -> None:
    """Raise ConfigError for an optimizer that steps through a gradient scaler that is not in the state.

    The scale would silently start over after each restart.
    """
    known = list(entries)
    for name, scaler in _scalers(state):
        if not any(scaler is entry for entry in known):
            raise ConfigError(
                f"state[{name!r}] steps through a {type(scaler).__qualname__} that is not in the state; add it (with "
                "Accelerate, it is accelerator.scaler)"
            )


def _scalers(values: Mapping[Any, object]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _scalers({f"{name}.{key}": item for key, item in value.items()})
        elif isinstance(value, list | tuple):
            yield from _scalers({f"{name}.{number}": item for number, item in enumerate(value)})
        elif INNER.get(_kind(value)) == "optimizer":
            scaler = getattr(value, "scaler", None)
            if scaler is not None and scaler.is_enabled():
                yield str(name), scaler


def _kind(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__
