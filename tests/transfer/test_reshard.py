"""raycheck's own restore: byte-exact at any world size and layout, checked block by block, and typed when damaged."""

import cProfile
import pstats
from collections import OrderedDict
from collections.abc import Callable
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from raycheck.bucket.format import object_keys as keys
from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.index import Chunk, Index
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.errors import CorruptError, NotFoundError
from raycheck.state.train_state import TrainState
from raycheck.transfer.read.reader import REQUEST_BYTES
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.frameworks import fsdp_training
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.played_ranks import assert_equal, check_restore, playing, save_played
from tests.support.processes.rank_fixtures import Trained
from tests.support.processes.save_without_ray import agreed, restore_state, save, save_state

MIB = 1024 * 1024
# aiohttp says so of every body over 1 MiB that the S3 store sends
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


def small_weights() -> dict[str, torch.Tensor]:
    """Rows that no world size divides, fewer rows than ranks, no rows at all, and no dimension at all."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"even": (8, 3), "uneven": (10, 3), "few": (2, 5), "one": (1,), "cube": (5, 2, 3), "long": (1001,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    weights["scalar"] = torch.tensor(4.5)
    weights["empty"] = torch.empty(0, 3)
    weights["brain"] = torch.randn(9, 2, generator=generator).bfloat16()
    weights["wide_float"] = torch.randn(7, generator=generator, dtype=torch.float64)
    return weights


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(4, 2), (3, 5), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((4, 1), (2, 4), (4, 4), (1, 3)))],
)
def test_model_and_optimizer_are_equal_at_another_world_size(store: Store, saving: int, loading: int):
    weights = small_weights()

    checkpoint = save_played(store, weights, world_size=saving)

    check_restore(checkpoint, weights, world_size=loading)


@pytest.mark.parametrize("loading", [1, 3])
def test_tensors_sharded_on_another_dimension_reshard(store: Store, loading: int):
    weights = {"wide": torch.randn(4, 10), "cube": torch.randn(3, 7, 2), "flat": torch.randn(6, 1)}
    columns = {"wide": [Shard(1)], "cube": [Shard(1)], "flat": [Shard(1)]}

    checkpoint = save_played(store, weights, world_size=4, layout=columns)

    check_restore(checkpoint, weights, world_size=loading, layout=columns)
    check_restore(checkpoint, weights, world_size=loading)
    check_restore(checkpoint, weights, world_size=loading, layout={"cube": [Shard(2)]})


def test_a_mesh_of_two_dimensions_reshards(store: Store):
    weights = {"both": torch.randn(5, 7), "rows": torch.randn(9, 2), "columns": torch.randn(2, 9)}
    crossed = {
        "both": [Shard(0), Shard(1)],
        "rows": [Replicate(), Shard(0)],
        "columns": [Shard(1), Replicate()],
    }

    checkpoint = save_played(store, weights, world_size=6, layout=crossed, mesh=(3, 2))

    check_restore(checkpoint, weights, world_size=1)
    check_restore(checkpoint, weights, world_size=3)
    check_restore(checkpoint, weights, world_size=4, layout=crossed, mesh=(2, 2))


def test_a_box_that_several_ranks_hold_is_written_once(store: Store):
    weights = {"weight": torch.randn(1024, 256)}
    replicated = {"weight": [Replicate(), Shard(0)]}

    checkpoint = save_played(store, weights, world_size=4, layout=replicated, mesh=(2, 2))

    assert payload_bytes(checkpoint) < 1.01 * 3 * MIB
    check_restore(checkpoint, weights, world_size=4, layout=replicated, mesh=(2, 2))


def test_a_rank_without_rows_of_a_tensor_writes_no_record_of_it(store: Store):
    weights = {"few": torch.randn(2, 5), "many": torch.randn(8, 5), "empty": torch.empty(0, 5)}

    checkpoint = save_played(store, weights, world_size=4, is_bare=True)

    index = index_of(checkpoint)
    written = [(index.tensors[chunk.tensor].name, chunk.rank) for chunk in index.chunks]
    assert [rank for name, rank in written if name == "model.few"] == [0, 1]
    assert [rank for name, rank in written if name == "model.many"] == [0, 1, 2, 3]
    assert "model.empty" in dict(written)


def test_plain_parameters_are_written_once_and_spread_over_the_ranks(store: Store):
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512), nn.BatchNorm1d(512))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ranks = agreed([TrainState({"model": model}, rank=rank, world_size=3) for rank in range(3)])
    staged = [rank.stage(Progress()) for rank in ranks]

    checkpoint = save(store, staged)
    for tensor in model.state_dict().values():
        tensor.zero_()
    TrainState({"model": model}, rank=2, world_size=5).apply(checkpoint)

    assert payload_bytes(checkpoint) == sum(tensor.nbytes for tensor in expected.values())
    sizes = [shard.size_bytes for shard in checkpoint.read_manifest().components[0].shards]
    assert sum(size > 2 * MIB for size in sizes) == 2
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("hidden", [8, 7, 3])
@pytest.mark.parametrize("kind", ["hybrid", "tensor parallel"])
def test_fsdp2_over_a_mesh_of_two_dimensions_restores_into_a_plain_module_and_back(tmp_path, kind: str, hidden: int):
    def build(*, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(OrderedDict(up=nn.Linear(6, hidden), down=nn.Linear(hidden, 5)))

    def build_sharded(*, seed: int) -> nn.Module:
        model = build(seed=seed)
        names = ("data" + uuid4().hex, "other" + uuid4().hex)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if kind == "hybrid":
            return fully_shard(model, mesh=mesh)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh[names[1]], plan, src_data_rank=None)
        return fully_shard(model, mesh=mesh[names[0]])

    store, expected, plain = open_store(f"file://{tmp_path}/run"), build(seed=1), build(seed=2)
    staged = []
    for rank in range(4):
        with playing(rank, 4):
            state = {"model": build_sharded(seed=1)}
            staged.append(TrainState(state, rank=rank, world_size=4).stage(Progress(step=1)))

    checkpoint = save(store, staged)
    restore_state(checkpoint, {"model": plain})

    for name, tensor in expected.state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name
    for rank in range(4):
        with playing(rank, 4):
            wanted, found = build_sharded(seed=1), build_sharded(seed=2)
            TrainState({"model": found}, rank=rank, world_size=4).apply(checkpoint)
            for name, tensor in wanted.state_dict().items():
                assert_equal(found.state_dict()[name], tensor, f"{name} on rank {rank}")


@pytest.mark.parametrize("kind", ["file", "s3"])
@pytest.mark.parametrize(("saving", "loading"), [(4, 2), (2, 4), (4, 4)])
def test_fsdp2_reshards_between_real_ranks(trained: Trained, ranks: Ranks, saving: int, loading: int, kind: str):
    checkpoint = trained[saving].checkpoints[kind]

    answers = ranks.run(fsdp_training.load_by_raycheck, loading, checkpoint.store.uri, checkpoint.entry)

    for tensors, scheduler, _ in answers:
        fsdp_training.assert_same(tensors, trained[saving].tensors)
        assert scheduler["last_epoch"] == 3


@pytest.mark.parametrize("saving", [4, 2])
def test_fsdp2_restores_into_a_plain_module_without_a_process_group(trained: Trained, saving: int):
    model = fsdp_training.Net(seed=9)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    restore_state(trained[saving].checkpoints["file"], {"model": model, "optimizer": optimizer, "scheduler": scheduler})

    fsdp_training.assert_same(fsdp_training.full({"model": model, "optimizer": optimizer}), trained[saving].tensors)
    assert scheduler.get_last_lr() == [0.001]


def test_fsdp2_goes_on_as_if_it_had_not_been_interrupted(trained: Trained, ranks: Ranks):
    checkpoint = trained[4].checkpoints["file"]

    answers = ranks.run(fsdp_training.go_on_by_raycheck, 4, checkpoint.store.uri, checkpoint.entry)

    for uninterrupted, restored in answers:
        fsdp_training.assert_same(restored, uninterrupted)


def test_a_tensor_of_many_sub_blocks_and_requests_reshards(store: Store):
    weights = {"weight": torch.randn(2503, 4001, generator=torch.Generator().manual_seed(3))}

    checkpoint = save_played(store, weights, world_size=2, is_bare=True)

    sizes = [chunk.payload_size for chunk in index_of(checkpoint).chunks if chunk.payload_size > 8]
    assert len(sizes) == 2
    assert min(sizes) > max(REQUEST_BYTES, 4 * SUB_BLOCK)
    check_restore(checkpoint, weights, world_size=1, is_bare=True)
    check_restore(checkpoint, weights, world_size=3, is_bare=True)
    check_restore(checkpoint, weights, world_size=2, is_bare=True, layout={"weight": [Shard(1)]})


def test_rows_longer_than_a_sub_block_are_cut_from_their_middle_and_end(store: Store):
    weights = {"weight": torch.arange(2 * 3_000_001, dtype=torch.int32).view(2, 3_000_001)}
    columns = {"weight": [Shard(1)]}

    checkpoint = save_played(store, weights, world_size=1, is_bare=True)

    check_restore(checkpoint, weights, world_size=3, is_bare=True, layout=columns)


def test_tensors_that_do_not_lie_in_row_order_are_saved_and_restored_by_value(store: Store):
    def strange(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Module()
        module.register_parameter("turned", nn.Parameter(torch.randn(300, 200).t()))
        module.register_parameter("image", nn.Parameter(torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)))
        module.register_buffer("every_third", torch.randn(30)[::3])
        module.register_buffer("window", torch.randn(10, 10)[2:7, 3:8])
        module.register_buffer("conjugate", torch.randn(6, dtype=torch.complex64).conj())
        return module

    one, two = strange(1), strange(2)

    restore_state(save_state(store, {"model": one}), {"model": two})

    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name
        assert two.state_dict()[name].stride() == tensor.stride()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_same_world_size_fetches_hardly_more_than_its_own_bytes(store: Store, world_size: int):
    weights = {f"layer{i}": torch.randn(401, 641) for i in range(4)}

    checkpoint = save_played(store, weights, world_size=world_size)
    restores = check_restore(checkpoint, weights, world_size=world_size)

    assert sum(done.bytes_fetched for done in restores) <= 1.01 * payload_bytes(checkpoint)


def test_planning_a_read_costs_the_same_per_tensor_however_many_there_are(tmp_path):
    def calls(count: int) -> int:
        """Count calls of functions by the profiler, which does not depend on the machine."""
        module = nn.Module()
        for i in range(count):
            module.register_buffer(f"b{i}", torch.tensor(float(i)))
        checkpoint = save_state(open_store(f"file://{tmp_path}/{count}"), {"model": module})
        profile = cProfile.Profile()
        profile.runcall(restore_state, checkpoint, {"model": module})
        return pstats.Stats(profile).total_calls

    few, many = calls(400), calls(1600)

    assert many / few < 5


def test_a_flipped_bit_is_named_by_rank_component_tensor_and_sub_block(store: Store):
    weights = {"first": torch.randn(100, 10), "second": torch.randn(6 * SUB_BLOCK // 40, 10)}
    checkpoint = save_played(store, weights, world_size=2, is_bare=True)
    chunk = chunk_of(checkpoint, "model.second", rank=1)

    flip(checkpoint, chunk, at=2 * SUB_BLOCK + 12345)

    named = rf"rank 1, component {chunk.component}: tensor model\.second, sub-block 2 "
    with pytest.raises(CorruptError, match=named):
        check_restore(checkpoint, weights, world_size=1, is_bare=True)
    with pytest.raises(CorruptError, match=named):
        check_restore(checkpoint, weights, world_size=2, is_bare=True)
    with pytest.raises(CorruptError, match=named):
        check_restore(checkpoint, weights, world_size=3, is_bare=True, layout={"second": [Shard(1)]})


@pytest.mark.parametrize("name", ["model.scalar", "optimizer.state.brain.exp_avg", "model.seen", "model.long"])
def test_every_tensor_is_checked_to_its_first_and_last_byte(store: Store, name: str):
    weights = small_weights()
    checkpoint = save_played(store, weights, world_size=1)
    chunk = chunk_of(checkpoint, name, rank=0)

    for at in (0, chunk.payload_size - 1):
        flip(checkpoint, chunk, at=at)

        with pytest.raises(CorruptError, match=rf"rank 0, component {chunk.component}: tensor {name}, sub-block 0 "):
            check_restore(checkpoint, weights, world_size=1)

        flip(checkpoint, chunk, at=at)
    check_restore(checkpoint, weights, world_size=1)


def damage_truncated(store: Store, one: str, two: str) -> None:
    del two
    data = store.get(one).data
    store.put(one, data[: len(data) // 2])


def damage_emptied(store: Store, one: str, two: str) -> None:
    del two
    store.put(one, b"")


def damage_swapped(store: Store, one: str, two: str) -> None:
    first, second = store.get(one).data, store.get(two).data
    store.put(one, second)
    store.put(two, first)


@pytest.mark.parametrize("damage", [damage_truncated, damage_emptied, damage_swapped])
def test_a_damaged_shard_is_corrupt_and_named(store: Store, damage: Callable[[Store, str, str], None]):
    weights = small_weights()
    checkpoint = save_played(store, weights, world_size=2)
    one, two = (keys.shard_key(checkpoint.entry.key, TRAIN, rank) for rank in range(2))

    damage(store, one, two)

    with pytest.raises(CorruptError, match=r"__0_0\.distcp|rank 0"):
        check_restore(checkpoint, weights, world_size=1)
    assert next(finding.key for finding in checkpoint.verify() if finding.problem) == one


def test_a_missing_shard_is_an_error_that_names_it(store: Store):
    weights = small_weights()
    checkpoint = save_played(store, weights, world_size=2)

    store.delete(keys.shard_key(checkpoint.entry.key, TRAIN, 1))

    with pytest.raises((CorruptError, NotFoundError), match=r"__1_0\.distcp"):
        check_restore(checkpoint, weights, world_size=1)


def index_of(checkpoint: Checkpoint) -> Index:
    return checkpoint.read_index(checkpoint.read_manifest())


def payload_bytes(checkpoint: Checkpoint) -> int:
    return sum(chunk.payload_size for chunk in index_of(checkpoint).chunks)


def chunk_of(checkpoint: Checkpoint, name: str, *, rank: int) -> Chunk:
    index = index_of(checkpoint)
    return next(chunk for chunk in index.chunks if index.tensors[chunk.tensor].name == name and chunk.rank == rank)


def flip(checkpoint: Checkpoint, chunk: Chunk, *, at: int) -> None:
    """Flip one bit of the chunk's payload in the bucket."""
    key = keys.shard_key(checkpoint.entry.key, chunk.component, chunk.rank)
    data = bytearray(checkpoint.store.get(key).data)
    data[chunk.payload_offset + at] ^= 0x10
    checkpoint.store.put(key, bytes(data))
