"""A run whose published versions an inference engine loads, in a process that has the engine."""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
WITHIN_S = 420.0


def judged(python: Path, file: str, place: Path, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a file with a folder as its argument in another environment. Return the notes that it prints."""
    done = subprocess.run(
        [python, file, place],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


class Served:
    """A small Llama that is trained, published and followed; and notes of what an engine has loaded or read of it.

    Each version has several files of weights. Every third one is whole.
    """

    def __init__(self, place: Path) -> None:
        import raycheck
        from raycheck.bucket.store import open_store
        from tests.published.weights import Trained
        from tests.support.samples import hf_models

        self.trained = Trained(open_store(f"file://{place}/run"), place / "cache")
        self.trained.model = hf_models.llama_bf16(
            hidden_size=128
        )  # vLLM's attention on CPUs wants heads of 32 elements
        self.follower = raycheck.follow(self.trained.store.uri, place / "local", keep=3)
        self.found: list[dict[str, Any]] = []

    def next_version(self) -> Any:
        """Train a step, publish it, and follow it."""
        self.trained.publish(whole_every=3, max_shard_bytes=40_000)
        version = self.follower.update()
        assert version is not None
        assert version.step == self.trained.steps
        return version

    def note(self, how: str, tensors: Iterable[tuple[str, Any]], **more: Any) -> None:
        """Note digests of the weights that an engine has, and of those that the trainer has now."""
        trained = digests(self.trained.weights.items())
        self.found.append(
            {"how": how, "step": self.trained.steps, "trained": trained, "loaded": digests(tensors), **more}
        )

    def note_read_meanwhile(self, how: str, version: Any, reader: Iterator[tuple[str, Any]]) -> None:
        """Note what a reader of this version gets, if the follower takes two more after the first tensor."""
        first, step, trained = next(reader), self.trained.steps, digests(self.trained.weights.items())
        assert version.path not in (self.next_version().path, self.next_version().path)
        self.note(how, [first, *reader], step=step, trained=trained)


def digests(tensors: Iterable[tuple[str, Any]]) -> dict[str, str]:
    from tests.support.frameworks.model_streamer import digest_of

    return {name: digest_of(values) for name, values in tensors}


def unfused(model: Any) -> dict[str, Any]:
    """Return the weights of an engine's Llama by the names that they have in the files."""
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    parts = {
        "qkv_proj": (["q_proj", "k_proj", "v_proj"], [head * count for count in heads]),
        "gate_up_proj": (["gate_proj", "up_proj"], [config.intermediate_size] * 2),
    }
    found = {}
    for name, values in model.named_parameters():
        fused = next((part for part in parts if part in name), None)
        if fused is None:
            found[name] = values
            continue
        names, sizes = parts[fused]
        found |= {name.replace(fused, own): part for own, part in zip(names, values.split(sizes), strict=True)}
    return found
