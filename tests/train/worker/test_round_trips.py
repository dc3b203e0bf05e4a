"""Counts how many answers of the store a restart and a commit wait for, one after the other.

Each request takes DELAY_S at a proxy before the server. A request that comes at least so long after another one may
have waited for its answer; the longest such chain is what a store far away costs.
"""

from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.background_call import InThread
from tests.support.coordinator_in_thread import InProcess, group_of
from tests.support.http_fault_proxy import FaultProxy, Head, fault_proxy
from tests.support.invariants import assert_invariants

DELAY_S = 2.5
"""How late each answer comes: far longer than it takes to send the requests that wait for none."""
EVERYTHING = 10**6


@pytest.fixture
def proxy(s3: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


def round_trips(heads: list[Head]) -> int:
    rounds, begun = 0, 0.0
    for at in sorted(head.at for head in heads):
        if at >= begun + DELAY_S:
            rounds, begun = rounds + 1, at
    return rounds


def train(groups: list[InProcess], proxy: FaultProxy, *, until: int) -> tuple[int, list[Head]]:
    """Train on all ranks to step `until`, with a save there. Returns the step at which they began, and all requests up
    to the moment when the last rank could begin."""

    def rank(group: InProcess) -> tuple[int, int]:
        base = torch.nn.Linear(8, 8).requires_grad_(False)  # referred to by later commits, which look at it
        torch.nn.init.ones_(base.weight), torch.nn.init.ones_(base.bias)
        mine = raycheck.PerRank(torch.full((8,), float(group.rank)))
        state = {"weights": torch.ones(64, 64), "base": base, "mine": mine}
        with raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=until), group=group) as ckpt:
            at = ckpt.restore()
            begun = len(proxy.heads)
            for _ in range(at.step, until):
                ckpt.end_step()
        return at.step, begun

    before = len(proxy.heads)
    results = [thread.join() for thread in [InThread(lambda g=group: rank(g)) for group in groups]]
    return results[0][0], proxy.heads[before : max(begun for _, begun in results)]


def test_a_restart_waits_for_at_most_six_answers(proxy: FaultProxy) -> None:
    uri = join_uri(proxy.uri, uuid4().hex)
    groups = group_of(uri, world_size=2)
    train(groups, proxy, until=2)
    proxy.rule("delay", ".*", "", times=EVERYTHING, delay_s=DELAY_S)

    began, heads = train([replace(group, id="again") for group in groups], proxy, until=3)  # with stores of their own

    assert began == 2
    assert 4 <= round_trips(heads) <= 6, [f"{head.at - heads[0].at:.2f} {head.method} {head.target}" for head in heads]
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [2, 3]


def test_a_commit_waits_for_two_answers_after_the_last_shard(proxy: FaultProxy) -> None:
    uri = join_uri(proxy.uri, uuid4().hex)
    groups = group_of(uri, world_size=2)
    train(groups, proxy, until=2)
    proxy.rule("delay", ".*", "", times=EVERYTHING, delay_s=DELAY_S)
    mark = len(proxy.heads)

    train([replace(group, id="again") for group in groups], proxy, until=3)

    heads = proxy.heads[mark:]
    shards = [head for head in heads if ".distcp" in head.target and head.method in ("PUT", "POST")]
    assert {head.method for head in shards} == {"PUT"}, "a small shard is one request"
    last = max(head.at for head in shards)
    swap = next(head for head in heads if head.at > last and head.method == "PUT" and "/latest" in head.target)
    after = [head for head in heads if last + DELAY_S <= head.at <= swap.at]
    assert round_trips(after) == 2, [f"{head.at - last:.2f} {head.method} {head.target}" for head in after]
