"""Knows the order in which a prepared loader gives its samples, and puts it back, also at another number of processes.

The order of a pass through the loader is that of its sampler: none to remember for a SequentialSampler, the state of a
generator at the beginning of the pass for a RandomSampler, a seed and the number of the pass for Accelerate's
SeedableRandomSampler. Anything else cannot be put back, and is refused by name.
"""

import random
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from raycheck.errors import StateMismatchError


class LoaderOrder:
    """Reads and sets what the order of one loader's samples follows from.

    loader: one that Accelerate prepared. refusal: why its order cannot be put back; None if it can.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sampler: Any = None
        self._lent: torch.Generator | None = None
        self.refusal = self._why_not()

    @property
    def length(self) -> int:
        """Returns the number of samples in the loader's dataset."""
        return len(self._loader.base_dataloader.dataset)

    @property
    def global_batch(self) -> int:
        """Returns the number of samples that all processes together take as one batch."""
        return int(self._loader.total_batch_size)

    def begin_pass(self, state: dict[str, Any] | None) -> None:
        """Fix the order of the pass that begins. state: the order that it had when it was saved; None: a new one.

        A RandomSampler without a generator draws its seed from torch's global generator. It is drawn here instead, as
        the sampler would, so that the generator's state is known.
        """
        if type(self._sampler) is not RandomSampler:
            return
        if self._sampler.generator is None:
            self._lent = self._sampler.generator = torch.Generator()
            self._lent.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        if state is not None and state["generator"] is not None:
            self._sampler.generator.set_state(_tensor(state["generator"]))

    def end_pass(self) -> None:
        """Leave the sampler as it was given."""
        if self._lent is not None:
            self._sampler.generator, self._lent = None, None

    def state_dict(self) -> dict[str, Any]:
        """Returns what the order of the next pass follows from; at the beginning of a pass, that of this pass."""
        generator = getattr(self._sampler, "generator", None)
        is_seedable = isinstance(self._sampler, SeedableRandomSampler)
        return {
            "sampler": type(self._sampler).__name__,
            "length": self.length,
            "generator": None if is_seedable or generator is None else bytes(generator.get_state().numpy()),
            "seed": self._sampler.initial_seed if is_seedable else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next passes have the order that follows from a saved state."""
        if isinstance(self._sampler, SeedableRandomSampler):
            self._sampler.initial_seed = int(state["seed"])
        elif getattr(self._sampler, "generator", None) is not None and state["generator"] is not None:
            self._sampler.generator.set_state(_tensor(state["generator"]))

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateMismatchError when a saved position would mean other samples here."""
        mine = self.state_dict()
        for name in ("sampler", "length"):
            if mine[name] != state[name]:
                raise StateMismatchError(
                    f"the loader's {name} was {state[name]!r} and is {mine[name]!r} here, so that its position would "
                    "mean other samples"
                )

    def _why_not(self) -> str | None:
        """Find the sampler. Returns why the order cannot be put back, or None."""
        if type(self._loader) is not DataLoaderShard or self._loader.use_stateful_dataloader:
            kind, base = type(self._loader).__name__, type(self._loader.base_dataloader).__name__
            return f"it is a {kind} over a {base}, whose position raycheck cannot put back exactly"
        batches = self._loader.base_dataloader.batch_sampler
        while hasattr(batches, "batch_sampler"):  # Accelerate's share of each process
            batches = batches.batch_sampler
        if type(batches) is not BatchSampler:
            kind = type(self._loader.base_dataloader.dataset if batches is None else batches).__name__
            return f"its samples come by a {kind}, whose order is not known"
        self._sampler = batches.sampler
        if type(self._sampler) not in (RandomSampler, SequentialSampler, SeedableRandomSampler):
            return f"its samples come in the order of a {type(self._sampler).__name__}, which cannot be put back"
        return None


class FetchRandom:
    """Holds this process's random state from just before the batch that was fetched ahead, if there is one.

    Accelerate fetches one batch more than it has given out. What the dataset draws for it, such as an augmentation, is
    drawn from here again after a restart. It differs from rank to rank.
    """

    def __init__(self) -> None:
        self.value: tuple[Any, ...] | None = None

    def take(self) -> tuple[Any, ...]:
        """Returns the state of python's, numpy's and torch's generators on the CPU, which datasets draw from."""
        return random.getstate(), np.random.get_state(), bytes(torch.get_rng_state().numpy())  # noqa: NPY002  the global one

    def put_back(self) -> None:
        """Set the generators to the held state, if there is one, and forget it."""
        if self.value is not None:
            random.setstate(self.value[0])
            np.random.set_state(self.value[1])  # noqa: NPY002  the same
            torch.set_rng_state(_tensor(self.value[2]))
        self.value = None


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
