"""Loads the model that all tenants share. Its weights are frozen, and over several ranks they are sharded by FSDP2.

There is one tree of modules. An adapter is no part of it: it is lent to the tree for the time of a call, and hooks on
the linear layers add what it computes. So neither FSDP nor another tenant ever sees its weights.
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
    """Adds scaling * up @ down to the weight of each linear layer that it has a pair for, by the layer's path."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float


class BaseModel:
    """Holds a causal language model of transformers, frozen and in evaluation mode.

    source: a folder, or a model's name on the hub. dtype: the type of its weights, such as "float32". It lies on the
    GPU where this process has one. Raises ConfigError when there is no such model, and when the ranks have different
    ones.
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
        """Lend an adapter to the model for the time of the block. Yields the model; None: as it is."""
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
        """Loads the tokenizer that lies with the model. Raises ConfigError when there is none."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.source)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"base_model={self.source} has no tokenizer, which stop strings need; give stop tokens: {error}"
            ) from error

    def layer_size(self, path: str) -> tuple[int, int]:
        """Returns how many values a linear layer reads and gives."""
        layer = self._linear[path]
        return layer.in_features, layer.out_features

    @property
    def stop_tokens(self) -> list[int]:
        """Returns the tokens at which the model ends a text by itself."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        return [] if found is None else [found] if isinstance(found, int) else list(found)

    def linear_layers(self, *, attn: bool, mlp: bool, unembed: bool) -> list[str]:
        """Returns the paths of the linear layers of these kinds. Raises ConfigError when the model has none."""
        output = self.model.get_output_embeddings()
        found = [
            path
            for path, module in self._linear.items()
            if (unembed and module is output)
            or (attn and _is_within(path, _ATTENTION))
            or (mlp and not _is_within(path, _ATTENTION) and _is_within(path, _MLP))
        ]
        if not found:
            raise ConfigError(f"base_model={self.source}: {self.arch} has no linear layers of the kinds asked for")
        return found


def _is_within(path: str, words: tuple[str, ...]) -> bool:
    return any(word in step for step in path.split(".") for word in words)


def _shard(model: Any, device: torch.device, ranks: Ranks) -> None:
    """Shard the weights over the ranks, layer by layer, so that no GPU ever holds more than one whole layer beside its
    shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks.size,))
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fingerprint_of(model: nn.Module) -> str:
    """Returns a digest of all weights with their names. A checkpoint of an adapter fits only the same base model."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
