"""A driver of actors without Ray Train, one of whose nodes is drained."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from uuid import uuid4

import pytest
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import raycheck
from raycheck.bucket.store.address import join_uri
from tests.support.processes.ray_cluster import Arena, drain

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
NOTICE_S = 12
STEP_S = 0.1


@ray.remote(num_cpus=1)
class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 2)


def train(address: str, uri: str, nodes: list[str]) -> int:
    """A driver. The first node is drained after ten steps; returns the last step before it goes."""
    ray.init(address=address, log_to_driver=False)
    actors = [
        Trainer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    step, goes_at = 0, float("inf")
    settings = raycheck.SaveSettings(every_steps=None, keep_last=None)
    ckpt = raycheck.ActorCheckpointer(actors, lambda actor: {"model": actor.model}, uri, settings)
    ckpt.restore()
    while time.monotonic() < goes_at - 1:
        ckpt.end_step()
        step += 1
        if step == 10:
            assert not raycheck.open_run(uri).checkpoints
            goes_at = drain(address, nodes[0], seconds=NOTICE_S) + NOTICE_S
        time.sleep(STEP_S)
    ray.shutdown()
    return step


def test_a_notice_that_an_actor_s_node_goes_brings_a_save_at_once_and_a_late_one(nodes: Arena, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    places = [node.node_id for node in nodes.add(2)]

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as driver:
        step = driver.submit(train, nodes.address, uri, places).result(timeout=120)

    run = raycheck.open_run(uri)
    first, last = [checkpoint.step for checkpoint in run.checkpoints]
    assert all(checkpoint.is_by_notice for checkpoint in run.checkpoints)
    assert 10 < first < 10 + 3 / STEP_S
    assert step - 5 / STEP_S < last <= step
