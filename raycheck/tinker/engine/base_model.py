"""Loads the model that all tenants share. Its weights are frozen, and FSDP2 shards them over several ranks.

There is one tree of modules. An adapter is not part of it: for the duration of a call, hooks on the linear layers add
the adapter's outputs. So neither FSDP nor another tenant ever sees its weights.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from raycheck.errors import ConfigError
from raycheck.tinker.engine.ranks import ALONE, Ranks

_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "feed_forward", "ffn", "experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter: it adds scaling * up @ down to the weight of each linear layer for whose path it has a pair."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float

    def copied(self) -> "Adapter":
        """Return a copy, which no step changes."""
        pairs = {path: (down.detach().clone(), up.detach().clone()) for path, (down, up) in self.pairs.items()}
        return Adapter(pairs=pairs, scaling=self.scaling)


class BaseModel:
    """A frozen causal language model of transformers in evaluation mode.

    source: a folder, or a model's name on the Hub. dtype: the type of its weights, such as "float32". The model is
    placed on the GPU if this process has one. Raises ConfigError if the model does not exist or differs between ranks.
    """

    def __init__(self, source: str, *, dtype: str = "float32", ranks: Ranks = ALONE) -> None:
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise ConfigError(f"base_model={source}: transformers cannot load it: {error}") from error
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.source = source
        self.ranks = ranks
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_tokens = int(getattr(self.model.config, "max_position_embeddings", 0) or 0)
        self.arch = type(self.model).__name__
        self.fingerprint = fingerprint_of(self.model)
        found = ranks.gather(self.fingerprint)
        if len(set(found)) > 1:
            raise ConfigError(f"base_model={source}: the ranks' nodes have models with different weights: {found}")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._adapter: Adapter | None = None
        self._linear = {path: module for path, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        for path, module in self._linear.items():
            module.register_forward_hook(partial(self._add_adapter, path))
        if ranks.size == 1:
            self.model.to(self.device)
        else:
            _shard(self.model, self.device, ranks)

    @contextmanager
    def with_adapter(self, adapter: Adapter | None) -> Iterator[Any]:
        """Apply an adapter to the model within the block, or no adapter if None. Yields the model."""
        self._adapter = adapter
        try:
            yield self.model
        finally:
            self._adapter = None

    def _add_adapter(self, path: str, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        del layer
        adapter = self._adapter
        if adapter is None or path not in adapter.pairs:
            return output
        down, up = adapter.pairs[path]
        added = nn.functional.linear(nn.functional.linear(given[0].to(down.dtype), down), up)
        return (output + added * adapter.scaling).to(output.dtype)

    @cached_property
    def tokenizer(self) -> Any:
        """Load the tokenizer stored with the model. Raises ConfigError if there is none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"base_model={self.source} has no tokenizer, which stop strings need; use stop tokens: {error}"
            ) from error

    def layer_size(self, path: str) -> tuple[int, int]:
        """Return a linear layer's input and output sizes."""
        layer = self._linear[path]
        return layer.in_features, layer.out_features

    @property
    def stop_tokens(self) -> list[int]:
        """Return the model's own end-of-text tokens."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        return [] if found is None else [found] if isinstance(found, int) else list(found)

    def linear_layers(self, *, attn: bool, mlp: bool, unembed: bool) -> list[str]:
        """Return the paths of the linear layers of these kinds. Raises ConfigError if the model has none."""
        output = self.model.get_output_embeddings()
        found = [
            path
            for path, module in self._linear.items()
            if (unembed and module is output)
            or (attn and _is_within(path, _ATTENTION))
            or (mlp and not _is_within(path, _ATTENTION) and _is_within(path, _MLP))
        ]
        if not found:
            raise ConfigError(f"base_model={self.source}: {self.arch} has no linear layers of the requested kinds")
        return found


def _is_within(path: str, words: tuple[str, ...]) -> bool:
    return any(word in step for step in path.split(".") for word in words)


def _shard(model: Any, device: torch.device, ranks: Ranks) -> None:
    """Shard the weights over the ranks, layer by layer, so that no GPU ever holds more than one full layer in addition
    to its shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.size,))
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fingerprint_of(model: nn.Module) -> str:
    """Return a digest of all weights and their names. An adapter's checkpoint fits only the same base model."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
