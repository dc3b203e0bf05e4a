"""Text from a bucket reaches a terminal harmless: tables, errors and logs show it and never obey it; JSON is exact."""

import io
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raycheck import errors
from raycheck.bucket.attempt_records import ResumeRecord, record_resume
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.cli.options import Text
from raycheck.log import logger
from raycheck.terminal import printable, printable_lines
from tests.support.processes.command_line import exit_code_of
from tests.support.samples.sample_checkpoints import Driver, latest_tree, put_latest_tree

HOSTILE = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets the title": "\x1b]0;title\x07",
    "a C1 control sequence": "\x9b31m",
    "deletes": "a\x7fb\x08c",
    "returns": "good\rbad",
    "another line": "one\nraycheck: two",
    "a tab": "one\ttwo",
    "a vertical tab": "one\x0btwo",
    "right to left": "\u202egnp.exe\u2066",
    "zero width": "lo\u200bss\u2060\ufeff",
    "a filler": "lo\u3164ss",
    "a variation selector": "lo\ufe0f\u180bss\U000e0100",
    "an empty pattern": "loss\u2800",
    "a line separator": "one\u2028two\u2029",
    "a tag": "loss\U000e0041",
    "a lone surrogate": "loss\udc9b",
    "markup": "[red]loss[/red][/]",
    "words": "läßt Grüße, 損失, [x]",
}
ALL = "".join(HOSTILE.values())


UNSEEN = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0\ufe00\ufe0f\U000e0100\U000e01ef"
"""Nothing is drawn for these, though Python calls them printable."""


def is_fit(text: str) -> bool:
    return all((letter.isprintable() and letter not in UNSEEN) or letter == "\n" for letter in text)


def process(*args: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Run one command as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "raycheck", *args],
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "COLUMNS": "4000", **environment},
    )


def raycheck(*args: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Run one command in this process, with outputs that take the same text as those of a process."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with mock.patch.dict(os.environ, COLUMNS="4000", **environment):
        code = exit_code_of(args, stdout, stderr)
    for stream in (stdout, stderr):
        stream.flush()
    return subprocess.CompletedProcess(args, code, stdout.buffer.getvalue(), stderr.buffer.getvalue())


@given(st.text(st.characters()))
@example(ALL)
def test_any_text_becomes_one_line_of_what_is_seen(text):
    shown = printable(text)

    assert shown.isprintable()
    shown.encode()
    assert printable(shown) == shown
    assert not text.isprintable() or "\u3164" in text or len(shown) >= len(text)


@given(st.lists(st.text(st.characters(exclude_characters="\n")), min_size=1))
def test_lines_stay_lines_and_none_but_the_first_begins_at_the_margin(lines):
    shown = printable_lines("\n".join(lines))

    assert is_fit(shown)
    assert len(shown.split("\n")) == len(lines)
    assert all(line[:1] in ("", " ") for line in shown.split("\n")[1:])
    assert printable_lines(shown) == shown


@pytest.mark.parametrize("text", ["loss", "läßt Grüße", "損失", "a\\x1b", "[red]"])
def test_what_is_seen_is_left_as_it_is(text):
    assert printable(text) == text
    assert Text(text).plain == text


@pytest.mark.parametrize("kind", [value for value in vars(errors).values() if isinstance(value, type)])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_an_error_shows_what_it_quotes(kind, text):
    error = kind(f"s3://bucket/run: {text}")

    assert is_fit(str(error))
    assert error.args == (f"s3://bucket/run: {text}",)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_log_line_shows_what_it_quotes(caplog, text):
    with caplog.at_level(logging.WARNING, logger="raycheck"):
        logger.warning("run %s: %s", text, ValueError(text))

    assert is_fit(caplog.records[0].getMessage())
    assert is_fit(caplog.text)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """A run whose every free text is hostile: run id, metrics, owners, notes of damage, causes, object names."""
    uri = f"file://{tmp_path}/runs/mine"
    store = open_store(uri)
    ann = Driver(store)
    ann.claim("g1")
    for number in (1, 2):
        ann.save(1, number)
    _, entry = Driver(store, coordinator="c2").claim("g2")
    driver = Driver(store, coordinator="c2")
    go_back(driver.register, driver.me, group="g2", key=entry.key, problem=ALL)
    resume = ResumeRecord(
        attempt=1,
        after=0,
        cause=ALL,
        restored=None,
        step=0,
        world_size_before=1,
        world_size=1,
        lost_steps=1,
        lost_s=1.0,
        since_commit_s=1.0,
        restore_s=1.0,
        restore_bytes=1,
        what=ALL,
    )
    record_resume(store, resume)
    Register(store).edit(
        lambda body, _: replace(
            body, newest=tuple(replace(item, metrics=dict.fromkeys(HOSTILE.values(), 1.0)) for item in body.live)
        ),
        what="a test",
    )
    tree = latest_tree(store)
    tree["run_id"] = ALL
    put_latest_tree(store, tree)
    return uri


def commands(uri: str) -> list[tuple[str, ...]]:
    return [
        ("ls", uri),
        ("show", uri),
        ("show", uri, "--at", "20"),
        ("top", uri),
        ("verify", uri),
        ("prune", uri, "--keep-last", "1", "--dry-run"),
        ("prune", uri, "--keep-best", "none:min:1"),
        ("pin", uri, ALL.replace("\udc9b", "")),
        ("sweep", uri, "--whole", "--dry-run"),
        ("rewind", uri, "20"),
        ("repair", uri),
    ]


def test_no_command_hands_on_what_a_terminal_obeys(uri):
    shown = ""
    for args in commands(uri):
        done = raycheck(*args, FORCE_COLOR="")
        if args == ("show", uri):
            as_process = process(*args, FORCE_COLOR="")
            assert is_fit(as_process.stdout.decode() + as_process.stderr.decode())
            assert as_process.returncode == done.returncode
        text = done.stdout.decode() + done.stderr.decode()
        assert is_fit(text), (args, text)
        assert "Traceback" not in text, (args, text)
        shown += text

    for seen in ("\\x1b[2J", "\\x9b31m", "\\u202e", "\\u200b", "\\udc9b", "[red]loss[/red][/]", "one\\nraycheck: two"):
        assert seen in shown, seen
    assert "läßt Grüße, 損失" in shown


def test_json_is_exact_and_has_nothing_that_a_terminal_obeys(uri):
    listed, shown = (process(verb, uri, "--json").stdout.decode() for verb in ("ls", "show"))

    assert is_fit(listed + shown)
    assert set(json.loads(listed)[0]["metrics"]) == set(HOSTILE.values())
    assert json.loads(shown)["run_id"] == ALL
    assert json.loads(shown)["attempts"][0]["resume"]["cause"] == ALL


def test_a_document_that_is_none_is_quoted_as_text(uri):
    open_store(uri).put(object_keys.LATEST_KEY, f'{{"format_version": "{ALL}"}}'.encode(errors="replace"))

    for args in commands(uri):
        done = raycheck(*args)
        text = done.stdout.decode() + done.stderr.decode()
        assert (done.returncode == 2) == (args[0] != "repair"), (args, text)
        assert is_fit(text), (args, text)
