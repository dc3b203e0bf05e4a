"""Models to sample from: weights of checkpoints and published versions, read from the bucket on first use.

The few most recently used stay in memory. They hold no state, so a death of the engine only costs another read.
"""

from collections import OrderedDict

import torch

from raycheck import follow, open_run
from raycheck.errors import NotFoundError
from raycheck.tinker.engine.base_model import Adapter, BaseModel
from raycheck.tinker.engine.generation import sample
from raycheck.tinker.engine.lora_model import LoraModel, peft_tensors
from raycheck.tinker.engine.orders import LoadSource, SampleOrder
from raycheck.tinker.wire.samples import SampleOutput

MAX_MODELS = 4


class Samplers:
    """A cache of adapters, for sampling from the base model, and from checkpoints and published versions over it."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._adapters: OrderedDict[LoadSource, Adapter] = OrderedDict()

    def sample(self, order: SampleOrder) -> SampleOutput:
        """Return the sampled sequences. Raises NotFoundError if the checkpoint or version is gone."""
        return sample(self._base, self._adapter(order), order)

    def keep(self, source: LoadSource, adapter: Adapter) -> None:
        """Keep an adapter that was just published, so that it needs not be read."""
        self._adapters[source] = adapter
        while len(self._adapters) > MAX_MODELS:
            self._adapters.popitem(last=False)

    def _adapter(self, order: SampleOrder) -> Adapter | None:
        source = order.source
        if source is None or order.shape is None:
            return None
        if source not in self._adapters:
            found = LoraModel(self._base, order.shape)
            try:
                self._load(found, source)
            except NotFoundError as error:
                raise NotFoundError(f"the weights are gone, make a new sampling client: {error}") from None
            self.keep(source, found.lora)
        self._adapters.move_to_end(source)
        return self._adapters[source]

    def _load(self, model: LoraModel, source: LoadSource) -> None:
        """Load the weights of a checkpoint or a version. Raises NotFoundError, on all ranks alike."""
        if not source.is_published:
            open_run(source.uri).restore(source.key, into={"model": model.adapter})
            return
        found = self._base.ranks.from_first(lambda: _tensors_of(source))
        with torch.no_grad():
            for name, values in peft_tensors(model.lora).items():
                values.copy_(found[name])


def _tensors_of(source: LoadSource) -> dict[str, torch.Tensor]:
    """Return the tensors of a published version. Raises NotFoundError."""
    published = open_run(source.uri).published()
    if published is None or source.key not in {version.directory for version in published.versions}:
        raise NotFoundError(f"version {source.key} is not published any more")
    with follow(source.uri, version=source.key, lease=False) as follower:
        version = follower.update()
        assert version is not None, "a new follower has none yet"
        return dict(version.tensors())
