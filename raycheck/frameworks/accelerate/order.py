"""Saves and restores the order in which a prepared loader yields its samples, at any number of processes.

The order of a pass follows from the loader's sampler. A SequentialSampler needs no state; a RandomSampler needs its
generator's state at the start of the pass; Accelerate's SeedableRandomSampler needs a seed and the number of the pass.
The order of any other sampler cannot be restored, and the sampler is refused by name.
"""

import random
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from raycheck.errors import StateMismatchError


class LoaderOrder:
    """The state that determines the order of one loader's samples.

    loader: a loader that Accelerate prepared. refusal: why its order cannot be restored; None if it can.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sampler: Any = None
        self._lent: torch.Generator | None = None
        self.refusal = self._why_not()

    @property
    def length(self) -> int:
        """Return the number of samples in the loader's dataset."""
        return len(self._loader.base_dataloader.dataset)

    @property
    def global_batch(self) -> int:
        """Return the number of samples in one batch over all processes."""
        return int(self._loader.total_batch_size)

    def begin_pass(self, state: dict[str, Any] | None) -> None:
        """Fix the order of the pass that begins. state: a saved order; None: a new order.

        A RandomSampler without a generator draws its seed from torch's global generator. The seed is drawn here
        instead, in the same way, so that the generator's state is known.
        """
        if type(self._sampler) is not RandomSampler:
            return
        if self._sampler.generator is None:
            self._lent = self._sampler.generator = torch.Generator()
            self._lent.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        if state is not None and state["generator"] is not None:
            self._sampler.generator.set_state(_tensor(state["generator"]))

    def end_pass(self) -> None:
        """Restore the sampler to the state in which it was given."""
        if self._lent is not None:
            self._sampler.generator, self._lent = None, None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the order of the next pass, or of the current pass at its start."""
        generator = getattr(self._sampler, "generator", None)
        is_seedable = isinstance(self._sampler, SeedableRandomSampler)
        return {
            "sampler": type(self._sampler).__name__,
            "length": self.length,
            "generator": None if is_seedable or generator is None else bytes(generator.get_state().numpy()),
            "seed": self._sampler.initial_seed if is_seedable else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next passes follow the order of a saved state."""
        if isinstance(self._sampler, SeedableRandomSampler):
            self._sampler.initial_seed = int(state["seed"])
        elif getattr(self._sampler, "generator", None) is not None and state["generator"] is not None:
            self._sampler.generator.set_state(_tensor(state["generator"]))

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError when a saved position would mean different samples here."""
        mine = self.state_dict()
        for name in ("sampler", "length"):
            if mine[name] != state[name]:
                raise StateMismatchError(
                    f"the loader's {name} was {state[name]!r} and is {mine[name]!r} here, so its position would mean "
                    "different samples"
                )

    def _why_not(self) -> str | None:
        """Find the sampler. Returns why the order cannot be restored, or None."""
        if type(self._loader) is not DataLoaderShard or self._loader.use_stateful_dataloader:
            kind, base = type(self._loader).__name__, type(self._loader.base_dataloader).__name__
            return f"it is a {kind} over a {base}, whose position raycheck cannot restore exactly"
        batches = self._loader.base_dataloader.batch_sampler
        while hasattr(batches, "batch_sampler"):  # Accelerate's wrapper that selects each process's share
            batches = batches.batch_sampler
        if type(batches) is not BatchSampler:
            kind = type(self._loader.base_dataloader.dataset if batches is None else batches).__name__
            return f"its batches come from a {kind}, whose order is not known"
        self._sampler = batches.sampler
        if type(self._sampler) not in (RandomSampler, SequentialSampler, SeedableRandomSampler):
            return f"its samples come in the order of a {type(self._sampler).__name__}, which cannot be restored"
        return None


class FetchRandom:
    """This process's random state from just before the batch that was fetched ahead, if there is one.

    Accelerate fetches one batch more than it has yielded. After a restart that batch is fetched again, and the
    dataset's random draws for it, such as augmentations, must be the same. The state differs from rank to rank.
    """

    def __init__(self) -> None:
        self.value: tuple[Any, ...] | None = None

    def take(self) -> tuple[Any, ...]:
        """Return the states of Python's, NumPy's, and torch's CPU generators, which datasets draw from."""
        return random.getstate(), np.random.get_state(), bytes(torch.get_rng_state().numpy())  # noqa: NPY002  the global one

    def put_back(self) -> None:
        """Set the generators to the stored state, if there is one, and drop it."""
        if self.value is not None:
            random.setstate(self.value[0])
            np.random.set_state(self.value[1])  # noqa: NPY002  the same
            torch.set_rng_state(_tensor(self.value[2]))
        self.value = None


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
