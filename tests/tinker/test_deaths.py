"""Any part dies at any moment: the client's losses are those of an undisturbed run, and nothing happens twice."""

import sqlite3
from contextlib import closing
from uuid import uuid4

import pytest
import tinker

import raycheck
from raycheck.tinker.checkpoint_paths import folder_of
from raycheck.tinker.journal import Journal
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, datum, new_model, result_of, train
from tests.support.servers.ports import free_port
from tests.support.servers.tinker_server import tinker_server, wait_until
from tests.tinker.conftest import KEY


def whole_run(client: tinker.ServiceClient, base: str) -> tuple[list[float], list[str]]:
    """A training with saves of both kinds, and a resume from one of them. Returns its losses, and the saves' paths."""
    model = new_model(client, base)
    losses = train(model, range(2))
    paths = [model.save_state("two", user_metadata={"step": "2"}).result(TIMEOUT_S).path]
    model.forward_backward([datum(5)], "cross_entropy").result(TIMEOUT_S)  # its gradient is in no checkpoint
    paths.append(model.save_state("with-gradient").result(TIMEOUT_S).path)
    losses += train(model, range(2, 4))
    paths.append(model.save_weights_for_sampler("four").result(TIMEOUT_S).path)
    resumed = client.create_training_client_from_state_with_optimizer(paths[0]).result(TIMEOUT_S)
    losses += train(resumed, range(2, 4))
    paths.append(resumed.save_state("two").result(TIMEOUT_S).path)
    return losses + train(model, range(4, 6)) + train(resumed, range(4, 6)), paths


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory) -> list[float]:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path_factory.mktemp("s") / "s.sqlite") as server:
        return whole_run(tinker.ServiceClient(base_url=server.url, api_key=KEY), base)[0]


class Deaths:
    """Says yes at the given calls of one method, counted from 1."""

    def __init__(self, method: str, *at: int) -> None:
        self.method, self.at, self.count = method, at, 0

    def __call__(self, method: str) -> bool:
        self.count += method == self.method
        return method == self.method and self.count in self.at


CALLS = [("open", 1), ("open", 2), ("run_pass", 1), ("run_pass", 4), ("optim_step", 1), ("optim_step", 3)]
CALLS += [("optim_step", 7), ("save", 1), ("save", 2), ("save", 3), ("save", 4)]
CALLS += [("is_committed", 1), ("is_committed", 2), ("is_committed", 3)]
DEFAULT = {("open", 2, "after"), ("run_pass", 4, "before"), ("optim_step", 3, "after")}
DEFAULT |= {("save", 2, "before"), ("save", 2, "after"), ("is_committed", 1, "after")}
CASES = [
    pytest.param(*case, id="-".join(map(str, case)), marks=() if case in DEFAULT else pytest.mark.slow)
    for case in ((*call, when) for call in CALLS for when in ("before", "after"))
]


@pytest.mark.parametrize(("method", "at", "when"), CASES)
def test_the_engine_dies_and_the_client_does_not_notice(
    base, connect, tmp_path, undisturbed, method: str, at: int, when: str
) -> None:
    bucket = f"memory://{uuid4().hex}"
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        setattr(server.engine, f"dies_{when}", Deaths(method, at))

        losses, paths = whole_run(connect(server), base)

        assert server.engine.life == 1
    assert losses == undisturbed
    assert_saved_once(bucket, paths)


def assert_saved_once(bucket: str, paths: list[str]) -> None:
    """In the bucket there is one checkpoint per save: an unnamed one of a run is that from which it was forked."""
    for run in {path.split("/")[2] for path in paths}:
        found = [item for item in raycheck.open_run(f"{bucket}/{folder_of(run)}").checkpoints if item.name]
        saved = sorted(path.partition(run + "/")[2].replace("/", ".") for path in paths if run in path)
        assert sorted(item.name for item in found) == saved


@pytest.mark.parametrize("method", ["run_pass", "save"])
def test_an_engine_that_always_dies_in_one_request_fails_that_request_alone(base, connect, tmp_path, method) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite") as server:
        model = new_model(connect(server), base)
        train(model, range(1))
        server.engine.dies_before = Deaths(method, *(range(1, 4) if method == "save" else (1, 3, 5)))

        future = model.save_state("x") if method == "save" else model.forward_backward([datum(4)], "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="the engine died 3 times"):
            future.result(TIMEOUT_S)

        assert train(model, range(1, 2))


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_requests_run_while_a_save_is_under_way_and_the_save_has_none_of_them(base, connect, tmp_path, dies) -> None:
    """When the engine dies, the save comes again, of the state that it was asked for."""
    bucket = f"memory://{uuid4().hex}"
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        expected = train(undisturbed, range(6))
        losses = train(model, range(2))
        server.engine.hides_commits = True
        first = model.save_state("first")

        losses += train(model, range(2, 4))
        second = model.save_state("second")
        if dies:
            server.engine.kill()
        server.engine.hides_commits = False

        paths = [save.result(TIMEOUT_S).path for save in (first, second)]
        assert losses + train(model, range(4, 6)) == expected
        for path, step in zip(paths, (2, 4), strict=True):
            resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
            assert train(resumed, range(step, 6)) == expected[step:]
        assert server.engine.life == dies
    assert_saved_once(bucket, paths)


def test_a_save_that_fails_leaves_what_ran_meanwhile(base, connect, tmp_path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        expected = train(undisturbed, range(4))
        losses = train(model, range(1))
        server.engine.hides_commits = True
        save = model.save_state("x")
        losses += train(model, range(1, 3))
        server.engine.fails_commits = True

        with pytest.raises(tinker.RequestFailedError, match="no space left"):
            save.result(TIMEOUT_S)

        server.engine.kill()
        assert losses + train(model, range(3, 4)) == expected


@pytest.mark.slow  # the SDK waits for up to 30 s before it asks again
def test_the_server_ends_while_a_save_is_under_way_and_the_next_one_makes_it(base, connect, tmp_path) -> None:
    bucket, port = f"memory://{uuid4().hex}", free_port()
    with tinker_server(base, bucket, tmp_path / "s.sqlite", port=port) as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        expected = train(undisturbed, range(5))
        losses = train(model, range(2))
        server.engine.hides_commits = True
        save = model.save_state("two")
        losses += train(model, range(2, 4))
    with tinker_server(base, bucket, tmp_path / "s.sqlite", port=port):
        path = save.result(TIMEOUT_S).path
        losses += train(model, range(4, 5))
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)

        assert train(resumed, range(2, 5)) == expected[2:]
    assert losses == expected
    assert_saved_once(bucket, [path])


def test_the_server_is_started_again_and_the_client_goes_on(base, connect, tmp_path, undisturbed) -> None:
    """Stopped while a request is under way; the SDK repeats what was refused meanwhile."""
    bucket, port = f"memory://{uuid4().hex}", free_port()
    with tinker_server(base, bucket, tmp_path / "s.sqlite", port=port) as server:
        client = connect(server)
        model = new_model(client, base)
        losses = train(model, range(2))
        path = model.save_state("two").result(TIMEOUT_S).path
        model.forward_backward([datum(5)], "cross_entropy").result(TIMEOUT_S)
        passed = model.forward_backward([datum(6, 2), datum(9, 4)], "cross_entropy")
    with tinker_server(base, bucket, tmp_path / "s.sqlite", port=port) as server:
        losses.append(passed.result(TIMEOUT_S).metrics["loss:sum"])
        model.optim_step(tinker.types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
        losses += train(model, range(3, 4))
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        losses += train(resumed, range(2, 4))

    assert losses == undisturbed[: len(losses)]


def test_a_request_that_was_logged_is_run_by_the_next_server(base, connect, tmp_path) -> None:
    """The answer to the submit was lost with the server; the client sends it again."""
    bucket, state = f"memory://{uuid4().hex}", tmp_path / "s.sqlite"
    body = {"seq_id": 3, "path": "kept", "ttl_seconds": None, "overwrite": False, "type": "save_weights"}
    with tinker_server(base, bucket, state) as server:
        model = new_model(connect(server), base)
        train(model, range(1))
        body["model_id"] = model.model_id
        server.engine.hides_commits = True  # the server ends before it knows of the commit
        first = ask(server.url, "save_weights", body)[1]["request_id"]
        run = f"{bucket}/{folder_of(model.model_id)}"
        wait_until(lambda: any(item.name == "weights.kept" for item in raycheck.open_run(run).checkpoints))
    with tinker_server(base, bucket, state) as server:
        again = ask(server.url, "save_weights", body)[1]["request_id"]
        found = result_of(server.url, first)

        assert "save" not in server.engine.calls  # its checkpoint is there: it has this request's id

    assert again == first
    assert found["path"] == f"tinker://{model.model_id}/weights/kept"
    assert_saved_once(bucket, [found["path"]])


def test_a_second_server_with_the_state_file_replaces_the_first(base, connect, tmp_path) -> None:
    bucket, state = f"memory://{uuid4().hex}", tmp_path / "s.sqlite"
    with tinker_server(base, bucket, state) as first:
        model = new_model(connect(first), base)
        losses = train(model, range(2))
        model.save_state("two").result(TIMEOUT_S)
        with tinker_server(base, bucket, state) as second:
            body = {"model_id": model.model_id, "seq_id": 6, "adam_params": {}, "type": "optim_step"}
            status, found = ask(first.url, "optim_step", body)
            assert (status, "another server" in found["detail"]) == (503, True)
            assert result_of(second.url, ask(second.url, "optim_step", body)[1]["request_id"])
            assert "optim_step" not in first.engine.calls[len(losses) * 2 + 2 :]


def test_a_second_server_takes_the_run_and_the_first_commits_nothing_more(base, connect, tmp_path) -> None:
    """With a copy of the state file, so that only the bucket can tell the two apart."""
    bucket, state = f"memory://{uuid4().hex}", tmp_path / "s.sqlite"
    with tinker_server(base, bucket, state) as first:
        model = new_model(connect(first), base)
        train(model, range(2))
        model.save_state("two").result(TIMEOUT_S)
        copied = Journal(str(state))  # counts the generation up
        copied._db.execute("VACUUM INTO ?", (str(tmp_path / "copy.sqlite"),))
        copied._db.execute("UPDATE server SET generation = generation - 1")
        copied.close()
        with tinker_server(base, bucket, tmp_path / "copy.sqlite") as second:
            body = {"model_id": model.model_id, "seq_id": 6, "path": "second", "type": "save_weights"}
            assert "error" not in result_of(second.url, ask(second.url, "save_weights", body)[1]["request_id"])

            with pytest.raises(tinker.RequestFailedError):
                model.save_state("first").result(TIMEOUT_S)

            found = {item.name for item in raycheck.open_run(f"{bucket}/{folder_of(model.model_id)}").checkpoints}
            assert found == {"weights.two", "weights.second"}


def test_a_number_that_never_comes_fails_what_waits_for_it_and_nothing_else(base, connect, tmp_path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", settings={"hold_s": 0.3}) as server:
        model = new_model(connect(server), base)
        body = {"model_id": model.model_id, "seq_id": 2, "adam_params": {}, "type": "optim_step"}

        found = result_of(server.url, ask(server.url, "optim_step", body)[1]["request_id"])
        late, _ = ask(server.url, "optim_step", {**body, "seq_id": 1})
        after = result_of(server.url, ask(server.url, "optim_step", {**body, "seq_id": 3})[1]["request_id"])

        assert found == {"error": "request 2 came, and 1 did not within 0 s", "category": "user"}
        assert late == 400
        assert after["metrics"] == {"grad_norm": 0.0}


def test_a_silent_session_ends_and_its_checkpoints_stay(base, connect, tmp_path) -> None:
    settings = {"session_timeout_s": 4.0, "cleanup_s": 0.1}  # longer than the save takes on a busy machine
    state = tmp_path / "s.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state, settings=settings) as server:
        client = connect(server)
        model = new_model(client, base)
        path = model.save_state("kept").result(TIMEOUT_S).path
        session = client.holder.get_session_id()

        def has_ended() -> bool:  # a question to the server would be a sign of life
            with closing(sqlite3.connect(state)) as db:
                return db.execute("SELECT status FROM sessions WHERE id = ?", (session,)).fetchone() == ("expired",)

        wait_until(has_ended)

        assert not server.engine._tenants._tenants
        assert ask(server.url, "session_heartbeat", {"session_id": session})[0] == 410
        assert tinker.RestClient(base_url=server.url, api_key=KEY).get_weights_info_by_tinker_path(path).result()


def test_covered_bodies_leave_the_state_file(base, connect, tmp_path) -> None:
    state = tmp_path / "s.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state) as server:
        model = new_model(connect(server), base)

        def kept() -> list[int]:
            query = "SELECT seq FROM requests WHERE lane = ? AND body IS NOT NULL AND seq > 0"
            with closing(sqlite3.connect(state)) as db:
                return [seq for (seq,) in db.execute(query, (model.model_id,))]

        train(model, range(2))
        assert kept() == [1, 2, 3, 4]
        model.save_state("two").result(TIMEOUT_S)
        assert kept() == []
        model.forward_backward([datum(4)], "cross_entropy").result(TIMEOUT_S)
        assert kept() == [6]


def test_a_model_that_is_never_saved_is_saved_for_a_recovery(base, connect, tmp_path) -> None:
    bucket = f"memory://{uuid4().hex}"
    with tinker_server(base, bucket, tmp_path / "s.sqlite", settings={"recovery_steps": 3}) as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = train(model, range(5))
        server.engine.kill()
        steps = server.engine.calls.count("optim_step")
        losses += train(model, range(5, 6))

        assert server.engine.calls.count("optim_step") == steps + 2 + 1  # steps 3 and 4 again, and the new one
        assert losses == train(undisturbed, range(6))
        (saved,) = raycheck.open_run(f"{bucket}/{folder_of(model.model_id)}").checkpoints[:1]
        assert saved.name is None
        assert (
            tinker.RestClient(base_url=server.url, api_key=KEY).list_checkpoints(model.model_id).result().checkpoints
            == []
        )


def test_a_number_far_ahead_is_refused(base, connect, tmp_path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite") as server:
        body = {"model_id": new_model(connect(server), base).model_id, "adam_params": {}}

        assert ask(server.url, "optim_step", {**body, "seq_id": 1 << 50})[0] == 422
        assert ask(server.url, "optim_step", {**body, "seq_id": 0})[0] == 422
        assert result_of(server.url, ask(server.url, "optim_step", {**body, "seq_id": 1})[1]["request_id"])["metrics"]


def test_what_may_run_runs_while_a_later_request_waits(base, connect, tmp_path) -> None:
    with tinker_server(base, f"memory://{uuid4().hex}", tmp_path / "s.sqlite", settings={"hold_s": 100}) as server:
        body = {"model_id": new_model(connect(server), base).model_id, "adam_params": {}}
        waiting = ask(server.url, "optim_step", {**body, "seq_id": 3})[1]["request_id"]

        first = ask(server.url, "optim_step", {**body, "seq_id": 1})[1]["request_id"]
        assert result_of(server.url, first)["metrics"]
        ask(server.url, "optim_step", {**body, "seq_id": 2})
        assert result_of(server.url, waiting)["metrics"]
