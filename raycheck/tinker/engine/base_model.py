"""Loads the model that all tenants share. Its weights are frozen; each tenant's modules refer to the same tensors."""

import copy
import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import nn

from raycheck import ConfigError

_ATTENTION = ("attn", "attention")
_MLP = ("mlp", "feed_forward", "ffn", "experts")


class BaseModel:
    """Holds a causal language model of transformers, frozen and in evaluation mode.

    source: a folder, or a model's name on the hub. dtype: the type of its weights, such as "float32". Raises
    ConfigError when there is no such model.
    """

    def __init__(self, source: str, *, dtype: str = "float32") -> None:
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise ConfigError(f"base_model={source}: transformers cannot load it: {error}") from error
        self.model = model.eval().requires_grad_(requires_grad=False)
        self.source = source
        self.vocab_size = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_tokens = int(getattr(self.model.config, "max_position_embeddings", 0) or 0)
        self.arch = type(self.model).__name__
        self.fingerprint = _fingerprint(self.model)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

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

    @property
    def stop_tokens(self) -> list[int]:
        """Returns the tokens at which the model ends a text by itself."""
        found = getattr(self.model.generation_config, "eos_token_id", None)
        return [] if found is None else [found] if isinstance(found, int) else list(found)

    def copy_for_tenant(self) -> Any:
        """Returns a copy of the modules over the very same weights: it takes memory for buffers only."""
        return copy.deepcopy(self.model, {id(weight): weight for weight in self.model.parameters()})

    def linear_layers(self, *, attn: bool, mlp: bool, unembed: bool) -> list[str]:
        """Returns the paths of the linear layers of these kinds. Raises ConfigError when the model has none."""
        output = self.model.get_output_embeddings()
        found = []
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and (
                (unembed and module is output)
                or (attn and _is_within(path, _ATTENTION))
                or (mlp and not _is_within(path, _ATTENTION) and _is_within(path, _MLP))
            ):
                found.append(path)
        if not found:
            raise ConfigError(f"base_model={self.source}: {self.arch} has no linear layers of the kinds asked for")
        return found


def _is_within(path: str, words: tuple[str, ...]) -> bool:
    return any(word in step for step in path.split(".") for word in words)


def _fingerprint(model: nn.Module) -> str:
    """Returns a digest of all weights with their names. A checkpoint of an adapter fits only the same base model."""
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()
