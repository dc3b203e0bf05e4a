"""Models to sample from: weights of checkpoints, read from the bucket on first use.

The few most recently used stay in memory. They hold no state, so a death of the engine only costs another read.
"""

from collections import OrderedDict

from raycheck import open_run
from raycheck.errors import NotFoundError
from raycheck.tinker.engine.base_model import Adapter, BaseModel
from raycheck.tinker.engine.generation import sample
from raycheck.tinker.engine.lora_model import LoraModel
from raycheck.tinker.engine.orders import SampleOrder
from raycheck.tinker.wire.samples import SampleOutput

MAX_MODELS = 4


class Samplers:
    """A cache of adapters, for sampling from the base model and from checkpoints over it."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self._models: OrderedDict[tuple[str, str], LoraModel] = OrderedDict()

    def sample(self, order: SampleOrder) -> SampleOutput:
        """Return the sampled sequences. Raises NotFoundError if the checkpoint is gone."""
        return sample(self._base, self._adapter(order), order)

    def _adapter(self, order: SampleOrder) -> Adapter | None:
        if order.source is None or order.shape is None:
            return None
        place = order.source.uri, order.source.key
        if place not in self._models:
            found = LoraModel(self._base, order.shape)
            try:
                open_run(order.source.uri).restore(order.source.key, into={"model": found.adapter})
            except NotFoundError as error:
                raise NotFoundError(f"the weights are gone, make a new sampling client: {error}") from None
            self._models[place] = found
            while len(self._models) > MAX_MODELS:
                self._models.popitem(last=False)
        self._models.move_to_end(place)
        return self._models[place].lora
