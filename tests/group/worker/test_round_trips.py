"""Counts the responses of the store for which a restart and a commit wait, one after the other."""

import re
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.diagnosis.checks import refuse_unfit_place
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_newest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import InProcess, group_of
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy
from tests.support.servers.store_rounds import StoreRounds


@pytest.fixture
def proxy(s3: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


def train(groups: list[InProcess], *, until: int, rounds: list[list[str]] | None = None) -> tuple[int, int]:
    """Train on all ranks to step `until`, with a save there. Returns the step at which they began, and how many rounds
    there were when the last rank could begin."""

    def rank(group: InProcess) -> tuple[int, int]:
        base = torch.nn.Linear(8, 8).requires_grad_(False)  # referred to by later commits, which look at it
        torch.nn.init.ones_(base.weight), torch.nn.init.ones_(base.bias)
        mine = raycheck.PerRank(torch.full((8,), float(group.rank)))
        state = {"weights": torch.ones(64, 64), "base": base, "mine": mine}
        with raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=until), group=group) as ckpt:
            at = ckpt.restore()
            begun = len(rounds or ())
            for _ in range(at.step, until):
                ckpt.end_step()
        return at.step, begun

    results = [thread.join() for thread in [InThread(lambda g=group: rank(g)) for group in groups]]
    return results[0][0], max(begun for _, begun in results)


def test_a_restart_waits_for_at_most_six_answers(proxy: FaultProxy) -> None:
    uri = join_uri(proxy.uri, uuid4().hex)
    groups = group_of(uri, world_size=2)
    train(groups, until=2)

    with StoreRounds(proxy) as rounds:
        again = [replace(group, id="again") for group in groups]  # with stores of their own
        began, answers = train(again, until=3, rounds=rounds.done)

    assert began == 2
    assert 4 <= answers <= 6, rounds.done
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [2, 3]


def test_a_first_start_waits_for_at_most_24_answers_to_examine_the_place(proxy: FaultProxy) -> None:
    """They are more than 80 requests: one to the endpoint, five for the rights, and then several at a time."""
    store = open_store(join_uri(proxy.uri, uuid4().hex))

    with StoreRounds(proxy) as rounds:
        refuse_unfit_place(store, node="n")

    assert sum(map(len, rounds.done)) > 80
    assert len(rounds.done) <= 24, rounds.done


def test_a_new_driver_waits_no_longer_where_40_000_drivers_have_started_the_run(proxy: FaultProxy) -> None:
    """All but the newest of them are in pages (40), which are read during the test of the store."""
    answers = []
    for count in (0, 40_000):
        uri = join_uri(proxy.uri, uuid4().hex)
        train(group_of(uri, world_size=2, owner="the first"), until=2)
        store = open_store(uri)
        others = tuple(uuid4().hex[:16] for _ in range(count))
        Register(store).edit(
            lambda body, _, new=others: replace(body, newest_owners=(*new, *body.newest_owners)), what="owners"
        )
        assert bool(read_newest(store).owner_pages) == bool(count)

        groups = group_of(uri, world_size=2, owner="the second")
        with StoreRounds(proxy) as rounds:
            began, waited = train(groups, until=3, rounds=rounds.done)

        assert began == 2
        assert bool(count) == any("/pages/" in request for round_ in rounds.done for request in round_)
        answers.append(waited)
        assert assert_invariants(store).owners == (*others, "the first", "the second")
    assert answers[0] == answers[1], answers


def test_a_commit_waits_for_two_answers_after_the_last_shard(proxy: FaultProxy) -> None:
    uri = join_uri(proxy.uri, uuid4().hex)
    groups = group_of(uri, world_size=2)
    train(groups, until=2)

    with StoreRounds(proxy) as rounds:
        train([replace(group, id="again") for group in groups], until=3)

    shards = [request for round_ in rounds.done for request in round_ if re.match("(PUT|POST) .*[.]distcp", request)]
    assert {request.split()[0] for request in shards} == {"PUT"}, "a small shard is one request"
    last = max(number for number, round_ in enumerate(rounds.done) if set(shards) & set(round_))
    is_swap = [any(request.startswith("PUT") and "/latest" in request for request in round_) for round_ in rounds.done]
    assert is_swap.index(True, last + 1) == last + 2, rounds.done[last:]
