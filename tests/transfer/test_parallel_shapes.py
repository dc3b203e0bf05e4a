"""Whatever shape a training has, its checkpoint goes into any other: meshes of two dimensions, every pair of world
sizes, pipelines and experts whose ranks hold different keys."""

import copy
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from raycheck.bucket.assembly.replica_agreement import agree
from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import StateMismatchError
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.frameworks import fsdp_training
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.played_ranks import check_restore, local, playing, save_played
from tests.support.processes.save_without_ray import agreed, claimed, committed, restore_state, save, save_state
from tests.support.samples import parallel_shapes


def save_by(
    ranks: Ranks, store: Store, kind: str, leaving: frozenset[int] = frozenset()
) -> tuple[Checkpoint, list[fsdp_training.Tensors], list[fsdp_training.Tensors]]:
    """Save what four ranks trained. Returns each rank's tensors at the save and one step after it too."""
    name = claimed(store, world_size=4, step=parallel_shapes.PROGRESS.step)
    answers = ranks.run(parallel_shapes.save_trained, 4, kind, store.uri, name, leaving)
    checkpoint = committed(store, name, [answer[0] for answer in answers], progress=parallel_shapes.PROGRESS)
    return checkpoint, [answer[1] for answer in answers], [answer[2] for answer in answers]


@pytest.mark.parametrize("kind", ["hybrid", "fsdp x tensor parallel", "replicas x tensor parallel"])
def test_a_mesh_of_two_by_two_real_ranks_is_saved_once_and_restored_anywhere(files: Store, ranks: Ranks, kind: str):
    checkpoint, (expected, *_), (after, *_) = save_by(ranks, files, kind)

    same_mesh = ranks.run(parallel_shapes.load, 4, kind, files.uri, checkpoint.entry)
    two_ranks = ranks.run(parallel_shapes.load, 2, "fsdp", files.uri, checkpoint.entry)
    place = f"{files.uri.removeprefix('file://')}/{component_prefix(checkpoint.entry.key, TRAIN)}"
    by_stock = ranks.run(parallel_shapes.load_by_stock_torch, 2, "fsdp", FileSystemReader, place)
    plain = parallel_shapes.build("plain", 1, seed=3)
    restore_state(checkpoint, plain)

    assert payload_bytes(checkpoint) == sum(tensor.nbytes for tensor in expected.values())
    for restored, one_step_on, _ in same_mesh:
        fsdp_training.assert_same(restored, expected)
        fsdp_training.assert_same(one_step_on, after)
    for restored, _, report in two_ranks:
        fsdp_training.assert_same(restored, expected)
        assert report.restored == ("model", "optimizer", "progress", "rng")
    for restored in by_stock:
        fsdp_training.assert_same(restored, expected)
    fsdp_training.assert_same(parallel_shapes.full(plain), expected)


@pytest.mark.parametrize("leaving", [{0, 1}, {2, 3}])
@pytest.mark.parametrize("kind", ["hybrid", "replicas x tensor parallel"])
def test_a_replica_that_leaves_writes_nothing_that_the_other_one_holds(
    files: Store, ranks: Ranks, kind: str, leaving: set[int]
) -> None:
    """Ranks 0 and 1 are one replica of the model, ranks 2 and 3 are the other. A rank alone holds its random state."""
    checkpoint, (expected, *_), _ = save_by(ranks, files, kind, frozenset(leaving))

    index = checkpoint.read_index(checkpoint.read_manifest())
    chunks = [(chunk.rank, index.tensors[chunk.tensor].name, chunk.payload_size) for chunk in index.chunks]
    by_leaving = {name for rank, name, size in chunks if rank in leaving and size}
    assert not {name for name in by_leaving if name.startswith(("model.", "optimizer."))}
    assert payload_bytes(checkpoint) == sum(tensor.nbytes for tensor in expected.values())
    plain = parallel_shapes.build("plain", 1, seed=3)
    restore_state(checkpoint, plain)
    fsdp_training.assert_same(parallel_shapes.full(plain), expected)


def test_a_pipeline_of_sharded_stages_is_restored_as_it_was_and_whole(files: Store, ranks: Ranks):
    checkpoint, expected, after = save_by(ranks, files, "pipeline")

    same = ranks.run(parallel_shapes.load, 4, "pipeline", files.uri, checkpoint.entry)
    plain = parallel_shapes.build("plain", 1, seed=3)
    restore_state(checkpoint, plain)

    for rank, (restored, one_step_on, report) in enumerate(same):
        fsdp_training.assert_same(restored, expected[rank])
        fsdp_training.assert_same(one_step_on, after[rank])
        assert report.missing == report.unexpected == ()
        assert ("model.tail.weight" in report.unused) == (rank < 2)
        assert ("optimizer.state.up.weight" in report.unused) == (rank >= 2)
    everything = parallel_shapes.full(plain)
    assert everything.keys() == expected[0].keys() | expected[2].keys()
    fsdp_training.assert_same(everything, {name: (expected[0] | expected[2])[name] for name in everything})


# --- the matrix ---

PAIRS = [(saving, loading) for saving in range(1, 5) for loading in range(1, 5)]
SHORT = {(1, 4), (2, 3), (3, 2), (3, 3), (4, 1), (4, 2)}


def matrix_weights() -> dict[str, torch.Tensor]:
    """Sizes that every world divides, that none does, and that are smaller than the world; and one replicated."""
    generator = torch.Generator().manual_seed(7)
    sizes = {"even": (12, 24), "uneven": (7, 11), "small": (2, 3), "single": (1, 1), "tall": (13, 1), "wide": (1, 13)}
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("saving", "loading"), [pytest.param(*pair, marks=[pytest.mark.slow] * (pair not in SHORT)) for pair in PAIRS]
)
def test_every_pair_of_world_sizes_reshards_on_both_dimensions(memory: Store, saving: int, loading: int, dim: int):
    weights = matrix_weights()
    layout = {name: [Shard(dim)] for name in weights}
    other = {name: [Shard(1 - dim)] for name in weights} | {"uneven": [Replicate()]}

    checkpoint = save_played(memory, weights, world_size=saving, layout=layout)

    check_restore(checkpoint, weights, world_size=loading, layout=layout)
    check_restore(checkpoint, weights, world_size=loading, layout=other)


def test_a_tensor_over_two_of_three_ranks_is_written_by_these(memory: Store):
    def build(rank: int, fill: float) -> nn.Module:
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(uuid4().hex,), _init_backend=False, _rank=rank)
        model = nn.Linear(3, 5)
        nn.init.constant_(model.bias, fill)
        whole = torch.arange(15.0).view(5, 3) * fill
        model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
        return model

    holdings, staged = [], []
    for is_settled in (False, True):
        for rank in range(3):
            with playing(rank, 3):
                state = TrainState({"model": build(rank, 1.0)}, rank=rank, world_size=3)
                if is_settled:
                    state.use_agreement(agree(holdings)[rank])
                    staged.append(state.stage(Progress(step=1)))
                else:
                    holdings.append(state.replica_checksums())

    checkpoint = save(memory, staged)
    plain = nn.Linear(3, 5)
    restore_state(checkpoint, {"model": plain})

    assert [len(rank.held) for rank in holdings] == [2, 2, 1]
    assert all(box.may_spread for rank in holdings for box in rank.held)
    assert payload_bytes(checkpoint) == plain.weight.nbytes + plain.bias.nbytes
    assert torch.equal(plain.weight, torch.arange(15.0).view(5, 3))
    for rank in range(3):
        with playing(rank, 3):
            model = build(rank, 2.0)
            TrainState({"model": model}, rank=rank, world_size=3).apply(checkpoint)
            rows = [(0, 3), (3, 5), (0, 0)][rank]
            assert torch.equal(local(model.weight).view(-1, 3), plain.weight[slice(*rows)])
            assert model.bias.tolist() == [1.0] * 5


# --- ranks that hold different keys ---


def stages(seed: int) -> list[parallel_shapes.State]:
    """A pipeline of two, each with its own optimizer, and a part that both hold."""
    model = parallel_shapes.whole(seed)
    shared = nn.Linear(2, 2)
    return [
        adam_over(nn.ModuleDict({"up": model.up, "shared": shared})),
        adam_over(nn.ModuleDict({"down": model.down, "tail": model.tail, "shared": copy.deepcopy(shared)})),
    ]


def joined(seed: int) -> parallel_shapes.State:
    model = parallel_shapes.whole(seed)
    parts = {"up": model.up, "down": model.down, "tail": model.tail, "shared": nn.Linear(2, 2)}
    return adam_over(nn.ModuleDict(parts))


def adam_over(model: nn.Module) -> parallel_shapes.State:
    """Two groups, with the biases apart."""
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.2, "weight_decay": 0.0}]
    return {"model": model, "optimizer": torch.optim.AdamW(groups)}


def step(*states: parallel_shapes.State) -> None:
    for state in states:
        for name, parameter in state["model"].named_parameters():
            torch.manual_seed(len(name))  # what ranks share gets the same gradient
            parameter.grad = torch.randn(parameter.shape)
        state["optimizer"].step()


def save_ranks(store: Store, states: list[parallel_shapes.State]) -> Checkpoint:
    ranks = agreed([TrainState(state, rank=rank, world_size=len(states)) for rank, state in enumerate(states)])
    return save(store, [rank.stage(Progress(step=1)) for rank in ranks])


def test_stages_of_a_pipeline_restore_as_they_were_swapped_and_as_one_model(memory: Store):
    saved = stages(1)
    step(*saved)
    expected = parallel_shapes.full(saved[0]) | parallel_shapes.full(saved[1])

    checkpoint = save_ranks(memory, saved)
    again, swapped, one = stages(2), stages(3)[::-1], joined(4)
    for rank in range(2):
        TrainState(again[rank], rank=rank, world_size=2).apply(checkpoint)
        TrainState(swapped[rank], rank=rank, world_size=2).apply(checkpoint)
    restore_state(checkpoint, one)

    assert payload_bytes(checkpoint) == sum(tensor.nbytes for tensor in expected.values())
    for rank in range(2):
        fsdp_training.assert_same(parallel_shapes.full(again[rank]), parallel_shapes.full(saved[rank]))
        fsdp_training.assert_same(parallel_shapes.full(swapped[rank]), parallel_shapes.full(saved[1 - rank]))
    found = parallel_shapes.full(one)
    fsdp_training.assert_same(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()
    assert [group["lr"] for group in one["optimizer"].param_groups] == [0.1, 0.2]
    step(*saved, one)
    found = parallel_shapes.full(one)
    expected = parallel_shapes.full(saved[0]) | parallel_shapes.full(saved[1])
    fsdp_training.assert_same(found, {name: expected[name] for name in found})


def test_a_whole_model_goes_into_stages_when_told_that_they_hold_less(memory: Store):
    one = joined(1)
    step(one)
    checkpoint = save_state(memory, one)

    for rank, stage in enumerate(stages(2)):
        with pytest.raises(StateMismatchError, match=r"only in the checkpoint: model\.(up|down)\."):
            TrainState(stage, rank=rank, world_size=2).apply(checkpoint)
        report = TrainState(stage, rank=rank, world_size=2).apply(checkpoint, strict=False).report

        found = parallel_shapes.full(stage)
        fsdp_training.assert_same(found, {name: parallel_shapes.full(one)[name] for name in found})
        here = {name for name in found if name.startswith("model.")}
        assert set(report.unexpected) >= {n for n in parallel_shapes.full(one) if n.startswith("model.")} - here


def test_a_new_parameter_of_a_stage_is_missed_although_other_stages_hold_other_names(memory: Store):
    checkpoint = save_ranks(memory, stages(1))
    later = stages(2)
    later[1]["model"]["new"] = nn.Linear(1, 1)
    before = parallel_shapes.full(later[1])

    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: model\.new\.weight"):
        TrainState(later[1], rank=1, world_size=2).apply(checkpoint)

    fsdp_training.assert_same(parallel_shapes.full(later[1]), before)


def test_an_entry_that_only_one_stage_has_is_kept(memory: Store):
    def build(seed: int) -> list[parallel_shapes.State]:
        torch.manual_seed(seed)
        critic = nn.Linear(3, 1)
        return [
            {"actor": nn.Linear(2, 2)},
            {"critic": critic, "its_optimizer": torch.optim.SGD(critic.parameters(), lr=0.1 * seed, momentum=0.9)},
        ]

    saved, again, one = build(1), build(2), build(3)
    saved[1]["critic"](torch.ones(1, 3)).sum().backward()
    saved[1]["its_optimizer"].step()

    checkpoint = save_ranks(memory, saved)
    reports = [
        TrainState(state, rank=r, world_size=2).apply(checkpoint, strict=False).report for r, state in enumerate(again)
    ]
    restore_state(checkpoint, one[0] | one[1])

    assert reports[1].restored == ("critic", "its_optimizer", "progress", "rng")
    for found in (again[1], one[1]):
        assert torch.equal(found["critic"].weight, saved[1]["critic"].weight)
        state, expected = found["its_optimizer"].state_dict(), saved[1]["its_optimizer"].state_dict()
        assert state["param_groups"] == expected["param_groups"]
        assert torch.equal(state["state"][0]["momentum_buffer"], expected["state"][0]["momentum_buffer"])


def test_experts_of_each_rank_are_kept_beside_a_router_that_is_written_once(memory: Store):
    def build(seed: int, experts: range) -> parallel_shapes.State:
        torch.manual_seed(seed)
        router = nn.Linear(4, 4)
        held = nn.ModuleDict()
        for number in experts:
            torch.manual_seed(100 * seed + number)
            held[str(number)] = nn.Linear(4, 4)
        return adam_over(nn.ModuleDict({"router": router, "experts": held}))

    saved = [build(1, range(2)), build(1, range(2, 4))]
    step(*saved)
    expected = parallel_shapes.full(saved[0]) | parallel_shapes.full(saved[1])

    checkpoint = save_ranks(memory, saved)
    spread = [build(2, range(rank, rank + 1)) for rank in range(4)]
    for rank, state in enumerate(spread):
        TrainState(state, rank=rank, world_size=4).apply(checkpoint)

    assert payload_bytes(checkpoint) == sum(tensor.nbytes for tensor in expected.values())
    for state in spread:
        found = parallel_shapes.full(state)
        fsdp_training.assert_same(found, {name: expected[name] for name in found})


def payload_bytes(checkpoint: Checkpoint) -> int:
    """Returns the payload bytes of distinct records: a tied tensor's second name has the record of the first."""
    chunks = checkpoint.read_index(checkpoint.read_manifest()).chunks
    return sum({(chunk.rank, chunk.record_offset): chunk.payload_size for chunk in chunks}.values())
