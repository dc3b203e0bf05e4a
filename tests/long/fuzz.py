"""Whatever bytes lie in a bucket, reading them ends in a value or in a CorruptError.

    pip install atheris
    python -m tests.long.fuzz [-max_total_time=3600]

Guided by coverage of raycheck/bucket; the first byte of an input says who reads the rest. An input that breaks the rule
is written to a file `crash-*`, and run again by naming that file.
"""

import json
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["raycheck.bucket"]):
    from raycheck.bucket.attempt_records import AttemptRecord, ResumeRecord, load_record, load_resume
    from raycheck.bucket.format.document import Document, dump, seal
    from raycheck.bucket.format.index_codec import dump_index, join_parts, load_index, parts_of
    from raycheck.bucket.format.latest import load_latest
    from raycheck.bucket.format.manifest import load_manifest
    from raycheck.bucket.format.plan_codec import dump_plan, load_plan
    from raycheck.bucket.format.values import decode
    from raycheck.errors import CorruptError
    from tests.bucket.format.test_documents import a_latest, a_manifest, an_index

WHAT = "fuzzed"


def latest(data: bytes) -> None:
    _reads_back(partial(load_latest, what=WHAT), data)


def manifest(data: bytes) -> None:
    _reads_back(partial(load_manifest, what=WHAT), data)


def record(data: bytes) -> None:
    _reads_back(partial(load_record, what=WHAT), data)


def resume(data: bytes) -> None:
    _reads_back(partial(load_resume, what=WHAT), data)


def index(data: bytes) -> None:
    read = load_index(data, what=WHAT)
    for number in range(len(read.tensors)):
        for chunk in read.chunks_of(number)[:100]:
            assert 0 <= chunk.record_offset <= chunk.payload_offset


def plan(data: bytes) -> None:
    """As it is inside its zlib stream, which no mutation would get through."""
    dump_plan(load_plan(zlib.compress(data, 0), what=WHAT))


def values(data: bytes) -> None:
    """The same of the values; what they say is decoded."""
    stream = zlib.compress(data, 0)
    read = load_index(join_parts(replace(parts_of(an_index()), values=(stream,))), what=WHAT)
    decode(dict(read.values), str)


def _reads_back(load: Callable[[bytes], Document], data: bytes) -> None:
    """Sealed, since no mutation would get through its checksum."""
    read = load(seal(data))
    assert load(dump(read)) == read


TARGETS: tuple[Callable[[bytes], None], ...] = (latest, manifest, record, resume, index, plan, values)


def one_input(data: bytes) -> None:
    if data:
        try:
            TARGETS[data[0] % len(TARGETS)](data[1:])
        except CorruptError:
            return


def seeds() -> list[bytes]:
    """One good body for each target."""
    body, parts = a_latest(), parts_of(an_index())
    ended = AttemptRecord(attempt=body.attempt, ended_by_attempt=2, ended_at=1.5, cause="why")
    began = ResumeRecord(
        attempt=2,
        after=1,
        cause="why",
        restored=None,
        step=3,
        world_size_before=4,
        world_size=3,
        lost_steps=None,
        lost_s=1.5,
        since_commit_s=2.5,
        restore_s=0.5,
        restore_bytes=7,
        what="nothing",
    )
    odd = {"a": {"$tuple": [1, {"$float": "inf"}, {"$ndarray": ["<f4", [1], "AACAPw=="]}]}, "b": {"$deque": [2, [1]]}}
    odd |= {
        "c": {"$enum": ["a:B", "C", 1]},
        "d": {"$dataclass": ["a:B", ["x"], {"x": {"$path": ["PosixPath", "YQ=="]}}]},
    }
    odd |= {
        "e": {"$datetime": ["2026-01-01T00:00:00", 0, {"$timezone": [[0, 3600, 0]]}]},
        "f": {"$defaultdict": ["int", []]},
    }
    bodies = (
        dump(body),
        dump(a_manifest()),
        dump(ended),
        dump(began),
        dump_index(an_index()),
        zlib.decompress(parts.plan),
        json.dumps(odd).encode(),
    )
    return [bytes([number]) + one for number, one in enumerate(bodies)]


def main() -> None:
    arguments = sys.argv
    if all(argument.startswith("-") for argument in arguments[1:]):
        corpus = Path(tempfile.mkdtemp(prefix="raycheck-fuzz-"))  # libFuzzer ends the process
        for number, seed in enumerate(seeds()):
            (corpus / str(number)).write_bytes(seed)
        arguments = [*arguments, str(corpus)]
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
