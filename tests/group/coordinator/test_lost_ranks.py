"""Tests that a rank that fails, or has no data where others have some, is reported at once to all ranks that wait for
it."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.errors import ConfigError
from raycheck.group.coordinator.messages import BaseWish, RankFailure, RankProof
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import InProcess, group_of

WITHIN_S = 60.0


@pytest.fixture
def pair() -> list[InProcess]:
    """Return the second group that one coordinator serves, as after Ray has started the workers again."""
    first = group_of(f"memory://{uuid4().hex}", world_size=2)
    claim(first)
    return [replace(place, id="second") for place in first]


def claim(group: list[InProcess]) -> None:
    for told in [place.tell("claim", place.id, place.world_size, place.rank) for place in group]:
        told.result(WITHIN_S)


def compare(place: InProcess) -> Any:
    return place.tell(
        "compare_data", RankProof(group=place.id, rank=0, world_size=2, stream="data", proof=None), WITHIN_S
    )


def offer(place: InProcess) -> Any:
    wish = BaseWish(group=place.id, rank=0, world_size=2, uri="memory://base", wanted={}, replicas=frozenset())
    return place.tell("offer_base", wish, WITHIN_S)


def end(place: InProcess) -> Any:
    return place.tell("finish", place.id, 0, 2, WITHIN_S)


WAITS: list[Callable[[InProcess], Future[Any]]] = [compare, offer, end]


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "while it waits"])
@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_hears_of_the_one_that_failed(pair: list[InProcess], wait: Any, is_before: bool) -> None:
    claim(pair[:1])
    told = None if is_before else wait(pair[0])
    pair[1].tell_failure(ConfigError("it broke"))

    with pytest.raises(ConfigError, match=r"^rank 1: it broke$"):
        (told or wait(pair[0])).result(WITHIN_S)


def test_a_failure_during_the_claim_is_not_forgotten(pair: list[InProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, begun, go = pair[0].coordinator._coordinator._protocol, Event(), Event()
    made = protocol.claim

    def slowly(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(WITHIN_S)
        return made(*arguments)

    monkeypatch.setattr(protocol, "claim", slowly)
    claiming = InThread(lambda: claim(pair[:1]))
    assert begun.wait(WITHIN_S)
    failure = RankFailure(group="second", rank=1, error=ConfigError("it broke"))
    pair[1].tell("rank_failed", failure).result(WITHIN_S)
    go.set()
    claiming.join()

    with pytest.raises(ConfigError, match=r"^rank 1: it broke$"):
        compare(pair[0]).result(WITHIN_S)


@pytest.mark.parametrize("holder", [0, 1])
def test_data_on_some_ranks_only_are_refused_by_name_on_all_of_them(holder: int) -> None:
    def train(place: InProcess) -> None:
        state: dict[str, object] = {"weights": torch.ones(1)}
        if place.rank == holder:
            data = raycheck.Batches(range(8), global_batch=2, rank=place.rank, world_size=2, prove=False)
            state["data"] = data
        with raycheck.Checkpointer(state, group=place) as ckpt:
            ckpt.restore()

    group = group_of(f"memory://{uuid4().hex}", world_size=2)
    for rank in [InThread(lambda place=place: train(place)) for place in group]:  # type: ignore[misc]
        with pytest.raises(ConfigError, match=rf"state\['data'\] is on ranks \[{holder}\] and not on ranks"):
            rank.join(WITHIN_S)


@pytest.mark.parametrize("peeks", [0, 1])
def test_ranks_that_peek_while_others_restore_are_named(peeks: int) -> None:
    group = group_of(f"memory://{uuid4().hex}", world_size=2)

    def train(place: InProcess) -> None:
        with raycheck.Checkpointer({"weights": torch.ones(1)}, group=place) as ckpt:
            ckpt.restore()
            ckpt.end_step()

    for rank in [InThread(lambda place=place: train(place)) for place in group]:  # type: ignore[misc]
        rank.join()
    again = [replace(place, id="second") for place in group]
    ranks = [raycheck.Checkpointer({"weights": torch.ones(1)}, group=place) for place in again]
    asked = [InThread(rank.peek if at == peeks else rank.restore) for at, rank in enumerate(ranks)]

    for call in asked:
        with pytest.raises(ConfigError, match=rf"ranks \[{peeks}\] call peek\(\), and ranks \[{1 - peeks}\] restore"):
            call.join(WITHIN_S)


@pytest.mark.parametrize("method", ["add", "peek"])
def test_the_others_hear_of_a_rank_whose_state_or_peek_is_refused(method: str) -> None:
    group = group_of(f"memory://{uuid4().hex}", world_size=2)
    ranks = [raycheck.Checkpointer({"weights": torch.ones(1)}, group=place) for place in group]
    waiting = InThread(ranks[0].restore)

    refused: Callable[[], Any]
    refused = partial(ranks[1].add, "own", object()) if method == "add" else partial(ranks[1].peek, on_corrupt="wrong")

    with pytest.raises(ConfigError) as error:
        refused()

    with pytest.raises(ConfigError) as told:
        waiting.join(WITHIN_S)
    assert str(told.value) == f"rank 1: {error.value}"
