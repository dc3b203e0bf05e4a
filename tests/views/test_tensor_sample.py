"""Statistics of tensors, compared with torch's own over the same values."""

from pathlib import Path

import pytest
import torch

from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, DamagedError, NotFoundError
from raycheck.run import CommittedCheckpoint, open_run
from raycheck.views.element_types import decode
from tests.support.processes.save_without_ray import save_state

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64]


def saved(folder: Path, tensor: torch.Tensor) -> CommittedCheckpoint:
    save_state(open_store(f"file://{folder}"), {"state": {"w": tensor}})
    return open_run(f"file://{folder}").at(1)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS], ids=str)
def test_a_small_tensor_is_read_whole_and_described_as_torch_does(tmp_path: Path, dtype: torch.dtype) -> None:
    values = (torch.randn(12, 7, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)

    found = saved(tmp_path, values).sample("state.w")

    plain = values.abs().double() if dtype.is_complex else values.double()
    assert (found.count, found.sampled, found.is_verified) == (84, 84, True)
    assert found.bytes_read == values.nbytes
    got = [found.minimum, found.maximum, found.mean, found.std]
    want = [plain.min(), plain.max(), plain.mean(), plain.std(correction=0)]
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), torch.stack(want))
    assert found.zeros == int((plain == 0).sum())
    assert sum(found.counts) == 84
    torch.testing.assert_close(torch.tensor(found.heat, dtype=torch.float64), plain.abs())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_bits_means_what_it_means_to_torch(dtype: torch.dtype) -> None:
    bits = torch.arange(2 ** (8 * dtype.itemsize)).to(torch.uint8 if dtype.itemsize == 1 else torch.uint16)

    found = decode(bits.numpy().tobytes(), str(dtype).removeprefix("torch."))

    torch.testing.assert_close(torch.from_numpy(found), bits.view(dtype).double(), equal_nan=True, rtol=0, atol=0)


def test_what_is_not_finite_is_counted_and_left_out_of_the_rest(tmp_path: Path) -> None:
    found = saved(tmp_path, torch.tensor([0.0, 1.0, float("nan"), float("inf"), -float("inf")])).sample("state.w")

    assert (found.nans, found.infinities, found.zeros) == (1, 2, 1)
    assert (found.minimum, found.maximum, sum(found.counts)) == (0.0, 1.0, 2)


@pytest.mark.parametrize("values", [torch.zeros(0, 3), torch.full((2,), float("nan"))], ids=["empty", "nan"])
def test_without_a_finite_value_there_is_no_statistic(tmp_path: Path, values: torch.Tensor) -> None:
    found = saved(tmp_path, values).sample("state.w")

    assert (found.minimum, found.mean, found.std, found.counts, found.edges) == (None, None, None, (), ())


def test_of_a_large_tensor_a_sample_within_the_budget_is_read(tmp_path: Path) -> None:
    values = torch.arange(4_000_000, dtype=torch.float32).reshape(2000, 2000)

    found = saved(tmp_path, values).sample("state.w", max_bytes=1 << 20)

    assert found.bytes_read <= 1 << 20
    assert found.sampled > 200_000
    assert not found.is_verified
    assert found.mean == pytest.approx(float(values.double().mean()), rel=0.1)
    assert len(found.heat) == 24
    read = [[value for value in line if value is not None] for line in found.heat]
    means = [sum(line) / len(line) for line in read if line]
    assert means == sorted(means)  # rows ascend


def test_a_budget_of_one_element_reads_one(tmp_path: Path) -> None:
    assert saved(tmp_path, torch.ones(100)).sample("state.w", max_bytes=4).sampled == 1


def test_damage_in_a_tensor_that_is_read_whole_is_found(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, torch.full((64,), 7.0))
    (shard,) = tmp_path.rglob("*.distcp")
    shard.write_bytes(shard.read_bytes().replace(torch.tensor(7.0).numpy().tobytes(), b"\1\2\3\4"))

    with pytest.raises(DamagedError, match=r"state\.w"):
        checkpoint.sample("state.w")


def test_bad_questions_are_answered_in_words(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, torch.ones(2))

    with pytest.raises(NotFoundError, match="has no tensor 'nothing'"):
        checkpoint.sample("nothing")
    with pytest.raises(ConfigError, match="max_bytes=0"):
        checkpoint.sample("state.w", max_bytes=0)
