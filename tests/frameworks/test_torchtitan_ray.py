"""torchtitan's own trainer inside Ray Train: it survives a killed worker, and goes on with another number of them."""

import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import ray.cloudpickle
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.examples import torchtitan_llama_with_raycheck as example
from tests.frameworks.test_torchtitan import weights
from tests.on_ray.test_examples import train_workers
from tests.support.frameworks.torchtitan_on_cpu import make_assets
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray and torchtitan warn


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokens, texts = make_assets(tmp_path / "assets")
    ray.cloudpickle.register_pickle_by_value(example)
    return {"tokenizer": str(tokens), "texts": str(texts), "dump_folder": str(tmp_path / "outputs")}


def test_a_killed_worker_changes_no_bit_and_one_worker_alone_goes_on(
    files: dict[str, str], cluster: None, s3: str, tmp_path: Path
) -> None:
    example.main(str(tmp_path), **files)
    with fault_proxy(s3) as proxy:
        bucket = join_uri(proxy.uri, uuid4().hex)
        upload = proxy.rule("hold", "PUT", "step-000000006-a1-.*/__1_0.distcp")
        training = InThread(lambda: example.main(bucket, **files))
        upload.wait(200)
        os.kill(train_workers()[-1], signal.SIGKILL)
        training.join()

        hurt = raycheck.open_run(join_uri(bucket, "llama"))
        body = assert_invariants(hurt.store)
        assert [attempt.restore_key for attempt in body.attempts] == [None, "step-000000004-a1-s2"]
        kept = weights(hurt.store.uri, 8, tmp_path / "x")
    example.main(str(tmp_path), workers=1, **{**files, "steps": 10})

    expected = weights(f"file://{tmp_path}/llama", 8, tmp_path / "y")
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    more = assert_invariants(open_store(f"file://{tmp_path}/llama"))
    assert more.entry(more.head).step == 10
    assert raycheck.open_run(f"file://{tmp_path}/llama").head.details().world_size == 1
