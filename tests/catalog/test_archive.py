"""Archives, with GNU tar, Python's tarfile, zstd and stock torch as judges: what is packed comes back to the last bit."""

import io
import os
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from uuid import uuid4

import pytest
import torch
import torch.distributed.checkpoint as dcp

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.protocol.claim import Identity, claim
from raycheck.bucket.protocol.resume import AUTO
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.catalog.archive import files, layout
from raycheck.catalog.archive.files import ArchiveStream, Place, compressed, decompressed, opened
from raycheck.catalog.archive.tar import BLOCK, END, TarReader
from raycheck.catalog.archive.unpack import unpack_into
from raycheck.errors import ConfigError, CorruptError, NotFoundError, StoreError
from tests.catalog.conftest import Sample, a_model, make_sample
from tests.support.histories.invariants import assert_invariants
from tests.support.servers.fault_injection import Mode, Wire, World

no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def assert_holds(uri: str, sample: Sample, *, step: int = 9) -> None:
    body = assert_invariants(open_store(uri))
    model, note = a_model(seed=5), {"words": [], "pair": ()}
    assert body is not None
    assert raycheck.open_run(uri).restore(into={"model": model, "note": note}) == step
    for mine, theirs in zip(model.parameters(), sample.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert note == {"words": ["a", "b"], "pair": (1, 2)}


# --- what others read ---


@no_group
def test_gnu_tar_makes_stock_dcp_directories_of_an_archive(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(sample.pack())

    done = subprocess.run(
        ["tar", "-xvf", "a.tar"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )

    folder = tmp_path / "step-000000009-a1-s2"
    assert done.stderr == ""
    assert done.stdout.splitlines()[:3] == [
        f"{folder.name}/{name}" for name in ("raycheck-archive.json", "manifest.json", "index")
    ]
    tensors = {f"model.{name}": torch.zeros_like(value) for name, value in sample.model.state_dict().items()}
    for component in ("train", "model.frozen"):
        reader = dcp.FileSystemReader(folder / component)
        known = reader.read_metadata().state_dict_metadata
        dcp.load({name: value for name, value in tensors.items() if name in known}, storage_reader=reader)
    for name, value in sample.model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], value)


def test_tarfile_finds_every_object_of_the_checkpoint_with_its_bytes(sample: Sample) -> None:
    manifest = raycheck.open_run(sample.uri).head._stored.read_manifest()
    stored = {key.rpartition("/")[2]: sample.store.get(key).data for key, _ in manifest.objects() if "train" in key}

    with tarfile.open(fileobj=io.BytesIO(sample.pack()), mode="r:") as archive:
        found = {item.name.partition("/")[2]: archive.extractfile(item).read() for item in archive}

    assert list(found) == [
        "raycheck-archive.json",
        "manifest.json",
        "index",
        "model.frozen/.metadata",
        "model.frozen/__0_0.distcp",
        "train/.metadata",
        "train/__0_0.distcp",
    ]
    assert {name: found[f"train/{name}"] for name in stored} == stored
    assert found["manifest.json"] == sample.store.get(object_keys.manifest_key(manifest.key)).data


@pytest.mark.parametrize("size", [0, 1, 512, (8 << 30) - 1, 8 << 30, 1 << 50])
@pytest.mark.parametrize("name", ["train/__0_0.distcp", f"{'c' * 100}/__12345_0.distcp"])
def test_tarfile_reads_the_header_of_any_size_and_name_and_so_do_we(size: int, name: str) -> None:
    whole = raycheck.catalog.TarStream(sizes={f"step-000000009-a1-s2/{name}": size}, modified_at=1_700_000_000)
    header, *padding, end = map(bytes, whole.chunks([[]]))

    with tarfile.open(fileobj=io.BytesIO(header + end), mode="r:") as archive:
        info = archive.next()
    stream = ArchiveStream(iter([header]), what="it")
    found = TarReader(stream).next_file("it")

    assert (info.name, info.size, info.mtime) == (f"step-000000009-a1-s2/{name}", size, 1_700_000_000)
    assert found == (f"step-000000009-a1-s2/{name}", size)
    assert not stream.some()
    assert whole.size_bytes == len(header) + size + sum(map(len, padding)) + len(end)
    assert (size + sum(map(len, padding))) % BLOCK == 0


def test_gnu_tar_reads_a_stream_of_any_files_whose_length_was_known(tmp_path: Path) -> None:
    files = {"empty": b"", "a" * 120: b"x" * 513, "\u00fc/two": b"y" * 1024}
    whole = raycheck.catalog.TarStream(sizes={name: len(data) for name, data in files.items()})

    data = b"".join(whole.chunks([item[:100], item[100:]] for item in files.values()))

    assert len(data) == whole.size_bytes
    subprocess.run(["tar", "-xf", "-"], cwd=tmp_path, input=data, check=True, timeout=60)
    assert {str(at.relative_to(tmp_path)): at.read_bytes() for at in tmp_path.rglob("*") if at.is_file()} == files


def test_an_archive_that_gnu_tar_has_packed_again_is_accepted(sample: Sample, tmp_path: Path) -> None:
    """Owners, times and the zeros at the end may be others."""
    with tarfile.open(fileobj=io.BytesIO(sample.pack())) as archive:
        archive.extractall(tmp_path, filter="data")
        names = archive.getnames()
    packed = subprocess.run(["tar", "-c", *names], cwd=tmp_path, capture_output=True, check=True, timeout=60).stdout

    raycheck.catalog.unpack(io.BytesIO(packed), f"{tmp_path}/new")

    assert_holds(f"{tmp_path}/new", sample)


def test_zstd_reads_a_compressed_archive_and_we_read_what_zstd_has_compressed(sample: Sample, tmp_path: Path) -> None:
    plain = sample.pack()
    (tmp_path / "a.tar").write_bytes(plain)
    raycheck.catalog.pack(sample.uri, str(tmp_path / "b.tar.zst"), zstd=True)

    subprocess.run(["zstd", "-q", "a.tar"], cwd=tmp_path, check=True, timeout=60)
    theirs = subprocess.run(["zstd", "-dc", "b.tar.zst"], cwd=tmp_path, capture_output=True, check=True, timeout=60)

    assert theirs.stdout == plain
    for name in ("a.tar.zst", "b.tar.zst"):
        raycheck.catalog.unpack(str(tmp_path / name), f"{tmp_path}/from-{name}")
        assert_holds(f"{tmp_path}/from-{name}", sample)


# --- there and back ---


def test_a_packed_checkpoint_begins_a_run_that_holds_all_of_it(place: str) -> None:
    sample = make_sample(join_uri(place, "run"))
    file, new = join_uri(place, "archives/mine.tar"), join_uri(place, "new")

    packed = raycheck.catalog.pack(sample.uri, file)
    done = raycheck.catalog.unpack(file, new)

    assert packed == done
    assert_holds(new, sample)
    body = read_latest(open_store(new))
    assert [(entry.key, entry.refs, dict(entry.metrics)) for entry in body.live] == [
        ("step-000000009-a0-s1", (), {"loss": 1.0 / 9})
    ]
    manifest = raycheck.open_run(new).head._stored.read_manifest()
    assert manifest.restored_from == f"{sample.uri.partition('?')[0]} step-000000009-a1-s2"


def test_the_next_training_goes_on_from_an_unpacked_checkpoint(sample: Sample) -> None:
    new = open_store(f"memory://{uuid4().hex}")
    raycheck.catalog.unpack(io.BytesIO(sample.pack(at=4)), new.uri)

    claimed = claim(
        Register(new), Identity(owner="me", coordinator="one"), group="g", world_size=1, resume=AUTO, run_id="other"
    )

    attempt, entry = claimed.attempt, claimed.entry
    assert (attempt.number, entry.step, entry.key) == (1, 4, "step-000000004-a0-s1")
    assert_invariants(new)


@pytest.mark.parametrize("step", [9, "9", "step-000000009-a1-s2", "HEAD", None])
def test_a_checkpoint_is_named_by_step_name_or_head(sample: Sample, step: int | str | None) -> None:
    assert raycheck.catalog.pack(sample.uri, io.BytesIO(), at=step).checkpoint == "step-000000009-a1-s2"


def test_an_archive_is_the_same_bytes_each_time(sample: Sample) -> None:
    assert sample.pack() == sample.pack()


def test_what_is_told_of_the_progress_ends_at_the_whole(sample: Sample) -> None:
    packed: list[tuple[int, int]] = []
    unpacked: list[tuple[int, int]] = []

    data = sample.pack(progress=lambda *at: packed.append(at))
    raycheck.catalog.unpack(
        io.BytesIO(data), f"memory://{uuid4().hex}", dry_run=True, progress=lambda *at: unpacked.append(at)
    )

    assert packed[-1] == (len(data), len(data))
    assert unpacked[-1][0] == unpacked[-1][1] < len(data)


# --- places ---


def test_a_place_with_a_run_is_refused_and_stays_as_it_is(sample: Sample) -> None:
    before = read_latest(sample.store)

    with pytest.raises(ConfigError, match="there is already a run"):
        raycheck.catalog.unpack(io.BytesIO(sample.pack()), sample.uri)

    assert read_latest(sample.store) == before
    assert_invariants(sample.store, before)


def test_a_dry_run_verifies_and_writes_nothing(sample: Sample) -> None:
    new = open_store(f"memory://{uuid4().hex}")
    data = bytearray(sample.pack())

    done = raycheck.catalog.unpack(io.BytesIO(data), new.uri, dry_run=True)
    data[-3000] ^= 1

    assert done.checkpoint == "step-000000009-a1-s2"
    with pytest.raises(CorruptError, match="checksum"):
        raycheck.catalog.unpack(io.BytesIO(data), new.uri, dry_run=True)
    assert list(new.list_objects("")) == []


def test_a_file_that_exists_is_not_written_over(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"mine")

    for zstd in (False, True):
        with pytest.raises(ConfigError, match=r"a\.tar exists"):
            raycheck.catalog.pack(sample.uri, str(tmp_path / "a.tar"), zstd=zstd)

    assert (tmp_path / "a.tar").read_bytes() == b"mine"


def test_a_compressed_archive_whose_size_nobody_knows_does_not_go_to_a_bucket(sample: Sample) -> None:
    with pytest.raises(ConfigError, match="is not known in advance"):
        raycheck.catalog.pack(sample.uri, f"memory://{uuid4().hex}/a.tar.zst", zstd=True)


@pytest.mark.parametrize("file", ["s3://bucket", "s3://bucket/", "s3://bucket/folder/", "memory://name"])
def test_a_uri_that_names_no_file_is_refused(sample: Sample, file: str) -> None:
    with pytest.raises(ConfigError, match="name a file"):
        raycheck.catalog.pack(sample.uri, file)


def test_settings_in_a_uri_and_escapes_in_a_name_are_kept(tmp_path: Path) -> None:
    place = Place.of("s3://b/x%20y.tar?region=eu-west-1", None, beside="s3://b/run")
    local = Place.of(str(tmp_path / "100% ?.tar"), None, beside="s3://b/run")

    assert (place.store.uri, place.key) == ("s3://b?region=eu-west-1", "x y.tar")
    assert local.key == "100% ?.tar"


# --- damage and faults ---


def test_a_damaged_source_makes_no_file(sample: Sample, tmp_path: Path) -> None:
    key = object_keys.shard_key("step-000000009-a1-s2", "train", 0)
    data = bytearray(sample.store.get(key).data)
    data[100] ^= 1
    sample.store.put(key, data)

    with pytest.raises(CorruptError, match="checksum"):
        raycheck.catalog.pack(sample.uri, str(tmp_path / "a.tar"))

    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_whose_object_is_gone_is_called_damaged_and_an_evicted_one_is_not(sample: Sample) -> None:
    sample.store.delete(object_keys.shard_key("step-000000009-a1-s2", "train", 0))

    with pytest.raises(raycheck.errors.DamagedError, match="missing although latest lists"):
        sample.pack()
    with pytest.raises(NotFoundError, match="no checkpoint of step 5"):
        sample.pack(at=5)


def test_bytes_that_changed_on_their_way_from_a_bucket_are_asked_for_again(sample: Sample) -> None:
    """The object is whole: only the first reading of one range differs."""
    place = Place(open_store(f"memory://{uuid4().hex}"), "a.tar")
    place.store.put("a.tar", sample.pack())
    read, flips = place.store.get_range, [1]

    def flipping(key: str, start: int, stop: int) -> bytes:
        data = bytearray(read(key, start, stop))
        if flips:
            data[-3000] ^= flips.pop()
        return bytes(data)

    place.store.get_range = flipping
    new = open_store(f"memory://{uuid4().hex}")

    unpack_into(Register(new), place, run_id="new")

    assert flips == []
    assert_holds(new.uri, sample)


def test_two_unpackings_at_one_place_never_share_a_name(sample: Sample) -> None:
    """Both have listed the place before either wrote there."""
    new = World()
    archives = [sample.pack(at=4), sample.pack(at=9)]
    outcomes: list[object] = []
    have_listed = [Event(), Event()]

    def race(number: int) -> None:
        wire = new.open()
        names = wire.list_names

        def slow_names(prefix: str) -> list[str]:
            found = names(prefix)
            have_listed[number].set()
            assert have_listed[1 - number].wait(60)
            return found

        wire.list_names = slow_names
        try:
            outcomes.append(unpack_into(Register(wire), io.BytesIO(archives[number]), run_id=f"run-{number}").step)
        except ConfigError as error:
            outcomes.append(str(error))
        finally:
            have_listed[number].set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(race, range(2)))

    steps = [item for item in outcomes if isinstance(item, int)]
    assert len(steps) == 1
    assert assert_invariants(new.inner).live[0].step == steps[0]
    assert len(outcomes) == 2


def test_the_same_step_unpacked_twice_at_once_takes_two_names(sample: Sample) -> None:
    world = World()
    first, second = world.open(), world.open()
    data = sample.pack()
    begun = []

    class Pausing(io.BytesIO):
        def read(self, size: int = -1) -> bytes:
            if not begun and self.tell() > BLOCK * 12:
                begun.append(unpack_into(Register(second), io.BytesIO(data), run_id="second"))
            return super().read(min(size, BLOCK))

    with pytest.raises(ConfigError, match="another run was created there in the meantime"):
        unpack_into(Register(first), Pausing(data), run_id="first")

    assert begun
    names = {item.key.split("/")[1] for item in world.inner.list_objects("checkpoints/")}
    assert names == {"step-000000009-a0-s1", "step-000000009-a0-s2"}
    assert assert_invariants(world.inner).run_id == "second"


def test_a_store_that_fails_ends_an_unpacking_without_a_run(sample: Sample) -> None:
    world = World()
    wire = Wire(world, lambda call: Mode.FAIL_BEFORE if call.key.endswith(".distcp") else Mode.APPLY)

    with pytest.raises(StoreError):
        unpack_into(Register(wire), io.BytesIO(sample.pack()), run_id="new")

    assert world.bodies == []
    assert_invariants(world.inner)


# --- compression ---


def bomb(size: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(bytes(size))


def test_a_compressed_bomb_is_refused_while_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOM_BYTES", 1 << 20)
    made = [0]

    with pytest.raises(CorruptError, match="unpack to more"):
        made.extend(len(chunk) for chunk in decompressed([bomb(1 << 30)], what="it"))

    assert sum(made) < 80 << 20


def test_what_would_be_taken_for_a_bomb_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROOM_BYTES", 1 << 20)

    with pytest.raises(ConfigError, match="leave zstd=True out"):
        list(compressed(bytes(1 << 20) for _ in range(64)))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: data + data,
        lambda data: data[:8] + bytes([data[8] ^ 255]) + data[9:],
    ],
    ids=["last byte", "half", "a byte more", "twice", "changed"],
)
def test_a_compressed_archive_that_was_cut_or_added_to_is_refused(sample: Sample, change) -> None:
    new = open_store(f"memory://{uuid4().hex}")

    with pytest.raises(CorruptError):
        raycheck.catalog.unpack(io.BytesIO(change(sample.pack(zstd=True))), new.uri)

    assert assert_invariants(new) is None


def test_the_stream_is_not_read_before_its_place_was_looked_at(sample: Sample) -> None:
    class Untouched(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise AssertionError("it was read")

    with pytest.raises(ConfigError, match="there is already a run"):
        raycheck.catalog.unpack(Untouched(), sample.uri)


def test_the_record_has_the_layout_that_is_documented(sample: Sample) -> None:
    data = sample.pack()
    size = int(data[124:135], 8)
    record = layout.load_record(data[BLOCK : BLOCK + size], what="it")

    assert data[:100].rstrip(b"\0") == b"step-000000009-a1-s2/raycheck-archive.json"
    assert (record.uri, record.checkpoint) == (sample.uri, "step-000000009-a1-s2")
    assert record.run_id == read_latest(sample.store).run_id
    at = BLOCK + size + -size % BLOCK
    for member in record.members:
        body = data[at + BLOCK : at + BLOCK + member.size_bytes]
        assert crc32(body) == member.crc32
        at += BLOCK + member.size_bytes + -member.size_bytes % BLOCK
    assert data[at:] == END


def test_an_archive_opened_from_a_pipe_may_come_in_pieces(sample: Sample) -> None:
    reading, writing = os.pipe()
    data = sample.pack()
    new = f"memory://{uuid4().hex}"

    def feed() -> None:
        with os.fdopen(writing, "wb", buffering=0) as sink:
            for at in range(0, len(data), 777):
                sink.write(data[at : at + 777])

    with ThreadPoolExecutor(1) as pool, os.fdopen(reading, "rb", buffering=0) as source:
        fed = pool.submit(feed)
        raycheck.catalog.unpack(source, new)
        fed.result(timeout=60)

    assert_holds(new, sample)


def test_an_empty_stream_is_no_archive() -> None:
    with opened(io.BytesIO(b"")) as stream, pytest.raises(CorruptError, match="cut short"):
        stream.read(1)
