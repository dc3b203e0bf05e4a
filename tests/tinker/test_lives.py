"""The engine dies while several tenants train, at each moment at which the server waits for something.

Another tenant's call starts it again. No tenant notices: the losses are those of a server whose engine never died.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from uuid import uuid4

import pytest
import tinker

from raycheck.tinker.journal import Journal
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, batch, datum, new_model, result_of, train
from tests.support.processes.await_points import watch
from tests.support.servers.tinker_server import tinker_server

STEP = tinker.types.AdamParams(learning_rate=1e-2)


class Watcher:
    """Notes where the models' queues wait, and kills the engine at one of these points."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        self.kill_at: tuple[str, str] | None = None
        self.kill: Callable[[], None] = lambda: None

    def __call__(self, when: str, point: str) -> None:
        self.seen[when, point] = None
        if (when, point) == self.kill_at:
            self.kill_at = None
            self.kill()


def train_two(models: list[tinker.TrainingClient], step: int, *, saves: bool) -> list[float]:
    """Let two tenants make a step at once. Each sends a pass, a step and two saves without waiting for answers."""
    passes, rest = [], []
    for model in models:
        passes.append(model.forward_backward(batch(step), "cross_entropy"))
        rest.append(model.optim_step(STEP))
        if saves:
            rest += [model.save_state(f"{step}"), model.save_weights_for_sampler(f"{step}")]
    losses = [passed.result(TIMEOUT_S).metrics["loss:sum"] for passed in passes]
    for future in rest:
        future.result(TIMEOUT_S)
    return losses


@pytest.mark.parametrize("has_all", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["steps", "all"])
def test_no_tenant_notices_a_death_of_the_engine_at_any_await_point(base, connect, tmp_path, has_all: bool) -> None:
    """Also at those that are met only while a model is rebuilt. has_all: with saves, and also while it begins to wait."""
    watcher = Watcher()

    def on_loop(loop: asyncio.AbstractEventLoop) -> None:
        watch(loop, "ModelQueue.", watcher)

    bucket = f"memory://{uuid4().hex}"
    with (
        tinker_server(base, bucket, tmp_path / "killed.sqlite", on_loop=on_loop) as server,
        tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "calm.sqlite") as calm,
    ):
        watcher.kill = server.engine.kill
        models, others = ([new_model(client, base, seed) for seed in (3, 4)] for client in map(connect, (server, calm)))
        done: set[tuple[str, str]] = set()
        met = step = 0
        assert train_two(models, step, saves=has_all) == train_two(others, step, saves=False)
        while points := [at for at in watcher.seen if at not in done and (has_all or at[0] == "resumed")]:
            step, life, watcher.kill_at = step + 1, server.engine.life, points[0]
            done.add(points[0])
            if any(name in points[0][1] for name in ("_open", "_catch_up")):
                server.engine.kill()
                life += 1

            losses = train_two(models, step, saves=has_all)

            assert losses == train_two(others, step, saves=False), points[0]
            met += server.engine.life > life
            watcher.kill_at = None
    assert met >= (25 if has_all else 5)  # the points of a server's start, and of some coincidences, come once
    assert any("_catch_up" in point for _, point in done)


def failing(times: int, what: str) -> Callable[[str], bool]:
    """Says yes to the first so many calls of a method: the engine dies before each of them."""
    left = [what] * times
    return lambda method: bool(left) and method == left[0] and bool(left.pop())


def test_a_step_that_was_sent_with_a_pass_that_failed_is_not_made(base, connect, tmp_path) -> None:
    """The client is told, sends both again, and has the losses of before; also after the model is rebuilt."""
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        expected = train(undisturbed, range(4))
        losses = train(model, range(1))
        server.engine.dies_before = failing(3, "run_pass")
        lost = model.forward_backward([datum(30)], "cross_entropy")
        passed = model.forward_backward([datum(7)], "cross_entropy")  # its gradient alone is not the batch's
        stepped = model.optim_step(STEP)

        with pytest.raises(tinker.RequestFailedError, match="the engine died 3 times"):
            lost.result(TIMEOUT_S)
        passed.result(TIMEOUT_S)
        with pytest.raises(tinker.RequestFailedError, match=r"no step was made.*request 3 before it failed"):
            stepped.result(TIMEOUT_S)
        losses += train(model, range(1, 3))
        server.engine.kill()

        assert losses + train(model, range(3, 4)) == expected


def after_a_failed_pass(server, client: tinker.ServiceClient, base: str) -> tuple[tinker.TrainingClient, list[float]]:
    """Returns a model of which the client knows that a pass has failed, and the losses of two undisturbed steps."""
    model, undisturbed = new_model(client, base), new_model(client, base)
    expected = train(undisturbed, range(2))
    server.engine.dies_before = failing(3, "run_pass")
    with pytest.raises(tinker.RequestFailedError):
        model.forward_backward([datum(30)], "cross_entropy").result(TIMEOUT_S)
    return model, expected


def test_a_step_that_is_sent_after_the_client_knows_of_the_failed_pass_is_made(base, connect, tmp_path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite") as server:
        model, expected = after_a_failed_pass(server, connect(server), base)

        losses = train(model, range(1))
        server.engine.kill()

        assert losses + train(model, range(1, 2)) == expected


def test_a_step_is_not_made_when_a_request_before_it_never_came(base, connect, tmp_path) -> None:
    """It may have been a pass."""
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", settings={"hold_s": 0.3}) as server:
        model = new_model(connect(server), base)
        one = {"data": [3], "dtype": "int64", "shape": [1]}
        item = {"model_input": {"chunks": [{"tokens": [2]}]}, "loss_fn_inputs": {"target_tokens": one}}
        given = {"forward_backward_input": {"data": [item], "loss_fn": "cross_entropy"}}
        steps = {"model_id": model.model_id, "adam_params": {}}

        first = ask(server.url, "forward_backward", {"model_id": model.model_id, "seq_id": 2, **given})[1]
        second = ask(server.url, "optim_step", {**steps, "seq_id": 3})[1]

        assert "1 did not" in result_of(server.url, first["request_id"])["error"]
        assert "no step was made" in result_of(server.url, second["request_id"])["error"]
        third = ask(server.url, "optim_step", {**steps, "seq_id": 4})[1]
        assert result_of(server.url, third["request_id"])["metrics"] == {"grad_norm": 0.0}


def test_a_model_is_saved_for_a_recovery_in_every_life(base, connect, tmp_path) -> None:
    with tinker_server(
        base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", settings={"recovery_steps": 2}
    ) as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = []
        for life in range(3):
            saves = server.engine.calls.count("save")
            losses += train(model, range(3 * life, 3 * life + 3))
            assert server.engine.calls.count("save") > saves
            server.engine.kill()

        assert losses == train(undisturbed, range(9))


def test_a_step_that_an_older_server_made_after_a_failed_pass_is_made_again(base, connect, tmp_path) -> None:
    """It did not note what the client knew. What was done is replayed as it was done."""
    state = tmp_path / "s.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state) as server:
        model, expected = after_a_failed_pass(server, connect(server), base)
        losses = train(model, range(1))
        with closing(sqlite3.connect(state)) as db:
            db.execute("UPDATE requests SET told = NULL")
            db.commit()
        server.engine.kill()

        assert losses + train(model, range(1, 2)) == expected


def test_a_state_file_of_an_older_server_is_read(tmp_path) -> None:
    path = tmp_path / "s.sqlite"
    Journal(str(path)).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE requests DROP COLUMN told")

    assert Journal(str(path)).untold_failure("m", 3) is None
