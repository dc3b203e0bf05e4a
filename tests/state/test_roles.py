"""Ranks of several roles, such as a policy's and a critic's, save one checkpoint in which each has its own entries."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.assembly.role import Role, roles_of
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.per_rank_entries import PerRank, RankZero
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, save

State = dict[str, Any]
SEPARATE = {"new": 1, "policy": 2, "critic": 2, "reward": 1}


def worker(role: str, rank: int, *, is_trained: bool, has_own: bool = True) -> State:
    """Return what one worker of a role has."""
    torch.manual_seed(len(role) if is_trained else 0)
    model = nn.Linear(3, 2 if role == "policy" else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if is_trained:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    seen = {"seen": f"{role} {rank}" if is_trained else ""}
    log = {"best": f"{role}'s" if is_trained else ""}
    entries = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    more = {"seen": PerRank(seen), "log": RankZero(log)} if has_own else {}
    return {role: {**entries, **more}}


def roles(sizes: dict[str, int]) -> list[Role]:
    return roles_of([{name} for name, size in sizes.items() for _ in range(size)])


def name_of(role: Role) -> str:
    (name,) = role.entries or {"policy"}
    return name


def workers(sizes: dict[str, int], *, is_trained: bool = False, has_own: bool = True) -> list[tuple[State, TrainState]]:
    """Return each rank's state and objects. The first rank also has what exists once."""
    made = []
    for rank, role in enumerate(roles(sizes)):
        own = worker(name_of(role), role.place.rank, is_trained=is_trained, has_own=has_own)
        once = {"step": 3 if is_trained and rank == 0 else 0}
        state = {**own, "driver": RankZero(once)}
        made.append((own | {"once": once}, TrainState(state, rank=rank, world_size=sum(sizes.values()), role=role)))
    return made


def saved(store: Store, sizes: dict[str, int], *, has_own: bool = True) -> tuple[Checkpoint, list[State]]:
    made = workers(sizes, is_trained=True, has_own=has_own)
    staged = []
    for rank, state in enumerate(agreed([state for _, state in made])):
        random.seed(rank)
        staged.append(state.stage(Progress(step=3)))
    return save(store, staged, progress=Progress(step=3)), [own for own, _ in made]


def values_of(own: State, role: str) -> State:
    parts = own[role]
    slots = {name: value for held in parts["optimizer"].state.values() for name, value in held.items()}
    tensors = {**parts["model"].state_dict(), **slots}
    found = {name: tensor.tolist() for name, tensor in tensors.items()}
    seen = parts["seen"].value["seen"] if "seen" in parts else None
    return found | {"scheduler": parts["scheduler"].state_dict()["last_epoch"], "seen": seen}


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [{"policy": 2, "critic": 2}, {"policy": 1, "critic": 2}, {"critic": 1, "policy": 2}, {"policy": 3, "critic": 1}],
)
def test_each_role_gets_its_own_entries_at_any_sizes(store: Store, sizes: dict[str, int], has_own: bool) -> None:
    checkpoint, before = saved(store, {"policy": 2, "critic": 2}, has_own=has_own)
    wanted = {(role, rank): before[first + rank] for role, first in (("policy", 0), ("critic", 2)) for rank in (0, 1)}
    drawn = {}
    for (own, state), role in zip(workers(sizes, has_own=has_own), roles(sizes), strict=True):
        done = state.apply(checkpoint)

        done.apply_rng()
        drawn[name_of(role), role.place.rank] = random.random()
        there = wanted.get((name_of(role), role.place.rank))
        if there is not None:
            assert values_of(own, name_of(role)) == values_of(there, name_of(role))
        assert own["once"]["step"] == (3 if role.in_group.rank == 0 else 0)
        if has_own:
            assert own[name_of(role)]["log"].obj["best"] == (f"{name_of(role)}'s" if role.place.rank == 0 else "")
        assert not done.report.unexpected
        assert not any(name.startswith(tuple(role.others)) for name in done.report.restored)
    first = {("policy", 0): 0, ("policy", 1): 1, ("critic", 0): 2, ("critic", 1): 3}
    expected = {place: random.Random(seed).random() for place, seed in first.items()}
    assert {place: number for place, number in drawn.items() if place in expected}.items() <= expected.items()
    assert len(set(drawn.values())) == len(drawn), "no two ranks draw the same numbers"


def test_workers_that_have_both_models_continue_from_separate_ones_and_back(store: Store) -> None:
    checkpoint, before = saved(store, {"policy": 2, "critic": 2})
    both = {**worker("policy", 0, is_trained=False), **worker("critic", 0, is_trained=False)}
    together = TrainState({**both, "driver": RankZero({"step": 0})}, rank=0, world_size=1)
    together.apply(checkpoint)
    again = save(store, [agreed([together])[0].stage(Progress(step=4))], save=2, progress=Progress(step=4))

    for (own, state), role in zip(workers({"policy": 1, "critic": 1}), ("policy", "critic"), strict=True):
        state.apply(again)

        assert values_of(own, role) | {"seen": ""} == values_of(before[0 if role == "policy" else 2], role) | {
            "seen": ""
        }


def test_roles_that_shared_their_ranks_draw_other_numbers_on_ranks_of_their_own(store: Store) -> None:
    shared = {**worker("policy", 0, is_trained=True), **worker("critic", 0, is_trained=True)}
    states = [shared, shared, worker("reward", 0, is_trained=True)]
    places = roles_of(states)
    made = [TrainState(own, rank=rank, world_size=3, role=places[rank]) for rank, own in enumerate(states)]
    staged = []
    for rank, state in enumerate(agreed(made)):
        random.seed(rank)
        staged.append(state.stage(Progress(step=3)))
    checkpoint = save(store, staged, progress=Progress(step=3))

    drawn: dict[str, list[float]] = {}
    for (_, state), role in zip(workers(SEPARATE), roles(SEPARATE), strict=True):
        state.apply(checkpoint, Selection.of(None, ["driver"]), strict=False).apply_rng()
        drawn.setdefault(min(role.entries), []).append(random.random())

    expected = [random.Random(seed).random() for seed in range(3)]
    assert drawn["critic"] == expected[:2], "the first role by name continues"
    assert drawn["reward"] == expected[2:]
    assert len({number for numbers in drawn.values() for number in numbers}) == sum(SEPARATE.values()), (
        "no two ranks draw the same numbers"
    )


def test_a_role_that_is_gone_and_a_role_that_is_new_are_refused_by_name(store: Store) -> None:
    checkpoint, _ = saved(store, {"policy": 1, "critic": 1})

    [(_, alone)] = workers({"policy": 1})
    with pytest.raises(StateMismatchError, match=r"only in the checkpoint: critic\.model"):
        alone.apply(checkpoint)
    _, (_, reward) = workers({"policy": 1, "reward": 1})
    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: reward\.model"):
        reward.apply(checkpoint)


def test_a_rank_of_a_role_without_one_of_its_entries_is_refused(store: Store) -> None:
    made = [state for _, state in workers({"policy": 2, "critic": 1})]
    role = roles({"policy": 2, "critic": 1})[1]
    short = worker("policy", 1, is_trained=False)
    del short["policy"]["scheduler"]
    made[1] = TrainState({**short, "driver": RankZero({"step": 0})}, rank=1, world_size=3, role=role)

    with pytest.raises(ConfigError, match=r"state\['policy\.scheduler'\] is on rank 0 and not on rank 1"):
        agreed(made)


def test_a_selection_may_name_another_role(store: Store) -> None:
    checkpoint, before = saved(store, {"policy": 1, "critic": 1})
    (policy, first), (critic, second) = workers({"policy": 1, "critic": 1})
    untouched = values_of(policy, "policy")
    selection = Selection.of(["critic"], [])

    first.check_selection(selection)
    first.apply(checkpoint, selection)
    second.apply(checkpoint, selection)

    assert values_of(policy, "policy") == untouched
    assert values_of(critic, "critic") == values_of(before[1], "critic")
