"""How far a tensor has moved between two checkpoints, compared with torch's own norms over the same values."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from raycheck.bucket.format.checksum import sub_block_crcs
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.store import Store, open_store
from raycheck.cli import app
from raycheck.errors import ConfigError, DamagedError, NotFoundError
from raycheck.run import CommittedCheckpoint, open_run
from raycheck.views.tensor_change import compare_tensor
from tests.support.processes.save_without_ray import save_state


def two(folder: Path, before: torch.Tensor, after: torch.Tensor) -> tuple[CommittedCheckpoint, CommittedCheckpoint]:
    uri = f"file://{folder}/run"
    for step, values in ((1, before), (2, after)):
        save_state(open_store(uri), {"state": {"w": values}}, save_number=step, step=step)
    run = open_run(uri)
    return run.at(1), run.at(2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_the_norms_are_torchs_own(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    old, new = ((torch.randn(20, 30) * 9).to(dtype) for _ in range(2))
    new[3] = old[3]
    before, after = two(tmp_path, old, new)

    found = before.compare_values(after, "state.w")

    a, b = old.double(), new.double()
    got = [found.norm_before, found.norm_after, found.norm_change, found.max_change]
    want = [a.norm(), b.norm(), (b - a).norm(), (b - a).abs().max()]
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), torch.stack(want))
    assert (found.count, found.sampled, found.bytes_read) == (600, 600, old.nbytes + new.nbytes)
    assert found.changed == int((a != b).sum())


def test_a_larger_tensor_is_compared_at_equal_places(tmp_path: Path) -> None:
    old = torch.arange(100_000, dtype=torch.float32)
    before, after = two(tmp_path, old, old + 2)

    found = before.compare_values(after, "state.w", max_bytes=40_000)

    assert 0 < found.sampled <= 5_000
    assert found.bytes_read == 8 * found.sampled
    assert found.max_change == 2.0
    assert found.norm_change == pytest.approx(2.0 * found.sampled**0.5)
    assert found.changed == found.sampled


def test_what_is_not_finite_is_counted_and_left_out_of_the_norms(tmp_path: Path) -> None:
    before, after = two(
        tmp_path, torch.tensor([3.0, 4.0, float("nan"), 1.0]), torch.tensor([3.0, 5.0, float("nan"), float("inf")])
    )

    found = before.compare_values(after, "state.w")

    assert (found.not_finite, found.changed) == (2, 2)
    assert (found.norm_before, found.norm_change, found.max_change) == (5.0, 1.0, 1.0)


def by_rows(store: Store, checkpoint: CommittedCheckpoint, values: torch.Tensor, parts: int) -> Index:
    """Writes the values in `parts` shards of rows into a checkpoint's directory, and returns their index."""
    chunks, at = [], 0
    for rank, part in enumerate(values.chunk(parts), start=10):
        data = part.contiguous().numpy().tobytes()
        store.put(shard_key(checkpoint.key, "train", rank), data)
        chunks.append(
            Chunk(
                tensor=0,
                component="train",
                rank=rank,
                offsets=(at, 0),
                sizes=tuple(part.shape),
                record_offset=0,
                record_size=len(data),
                payload_offset=0,
                payload_size=len(data),
                crcs=tuple(sub_block_crcs(memoryview(data))),
            )
        )
        at += part.shape[0]
    return index_of([Tensor(name="w", dtype="float32", shape=tuple(values.shape), path=("w",))], chunks)


def test_another_world_size_is_compared_whole_or_refused(tmp_path: Path) -> None:
    old, new = torch.randn(40, 6), torch.randn(40, 6)
    before, after = two(tmp_path, old, new)
    store = open_store(f"file://{tmp_path}/run")
    documents = [
        (before._stored.read_manifest(), by_rows(store, before, old, 4)),
        (after._stored.read_manifest(), by_rows(store, after, new, 3)),
    ]

    found = compare_tensor(store, *documents, "w")

    assert found.norm_change == pytest.approx(float((new - old).double().norm()))
    assert found.sampled == 240
    with pytest.raises(ConfigError, match=f"max_bytes={2 * old.nbytes}"):
        compare_tensor(store, *documents, "w", max_bytes=100)


def test_what_cannot_be_compared_is_refused_by_name(tmp_path: Path) -> None:
    before, after = two(tmp_path / "a", torch.zeros(2), torch.zeros(3))
    other, _ = two(tmp_path / "b", torch.zeros(2), torch.zeros(2))
    odd, odder = two(tmp_path / "c", torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64))

    with pytest.raises(ConfigError, match=r"\[2\] before and \[3\] after"):
        before.compare_values(after, "state.w")
    with pytest.raises(NotFoundError, match=r"state\.v"):
        before.compare_values(after, "state.v")
    with pytest.raises(ConfigError, match="of another run"):
        before.compare_values(other, "state.w")
    with pytest.raises(ConfigError, match="complex"):
        odd.compare_values(odder, "state.w")
    with pytest.raises(ConfigError, match="max_bytes=0"):
        before.compare_values(after, "state.w", max_bytes=0)


def test_a_changed_byte_is_damage(tmp_path: Path) -> None:
    before, after = two(tmp_path, torch.full((50,), 1.5), torch.full((50,), 2.5))
    path = tmp_path / "run" / shard_key(after.key, "train", 0)
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((50,), 2.5).numpy().tobytes())] ^= 1
    path.write_bytes(data)

    with pytest.raises(DamagedError, match=r"state\.w"):
        before.compare_values(after, "state.w")


def test_the_command_says_the_same(tmp_path: Path) -> None:
    before, after = two(tmp_path, torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]))
    asked = ["diff", f"file://{tmp_path}/run", "1", "2", "--values", "state.w"]

    shown, as_json = (CliRunner().invoke(app, [*asked, *more]).output for more in ([], ["--json"]))

    found = before.compare_values(after, "state.w")
    assert json.loads(as_json)["norm_change"] == found.norm_change == 1.0
    assert "norm of the change 1" in shown
    assert "2 of 2 values (all), 16 B read" in shown
    assert "norm of the change" in found._repr_html_()
