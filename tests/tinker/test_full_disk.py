"""The disk of the state file is full for a while: the client waits, and nothing is lost or done twice."""

import asyncio
import resource
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from raycheck.errors import ConfigError
from raycheck.tinker.journal import Journal, LoggedRequest
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, new_model, train
from tests.support.servers.tinker_server import tinker_server, wait_until


@contextmanager
def full_disk(state: Path) -> Iterator[None]:
    """Let no file of this process become larger than the log of the state file is. Writes beyond that fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does, but some libraries do not
    resource.setrlimit(resource.RLIMIT_FSIZE, (state.with_name(state.name + "-wal").stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("method", ["run_pass", "optim_step", "save", "is_committed"])
def test_the_disk_is_full_while_a_request_runs_and_its_result_waits_for_room(
    base, connect, tmp_path, caplog, method
) -> None:
    state = tmp_path / "s.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state) as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = train(model, range(2))
        is_running, goes_on = threading.Event(), threading.Event()

        call = server.engine.call

        async def held(called: str, *args: Any, **options: Any) -> Any:
            if called == method:
                is_running.set()
                assert await asyncio.to_thread(goes_on.wait, TIMEOUT_S)
            return await call(called, *args, **options)

        server.engine.call = held
        saved = model.save_state("two") if method in ("save", "is_committed") else None
        passed = threading.Thread(target=lambda: losses.extend(train(model, range(2, 3))))
        passed.start()
        assert is_running.wait(TIMEOUT_S)
        with full_disk(state):
            wait_until(lambda: ask(server.url, "create_session", {})[0] == 503)
            goes_on.set()
            wait_until(lambda: "cannot be written" in caplog.text)
        passed.join(TIMEOUT_S)
        assert not passed.is_alive()
        losses += train(model, range(3, 5))

        assert saved is None or saved.result(TIMEOUT_S).path
        assert losses == train(undisturbed, range(5))
        calls = server.engine.calls
        assert [calls.count(name) for name in ("run_pass", "optim_step", "save")] == [10, 10, int(saved is not None)]


def test_a_state_file_that_cannot_be_written_is_said_at_once(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    journal = Journal(str(tmp_path / "s.sqlite"))

    for path in ("file/s.sqlite", "folder"):
        with pytest.raises(ConfigError, match=r"state=.*cannot be opened or written"):
            Journal(str(tmp_path / path))
    with full_disk(tmp_path / "s.sqlite"), pytest.raises(ConfigError, match="make room"):
        Journal(str(tmp_path / "s.sqlite"))

    journal.close()


def test_a_training_run_is_logged_with_its_first_request_or_not_at_all(tmp_path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    request = LoggedRequest(id="a", lane="m", seq=0, kind="create_model", digest="d", body=b"", status="pending")
    journal.submit(request)

    with pytest.raises(sqlite3.IntegrityError):
        journal.create_model(request, session="s", facts="{}", at=0.0)

    assert journal.rows("SELECT id FROM models") == []
    journal.submit(replace(request, id="b", seq=1))  # no transaction was left open
    journal.close()
