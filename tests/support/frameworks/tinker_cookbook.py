"""Installs the cookbook of the tinker SDK without most of its dependencies, and makes what its recipes train on.

It goes into a virtual environment beside the repository's, and finds all else in that one. The names of the model and
of the data set are those that the recipes know; both are folders in the directory that a recipe is run in, where
transformers and datasets look first.
"""

import csv
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.processes.virtual_environments import prepare_venv

VERSION = "0.6.1"
KEY = "tml-for-tests-only"
FOLDER = Path(__file__).parents[3] / ".venv-tinker-cookbook"
PYTHON = FOLDER / "bin/python"
NEEDED = (
    "chz",
    "blobfile",
    "pyrage",
    "termcolor",
    "tiktoken",
    "tml-renderers",
    "lxml",
    "pycryptodomex",
    "pylatexenc",
    "math-verify",
    "latex2sympy2-extended",
    "antlr4-python3-runtime==4.13.2",
)
MODEL = "meta-llama/Llama-3.2-1B"
TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""Where the recipes take the tokenizer of MODEL from."""
DATA = "HuggingFaceH4/no_robots"
SUMS = "openai/gsm8k"
PREFERENCES = "Anthropic/hh-rlhf"
PROMPTS = "zwhe99/DeepMath-103K"
CHOICES = "hicai-zju/SciKnowEval"
FORECASTS = "forecasts.csv"
ANSWERS = [f"\\boxed{{{number}}}" for number in range(4)]
"""Are one token each, so that a model that knows nothing gives some of the answers by chance, and earns rewards."""
WORDS = tuple(
    re.findall(r"\w+", "a fox is no dog and a dog is no fox but both run and bark at night when the moon is full")
)


def prepare() -> None:
    prepare_venv(
        FOLDER, f"cookbook-{VERSION}-with-math", "--no-deps", f"tinker_cookbook=={VERSION}", *NEEDED, finds_ours=True
    )


def make_workplace(folder: Path, rows: int = 64) -> None:
    """Write a tiny model, a tokenizer and conversations below `folder`."""
    tool = Tokenizer(models.BPE())
    tool.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tool.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end_of_text|>"]
    )
    tool.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tool, eos_token="<|end_of_text|>", bos_token="<|end_of_text|>")
    tokenizer.add_tokens(ANSWERS)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / MODEL)
    for place in (MODEL, TOKENIZER):
        tokenizer.save_pretrained(folder / place)
    (folder / DATA).mkdir(parents=True)
    for name, first in (("train", 0), ("test", rows)):
        with (folder / DATA / f"{name}.jsonl").open("w") as file:
            for number in range(first, first + rows):
                talk = [
                    {"role": "user", "content": text(number, 6)},
                    {"role": "assistant", "content": text(7 * number + 3, 8)},
                ]
                file.write(json.dumps({"prompt": talk[0]["content"], "messages": talk}) + "\n")


def make_sums(folder: Path, rows: int = 64) -> None:
    """Write sums below `folder`, as the recipes of reinforcement learning take them."""
    (folder / SUMS).mkdir(parents=True)
    files = "".join(f"\n  - split: {name}\n    path: {name}.jsonl" for name in ("train", "test"))
    (folder / SUMS / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:{files}\n---\n")
    for name in ("train", "test"):
        lines = [
            {"question": f"How many dogs are {number % 4} dogs?", "answer": f"It is so. #### {number % 4}"}
            for number in range(rows)
        ]
        (folder / SUMS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_preferences(folder: Path) -> None:
    """Write pairs of answers, of which one is preferred. The recipe wants 1024 to test on, and skips equal ones."""
    (folder / PREFERENCES).mkdir(parents=True)
    for name, rows in (("train", 64), ("test", 1024)):
        lines = []
        for number in range(rows):
            talk = f"\n\nHuman: {text(number, 6)}\n\nAssistant: "
            chosen = talk + text(number + 1, 5)
            lines.append({"chosen": chosen, "rejected": talk + text(3 * number + 2, 7) if number < 64 else chosen})
        _write_lines(folder / PREFERENCES / f"{name}.jsonl", lines)


def make_prompts(folder: Path, rows: int = 64) -> None:
    """Write prompts to distill a teacher with."""
    (folder / PROMPTS).mkdir(parents=True)
    for name in ("train", "test"):
        _write_lines(folder / PROMPTS / f"{name}.jsonl", [{"question": text(number, 6)} for number in range(rows)])


def make_choices(folder: Path, rows: int = 48) -> None:
    """Write questions with two answers to choose from."""
    (folder / CHOICES).mkdir(parents=True)
    kind = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-4-choices"}
    lines = []
    for number in range(rows):
        answers = {"label": ["A", "B"], "text": [text(number, 2), text(number + 1, 2)]}
        lines.append({**kind, "question": text(number, 5), "choices": answers, "answerKey": "AB"[number % 2]})
    _write_lines(folder / CHOICES / "test.jsonl", lines)


def make_forecasts(folder: Path, rows: int = 64) -> None:
    """Write markets in a file of their own, half of them after 2026-01-01."""
    with (folder / FORECASTS).open("w", newline="") as file:
        columns = "submission_id event_ticker title snapshot_time close_time market_outcome category markets sources"
        table = csv.writer(file)
        table.writerow(columns.split())
        for number in range(rows):
            year = 2027 if number % 2 else 2024
            times = [f"{year}-01-01T00:00:00+00:00", f"{year}-02-01T00:00:00+00:00"]
            market, source = "will a dog bark", {"title": "a moon", "summary": text(number, 5), "ranking": 1}
            outcome = json.dumps({market: number // 2 % 2})
            names = [f"s{number}", f"e{number}", text(number, 4)]
            table.writerow([*names, *times, outcome, "dogs", json.dumps([market]), json.dumps([source])])


def _write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def text(number: int, length: int) -> str:
    return " ".join(WORDS[(number + 3 * place) % len(WORDS)] for place in range(length))


def start_recipe(folder: Path, url: str, recipe: str, **arguments: Any) -> subprocess.Popen[str]:
    """Start a recipe in `folder` against a server, with its output in `recipe.log` there."""
    words = [f"{name}={value}" for name, value in arguments.items()]
    command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={url}", f"model_name={MODEL}", *words]
    log = (folder / "recipe.log").open("a")
    pipes = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), text=True, **pipes)
    assert process.stdin is not None
    with process.stdin as answers:
        answers.write("resume\n")  # some recipes ask what to do with a folder that is there
    return process


def environment(folder: Path) -> dict[str, str]:
    """Nothing is fetched from anywhere."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "WANDB_MODE": "disabled",
    }
    return {**os.environ, **offline}


def metrics_in(folder: Path) -> list[dict[str, Any]]:
    """The metrics that a recipe has logged, line by line, without those that are times."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [{name: value for name, value in line.items() if "time" not in name} for line in found]


if __name__ == "__main__":
    prepare()
