"""Tests LoRA runs that share one base model in the bucket: an import, or another run (step 39)."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import peft
import pytest
import torch

import raycheck
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.command_line import raycheck as command
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.samples.hf_models import llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings=True:UserWarning"),
]


@pytest.fixture
def bucket() -> str:
    return f"memory://{uuid4().hex}"


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a Hugging Face directory. One of tied weights has only one of their names."""
    llama(tie_word_embeddings=request.param).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def lora(folder: Path, seed: int, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(**config))


def train(uri: str, model_of: Any, *, steps: int = 1, world_size: int = 1, **settings: Any) -> list[Any]:
    """Train on every rank. Returns the ranks' models."""

    def rank(group: raycheck.adapters.Group, model: Any) -> Any:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        chosen = raycheck.SaveSettings(every_steps=1, **settings)
        with raycheck.Checkpointer({"model": model, "optimizer": optimizer}, chosen, group=group) as ckpt:
            at = ckpt.restore().step
            for step in range(at, at + steps):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5 + step) if parameter.requires_grad else None
                optimizer.step()
                ckpt.end_step()
                ckpt.wait()
        return model

    places = [(group, model_of()) for group in group_of(uri, world_size=world_size)]
    return [it.join() for it in [InThread(lambda at=at: rank(*at)) for at in places]]


def stored(uri: str) -> int:
    """Return how many bytes of shards lie below a run."""
    return sum(item.size_bytes for item in open_store(uri).list_objects("checkpoints/") if item.key.endswith("distcp"))


def same(one: Any, other: Any) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def assert_restores(uri: str, wanted: Any, blank: Any) -> None:
    with torch.no_grad():
        for parameter in blank.parameters():
            parameter.fill_(-1)
    raycheck.open_run(uri).restore(into={"model": blank})
    assert same(blank, wanted)


def test_two_lora_runs_on_one_imported_base_upload_their_adapters_alone(bucket: str, weights: Path) -> None:
    base = f"{bucket}/base"
    raycheck.catalog.import_checkpoint(str(weights), base)
    whole = stored(base)

    trained = {
        name: train(f"{bucket}/runs/{name}", lambda seed=seed: lora(weights, seed), base=base)[0]
        for seed, name in enumerate(("one", "two"))
    }

    for seed, name in enumerate(trained):
        uri = f"{bucket}/runs/{name}"
        assert stored(uri) < whole / 4
        body = assert_invariants(open_store(uri))
        assert [loan.source for loan in body.loans] == ["../../base"]
        assert body.holds == (), "the reservation has gone with the commit"
        assert not any(finding.problem for finding in raycheck.open_run(uri).at(body.entry(body.head).step).verify())
        assert_restores(uri, trained[name], lora(weights, seed + 10))
    assert not same(trained["one"], trained["two"])
    assert len(read_latest(open_store(base)).holds) == 2
    with pytest.raises(ConfigError, match="2 other runs use"):
        raycheck.catalog.delete_run(base)


def test_a_layer_that_is_trained_beside_the_adapter_leaves_the_base_s_own_in_the_base(
    bucket: str, weights: Path
) -> None:
    base, uri = f"{bucket}/base", f"{bucket}/run"
    raycheck.catalog.import_checkpoint(str(weights), base)

    (model,) = train(uri, lambda: lora(weights, 0, modules_to_save=["lm_head"]), base=base)

    assert read_latest(open_store(uri)).loans
    assert_restores(uri, model, lora(weights, 3, modules_to_save=["lm_head"]))


def test_a_restart_at_another_world_size_goes_on_referring_to_the_base(bucket: str, weights: Path) -> None:
    base, uri = f"{bucket}/base", f"{bucket}/run"
    raycheck.catalog.import_checkpoint(str(weights), base)
    train(uri, lambda: lora(weights, 0), base=base, world_size=2)
    train(uri, lambda: lora(weights, 5), base=base, world_size=3)  # the restore has found all that is frozen

    (model, *_) = train(uri, lambda: lora(weights, 6))

    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [1, 2, 3]
    assert len({entry.refs for entry in body.live}) == 1
    assert stored(uri) < stored(base)
    assert_restores(uri, model, lora(weights, 7))


def test_the_command_line_says_which_run_a_run_uses_and_refuses_to_delete_that(bucket: str, weights: Path) -> None:
    base, uri = f"{bucket}/base", f"{bucket}/run"
    raycheck.catalog.import_checkpoint(str(weights), base)
    train(uri, lambda: lora(weights, 0), base=base)
    (name,) = raycheck.open_run(uri).borrowed["../base"]

    shown, facts = command("show", uri), json.loads(command("show", uri, "--json").stdout)
    refused = command("delete-run", base, "--yes", "--live")

    assert f"uses 1 checkpoint(s) of ../base: {name}" in shown.stdout.splitlines()
    assert facts["borrowed"] == {"../base": [name]}
    assert facts["checkpoint"]["components"]["model.frozen"] == f"../base/{name}"
    assert refused.returncode == 2
    assert "another run uses checkpoints of it (../run)" in refused.stderr


def test_another_lora_run_is_a_base_too(bucket: str, weights: Path) -> None:
    first, second = f"{bucket}/first", f"{bucket}/second"
    train(first, lambda: lora(weights, 0), world_size=2)

    (model,) = train(second, lambda: lora(weights, 1), base=first)

    assert read_latest(open_store(second)).loans[0].source == "../first"
    assert stored(second) < stored(first) / 3
    train(first, lambda: lora(weights, 0), steps=3, keep_last=1)
    prune(Register(open_store(first)), grace_s=0.0)
    assert_restores(second, model, lora(weights, 3))


def test_a_base_that_has_borrowed_hands_on_what_it_borrowed(bucket: str, weights: Path) -> None:
    base, first, second = (f"{bucket}/{name}" for name in ("base", "first", "second"))
    raycheck.catalog.import_checkpoint(str(weights), base)
    train(first, lambda: lora(weights, 0), base=base)

    (model,) = train(second, lambda: lora(weights, 1), base=first)

    assert [loan.source for loan in read_latest(open_store(second)).loans] == ["../base"]
    assert_restores(second, model, lora(weights, 3))


def changed(weights: Path, seed: int) -> Any:
    model = lora(weights, seed)
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).view(torch.int32).view(-1)[3] ^= 1
    return model


@pytest.mark.parametrize("world_size", [1, 3])
def test_one_other_bit_is_another_base(bucket: str, weights: Path, world_size: int, caplog: Any) -> None:
    base, uri = f"{bucket}/base", f"{bucket}/run"
    raycheck.catalog.import_checkpoint(str(weights), base)

    model = train(uri, lambda: changed(weights, 0), base=base, world_size=world_size)[0]

    assert "has other bytes" in caplog.text
    assert read_latest(open_store(uri)).loans == ()
    assert stored(uri) > stored(base)
    assert_restores(uri, model, lora(weights, 7))


def test_what_changes_after_the_comparison_is_uploaded(bucket: str, weights: Path) -> None:
    base, uri = f"{bucket}/base", f"{bucket}/run"
    raycheck.catalog.import_checkpoint(str(weights), base)
    model = lora(weights, 0)
    settings = raycheck.SaveSettings(every_steps=1, base=base)
    with raycheck.Checkpointer({"model": model}, settings, group=group_of(uri)[0]) as ckpt:
        ckpt.restore()
        ckpt.end_step()
        ckpt.wait()
        before = stored(uri)
        with torch.no_grad():
            next(p for p in model.parameters() if not p.requires_grad).add_(1)
        ckpt.end_step()

    assert before < stored(base) / 5
    assert stored(uri) > stored(base)
    assert_restores(uri, model, lora(weights, 7))


@pytest.mark.parametrize("problem", ["gone", "unreadable", "damaged", "another type", "another shape"])
def test_a_base_that_cannot_be_used_costs_an_upload_and_says_why(
    bucket: str, tmp_path: Path, problem: str, caplog: Any
) -> None:
    llama().save_pretrained(tmp_path)
    base, uri = f"{bucket}/base", f"{bucket}/run"
    if problem == "unreadable":
        open_store(base).put("latest", b"{}")
    elif problem != "gone":
        raycheck.catalog.import_checkpoint(str(tmp_path), base)
    if problem == "damaged":
        store = open_store(base)
        key = next(it.key for it in store.list_objects("checkpoints/") if "frozen" in it.key and it.key.endswith("cp"))
        data = bytearray(store.get(key).data)
        data[len(data) // 3 : 2 * len(data) // 3] = bytes(2 * len(data) // 3 - len(data) // 3)
        store.put(key, bytes(data))
    if problem == "another type":
        llama().bfloat16().save_pretrained(tmp_path)
    if problem == "another shape":
        llama(vocab_size=32).save_pretrained(tmp_path)

    (model,) = train(uri, lambda: lora(tmp_path, 0), base=base)

    lines = [record.getMessage() for record in caplog.records if "base cannot be used" in record.getMessage()]
    assert len(lines) == 1
    said = {
        "gone": "no run here",
        "unreadable": "has no format version",
        "damaged": "DamagedError",
        "another type": "is float32[64, 32], and here it is bfloat16[64, 32]",
        "another shape": "is float32[64, 32], and here it is float32[32, 32]",
    }
    assert said[problem] in lines[0]
    assert_invariants(open_store(uri))
    assert_restores(uri, model, lora(tmp_path, 3))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_has_nothing_frozen_says_so_and_trains(
    bucket: str, tmp_path: Path, world_size: int, caplog: Any
) -> None:
    llama().save_pretrained(tmp_path)
    base, uri = f"{bucket}/base", f"{bucket}/run"
    raycheck.catalog.import_checkpoint(str(tmp_path), base)

    (model, *_) = train(uri, llama, base=base, world_size=world_size)

    assert caplog.text.count("nothing of this run is frozen") == 1
    assert read_latest(open_store(uri)).loans == ()
    assert_restores(uri, model, llama())


def test_a_run_in_another_bucket_or_the_run_itself_is_refused(bucket: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    for base in (f"{bucket}/run", f"{bucket}/run/inside", f"file://{tmp_path}/x"):
        with pytest.raises(ConfigError, match="base"):
            train(f"{bucket}/run", lambda: lora(tmp_path, 0), base=base)
    with pytest.raises(ConfigError, match="base='x'"):
        raycheck.SaveSettings(base="x")
