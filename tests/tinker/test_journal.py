"""The state file: what it keeps over a restart, and that one server at a time writes it."""

from pathlib import Path

import pytest

from raycheck.errors import ConfigError
from raycheck.tinker.journal import Journal, LoggedRequest, ReplacedError


def request(seq: int, kind: str = "optim_step", **more) -> LoggedRequest:
    known = {"id": f"id-{seq}", "lane": "m", "seq": seq, "kind": kind, "digest": "d", "body": b"b", "status": "pending"}
    return LoggedRequest(**{**known, **more})


def test_what_was_submitted_is_there_after_a_restart(tmp_path) -> None:
    first = Journal(str(tmp_path / "s.sqlite"))
    first.submit(request(0))
    first.finish("id-0", "done", "json", b"{}")
    first.submit(request(1))
    first._db.close()

    second = Journal(str(tmp_path / "s.sqlite"))

    assert second.request("id-0").result == b"{}"
    assert second.first_pending("m") == request(1)
    assert second.generation == 2


def test_a_number_has_one_request(tmp_path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    journal.submit(request(0))

    assert journal.submit(request(0, id="another", digest="other")) == request(0)
    assert journal.next_seq("m") == 1


def test_missing_numbers_are_known(tmp_path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    for seq in (0, 1, 4):
        journal.submit(request(seq))

    assert journal.missing_before("m", 4) == [2, 3]
    assert journal.missing_before("m", 1) == []


def test_only_what_has_changed_the_model_since_is_replayed(tmp_path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    kinds = [
        "create_model",
        "forward_backward",
        "optim_step",
        "save_weights",
        "forward",
        "forward_backward",
        "optim_step",
    ]
    for seq, kind in enumerate(kinds):
        journal.submit(request(seq, kind))
        journal.finish(f"id-{seq}", "failed" if seq == 6 else "done", "json", b"{}")

    assert [item.seq for item in journal.to_replay("m", 0)] == [1, 2, 5]
    assert journal.newest_change("m", 3) == 2
    journal.cover("m", 2)
    assert [item.body for item in journal.to_replay("m", 0)] == [None, None, b"b"]
    assert journal.request("id-3").body is None


def test_a_rejected_step_hides_no_failure_before_it(tmp_path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    journal.submit(request(1, "forward_backward", status="failed", form="error", result=b"{}"))
    journal.submit(request(2, status="failed", form="refusal", result=b"lr"))
    journal.submit(request(3))

    assert journal.untold_failure("m", 3) == journal.request("id-1")
    journal.finish("id-3", "done", "no_step", b"{}")
    journal.submit(request(4))
    assert journal.untold_failure("m", 4) is None


@pytest.mark.parametrize(("status", "live"), [("done", "live"), ("failed", "unloaded")])
def test_a_model_that_could_not_be_created_is_not_loaded(tmp_path, status, live) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    for run in "mn":
        first = request(0, "create_model", id=run, lane=run)
        journal.create_model(first, session="s", facts="{}", at=0.0)
    journal.submit(request(1, lane="n"))

    journal.finish("m", status, "error", b"{}")
    journal.finish("id-1", "failed", "error", b"{}")

    assert journal.rows("SELECT id, status FROM models ORDER BY id") == [("m", live), ("n", "live")]


def test_a_kept_key_is_in_files_that_nobody_else_can_read(tmp_path, monkeypatch) -> None:
    (tmp_path / "s.sqlite").touch()
    (tmp_path / "s.sqlite").chmod(0o644)
    journal = Journal(str(tmp_path / "s.sqlite"))

    assert journal.kept_key("tml-a") == "tml-a"

    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("s.sqlite", "s.sqlite-wal", "s.sqlite-shm"), 0o600
    )

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)  # the file is another user's
    with pytest.raises(ConfigError, match=r"--state .*not permitted.*--api-key-file"):
        journal.kept_key("tml-b")


def test_a_replaced_server_writes_nothing_more(tmp_path) -> None:
    first, second = (Journal(str(tmp_path / "s.sqlite")) for _ in "12")

    with pytest.raises(ReplacedError):
        first.submit(request(0))

    assert second.request_at("m", 0) is None
    second.submit(request(0))


def test_an_answer_is_remembered_for_its_time(tmp_path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    journal.remember_answer("a", 200, "{}", keep_s=100)

    assert journal.answer_to("a") == (200, "{}")
    journal.remember_answer("b", 200, "{}", keep_s=-1)
    assert journal.answer_to("a") is None


@pytest.mark.parametrize("data", [b"no database at all, and long enough to look like a file of another program" * 20])
def test_a_file_of_another_program_is_refused(tmp_path, data) -> None:
    path = tmp_path / "s.sqlite"
    path.write_bytes(data)

    with pytest.raises(ConfigError, match="not a state file"):
        Journal(str(path))

    assert path.read_bytes() == data
