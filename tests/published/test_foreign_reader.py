"""A reader that was written from FORMAT.md alone has what raycheck publishes, and refuses what is damaged."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raycheck.bucket.store import open_store
from raycheck.published.file_patch import patch_files
from raycheck.published.records import RECORD_FILE
from tests.published import foreign_reader
from tests.published.weights import Trained

BLOCK_BYTES = 4 * 1024 * 1024


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, dict[str, dict[str, bytes]]]:
    """A series with whole versions and patches, and the files of each version, by its directory."""
    trained = Trained(open_store(f"file://{tmp_path}/run"), tmp_path / "cache")
    files = {}
    for share in (0.02, 0.02, 0.9, 0.01, 0.3, 0.0, 0.02):
        done = trained.publish(trained.step(share=share), whole_every=4, keep_last=8)
        here = (trained.cache / "latest").resolve()
        files[done.version.directory] = {
            path.name: path.read_bytes() for path in here.iterdir() if path.name != RECORD_FILE
        }
    return tmp_path / "run/published", files


def test_it_has_every_version(published: tuple[Path, dict[str, dict[str, bytes]]]):
    place, files = published

    newest = list(files.values())[-1]
    assert foreign_reader.read_version(str(place)) == newest
    for directory, expected in files.items():
        assert foreign_reader.read_version(str(place), directory) == expected
        assert foreign_reader.read_from(expected, directory, str(place)) == newest


def test_it_notices_each_damaged_object(published: tuple[Path, dict[str, dict[str, bytes]]]):
    place, files = published
    last_whole = list(files)[4]
    for path in [place / "versions.json", *(place / list(files)[-1]).iterdir(), place / last_whole / "version.json"]:
        good = path.read_bytes()
        path.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
        with pytest.raises(ValueError, match=r"."):
            foreign_reader.read_version(str(place))
        path.write_bytes(good)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_it_applies_every_kind_of_block(tmp_path: Path, width: int):
    """Unchanged blocks, few changes, many, and values that resemble nothing, in tensors of several blocks."""
    generator = np.random.default_rng(width)
    before, after = {}, {}
    for name, share in {"few": 0.001, "many": 1.0, "none": 0.0}.items():
        count = (2 * BLOCK_BYTES + 4096) // width
        base = generator.integers(0, 256, count * width, dtype=np.uint8).view(f"<u{width}")
        new = base.copy()
        half = new[BLOCK_BYTES // width :]
        half[generator.random(len(half)) < share] ^= 1
        before[name], after[name] = base, new
    before["others"], after["others"] = (
        generator.integers(0, 256, BLOCK_BYTES + 8, dtype=np.uint8).view(f"<u{width}") for _ in range(2)
    )
    save_file(before, tmp_path / "before.safetensors")
    save_file(after, tmp_path / "after.safetensors")
    made = bytearray((tmp_path / "before.safetensors").read_bytes())

    for patch in patch_files(tmp_path / "before.safetensors", tmp_path / "after.safetensors"):
        foreign_reader._apply(patch, made, "a patch")

    assert made == (tmp_path / "after.safetensors").read_bytes()
