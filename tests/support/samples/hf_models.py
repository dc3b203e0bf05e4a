"""Makes tiny Hugging Face models with random weights; nothing is fetched from anywhere."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedTokenizerFast,
)

IDS = torch.arange(1, 17).view(2, 8)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(seed: int = 0, **config: object) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **config})).eval()


def gpt2(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MixtralConfig(**SMALL, num_local_experts=4)).eval()


def llama_bf16(**config: object) -> Any:
    """Make a Llama in bfloat16 as users do: `.bfloat16()` would also round the rotary frequencies, which are not saved."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SMALL, **config}), dtype=torch.bfloat16).eval()


def tokenizer() -> Any:
    tool = Tokenizer(models.BPE())
    tool.pre_tokenizer = pre_tokenizers.Whitespace()
    tool.train_from_iterator(["a fox is no dog and a dog is no fox"] * 4, trainers.BpeTrainer(vocab_size=60))
    return PreTrainedTokenizerFast(tokenizer_object=tool)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def from_pretrained(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(folder).eval()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of the directory's weight files, as safetensors itself reads them."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not set(tensors) & set(found)
        found |= tensors
    return found
