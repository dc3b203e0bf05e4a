"""Whatever stands in a document of a bucket, a command ends: with an answer, or with one sentence that says what is
wrong with which object, and never with a traceback.

The documents are those of a real run. Each is changed at one place, and all checksums above it are made right again, as
somebody would who wants to be believed.
"""

import io
import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycheck.bucket.attempt_records import ResumeRecord, record_end, record_resume
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index_codec import MAGIC
from raycheck.bucket.format.latest import Attempt
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.cli import main
from raycheck.errors import CorruptError
from raycheck.run import open_run
from tests.support.processes.save_without_ray import Own, save_state
from tests.support.samples import hf_models
from tests.support.samples.sample_checkpoints import sealed

STEP = 6
DOCUMENTS = ("latest", "manifest", "end", "start", "index header", "plan header", "plan lines", "values")


def answered(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process. Returns exit code, output and errors."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["raycheck", *arguments])
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, stdout.getvalue(), stderr.getvalue()


def a_run(store: Store) -> None:
    """Two commits of a model that can be exported, values of all kinds, and both documents of an attempt."""
    for number, step in enumerate((3, STEP), 1):
        model = hf_models.llama()
        optimizer = torch.optim.AdamW(model.parameters())
        model(hf_models.IDS, labels=hf_models.IDS).loss.backward()
        optimizer.step()
        state = {
            "model": model,
            "optimizer": optimizer,
            "tokenizer": hf_models.tokenizer(),
            "data": Own({"position": 3, "seen": (1, 2.5, None), "tail": [True]}),
        }
        save_state(store, state, save_number=number, step=step, metrics={"loss": 1.0 / step})
    body = read_latest(store)
    ended = Attempt(
        number=1, owner="o", coordinator="c", group="g", world_size=1, restore_key=None, last_save=1, claimed_at=1e9
    )
    assert record_end(store, ended, by=body.attempt, cause="a test")
    resume = ResumeRecord(
        attempt=body.attempt.number,
        after=1,
        cause="a test",
        restored=body.head,
        step=STEP,
        world_size_before=1,
        world_size=1,
        lost_steps=2,
        lost_s=1.5,
        since_commit_s=2.5,
        restore_s=0.5,
        restore_bytes=100,
        what="restored: model",
    )
    assert record_resume(store, resume)


def tree_of(data: bytes) -> Any:
    return json.loads(data)


class Documents:
    """The documents of the head of a run: to be changed one at a time, and put into the bucket consistently."""

    def __init__(self, store: Store) -> None:
        self.store = store
        body = read_latest(store)
        assert body.head is not None
        self._keys = {
            "latest": object_keys.LATEST_KEY,
            "manifest": object_keys.manifest_key(body.head),
            "index": object_keys.index_key(body.head),
            "end": object_keys.attempt_key(1),
            "start": object_keys.resume_key(body.attempt.number),
        }
        self._whole = {name: store.get(key).data for name, key in self._keys.items()}

    def restore(self) -> None:
        for name, data in self._whole.items():
            self.store.put(self._keys[name], data)

    def change(self, name: str, edit: Callable[[Any], Any]) -> None:
        """Put what `edit` makes of the tree of that document, and make right all checksums above it."""
        if name in ("end", "start", "latest"):
            self._put(name, as_body(edit(tree_of(self._whole[name]))))
        elif name == "manifest":
            self._put_manifest(edit(tree_of(self._whole["manifest"])))
        else:
            index = edited_index(self._whole["index"], name, edit)
            self._put("index", index)
            about = {"size_bytes": len(index), "crc32": crc32(index)}
            self._put_manifest(tree_of(self._whole["manifest"]) | {"index": about})

    def _put_manifest(self, tree: Any) -> None:
        data = as_body(tree)
        self._put("manifest", data)
        latest = tree_of(self._whole["latest"])
        latest["newest"][-1]["manifest_crc32"] = crc32(data)
        self._put("latest", sealed(latest))

    def _put(self, name: str, data: bytes) -> None:
        self.store.put(self._keys[name], data)


def as_body(tree: Any) -> bytes:
    return sealed(tree) if isinstance(tree, dict) else json.dumps(tree).encode()


def edited_index(data: bytes, name: str, edit: Callable[[Any], Any]) -> bytes:
    (length,) = struct.unpack_from("<Q", data, 4)
    header, parts = json.loads(data[12 : 12 + length]), data[12 + length :]
    if name == "index header":
        return closed(edit(header), parts)
    sizes = dict(header["parts"])
    plan, checksums, values = (
        parts[: sizes["plan"]],
        parts[sizes["plan"] : -sizes["values"]],
        parts[-sizes["values"] :],
    )
    if name == "values":
        first = header["values"][0]
        stream = zlib.compress(json.dumps(edit(json.loads(zlib.decompress(values[:first])))).encode())
        header["values"][0], values = len(stream), stream + values[first:]
    else:
        plan = edited_plan(plan, name, edit)
    header["parts"] = [["plan", len(plan)], ["checksums", len(checksums)], ["values", len(values)]]
    return closed(header, plan + checksums + values)


def edited_plan(data: bytes, name: str, edit: Callable[[Any], Any]) -> bytes:
    raw = zlib.decompress(data)
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    end = 8 + length + header["tensors"][1]
    lines, columns = raw[8 + length : end], raw[end:]
    if name == "plan header":
        header = edit(header)
    else:
        rows = edit([json.loads(line) for line in lines.split(b"\n")])
        lines = b"\n".join(json.dumps(row).encode() for row in rows) if isinstance(rows, list) else b"x"
        header["tensors"] = [len(rows) if isinstance(rows, list) else 1, len(lines)]
    text = json.dumps(header).encode()
    return zlib.compress(struct.pack("<Q", len(text)) + text + lines + columns)


def closed(header: Any, parts: bytes) -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + struct.pack("<Q", len(text)) + text + parts


@pytest.fixture(scope="module")
def documents() -> Documents:
    store = open_store(f"memory://{uuid4().hex}")
    a_run(store)
    return Documents(store)


ODD = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**63), 10**18, 10**30, 10**400),
    *(0.5, -0.5, 1e18, 3.2e16, -1e15, 1e300, -1e300, 5e-324, math.nan, math.inf, -math.inf),
    *("", "x", "../x", "/etc/passwd", "step-000000003-a1-s1", "1", "nan", "\x1b[2J", "a" * 5000, "$tuple", "."),
    *([], {}, [[]], [None], [1, 2], {"": None}, {"x": 1}, {"$tuple": [1]}, {"$ndarray": ["<f4", [1 << 40], ""]}),
]
"""What a reader meets where it looks for something else."""


def mutated(data: st.DataObject, tree: Any) -> Any:
    """`tree` with one place in it removed, repeated or made odd."""
    if not isinstance(tree, dict | list) or not tree or not data.draw(st.integers(0, 7)):
        return data.draw(st.sampled_from(ODD))
    key = data.draw(st.sampled_from(sorted(tree) if isinstance(tree, dict) else range(len(tree))))
    copy = tree.copy()
    what = data.draw(st.sampled_from(["go", "go", "go", "go", "remove", "repeat", "rename"]))
    if what == "remove":
        del copy[key]
    elif what == "repeat" and isinstance(copy, list):
        copy.append(copy[key])
    elif what == "rename" and isinstance(copy, dict):
        copy[data.draw(st.sampled_from(["", "x", "$tuple", "a.b"]))] = copy.pop(key)
    else:
        copy[key] = mutated(data, copy[key])
    return copy


COMMANDS = {
    "ls": ("ls",),
    "ls json": ("ls", "--json"),
    "show": ("show",),
    "show json": ("show", "--json"),
    "verify": ("verify",),
    "pin": ("pin", str(STEP)),
    "prune": ("prune", "--keep-last", "1", "--dry-run"),
    "prune best": ("prune", "--keep-best", "loss:min:1", "--keep-every-steps", "2", "--dry-run", "--json"),
    "sweep": ("sweep", "--dry-run"),
    "rewind": ("rewind", "3"),
    "repair": ("repair",),
    "export-hf": ("export-hf",),
}


def check(uri: str, command: str, folder: Path) -> tuple[int, str]:
    """Run a command. Returns exit code and errors. Raises AssertionError for an ending that is none."""
    verb, *options = COMMANDS[command]
    dest = [f"{folder}/{uuid4().hex}"] if verb == "export-hf" else []
    code, _, stderr = answered(verb, uri, *dest, *options)
    assert code in (0, 1, 2)
    assert "Traceback" not in stderr
    if code == 2:
        assert stderr.startswith("raycheck: ")
    return code, stderr


@pytest.mark.parametrize("component", ["", "x", "../train"])
def test_an_index_that_names_a_component_that_is_none_of_the_manifest_is_refused(
    documents: Documents, tmp_path: Path, component: str
) -> None:
    def renamed(header: Any) -> Any:
        return header | {"objects": [[component, *rest] for _, *rest in header["objects"]]}

    documents.change("plan header", renamed)
    try:
        code, stderr = check(documents.store.uri, "export-hf", tmp_path)
        assert code == 2
        assert f"names the component {component!r}" in stderr
        with pytest.raises(CorruptError, match="names the component"):
            open_run(documents.store.uri).restore(into={"model": hf_models.llama()})
    finally:
        documents.restore()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", DOCUMENTS)
@settings(
    max_examples=int(os.environ.get("RAYCHECK_TEST_EXAMPLES", "4")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_no_document_ends_a_command_with_a_traceback(
    documents: Documents, tmp_path_factory: pytest.TempPathFactory, name: str, command: str, data: st.DataObject
) -> None:
    documents.change(name, lambda tree: mutated(data, tree))

    try:
        check(documents.store.uri, command, tmp_path_factory.getbasetemp())
    finally:
        documents.restore()


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune", "sweep"])
@pytest.mark.parametrize("at", [1e18, -1e15, 1e300, -1e300, 0, -1])
def test_a_time_that_no_calendar_has_is_shown_as_none(
    documents: Documents, tmp_path: Path, command: str, at: float
) -> None:
    def edit(tree: Any) -> Any:
        tree["attempts"][-1]["claimed_at"] = at
        tree["newest_evicted"] = [{"key": "step-000000001-a1-s9", "at": at}]
        for entry in tree["newest"]:
            entry["committed_at"] = at
        return tree

    documents.change("latest", edit)

    try:
        assert check(documents.store.uri, command, tmp_path) == (0, "")
    finally:
        documents.restore()


def test_a_pipe_in_place_of_a_document_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    a_run(store)
    for key in [object_keys.LATEST_KEY, object_keys.attempt_key(1)]:
        store.delete(key)
        os.mkfifo(tmp_path / "run" / key)

    for command in COMMANDS:
        code, stderr = check(store.uri, command, tmp_path)

        assert code == 2, command
        assert "latest is not a file but a pipe" in stderr, command


@pytest.mark.parametrize("key", ["latest", "manifest.json", "index", "shard"])
def test_a_pipe_below_a_checkpoint_is_damage(tmp_path: Path, key: str) -> None:
    store = open_store(f"file://{tmp_path}/run")
    a_run(store)
    name = read_latest(store).head
    assert name is not None
    paths = {
        "manifest.json": object_keys.manifest_key(name),
        "index": object_keys.index_key(name),
        "latest": object_keys.LATEST_KEY,
    }
    path = tmp_path / "run" / paths.get(key, object_keys.shard_key(name, "train", 0))
    path.unlink()
    os.mkfifo(path)

    assert check(store.uri, "verify", tmp_path)[0] == (2 if key == "latest" else 1)


# --- memory ---

GIB = 1 << 30
MEGABYTES = 200
"""What a command may take more than it takes of a run without anything odd; torch is loaded in both."""


def peak_megabytes(*arguments: str) -> float:
    """Returns the peak memory of a process of its own."""
    program = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from raycheck.cli import main\n"
        "sys.argv = ['raycheck', *sys.argv[1:]]\n"
        "try:\n    main()\n"
        # not ru_maxrss, which begins with that of the process that started this one
        "finally:\n    print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1], file=sys.stderr)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=100
    )
    assert "Traceback" not in ended.stderr
    return int(ended.stderr.split()[-1]) / 1e3


def grown_values(tree: Any) -> Any:
    """A hundred megabytes of brackets, of which the stream has a thousandth."""
    return tree | {"bomb": [[[]] * 1000] * 25_000}


def grown_lines(rows: Any) -> Any:
    return rows + [["a", "float32", [], ["a"]]] * 4_000_000


def grown_header(tree: Any) -> Any:
    return tree | {"bomb": [[]] * 20_000_000}


BOMBS = {"values": grown_values, "plan lines": grown_lines, "plan header": grown_header}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = open_store(f"file://{tmp_path_factory.mktemp('hostile')}/run")
    a_run(store)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_index_does_not_unpack_to_gigabytes(hostile: Store, tmp_path: Path, bomb: str) -> None:
    documents, commands = Documents(hostile), (("show",), ("verify",), ("export-hf", f"{tmp_path}/dest"))
    without = {verb: peak_megabytes(verb, hostile.uri, *more) for verb, *more in commands}
    documents.change(bomb, BOMBS[bomb])
    assert hostile.head(object_keys.index_key(read_latest(hostile).head or "")) < 1_000_000

    try:
        peaks = {
            verb: peak_megabytes(verb, hostile.uri, *(f"{item}2" for item in more)) - without[verb]
            for verb, *more in commands
        }
    finally:
        documents.restore()

    assert max(peaks.values()) < MEGABYTES, peaks


@pytest.fixture(scope="module")
def usual_megabytes(hostile: Store) -> float:
    """The peak memory of `show` on that run, before anything in it is changed."""
    return peak_megabytes("show", hostile.uri)


@pytest.mark.parametrize("key", ["latest", "attempts/000001.json", "attempts/000001.start.json", "manifest", "index"])
def test_an_object_of_a_gigabyte_is_not_read(hostile: Store, usual_megabytes: float, key: str) -> None:
    head = read_latest(hostile).head or ""
    key = {"manifest": object_keys.manifest_key(head), "index": object_keys.index_key(head)}.get(key, key)
    path = Path(hostile.uri.removeprefix("file://")) / key
    whole = path.read_bytes()
    os.truncate(path, GIB)  # with a hole: it takes no place on the disk

    try:
        assert peak_megabytes("show", hostile.uri) - usual_megabytes < 30
    finally:
        path.write_bytes(whole)
