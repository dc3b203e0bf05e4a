"""A rank's parameter of Megatron-core is cut into boxes of the model's tensors, whatever range of it a rank trains.

The judge is the whole model's tensor. What stands in for Megatron's ShardedTensor here has the fields of megatron-core
0.16.1's; tests/frameworks/test_megatron.py runs Megatron itself.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import raycheck.adapters
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.state.entries.megatron_parts import ParameterPiece, pieces_of, ranges_of, without_rows
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import boxes_of
from raycheck.transfer.stage.tensor_parts import Part, describe, describe_parts, description_of
from tests.support.processes.save_without_ray import agreed, save


def sharded(data: torch.Tensor, rank: int = 0, degree: int = 1, *, key: str = "w", replica: Any = (0, 0, 0)) -> Any:
    """Describe rows of a tensor as Megatron does."""
    rows, *rest = data.shape
    return SimpleNamespace(
        key=key,
        data=data,
        local_shape=tuple(data.shape),
        global_shape=(degree * rows, *rest),
        global_offset=(rank * rows, *(0 for _ in rest)),
        prepend_axis_num=0,
        flattened_range=None,
        allow_shape_mismatch=False,
        replica_id=replica,
    )


def gated(data: torch.Tensor, rank: int, degree: int) -> Any:
    """Describe two fused halves, as the factory of Megatron's gated layers does."""

    def build(key: str, own: torch.Tensor, replica: Any, _range: None) -> list[Any]:
        return [
            sharded(half, rank, degree, key=f"{key}_{name}", replica=replica)
            for name, half in zip("wv", torch.chunk(own, 2), strict=True)
        ]

    return SimpleNamespace(key="w", data=data, build_fn=build, replica_id=(0, 0, 0))


def own_of(whole: dict[str, torch.Tensor], rank: int, degree: int) -> torch.Tensor:
    """Return a rank's parameter: its rows of the one half, then its rows of the other."""
    return torch.cat([torch.chunk(half, degree)[rank] for half in whole.values()]).contiguous()


@st.composite
def halves_and_cuts(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    degree, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape = [degree * share, *draw(st.lists(st.integers(1, 4), max_size=2))]
    size = 2 * math.prod(shape) // degree
    return shape, degree, sorted(draw(st.lists(st.integers(0, size), max_size=4)))


@given(halves_and_cuts())
def test_every_range_of_fused_halves_is_few_boxes_that_together_are_the_whole(
    drawn: tuple[list[int], int, list[int]],
) -> None:
    shape, degree, cuts = drawn
    numbers = torch.arange(2.0 * math.prod(shape)).reshape(2, *shape) + 1
    whole = {"w_w": numbers[0], "w_v": numbers[1]}
    found = {name: torch.zeros(shape) for name in whole}
    for rank in range(degree):
        own = own_of(whole, rank, degree)
        pieces = pieces_of("w", gated(own, rank, degree))
        flat = own.reshape(-1)
        for start, stop in pairwise([0, *cuts, len(flat)]):
            memory = flat[start:stop].clone()
            for item in ranges_of(pieces, memory, start):
                boxes = boxes_of(item.name, (), item.of(memory), may_spread=False)
                assert len(boxes) <= 2 * len(shape) - 1
                for box in boxes:
                    place = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
                    assert not found[item.name][place].any()  # each element once
                    found[item.name][place] = box.local

    assert all(torch.equal(found[name], whole[name]) for name in whole)


class Held(nn.Module):
    """What one rank holds of the tensors of a model, as parameters that describe themselves."""

    def __init__(self, ranges: Sequence[Any]) -> None:
        super().__init__()
        for item in ranges:
            part = item.of(item.memory)
            self.register_parameter(item.name, describe(nn.Parameter(part), description_of(part)))


def ranks_of(whole: dict[str, torch.Tensor], degree: int, cut: int) -> list[dict[str, object]]:
    """Return the states of ranks that share the tensors: each rank's parameter is cut in two."""
    states = []
    for rank in range(degree):
        own = own_of(whole, rank, degree)
        pieces, flat = pieces_of("w", gated(own, rank, degree)), own.reshape(-1)
        for start, stop in ((0, cut), (cut, len(flat))):
            states.append({"model": Held(list(ranges_of(pieces, flat[start:stop].clone(), start)))})
    return states


@pytest.mark.parametrize(("saving", "loading"), [((2, 7), (4, 5)), ((4, 10), (1, 31)), ((1, 3), (2, 20))])
def test_fused_halves_restore_at_another_degree_and_in_other_ranges(
    saving: tuple[int, int], loading: tuple[int, int], memory: Store
) -> None:
    whole = {name: torch.randn(8, 5) for name in ("w_w", "w_v")}
    ranks = ranks_of(whole, *saving)
    states = [TrainState(state, rank=rank, world_size=len(ranks)) for rank, state in enumerate(ranks)]
    agreed(states)
    checkpoint = save(memory, [state.stage(Progress(step=1)) for state in states])

    here = ranks_of({name: torch.zeros(8, 5) for name in whole}, *loading)
    for rank, state in enumerate(here):
        TrainState(state, rank=rank, world_size=len(here)).apply(checkpoint, strict=False)

    for state, wanted in zip(here, ranks_of(whole, *loading), strict=True):
        for name, parameter in state["model"].named_parameters():  # type: ignore[attr-defined]
            assert torch.equal(parameter, dict(wanted["model"].named_parameters())[name])  # type: ignore[attr-defined]


def test_a_copy_that_another_rank_saves_is_only_read(memory: Store) -> None:
    pieces = [
        pieces_of("w", sharded(torch.full((4, 2), value), replica=(stage, 0, 0)))
        for stage, value in ((0, 1.0), (1, 2.0))
    ]
    held = [
        {"model": Held(list(ranges_of(own, torch.full((size,), float(rank + 1)), start)))}
        for rank, (own, start, size) in enumerate([(pieces[0], 0, 8), (pieces[1], 0, 3), (pieces[1], 3, 5)])
    ]
    states = [TrainState(state, rank=rank, world_size=3) for rank, state in enumerate(held)]
    agreed(states)
    checkpoint = save(memory, [state.stage(Progress(step=1)) for state in states])

    for rank, state in enumerate(held):
        TrainState(state, rank=rank, world_size=3).apply(checkpoint)
        assert torch.equal(state["model"].w, torch.ones_like(state["model"].w))  # type: ignore[attr-defined]


@given(rows=st.integers(1, 6), kept=st.integers(1, 8), start=st.integers(0, 10))
def test_padding_is_left_out_of_the_boxes(rows: int, kept: int, start: int) -> None:
    whole = torch.arange(2.0 * rows).reshape(rows, 2)
    memory = whole.reshape(-1)[start:].clone()
    pieces = [ParameterPiece("w", (rows, 2), (0, 0), (rows, 2), 0)]

    found = torch.zeros(kept, 2)
    for item in ranges_of(pieces, memory, start):
        tensor = without_rows(item.of(memory), kept)
        for box in boxes_of("w", (), tensor, may_spread=False):
            assert box.shape == (kept, 2)
            found[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))] = box.local

    wanted = torch.zeros(kept, 2)
    wanted[:rows] = whole[:kept]
    wanted.reshape(-1)[:start] = 0
    assert torch.equal(found, wanted)


def test_a_fused_parameter_without_a_factory_is_refused_by_name() -> None:
    weight = torch.zeros(4, 2)
    weight.partition_stride = 2  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match=r"decoder\.w is fused: each tensor-parallel rank has 2 pieces"):
        pieces_of("decoder.w", sharded(weight))


@pytest.mark.parametrize(
    "cut",
    [
        lambda own: torch.chunk(own, 2, dim=1),
        lambda own: [own.clone()],
        lambda own: [own.t()],
        lambda own: [own[1:]],
        lambda own: [own, own[2:]],
    ],
    ids=["columns", "a copy", "transposed", "not all", "twice"],
)
def test_a_factory_that_makes_no_runs_of_the_parameter_is_refused_by_name(cut: Any) -> None:
    def build(key: str, own: torch.Tensor, replica: Any, _range: None) -> list[Any]:
        return [sharded(part, key=f"{key}{number}", replica=replica) for number, part in enumerate(cut(own))]

    factory = SimpleNamespace(key="w", data=torch.zeros(4, 2), build_fn=build, replica_id=(0, 0, 0))
    with pytest.raises(ConfigError, match=r"decoder\.w is made of"):
        pieces_of("decoder.w", factory)


def test_several_boxes_of_one_key_are_one_tensor() -> None:
    def build(key: str, own: torch.Tensor, replica: Any, _range: None) -> dict[str, Any]:
        halves = [sharded(half, key=key, replica=replica) for half in torch.chunk(own, 2)]
        for number, half in enumerate(halves):
            half.global_shape, half.global_offset = (8, 3), (4 * number, 0)
        return {"halves": halves}

    own = torch.arange(12.0).reshape(4, 3)
    pieces = pieces_of("w", SimpleNamespace(key="w", data=own, build_fn=build, replica_id=(0, 0, 0)))
    (item,) = ranges_of(pieces, own.reshape(-1), 0)

    boxes = boxes_of("w", (), item.of(own), may_spread=False)
    assert [(box.offsets, box.sizes) for box in boxes] == [((0, 0), (2, 3)), ((4, 0), (2, 3))]
    assert [box.local.tolist() for box in boxes] == [own[:2].tolist(), own[2:].tolist()]


@pytest.mark.parametrize(
    "part", [Part((0, 0), (3, 2), (0,)), Part((3, 0), (2, 2), (0,)), Part((0, 0), (2, 2), (1,)), Part((0,), (2,), (0,))]
)
def test_a_part_that_memory_cannot_have_is_refused_when_it_is_described(part: Part) -> None:
    with pytest.raises(ConfigError, match="describes parts of a larger one which it cannot have"):
        describe_parts(torch.zeros(4), (4, 2), [part])


def test_another_version_than_those_tried_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="a training of Megatron-core with version unknown"):
        raycheck.adapters.megatron(nn.Linear(2, 2))
