"""Ray's own example for Lightning, with raycheck: two changed lines, and it survives a SIGKILL and another world size."""

import os
import signal
from uuid import uuid4

import pytest
import ray.cloudpickle
from ray.train import ScalingConfig

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.examples import lightning_ddp, lightning_ddp_with_raycheck
from tests.on_ray.test_examples import changes, train_workers
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.servers.http_fault_proxy import fault_proxy

of_ray = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def test_rays_example_takes_two_changed_lines() -> None:
    lines = changes(lightning_ddp, lightning_ddp_with_raycheck)

    assert "+import raycheck" in lines
    assert len([line for line in lines if line.startswith("+")]) == 3


@of_ray[0]
@of_ray[1]
def test_rays_example_survives_a_killed_worker_and_goes_on_with_another_world_size(
    cluster: None, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 batches of 16 per epoch; the workers are killed once in the first epoch, and the next call has one worker."""
    ray.cloudpickle.register_pickle_by_value(lightning_ddp_with_raycheck)
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        upload = proxy.rule("hold", "PUT", "step-000000012-a1-.*/__1_0.distcp")
        training = InThread(lambda: lightning_ddp_with_raycheck.main(storage, epochs=1))
        upload.wait(200)
        os.kill(train_workers()[-1], signal.SIGKILL)
        training.join()
    storage = join_uri(s3, storage.rpartition("/")[2].partition("?")[0])
    uri = join_uri(storage, "images")
    monkeypatch.setattr(lightning_ddp_with_raycheck, "ScalingConfig", lambda **_: ScalingConfig(num_workers=1))

    lightning_ddp_with_raycheck.main(storage, epochs=2)

    body = assert_invariants(open_store(uri))
    assert [attempt.restore_key for attempt in body.attempts][:2] == [None, "step-000000008-a1-s2"]
    assert len(body.attempts) == 3
    head = raycheck.open_run(uri).head
    assert head is not None
    assert Progress.of(head.details(values=True).values["progress"]).samples == 512
    assert (head.step, head.details().world_size) == (32, 1)
