"""Ray's own example for Accelerate survives a killed worker with one changed line, and ends with the same weights."""

import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import ray.cloudpickle
import torch
from transformers import BertConfig, BertForSequenceClassification

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.examples import accelerate_bert_with_raycheck as example
from tests.on_ray.test_examples import train_workers
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray and Accelerate warn


def weights_of(uri: str) -> dict[str, torch.Tensor]:
    """Returns the weights of the run's newest checkpoint."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
    assert raycheck.open_run(uri).restore(into={"model": model}) == 36
    return model.state_dict()


def test_a_killed_worker_costs_steps_and_changes_nothing(cluster: None, s3: str, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(example)
    example.main(str(tmp_path))
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        upload = proxy.rule("hold", "PUT", "step-000000030-a1-.*/__1_0.distcp")
        training = InThread(lambda: example.main(storage))

        upload.wait(200)
        os.kill(train_workers()[-1], signal.SIGKILL)
        training.join()

        body = assert_invariants(open_store(join_uri(storage, "bert")))
        assert [attempt.restore_key for attempt in body.attempts] == [None, "step-000000020-a1-s2"]
        hurt, whole = weights_of(join_uri(storage, "bert")), weights_of(f"file://{tmp_path}/bert")
    assert all(torch.equal(hurt[name], whole[name]) for name in whole)
