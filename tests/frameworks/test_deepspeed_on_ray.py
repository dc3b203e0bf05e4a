"""Ray's own example for DeepSpeed survives a killed worker, and continues on another number of workers."""

import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.on_ray.test_examples import train_workers
from tests.support.frameworks import deepspeed_on_ray, deepspeed_training
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = pytest.mark.slow


def weights_at(uri: str, at: int | str) -> torch.Tensor:
    """Return all weights of the checkpoint with this step or key."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
    raycheck.open_run(uri).restore(at, into={"engine": {"model": model}}, strict=False)
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def keys_at(uri: str, step: int) -> list[str]:
    return [item.key for item in raycheck.open_run(uri).checkpoints if item.step == step]


def losses(uri: str) -> dict[int, float]:
    return {item.step: item.metrics["loss"] for item in raycheck.open_run(uri).checkpoints}


def test_a_killed_worker_is_replaced_and_changes_nothing(s3: str, tmp_path: Path) -> None:
    deepspeed_training.prepare()
    whole = f"file://{tmp_path}/whole"
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        upload = proxy.rule("hold", "PUT", "step-000000010-a1-.*/__1_0.distcp")
        training = InThread(
            lambda: deepspeed_on_ray.train_all({"storage_path": whole}, {"storage_path": storage}, within_s=240.0)
        )

        upload.wait(200)
        os.kill(train_workers()[-1], signal.SIGKILL)
        training.join(240.0)

        hurt = join_uri(storage, "bert")
        body = assert_invariants(open_store(hurt))
        assert [attempt.restore_key for attempt in body.attempts] == [None, "step-000000005-a1-s1"]
        assert losses(hurt) == losses(f"{whole}/bert")
        assert set(losses(hurt)) == {5, 10, 15, 20, 24}
        assert torch.equal(weights_at(hurt, 24), weights_at(f"{whole}/bert", 24))


def test_another_number_of_workers_continues_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    deepspeed_training.prepare()
    training = {"storage_path": f"file://{tmp_path}", "num_epochs": 5, "dropout": 0.0}

    deepspeed_on_ray.train_all(training, {**training, "num_workers": 3, "goes_back_to": 20})

    run = f"file://{tmp_path}/bert"
    body = assert_invariants(open_store(run))
    assert (body.attempts[-1].world_size, str(body.attempts[-1].restore_key)[:14]) == (3, "step-000000020")
    last = {key.split("-")[2]: key for key in keys_at(run, 40)}
    before, expected, found = (weights_at(run, at) for at in (20, last["a1"], last[f"a{body.attempts[-1].number}"]))
    assert 0 < (found - expected).norm() < 0.1 * (expected - before).norm()


def test_deepspeed_s_own_checkpoint_of_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    deepspeed_training.prepare()
    own = {"example": "deepspeed_bert", "storage_path": f"{tmp_path}", "num_epochs": 1}
    deepspeed_on_ray.train_all(own)
    (saved,) = (tmp_path / "bert").glob("checkpoint_*/")

    with pytest.raises(RuntimeError, match="DP world size of 2 but the current world size is 3"):
        deepspeed_on_ray.train_all({**own, "num_workers": 3, "loads": str(saved)})
