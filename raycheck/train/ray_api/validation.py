"""Attaches what a trainer's validation function returns to the commit that it was given, as scores.

Ray keeps the metrics of a validation beside those that were reported, in its Result. In the bucket they are scores:
`keep_best` obeys them, and `raycheck ls` shows them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raycheck.bucket.format.object_keys import pointed_by
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.errors import RaycheckError
from raycheck.train.log import event, logger


@contextmanager
def scored_validation(trainer: Any, uri: str) -> Iterator[None]:
    """Makes the trainer's validation function score the commits of the run at `uri`, as long as the block runs."""
    config = getattr(trainer, "validation_config", None)
    if config is None:
        yield
        return
    before, config.fn = config.fn, ScoringValidation(config.fn, uri)
    try:
        yield
    finally:
        config.fn = before


@dataclass(frozen=True, slots=True)
class ScoringValidation:
    """Runs the user's validation function, in Ray's task, and scores the commit with the finite numbers it returns.

    A commit that retention has dropped meanwhile, or a store that fails, is a warning: Ray has the metrics all the
    same.
    """

    validate: Any
    uri: str

    def __call__(self, checkpoint: Any, **kwargs: Any) -> Any:
        metrics = self.validate(checkpoint, **kwargs)
        name = pointed_by(checkpoint.path)
        scores = _scores_in(metrics)
        if name is None or not scores:
            return metrics
        try:
            name_and_score.score(Register(open_store(self.uri)), str(name), scores)
        except RaycheckError as error:
            text = "the commit was validated, and its scores were not kept in the bucket"
            logger.warning(event(text, checkpoint=name, cause=error, run=self.uri))
        return metrics


def _scores_in(metrics: Any) -> dict[str, float]:
    """Returns the finite numbers among a validation's metrics; also those of tensors and arrays of one element."""
    found = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        number = value.item() if getattr(value, "size", None) == 1 or _is_scalar_tensor(value) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            found[str(name)] = float(number)
    return found


def _is_scalar_tensor(value: Any) -> bool:
    return callable(getattr(value, "numel", None)) and value.numel() == 1
