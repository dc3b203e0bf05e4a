"""All models of one process by id, each with its run in the bucket, and every operation on them.

A model is a function of its checkpoint in the bucket and the requests since then. `open` restores its run's newest
checkpoint, or initializes the model, and reports which requests that covers. So the process may die at any moment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raycheck import Checkpointer, open_run
from raycheck.adapters import Group
from raycheck.catalog import fork_run
from raycheck.errors import ConfigError, NotFoundError, SaveFailedError
from raycheck.tinker.checkpoint_paths import is_borrowed
from raycheck.tinker.engine import commits
from raycheck.tinker.engine.base_model import BaseModel
from raycheck.tinker.engine.lora_model import LoraModel
from raycheck.tinker.engine.lora_shape import AdamParams, LoraShape
from raycheck.tinker.engine.orders import (
    BaseFacts,
    LoadSource,
    NoteValue,
    PassOutput,
    SampleOrder,
    SaveOrder,
)
from raycheck.tinker.engine.passes import run_pass
from raycheck.tinker.engine.publisher import Publisher
from raycheck.tinker.engine.samplers import Samplers
from raycheck.tinker.wire.samples import SampleOutput
from raycheck.tinker.wire.training_data import TrainingBatch


@dataclass(kw_only=True, slots=True)
class _Tenant:
    """A model, and what saves it. step: how many steps it has made, in all attempts."""

    model: LoraModel
    checkpointer: Checkpointer
    publisher: Publisher
    step: int = 0


class Tenants:
    """The models of one process. make_group: returns this process's group, which saves the run at a URI.

    With several ranks, each has its own Tenants and receives the same calls in the same order.
    """

    def __init__(self, base: BaseModel, make_group: Callable[[str], Group]) -> None:
        self._base = base
        self._make_group = make_group
        self._tenants: dict[str, _Tenant] = {}
        self._samplers = Samplers(base)

    def facts(self) -> BaseFacts:
        base = self._base
        return BaseFacts(
            arch=base.arch, vocab_size=base.vocab_size, max_tokens=base.max_tokens, fingerprint=base.fingerprint
        )

    def open(self, model_id: str, shape: LoraShape, uri: str, source: LoadSource | None) -> Mapping[str, NoteValue]:
        """Create a model, claim its run at `uri`, and restore the run's newest checkpoint if there is one.

        source: another run's checkpoint from which a new run starts; no tensor is copied. Returns the note of the
        restored checkpoint if this run saved it. Otherwise the model is in its initial state, and the note is empty.
        """
        self.close(model_id)
        ranks = self._base.ranks
        note: Mapping[str, NoteValue] | None = ranks.from_first(lambda: _fork_or_find(uri, source))
        model = LoraModel(self._base, shape)
        checkpointer = Checkpointer(model.state, commits.SETTINGS, group=self._make_group(uri))
        weights_only = source is not None and not source.with_optimizer and note is None
        found = checkpointer.restore(only=["model"] if weights_only else None, on_corrupt="raise")
        publisher = Publisher(ranks, uri, found.attempt)
        self._tenants[model_id] = _Tenant(model=model, checkpointer=checkpointer, publisher=publisher, step=found.step)
        # Read again: a save of a dead engine may have been committed before the claim, and restored.
        note = ranks.from_first(lambda: _own_note(uri))
        return note or {}

    def run_pass(self, model_id: str, batch: TrainingBatch) -> PassOutput:
        """See passes.run_pass."""
        return run_pass(self._tenant(model_id).model, batch)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """Make one AdamW step. Returns its metrics. Raises FencedError if another server has claimed the run."""
        tenant = self._tenant(model_id)
        metrics = tenant.model.step(params)
        tenant.step += 1
        tenant.checkpointer.end_step(metrics)
        return metrics

    def drop_gradients(self, model_id: str) -> None:
        """Drop the gradients since the last step."""
        self._tenant(model_id).model.optimizer.zero_grad()

    def load(self, model_id: str, source: LoadSource) -> None:
        """Load a checkpoint's weights into a live model, and the optimizer state if `source` says so."""
        model = self._tenant(model_id).model
        entries = {name: value for name, value in model.state.items() if name == "model" or source.with_optimizer}
        open_run(source.uri).restore(source.key, into=entries)
        model.optimizer.zero_grad()

    def save(self, model_id: str, order: SaveOrder) -> None:
        """See commits.begin_save."""
        commits.begin_save(self._tenant(model_id).checkpointer, order)

    def is_committed(self, model_id: str) -> bool:
        """See commits.is_committed."""
        return commits.is_committed(self._tenant(model_id).checkpointer, self._base.ranks)

    def publish(self, model_id: str) -> None:
        """See Publisher.begin."""
        tenant = self._tenant(model_id)
        tenant.publisher.begin(tenant.model, tenant.step)

    def published(self, model_id: str, uri: str) -> LoadSource | None:
        """Return where samplers find what was published, or None if it is not there yet. See Publisher.published."""
        found = self._tenant(model_id).publisher.published()
        if found is None:
            return None
        source = LoadSource(uri=uri, key=found[0], with_optimizer=False, is_published=True)
        self._samplers.keep(source, found[1])
        return source

    def sample(self, order: SampleOrder) -> SampleOutput:
        """See Samplers.sample."""
        return self._samplers.sample(order)

    def close(self, model_id: str) -> None:
        """Drop a model if it is loaded. Nothing is saved; saves under way may finish."""
        tenant = self._tenants.pop(model_id, None)
        if tenant is not None:
            reason = SaveFailedError("the model was unloaded")
            tenant.checkpointer.__exit__(type(reason), reason, None)
            tenant.publisher.close()

    def _tenant(self, model_id: str) -> _Tenant:
        tenant = self._tenants.get(model_id)
        if tenant is None:
            raise ConfigError(f"model {model_id} is not loaded")
        return tenant


def _fork_or_find(uri: str, source: LoadSource | None) -> dict[str, NoteValue] | None:
    """Create a new run from a source's checkpoint, unless it exists. Returns the result of `_own_note`."""
    if source is not None:
        fork_run(source.uri, uri, source.key)
    return _own_note(uri)


def _own_note(uri: str) -> dict[str, NoteValue] | None:
    """Return the note of a run's newest checkpoint, or None if the run has saved none."""
    try:
        head = open_run(uri).head
    except NotFoundError:
        return None
    return None if head is None or is_borrowed(head.key) else dict(head.note())
