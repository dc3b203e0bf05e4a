"""A run whose weights change a little from step to step, and its publishing without Ray."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.published.follower import PulledVersion
from raycheck.published.publish import Published, publish
from raycheck.settings import Publish
from tests.support.processes.save_without_ray import save_state
from tests.support.samples import hf_models


class Trained:
    """A small model, trained without gradients: `step` changes a few of its values and commits it."""

    def __init__(self, store: Store, cache: Path) -> None:
        self.store = store
        self.cache = cache
        self.model = hf_models.llama_bf16()
        self.steps = 0
        self._random = torch.Generator().manual_seed(0)

    def step(self, share: float = 0.02) -> Checkpoint:
        change(self.model, self._random, share)
        self.steps += 1
        return save_state(self.store, {"model": self.model}, save_number=self.steps, step=self.steps)

    def publish(self, checkpoint: Checkpoint | None = None, **options: object) -> Published:
        done = publish(checkpoint or self.step(), Publish(**{"cache": str(self.cache), **options}))
        assert done is not None
        return done

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights as they are published now."""
        return {name: values.detach().clone() for name, values in self.model.state_dict().items()}


def change(model: torch.nn.Module, random: torch.Generator, share: float) -> None:
    """Change this share of all values a little."""
    with torch.no_grad():
        for values in model.parameters():
            chosen = torch.rand(values.shape, generator=random) < share
            values.add_(chosen * torch.randn(values.shape, generator=random) * 1e-2)


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """Read the weights of a Hugging Face directory as any reader does."""
    return {name: values for file in sorted(path.glob("*.safetensors")) for name, values in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, values in expected.items() if not torch.equal(found[name], values)]


def assert_has(version: PulledVersion | None, trained: Trained) -> None:
    """The version is the newest of this training, to the bit."""
    assert version is not None
    assert version.step == trained.steps
    assert_equal(loaded(version.path), trained.weights)
