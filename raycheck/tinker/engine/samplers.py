"""Models to sample from: weights of checkpoints, read from the bucket on first use.

The few most recently used stay in memory. They hold no state, so a death of the engine only costs another read.
"""

from collections import OrderedDict

from raycheck import follow, open_run
from raycheck.errors import ConfigError, NotFoundError
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
                _load(found, source)
            except NotFoundError as error:
                raise NotFoundError(f"the weights are gone, make a new sampling client: {error}") from None
            self.keep(source, found.lora)
        self._adapters.move_to_end(source)
        return self._adapters[source]


def _load(model: LoraModel, source: LoadSource) -> None:
    """Load an adapter's weights. Raises NotFoundError."""
    if source.version is None:
        open_run(source.uri).restore(source.key, into={"model": model.adapter})
        return
    with follow(source.uri, version=source.version, lease=False) as follower:
        try:
            version = follower.update()
        except ConfigError as error:
            raise NotFoundError(str(error)) from None
        if version is None:
            raise NotFoundError("nothing is published any more")
        version.load_into(peft_tensors(model.lora))
