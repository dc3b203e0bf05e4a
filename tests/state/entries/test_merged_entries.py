"""Objects whose ranks each hold a share: a restore at any world size gives all shares to every rank."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from raycheck.bucket.assembly.role import roles_of
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import StateMismatchError
from raycheck.on_ray.data.row_set import RowSet
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, save


class Consumed:
    """Keeps the rows that this rank has consumed, as RayData does."""

    merges_ranks = True

    def __init__(self, rank: int, column: str = "id") -> None:
        self.rank, self.column = rank, column
        self.rows, self.seen = RowSet(), RowSet()

    def state_dict(self) -> dict[str, Any]:
        return {"column": self.column, "rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a merged entry is given all ranks' states")

    def check_rank_states(self, states: list[dict[str, Any]]) -> None:
        if states[0]["column"] != self.column:
            raise StateMismatchError(f"column: saved {states[0]['column']!r}")

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        self.seen = RowSet.union(RowSet.of_state(state["rows"]) for state in states)
        self.rows = self.seen if self.rank == 0 else RowSet()


def ranks_of(world_size: int, **options: Any) -> tuple[list[Consumed], list[TrainState]]:
    ranks = [Consumed(rank, **options) for rank in range(world_size)]
    states = [
        TrainState({"data": one, "weight": torch.ones(2)}, rank=rank, world_size=world_size)
        for rank, one in enumerate(ranks)
    ]
    return ranks, list(agreed(states))


def ids_in(rows: RowSet) -> set[int]:
    return {int(number) for part in rows.parts() for number in part}


@pytest.mark.parametrize("scale", [1, 2**50], ids=["close together", "far apart"])
def test_what_all_ranks_hold_comes_to_every_rank_over_four_world_sizes(store: Store, scale: int):
    added, checkpoint = set[int](), None
    for number, world_size in enumerate((4, 3, 2, 5), 1):
        ranks, states = ranks_of(world_size)
        for state in states if checkpoint else ():
            state.apply(checkpoint)
            assert "data" not in str(state.apply(checkpoint).report.unused)
        assert all(ids_in(one.seen) == added for one in ranks)
        for one in ranks:
            mine = [scale * (1000 * number + 100 * one.rank + row) for row in range(10 * (1 + one.rank))]
            one.rows.add(np.array(mine, np.uint64))
            added |= {*mine}
        checkpoint = save(store, [state.stage(Progress(step=number)) for state in states], save=number)

    ranks, states = ranks_of(1)
    states[0].apply(checkpoint)
    assert ids_in(ranks[0].seen) == added


def test_what_the_object_refuses_changes_nothing(store: Store):
    ranks, states = ranks_of(2)
    ranks[1].rows.add(np.array([5], np.uint64))
    checkpoint = save(store, [state.stage(Progress(step=1)) for state in states])
    others, states = ranks_of(1, column="key")

    with pytest.raises(StateMismatchError, match=r"data: column: saved 'id'"):
        states[0].apply(checkpoint)

    assert ids_in(others[0].seen) == set()


class Paired(Consumed):
    """Has the ranks take the random state of every second rank, in pairs."""

    def random_rank(self, states: list[dict[str, Any]]) -> int:
        assert [state["column"] for state in states] == ["id"] * len(states)
        return self.rank // 2 * 2


def test_an_object_may_choose_whose_random_state_a_rank_takes(memory: Store):
    def states_of(world_size: int) -> list[TrainState]:
        return [
            TrainState({"data": Paired(rank), "weight": torch.ones(2)}, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    staged, expected = [], []
    for rank, state in enumerate(agreed(states_of(3))):
        torch.manual_seed(rank)
        staged.append(state.stage(Progress(step=1)))
        expected.append(torch.rand(3).tolist())
    checkpoint = save(memory, staged)

    drawn = []
    for state in states_of(6):
        state.apply(checkpoint, Selection.of(None, ["data"])).apply_rng()
        drawn.append(torch.rand(3).tolist())

    assert drawn[:4] == [expected[0], expected[0], expected[2], expected[2]]
    assert drawn[4] == drawn[5] not in expected


def test_a_role_that_shared_its_ranks_gets_other_states_which_are_equal_where_those_were(memory: Store):
    """As if the policy and the critic shared a tensor-parallel group, and each has such a group of its own now."""

    def of(name: str, rank: int) -> dict[str, Any]:
        return {name: {"data": Own(rank), "weight": torch.ones(2)}}

    class Own(Consumed):
        def random_rank(self, states: list[dict[str, Any]]) -> int:
            return self.rank

    roles = roles_of([{"critic", "policy"}, {"critic", "policy"}, {"reward"}])
    shared = [of("critic", rank) | of("policy", rank) for rank in range(2)]
    states = [
        TrainState(own, rank=rank, world_size=3, role=roles[rank])
        for rank, own in enumerate([*shared, of("reward", 0)])
    ]
    staged, expected = [], []
    for rank, state in enumerate(agreed(states)):
        torch.manual_seed(rank // 2)
        random.seed(rank)
        staged.append(state.stage(Progress(step=1)))
        expected.append(torch.rand(3).tolist())
    checkpoint = save(memory, staged)

    drawn, own_numbers = [], []
    roles = roles_of([{"critic"}, {"critic"}, {"policy"}, {"policy"}, {"reward"}])
    for rank, name in enumerate(["critic", "critic", "policy", "policy", "reward"]):
        state = TrainState(of(name, rank % 2), rank=rank, world_size=5, role=roles[rank])
        state.apply(checkpoint).apply_rng()
        drawn.append(torch.rand(3).tolist())
        own_numbers.append(random.random())

    assert drawn[:2] == [expected[0], expected[0]], "the first role by name continues"
    assert drawn[2] == drawn[3] not in expected
    assert drawn[4] == expected[2]
    assert len({*own_numbers}) == 5


def test_the_choice_is_among_the_ranks_that_had_the_object(memory: Store):
    """As if the policy's and the critic's ranks were others then, and all ranks have both now."""
    roles = roles_of([{"critic"}, {"policy"}, {"policy"}])
    states = [
        TrainState({name: {"data": Paired(place), "weight": torch.ones(2)}}, rank=rank, world_size=3, role=roles[rank])
        for rank, (name, place) in enumerate([("critic", 0), ("policy", 0), ("policy", 1)])
    ]
    staged, expected = [], []
    for rank, state in enumerate(agreed(states)):
        torch.manual_seed(rank)
        staged.append(state.stage(Progress(step=1)))
        expected.append(torch.rand(3).tolist())
    checkpoint = save(memory, staged)

    drawn = []
    for rank in range(4):
        both = {name: {"data": Paired(rank), "weight": torch.ones(2)} for name in ("policy", "critic")}
        TrainState(both, rank=rank, world_size=4).apply(checkpoint).apply_rng()
        drawn.append(torch.rand(3).tolist())

    assert drawn[:2] == [expected[1], expected[1]], "the first of the policy's ranks, which is not the first of all"
    assert drawn[2] == drawn[3] not in expected
