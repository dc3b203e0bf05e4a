"""A tensor of the state may be several boxes on a rank: whatever says which, every cut restores every other cut.

The judge is the whole tensor, and stock torch, which reads the checkpoint with its own loader.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, SaveFailedError
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import boxes_of
from raycheck.transfer.stage.tensor_parts import boxes_of_range, described_as, flat_part
from tests.support.processes.save_without_ray import Own, agreed, restore_state, save, save_state
from tests.transfer.test_stock_torch import no_group, place_of


def described(tensor: torch.Tensor, shape: Sequence[int], *boxes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Give a tensor what torch.distributed.checkpoint.CheckpointableTensor of torch 2.14 asks for.

    boxes: for each, its offsets in the whole, its offsets in this tensor, and its sizes.
    """
    tensor.global_shape = tuple(shape)  # type: ignore[attr-defined]
    for number, attribute in enumerate(("global_offsets", "local_offsets", "local_sizes")):
        setattr(tensor, attribute, tuple(tuple(box[number]) for box in boxes))
    return tensor


def whole(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1


def flat_cut(tensor: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Cut a tensor's elements in row-major order, as ZeRO does: one range for each rank."""
    flat = tensor.reshape(-1)
    return [flat_part(flat[start:stop].clone(), tensor.shape, start) for start, stop in pairwise([0, *cuts, len(flat)])]


def saved(store: Store, ranks: Sequence[dict[str, object]], *, number: int = 1) -> Checkpoint:
    world_size = len(ranks)
    states = [TrainState(state, rank=rank, world_size=world_size) for rank, state in enumerate(ranks)]
    for state in states:
        state.check()
    if world_size > 1:
        agreed(states)
    return save(store, [state.stage(Progress(step=number)) for state in states], save=number)


def restored(checkpoint: Checkpoint, ranks: Sequence[dict[str, object]]) -> None:
    for rank, state in enumerate(ranks):
        TrainState(state, rank=rank, world_size=len(ranks)).apply(checkpoint)


def owner(tensor: torch.Tensor) -> dict[str, object]:
    return {"owner": Own({"w": tensor})}


def own_of(state: dict[str, object]) -> torch.Tensor:
    found = state["owner"]
    assert isinstance(found, Own)
    result: torch.Tensor = found.state["w"]
    return result


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
    cuts = st.lists(st.integers(0, math.prod(shape)), max_size=3).map(sorted)
    return shape, draw(cuts), draw(cuts)


@given(shapes_and_cuts())
def test_every_flat_range_restores_every_other(drawn: tuple[list[int], list[int], list[int]]) -> None:
    shape, saving, loading = drawn
    tensor = whole(shape)
    store = open_store(f"memory://{uuid4().hex}")

    checkpoint = saved(store, [owner(part) for part in flat_cut(tensor, saving)])

    assert [item.shape for item in checkpoint.read_index(checkpoint.read_manifest()).tensors] == [tuple(shape)]
    here = [owner(part) for part in flat_cut(torch.zeros(shape), loading)]
    restored(checkpoint, here)
    assert torch.equal(torch.cat([own_of(state) for state in here]), tensor.reshape(-1))
    at_once = owner(torch.zeros(shape))
    restore_state(checkpoint, at_once)
    assert torch.equal(own_of(at_once), tensor)


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_a_range_is_its_boxes_in_order_and_few_of_them(shape: list[int], data: st.DataObject) -> None:
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))

    boxes = list(boxes_of_range(tuple(shape), start, stop))

    found = [
        numbers[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))].reshape(-1)
        for offsets, sizes in boxes
    ]
    assert torch.equal(torch.cat([*found, numbers.new_empty(0)]), torch.arange(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def split(
    low: Sequence[int], sizes: Sequence[int], draw: st.DrawFn, depth: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a box into boxes, at random places along random dimensions."""
    wide = [dim for dim, size in enumerate(sizes) if size > 1]
    if not depth or not wide:
        yield list(low), list(sizes)
        return
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(1, sizes[dim] - 1))
    yield from split(low, [*sizes[:dim], at, *sizes[dim + 1 :]], draw, depth - 1)
    rest = [*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :]]
    yield from split([*low[:dim], low[dim] + at, *low[dim + 1 :]], rest, draw, depth - 1)


@st.composite
def random_boxes(draw: st.DrawFn, shape: Sequence[int]) -> list[list[tuple[list[int], list[int]]]]:
    """Cut a tensor into up to eight boxes, and deal them to up to three ranks."""
    ranks: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for box in split([0] * len(shape), shape, draw, 3):
        ranks[draw(st.integers(0, len(ranks) - 1))].append(box)
    return ranks


def rows_of(tensor: torch.Tensor, boxes: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Put boxes of a tensor one below the other into one padded tensor, which describes them."""
    rank = tensor.dim()
    height = sum(sizes[0] for _, sizes in boxes) + 1
    widths = [max([1, *(sizes[dim] for _, sizes in boxes)]) + 1 for dim in range(1, rank)]
    own, at, found = torch.full((height, *widths), -1.0), 0, []
    for low, sizes in boxes:
        start = [at, *(0 for _ in widths)]
        target = tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))
        own[target] = tensor[tuple(slice(first, first + size) for first, size in zip(low, sizes, strict=True))]
        found.append((low, start, sizes))
        at += sizes[0]
    return described(own, tensor.shape, *found)


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), data=st.data())
def test_random_boxes_dealt_to_random_ranks_restore_each_other(shape: list[int], data: st.DataObject) -> None:
    tensor = whole(shape)
    store = open_store(f"memory://{uuid4().hex}")
    saving, loading = data.draw(random_boxes(shape)), data.draw(random_boxes(shape))

    checkpoint = saved(store, [owner(rows_of(tensor, boxes)) for boxes in saving])

    here = [owner(rows_of(torch.zeros(shape), boxes)) for boxes in loading]
    restored(checkpoint, here)
    for state, boxes in zip(here, loading, strict=True):
        wanted = rows_of(tensor, boxes)
        for box, wish in zip(
            *(boxes_of("w", (), item, may_spread=False) for item in (own_of(state), wanted)), strict=True
        ):
            assert torch.equal(box.local, wish.local)


@no_group
def test_stock_torch_reads_a_tensor_of_many_boxes(files: Store) -> None:
    tensor = whole([7, 5])
    checkpoint = saved(files, [owner(part) for part in flat_cut(tensor, [3, 17, 18])])

    reader, place, options = place_of(checkpoint)
    found = {"owner.w": torch.zeros(7, 5)}
    dcp.load(found, storage_reader=reader(place, **options))

    assert torch.equal(found["owner.w"], tensor)


def halves(weight: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return one rank's part of a weight of two fused halves: its share of the first, then its share of the second."""
    rows, columns = weight.shape
    share = rows // 2 // world_size
    low, high = weight[rank * share :][:share], weight[rows // 2 + rank * share :][:share]
    boxes = [
        ([rank * share, 0], [0, 0], [share, columns]),
        ([rows // 2 + rank * share, 0], [share, 0], [share, columns]),
    ]
    return described(torch.cat([low, high]), weight.shape, *boxes)


def fused(seed: int, rank: int, world_size: int) -> dict[str, object]:
    """A module with such a part of a weight, and what Adam has of it."""
    torch.manual_seed(seed)
    whole_weight = torch.randn(8, 3)
    model = nn.Linear(3, 8 // world_size, bias=False)
    part = halves(whole_weight, rank, world_size)
    model.weight = described(
        nn.Parameter(part.clone()),
        part.global_shape,
        *zip(  # type: ignore[attr-defined, assignment]
            part.global_offsets,
            part.local_offsets,
            part.local_sizes,
            strict=True,  # type: ignore[attr-defined]
        ),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def stepped(state: dict[str, object], rank: int, world_size: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, nn.Linear)
    assert isinstance(optimizer, torch.optim.Adam)
    model.weight.grad = halves(whole([8, 3]), rank, world_size).clone()
    optimizer.step()


@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (2, 1), (1, 4), (2, 2)])
def test_fused_halves_and_their_optimizer_state_restore_at_another_degree(
    memory: Store, saving: int, loading: int
) -> None:
    ranks = [fused(1, rank, saving) for rank in range(saving)]
    for rank, state in enumerate(ranks):
        stepped(state, rank, saving)

    checkpoint = saved(memory, ranks)

    here, undisturbed = ([fused(seed, rank, loading) for rank in range(loading)] for seed in (2, 1))
    restored(checkpoint, here)
    for rank, (state, other) in enumerate(zip(here, undisturbed, strict=True)):
        stepped(other, rank, loading)
        stepped(other, rank, loading)
        stepped(state, rank, loading)
        assert torch.equal(state["model"].weight, other["model"].weight)  # type: ignore[attr-defined]


def test_a_second_save_of_unmoved_parts_is_planned_once_and_holds_the_new_values(memory: Store) -> None:
    state = fused(1, 0, 1)
    live = TrainState(state, rank=0, world_size=1)
    stepped(state, 0, 1)
    save(memory, [live.stage(Progress(step=1))])
    plan = live._plan
    stepped(state, 0, 1)

    checkpoint = save(memory, [live.stage(Progress(step=2))], save=2)

    assert live._plan is plan
    here = fused(2, 0, 1)
    restore_state(checkpoint, here)
    assert torch.equal(here["model"].weight, state["model"].weight)  # type: ignore[attr-defined]


def test_a_hole_and_an_overlap_are_refused_by_name(memory: Store) -> None:
    tensor = whole([4, 4])
    first, second = flat_cut(tensor, [6])
    with pytest.raises(SaveFailedError, match=r"owner\.w"):
        saved(memory, [owner(first), owner(flat_part(torch.zeros(9), (4, 4), 7))])
    with pytest.raises(SaveFailedError, match=r"owner\.w"):
        saved(memory, [owner(first), owner(flat_part(torch.zeros(11), (4, 4), 5))], number=2)
    saved(memory, [owner(first), owner(second)], number=3)


@pytest.mark.parametrize(
    "box",
    [
        ([0, 0], [0, 0], [5, 2]),
        ([3, 0], [0, 0], [2, 2]),
        ([0, 0], [3, 0], [2, 2]),
        ([0], [0, 0], [2, 2]),
        ([-1, 0], [0, 0], [2, 2]),
    ],
)
def test_parts_that_a_tensor_cannot_have_are_refused_by_name(box: tuple[list[int], list[int], list[int]]) -> None:
    odd = described(torch.zeros(4, 2), (4, 2), box)

    with pytest.raises(ConfigError, match=r"state at owner\.w is a tensor of shape \[4, 2\] that describes parts"):
        TrainState(owner(odd), rank=0, world_size=1).check()


@pytest.mark.parametrize(("memory_shape", "start"), [((2, 2), 0), ((5,), 0), ((2,), 3), ((2,), -1)])
def test_a_flat_range_outside_of_the_whole_is_refused(memory_shape: tuple[int, ...], start: int) -> None:
    with pytest.raises(ConfigError, match="is no range of a tensor of shape"):
        flat_part(torch.zeros(memory_shape), (2, 2), start)


def test_a_description_is_taken_over_only_by_what_has_the_same_shape() -> None:
    part = described(torch.zeros(2, 2), (4, 2), ([2, 0], [0, 0], [2, 2]))

    assert described_as(torch.ones(2, 2), part).global_shape == (4, 2)  # type: ignore[attr-defined]
    assert not hasattr(described_as(torch.ones(2), part), "global_shape")


def test_a_changed_shape_is_refused_by_the_whole_shape(memory: Store) -> None:
    checkpoint = save_state(memory, owner(flat_part(torch.zeros(6), (2, 3), 0)))

    other = nn.Module()
    other.register_parameter("w", described(nn.Parameter(torch.zeros(2, 3)), (4, 3), ([0, 0], [0, 0], [2, 3])))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="owner"):
        restore_state(checkpoint, {"owner": other})
