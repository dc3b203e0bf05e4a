"""Archives that somebody has cut, changed or made up: each is refused, no run begins, and nothing else is touched."""

import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.manifest import Blob, Manifest, load_manifest
from raycheck.bucket.store import open_store
from raycheck.catalog.archive.layout import MAX_RECORD, ArchiveRecord, Member, load_record
from raycheck.catalog.archive.tar import BLOCK, END
from raycheck.errors import CorruptError
from tests.catalog.conftest import Sample

FOLDER = "step-000000009-a1-s2"


@pytest.fixture(scope="module")
def packed() -> bytes:
    from tests.catalog.conftest import make_sample

    return make_sample(f"memory://{uuid4().hex}/run").pack()


Parts = list[tuple[tarfile.TarInfo, bytes]]


def parts_of(data: bytes) -> Parts:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [(item, archive.extractfile(item).read()) for item in archive]


def joined(parts: Parts) -> bytes:
    """Returns the archive that tarfile makes of these members, whatever they are."""
    sink = io.BytesIO()
    for info, body in parts:
        sink.write(info.tobuf(tarfile.PAX_FORMAT))
        sink.write(body + bytes(-len(body) % BLOCK))
    return sink.getvalue() + END


def assert_refused(data: bytes, match: str = ".", *, size_is_known: bool = True) -> None:
    """As a stream and as a file, whose size is known."""
    sources: list[object] = [io.BytesIO(data)]
    if size_is_known:
        place = open_store(f"memory://{uuid4().hex}")
        place.put("a.tar", data)
        sources.append(f"{place.uri}/a.tar")
    for source in sources:
        new = open_store(f"memory://{uuid4().hex}/new")
        with pytest.raises(CorruptError, match=match):
            raycheck.catalog.unpack(source, new.uri)
        written = {item.key for item in new.list_objects("")}
        assert all(key.startswith("checkpoints/step-000000009-a0-s1/") for key in written)
        assert not {key for key in written if key.endswith("manifest.json")}


# --- cut short, or added to ---


def test_an_archive_cut_at_any_block_or_inside_one_is_refused(packed: bytes) -> None:
    parts, at, edges = parts_of(packed), 0, {0}
    for _, body in parts:
        edges |= {at + BLOCK, at + BLOCK + len(body)}
        at += BLOCK + len(body) + -len(body) % BLOCK
        edges.add(at)
    edges.add(len(packed) - BLOCK)
    assert at + len(END) == len(packed)

    for cut in sorted({edge + by for edge in edges for by in (-1, 0, 1)}):
        if 0 <= cut < len(packed):
            assert_refused(packed[:cut], size_is_known=cut % 2 == 0)


@pytest.mark.parametrize(
    "more", [b"x", bytes(BLOCK) + b"x", bytes((1 << 20) + 1)], ids=["a byte", "after zeros", "too many zeros"]
)
def test_bytes_after_the_end_are_refused(packed: bytes, more: bytes) -> None:
    assert_refused(packed + more, "after the end")


def test_a_second_archive_after_the_first_is_refused(packed: bytes) -> None:
    assert_refused(packed + packed, "after the end")
    assert_refused(packed[: -len(END)] + packed, "between its members")


@pytest.mark.enumeration
def test_no_byte_can_be_changed_unseen(packed: bytes) -> None:
    """But for those of a header that say nothing of the member: owners, times, rights."""
    starts, at = [], 0
    for _, body in parts_of(packed):
        starts.append(at)
        at += BLOCK + len(body) + -len(body) % BLOCK
    free = {at + offset for at in starts for offset in range(100, 124)} | {
        at + offset for at in starts for offset in (*range(136, 148), 155, *range(157, BLOCK))
    }
    accepted = []
    places = [*range(4 * BLOCK), *range(4 * BLOCK, len(packed), 37)]
    for place in places:
        changed = bytearray(packed)
        changed[place] ^= 0x55
        try:
            raycheck.catalog.unpack(io.BytesIO(changed), f"memory://{uuid4().hex}", dry_run=True)
        except CorruptError:
            continue
        accepted.append(place)

    assert set(accepted) <= free


# --- members ---


def moved(parts: Parts) -> Parts:
    return [*parts[:4], parts[5], parts[4], *parts[6:]]


def renamed(parts: Parts, name: str) -> Parts:
    info, body = parts[-1]
    info.name = name
    return [*parts[:-1], (info, body)]


def typed(parts: Parts, kind: bytes, link: str = "") -> Parts:
    info, body = parts[-1]
    info.type, info.linkname = kind, link
    return [*parts[:-1], (info, b"" if kind != tarfile.REGTYPE else body)]


def with_pax(parts: Parts, headers: dict[str, str]) -> Parts:
    info, body = parts[-1]
    info.pax_headers = headers
    return [*parts[:-1], (info, body)]


MEMBERS: dict[str, Callable[[Parts], Parts]] = {
    "missing": lambda parts: parts[:-1],
    "missing first": lambda parts: parts[1:],
    "extra": lambda parts: [*parts, (tarfile.TarInfo(f"{FOLDER}/more"), b"")],
    "twice": lambda parts: [*parts, parts[-1]],
    "twice in place": lambda parts: [*parts[:-1], parts[-2], parts[-1]],
    "another order": moved,
    "a parent": lambda parts: renamed(parts, f"{FOLDER}/../../evil"),
    "absolute": lambda parts: renamed(parts, "/etc/evil"),
    "another folder": lambda parts: renamed(parts, "step-000000009-a1-s3/train/__0_0.distcp"),
    "a name of 5,000 letters": lambda parts: renamed(parts, "x" * 5000),
    "symbolic link": lambda parts: typed(parts, tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": lambda parts: typed(parts, tarfile.LNKTYPE, f"{FOLDER}/index"),
    "device": lambda parts: typed(parts, tarfile.CHRTYPE),
    "block device": lambda parts: typed(parts, tarfile.BLKTYPE),
    "pipe": lambda parts: typed(parts, tarfile.FIFOTYPE),
    "folder": lambda parts: typed(parts, tarfile.DIRTYPE),
    "old sparse file": lambda parts: typed(parts, tarfile.GNUTYPE_SPARSE),
    "contiguous file": lambda parts: typed(parts, tarfile.CONTTYPE),
    "sparse 0.1": lambda parts: with_pax(parts, {"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}),
    "sparse 1.0": lambda parts: with_pax(
        parts, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    ),
    "another size in pax": lambda parts: with_pax(parts, {"size": str(1 << 60)}),
    "another name in pax": lambda parts: with_pax(parts, {"path": "../evil"}),
    "a long pax header": lambda parts: with_pax(parts, {"comment": "x" * 10_000}),
    "an empty file": lambda parts: [],
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_that_is_not_the_one_expected_is_refused(packed: bytes, name: str) -> None:
    assert_refused(joined(MEMBERS[name](parts_of(packed))))


@pytest.mark.parametrize("kind", [tarfile.XGLTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_a_header_that_says_it_is_huge_takes_no_memory(packed: bytes, kind: bytes) -> None:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = kind, 8 << 30

    for at in (0, len(packed) - len(END)):
        assert_refused(packed[:at] + info.tobuf(tarfile.GNU_FORMAT) + packed[at:])


def test_headers_within_headers_are_refused(packed: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 16
    inner = info.tobuf(tarfile.USTAR_FORMAT) + b"16 path=evil.txt".ljust(BLOCK, b"\0")

    assert_refused(inner * 50 + packed)


@pytest.mark.parametrize("size", [0, MAX_RECORD + 1, 8 << 30, (1 << 62) + 1])
def test_a_record_of_an_impossible_size_is_not_read(packed: bytes, size: int) -> None:
    (info, body), *others = parts_of(packed)
    info.size = size

    assert_refused(info.tobuf(tarfile.GNU_FORMAT) + body + joined(others), "not an archive of raycheck")


@pytest.mark.parametrize("data", [b"\x1f\x8b\x08" + bytes(600), b"PK\x03\x04" + bytes(600), bytes(2048), b"x" * 5000])
def test_another_kind_of_file_is_refused(data: bytes) -> None:
    assert_refused(data)


# --- record and manifest that agree with their checksums, and lie ---


def lying(packed: bytes, change: Callable[[Manifest], Manifest]) -> bytes:
    """Returns an archive whose record and checksums fit a manifest that was changed."""
    parts = parts_of(packed)
    manifest = change(load_manifest(parts[1][1], what="manifest"))
    data = dump(manifest)
    record = load_record(parts[0][1], what="record")
    blobs = [manifest.index, *(blob for part in manifest.components for blob in (part.metadata, *part.shards))]
    named = zip((member.name for member in record.members[1:]), blobs, strict=False)
    members = (
        Member(name="manifest.json", size_bytes=len(data), crc32=crc32(data)),
        *(Member(name=name, size_bytes=blob.size_bytes, crc32=blob.crc32) for name, blob in named),
    )
    return with_record(parts, replace(record, members=members), data)


def with_record(parts: Parts, record: ArchiveRecord, manifest: bytes) -> bytes:
    bodies = [dump(record), manifest, *(body for _, body in parts[2:])]
    for (info, _), body in zip(parts, bodies, strict=True):
        info.size = len(body)
    return joined([(info, body) for (info, _), body in zip(parts, bodies, strict=True)])


def component(manifest: Manifest, **fields) -> Manifest:
    *others, last = manifest.components
    return replace(manifest, components=(*others, replace(last, **fields)))


LIES: dict[str, Callable[[Manifest], Manifest]] = {
    "a path as a component": lambda m: component(m, name="../../evil"),
    "a component as another object": lambda m: component(m, name="index"),
    "a component twice": lambda m: replace(
        m, components=(m.components[0], replace(m.components[1], name="model.frozen"))
    ),
    "a shard twice": lambda m: component(m, shards=m.components[-1].shards * 2),
    "a shard less": lambda m: component(m, shards=()),
    "fewer than no bytes": lambda m: component(m, metadata=Blob(size_bytes=-1, crc32=0)),
    "an exabyte": lambda m: component(m, metadata=Blob(size_bytes=1 << 60, crc32=0)),
    "an index of 2 GiB": lambda m: replace(m, index=Blob(size_bytes=2 << 30, crc32=0)),
    "another checkpoint": lambda m: replace(m, key="step-000000009-a1-s3"),
    "no checkpoint's name": lambda m: replace(m, key="../../x"),
    "a reference to a path": lambda m: component(m, checkpoint="../../x"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_names_what_cannot_be_is_refused(packed: bytes, name: str) -> None:
    assert_refused(lying(packed, LIES[name]))


def test_the_archives_these_lies_are_made_of_is_accepted(packed: bytes) -> None:
    done = raycheck.catalog.unpack(io.BytesIO(lying(packed, lambda manifest: manifest)), f"memory://{uuid4().hex}/new")

    assert done.step == 9


def test_what_is_no_index_is_refused_although_its_checksum_is_right(packed: bytes) -> None:
    parts = parts_of(packed)
    parts[2] = (parts[2][0], b"RCIX" + bytes(100))
    parts[2][0].size = 104

    changed = lying(joined(parts), lambda m: replace(m, index=Blob(size_bytes=104, crc32=crc32(parts[2][1]))))

    assert_refused(changed, "index")


@pytest.mark.parametrize(
    "change",
    [
        lambda record: replace(record, checkpoint="step-000000009-a1-s7"),
        lambda record: replace(record, members=record.members[:-1]),
        lambda record: replace(record, members=()),
        lambda record: replace(record, members=(*record.members, record.members[-1])),
        lambda record: replace(record, members=tuple(reversed(record.members))),
        lambda record: replace(record, members=(replace(record.members[0], size_bytes=1 << 50), *record.members[1:])),
        lambda record: replace(record, format_version=99),
    ],
    ids=["another checkpoint", "a member less", "no members", "a member twice", "reversed", "a huge manifest", "newer"],
)
def test_a_record_that_does_not_fit_the_manifest_is_refused(packed: bytes, change) -> None:
    parts = parts_of(packed)

    assert_refused(with_record(parts, change(load_record(parts[0][1], what="record")), parts[1][1]))


def test_a_source_that_says_where_to_go_is_only_noted(sample: Sample) -> None:
    """The record's URI is shown to people, and never opened."""
    parts = parts_of(sample.pack())
    record = replace(load_record(parts[0][1], what="record"), uri="s3://evil/\x1b[31m")
    new = open_store(f"memory://{uuid4().hex}/new")

    raycheck.catalog.unpack(io.BytesIO(with_record(parts, record, parts[1][1])), new.uri)

    assert raycheck.open_run(new.uri).head.details().restored_from == f"s3://evil/\x1b[31m {FOLDER}"
