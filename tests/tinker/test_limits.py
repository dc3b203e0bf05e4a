"""What one client may cost the server, and texts that are none: refused by name, and the log has no traceback."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
import tinker

from raycheck.tinker.journal import KEPT_SAMPLES, SAMPLING_LANE, Journal, LoggedRequest
from raycheck.tinker.service import KEPT_S
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, new_model
from tests.support.servers.tinker_server import tinker_server, wait_until

HALF = "\ud800"
PATH = "tinker://s:train:0/weights/x"
LORA = {"rank": 1}


def logged_by_the_server(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what was logged, without what an earlier test left running: an SDK's client, and the watch of a training
    that was never closed. The server's own trainings are other processes."""
    return [
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith("tinker.") and record.threadName != "raycheck-watch"
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_session", {"tags": [HALF]}),
        ("create_session", {"user_metadata": {HALF: "x"}}),
        ("create_session", {"user_metadata": {"x": HALF}}),
        ("create_session", {"display_name": HALF}),
        ("session_heartbeat", {"session_id": HALF}),
        ("create_model", {"session_id": HALF, "model_seq_id": 0, "lora_config": LORA}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": HALF, "lora_config": LORA}),
        ("get_info", {"model_id": HALF}),
        ("unload_model", {"model_id": HALF}),
        ("optim_step", {"model_id": HALF, "adam_params": {}}),
        ("optim_step", {"model_id": "m", "adam_params": {HALF: 1}}),
        ("forward", {"model_id": HALF, "forward_input": {"data": [], "loss_fn": "cross_entropy"}}),
        ("forward_backward", {"model_id": "m", "forward_backward_input": {"data": [], "loss_fn": HALF}}),
        ("save_weights", {"model_id": HALF, "path": "x"}),
        ("save_weights", {"model_id": "m", "path": HALF}),
        ("load_weights", {"model_id": HALF, "path": PATH}),
        ("load_weights", {"session_id": "s", "model_seq_id": 0, "path": f"tinker://{HALF}/weights/x"}),
        ("weights_info", {"tinker_path": f"tinker://s:train:0/weights/{HALF}"}),
        ("copy_weights", {"source_path": HALF}),
        ("create_sampling_session", {"session_id": HALF, "sampling_session_seq_id": 0}),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 0, "model_path": HALF}),
        ("asample", {"sampling_session_id": HALF, "prompt": {}}),
        ("asample", {"base_model": HALF, "prompt": {}}),
        ("asample", {"base_model": "m", "prompt": {}, "sampling_params": {"stop": [HALF]}}),
        ("retrieve_future", {"request_id": HALF}),
        ("telemetry/../client/config", {HALF: 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else ascii(value),
)
def test_half_a_character_is_refused_by_its_fields_name(server, caplog, path: str, body: dict[str, object]) -> None:
    status, answer = ask(server.url, path.rpartition("../")[2], body)

    assert (status, "lone surrogate" in answer["detail"]) == (422, True)
    assert any(ascii(name) in answer["detail"] for name in body)
    assert logged_by_the_server(caplog) == []


@pytest.mark.parametrize(
    "raw", [b'{"session_id": "\xed\xa0\x80"}', b'{"session_id": "\xff"}', '{"a": 1}'.encode("utf-16")]
)
def test_what_is_not_utf_8_is_refused(server, caplog, raw: bytes) -> None:
    assert ask(server.url, "session_heartbeat", raw)[0] == 422
    assert logged_by_the_server(caplog) == []


def test_a_whole_character_that_json_writes_in_two_halves_is_taken(server) -> None:
    status, answer = ask(server.url, "create_session", {"display_name": "\U0001f600", "tags": ["\U0001f600"]})

    assert status == 200
    assert ask(server.url, f"sessions/{answer['session_id']}")[1]["display_name"] == "\U0001f600"


ODD = ["%ED%A0%80", "%FF", "%00", "%C3%A9", "%F0%9F%98%80", "a%2F..%2Fb"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("sessions/{}", "GET"),
        ("sessions/{}/finish", "POST"),
        ("samplers/{}", "GET"),
        ("training_runs/{}", "GET"),
        ("training_runs/{}/checkpoints", "GET"),
        ("models/{}/checkpoints", "GET"),
        ("training_runs/{}/checkpoints/weights/x", "DELETE"),
        ("training_runs/s:train:0/checkpoints/{}/x", "DELETE"),
        ("training_runs/s:train:0/checkpoints/weights/{}", "DELETE"),
        ("training_runs/s:train:0/checkpoints/weights/{}/publish", "POST"),
        ("training_runs/s:train:0/checkpoints/{}/archive", "GET"),
        ("training_runs/s:train:0/checkpoints/weights/{}/external_weights_urls", "GET"),
        ("downloads/{}/weights/x/9999999999/00/f", "GET"),
        ("downloads/s:train:0/{}/x/9999999999/00/f", "GET"),
        ("downloads/s:train:0/weights/x/{}/00/f", "GET"),
        ("downloads/s:train:0/weights/x/9999999999/{}/f", "GET"),
        ("downloads/s:train:0/weights/x/9999999999/00/{}", "GET"),
        ("training_runs?limit={}", "GET"),
        ("checkpoints?offset={}", "GET"),
    ],
)
def test_odd_addresses_are_refused(server, caplog, path: str, method: str, odd: str) -> None:
    status, answer = ask(server.url, path.format(odd), {} if method == "POST" else None, method=method)

    assert status in (400, 403, 404, 422)
    assert "internal error" not in answer["detail"]
    assert logged_by_the_server(caplog) == []


@pytest.mark.parametrize("name", ["x-idempotency-key", "Accept", "X-Forwarded-Proto", "x-api-key", "Content-Encoding"])
def test_odd_headers_are_no_fault(server, caplog, name: str) -> None:
    """Bytes that are no text in any encoding that HTTP knows of."""
    sent = {name: "\xff\xed\xa0\x80"}

    for path, body in (("create_session", {}), ("copy_weights", {"source_path": PATH}), ("retrieve_future", {})):
        status, answer = ask(server.url, path, body, headers=sent)
        assert status in (200, 404, 415, 422), answer
        assert ask(server.url, path, body, headers=sent)[0] == status
    assert logged_by_the_server(caplog) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tags": ["x"] * 65}, "at most 64"),
        ({"tags": ["x" * 513]}, "at most 512"),
        ({"tags": [{"x": 1}]}, "a text of"),
        ({"tags": "x"}, "a list"),
        ({"user_metadata": {"x": "y" * 1000}}, "at most 1000"),
        ({"display_name": "x" * 513}, "1 to 512"),
        ({"sdk_version": ["x"]}, "1 to 512"),
    ],
)
def test_what_a_session_keeps_is_bounded(server, body: dict[str, object], words: str) -> None:
    status, answer = ask(server.url, "create_session", body)

    assert (status in (400, 422), words in answer["detail"]) == (True, True), answer


def test_so_many_models_and_no_more(base, connect, tmp_path: Path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", settings={"max_models": 2}) as server:
        client = connect(server)
        first, second = new_model(client, base), new_model(client, base)
        path = first.save_state("x").result(TIMEOUT_S).path

        with pytest.raises(tinker.APIStatusError, match=r"2 models are loaded.*--max-models"):
            new_model(client, base)
        with pytest.raises(tinker.APIStatusError, match=r"2 models are loaded"):
            client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        ask(server.url, "unload_model", {"model_id": second.model_id})
        wait_until(lambda: len(server.engine._tenants._tenants) == 1)

        assert client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)


def rows(state: Path) -> dict[str, int]:
    with closing(sqlite3.connect(state)) as db:
        tables = ("sessions", "models", "requests", "samplers")
        return {table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def test_rows_of_a_session_that_is_over_are_deleted_in_time(base, connect, tmp_path: Path) -> None:
    state, bucket = tmp_path / "s.sqlite", f"memory://{uuid4().hex}"
    with tinker_server(base, bucket, state, settings={"cleanup_s": 0.05, "session_timeout_s": None}) as server:
        client, other = connect(server), connect(server)
        model, kept = new_model(client, base), new_model(other, base)
        path = model.save_state("x").result(TIMEOUT_S).path
        session = model.model_id.partition(":")[0]
        assert ask(server.url, f"sessions/{session}/finish", {"reason": {}}, method="POST")[0] == 204
        assert ask(server.url, "session_heartbeat", {"session_id": session})[0] == 410

        with closing(sqlite3.connect(state)) as db:
            db.execute("UPDATE sessions SET seen_at = ? WHERE id = ?", (time.time() - KEPT_S - 1, session))
            db.commit()
        wait_until(lambda: rows(state)["sessions"] == 1)

        assert rows(state) == {"sessions": 1, "models": 1, "requests": 1, "samplers": 0}
        assert ask(server.url, "get_info", {"model_id": model.model_id})[0] == 404
        assert ask(server.url, "get_info", {"model_id": kept.model_id})[0] == 200
        assert other.create_training_client_from_state(path).result(TIMEOUT_S)


def test_results_of_sampling_without_a_session_are_bounded(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path / "s.sqlite"))
    with journal.writing() as db:
        for seq in range(KEPT_SAMPLES + 5):
            status = "pending" if seq == 1 else "done"
            db.execute(
                "INSERT INTO requests VALUES (?, ?, ?, 'sample', '', NULL, ?, NULL, NULL, NULL)",
                (str(seq), SAMPLING_LANE, seq, status),
            )

    journal.forget(before=0.0)

    left = [seq for (seq,) in journal.rows("SELECT seq FROM requests ORDER BY seq")]
    assert left == [1, *range(5, KEPT_SAMPLES + 5)]
    assert isinstance(journal.request("1"), LoggedRequest)
    journal.close()
