"""Copied and published checkpoints by the real SDK. A copy is in a run of its own, shares its tensors, and is made once."""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

import raycheck
from raycheck.bucket.store.local import LocalStore
from raycheck.tinker.checkpoint_paths import CheckpointPath, folder_of
from raycheck.tinker.checkpoint_store import CheckpointStore
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, loss_of, new_model, train
from tests.support.servers.tinker_server import RunningServer, tinker_server
from tests.tinker.conftest import KEY

PROJECT = "any"  # the SDK asks for one, and the server has none
ONE_KEY = {"x-idempotency-key": "one and the same"}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> str:
    return f"file://{tmp_path_factory.mktemp('bucket')}"


@pytest.fixture(scope="module")
def server(base: str, bucket: str, tmp_path_factory) -> Iterator[RunningServer]:
    with tinker_server(base, bucket, tmp_path_factory.mktemp("state") / "server.sqlite") as running:
        yield running


@pytest.fixture
def rest(server) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=KEY)


def run_id_in(path: str) -> str:
    return CheckpointPath.parse(path).run


def run_of(bucket: str, path: str) -> raycheck.Run:
    return raycheck.open_run(f"{bucket}/{folder_of(run_id_in(path))}")


def tensor_bytes(bucket: str, path: str) -> int:
    """How large the shards are that lie in the folder of a checkpoint's run."""
    folder = Path(bucket.removeprefix("file://")) / folder_of(run_id_in(path))
    return sum(item.stat().st_size for item in folder.rglob("*.distcp"))


def test_a_copy_shares_its_tensors_and_outlives_its_source(server, connect, base, bucket, rest) -> None:
    client = connect(server)
    model = new_model(client, base, user_metadata={"renderer_name": "plain"})
    train(model, range(3))
    path = model.save_state("three", user_metadata={"score": "7"}).result(TIMEOUT_S).path
    undisturbed = train(model, range(3, 6))

    copied = rest.copy_weights(path, PROJECT).result(TIMEOUT_S)

    assert tensor_bytes(bucket, path) > 0
    assert tensor_bytes(bucket, copied) == 0
    (found,) = rest.list_checkpoints(run_id_in(copied)).result().checkpoints
    assert (found.checkpoint_id, found.tinker_path, found.expires_at) == ("weights/three", copied, None)
    assert (found.checkpoint_type, found.user_metadata) == ("training", {"score": "7"})
    assert rest.get_training_run(run_id_in(copied)).result().user_metadata == {"renderer_name": "plain"}
    model.save_state("six").result(TIMEOUT_S)
    rest.delete_checkpoint_from_tinker_path(path).result()
    raycheck.open_run(f"{bucket}/{folder_of(model.model_id)}").prune(grace_s=0.0)
    resumed = client.create_training_client_from_state_with_optimizer(copied).result(TIMEOUT_S)
    assert train(resumed, range(3, 6)) == undisturbed


def test_a_copy_can_be_made_with_await_and_by_the_service_client(server, connect, base, rest) -> None:
    path = new_model(connect(server), base).save_state("one").result(TIMEOUT_S).path
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY, project_id=PROJECT)

    async def copy() -> list[str]:
        return [
            await rest.copy_weights(path, PROJECT),
            await rest.copy_weights_async(path, PROJECT, weights_access_token="of another account"),
            await client.copy_weights(path),
        ]

    copies = asyncio.run(asyncio.wait_for(copy(), TIMEOUT_S))

    assert len({path, *copies}) == 4
    for copied in copies:
        assert rest.get_weights_info_by_tinker_path(copied).result().lora_rank == 4


def test_sampler_weights_stay_that_and_are_sampled_and_downloaded(server, connect, base, rest) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(2))
    path = model.save_weights_for_sampler("two").result(TIMEOUT_S).path
    prompt, params = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=6, seed=1, stop=[])

    def sampled(path: str) -> list[int]:
        sampler = client.create_sampling_client(model_path=path).result(TIMEOUT_S)
        found = sampler.sample(prompt, num_samples=1, sampling_params=params).result(TIMEOUT_S)
        return list(found.sequences[0].tokens)

    copied = rest.copy_weights(path, PROJECT).result(TIMEOUT_S)

    assert copied == f"tinker://{run_id_in(copied)}/sampler_weights/two"
    assert rest.list_checkpoints(run_id_in(copied)).result().checkpoints[0].checkpoint_type == "sampler"
    assert sampled(copied) == sampled(path)
    with pytest.raises(tinker.BadRequestError, match="not a training state"):
        client.create_training_client_from_state(copied).result(TIMEOUT_S)


def test_a_copy_of_external_weights_is_downloaded(server, connect, base, rest) -> None:
    path = new_model(connect(server), base).save_weights_external("one").result(TIMEOUT_S).path

    copied = rest.copy_weights(path, PROJECT).result(TIMEOUT_S)

    files = [sorted(rest.get_external_weights_urls(one).result().urls) for one in (path, copied)]
    assert files[0] == files[1] != []


def test_a_copy_expires_by_itself(server, connect, base, bucket, rest) -> None:
    client = connect(server)
    path = new_model(client, base).save_state("one", ttl_seconds=7200).result(TIMEOUT_S).path

    stays, goes = (rest.copy_weights(path, PROJECT, ttl_seconds=ttl).result(TIMEOUT_S) for ttl in (None, 3600))

    expiry = [rest.list_checkpoints(run_id_in(one)).result().checkpoints[0] for one in (stays, goes)]
    assert expiry[0].expires_at is None
    assert (expiry[1].expires_at - expiry[1].time).total_seconds() == pytest.approx(3600, abs=5)
    run_of(bucket, path).name_checkpoint("weights.one", "weights.one", expire_after_s=0.001)
    with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
        rest.copy_weights(path, PROJECT).result(TIMEOUT_S)
    assert loss_of(client.create_training_client_from_state(stays).result(TIMEOUT_S))


def test_what_cannot_be_copied_is_refused_and_makes_no_run(server, connect, base, rest) -> None:
    model = new_model(connect(server), base)
    path = model.save_state("one").result(TIMEOUT_S).path
    deleted = model.save_state("two").result(TIMEOUT_S).path
    rest.delete_checkpoint_from_tinker_path(deleted).result()
    before = rest.list_training_runs(limit=1000).result().cursor.total_count

    for gone in (deleted, path.replace("one", "other"), "tinker://session_x:train:0/weights/one"):
        with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
            rest.copy_weights(gone, PROJECT).result(TIMEOUT_S)
    for odd in ("tinker://x/weights/one", f"{path}/more", path.replace("weights", "..")):
        with pytest.raises(tinker.BadRequestError, match="is no"):
            rest.copy_weights(odd, PROJECT).result(TIMEOUT_S)
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
        rest.copy_weights(path, PROJECT, ttl_seconds=60).result(TIMEOUT_S)
    session = model.model_id.partition(":")[0]
    status, found = ask(server.url, "copy_weights", {"source_path": path, "session_id": session, "model_seq_id": 7})
    assert (status, "a new session only" in found["detail"]) == (400, True)
    assert ask(server.url, "copy_weights", {"destination_project_id": PROJECT})[0] == 422

    assert rest.list_training_runs(limit=1000).result().cursor.total_count == before


def test_a_call_that_is_repeated_makes_one_copy_and_another_call_another(
    server, connect, base, bucket, tmp_path
) -> None:
    """Also when a server with another state file answers, and when the source is gone by then."""
    model = new_model(connect(server), base)
    path = model.save_state("one").result(TIMEOUT_S).path
    body = {"source_path": path, "destination_project_id": PROJECT, "ttl_seconds": 3600}

    first = ask(server.url, "copy_weights", body, headers=ONE_KEY)
    expires_at = run_of(bucket, first[1]["tinker_path"]).head.expires_at
    other = ask(server.url, "copy_weights", body, headers={"x-idempotency-key": "another"})
    tinker.RestClient(base_url=server.url, api_key=KEY).delete_checkpoint_from_tinker_path(path).result()
    with tinker_server(base, bucket, tmp_path / "new.sqlite") as elsewhere:
        repeated = [ask(url, "copy_weights", body, headers=ONE_KEY) for url in (server.url, elsewhere.url)]

    assert repeated == [first, first]
    assert first[0] == other[0] == 200
    assert first != other
    assert run_of(bucket, first[1]["tinker_path"]).head.expires_at == expires_at


class Killed(BaseException):
    """Nothing of the server handles it, as nothing handles a kill."""


def killed_at(number: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> bool:
    """Do the work until its write of this number, counted from 0, has arrived. Returns whether it came so far."""
    count = 0

    def dying(write: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal count
            done = write(*arguments)
            count += 1
            if count == number + 1:
                raise Killed
            return done

        return run

    with monkeypatch.context() as patched:
        for verb in ("put", "put_parts", "put_if_absent", "put_if_match", "delete"):
            patched.setattr(LocalStore, verb, dying(getattr(LocalStore, verb)))
        try:
            work()
        except Killed:
            return True
        return False


def test_a_copy_that_was_killed_after_any_write_is_made_by_a_repetition(
    server, connect, base, bucket, monkeypatch
) -> None:
    model = new_model(connect(server), base)
    source = CheckpointPath.parse(model.save_state("one").result(TIMEOUT_S).path)
    CheckpointStore(bucket).set_public(source, True)
    number, is_killed = 0, True

    while is_killed:
        run = f"session_killed{number}:train:0"
        is_killed = killed_at(number, monkeypatch, partial(CheckpointStore(bucket).copy, source, run, 3600))
        before = CheckpointStore(bucket).of_run(run)
        copied = CheckpointStore(bucket).copy(source, run, 3600)

        (found,) = CheckpointStore(bucket).of_run(run)
        assert found.path == copied
        assert before in ([], [found])
        assert not found.is_public
        assert raycheck.open_run(found.uri).borrowed
        number += 1

    assert number > 5  # the source's hold, the reserved name, manifest, `latest`, that it is not public, its name


def test_a_deleted_copy_is_gone_with_its_run_and_gives_its_source_back(server, connect, base, bucket, rest) -> None:
    path = new_model(connect(server), base).save_state("one").result(TIMEOUT_S).path
    copied = rest.copy_weights(path, PROJECT).result(TIMEOUT_S)
    assert list(run_of(bucket, path).lent) == [f"../{folder_of(run_id_in(copied))}"]

    rest.delete_checkpoint_from_tinker_path(copied).result()

    with pytest.raises(tinker.NotFoundError):
        rest.list_checkpoints(run_id_in(copied)).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(copied).result()
    with pytest.raises(raycheck.errors.NotFoundError):
        run_of(bucket, copied)
    assert run_of(bucket, path).lent == {}


def test_what_was_made_of_a_copy_outlives_the_copy_and_its_source(server, connect, base, bucket, rest) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(2))
    path = model.save_state("two").result(TIMEOUT_S).path
    undisturbed = train(model, range(2, 4))
    model.save_state("four").result(TIMEOUT_S)
    copied = rest.copy_weights(path, PROJECT).result(TIMEOUT_S)
    again = rest.copy_weights(copied, PROJECT).result(TIMEOUT_S)
    resumed = client.create_training_client_from_state_with_optimizer(copied).result(TIMEOUT_S)

    for one in (path, copied):
        rest.delete_checkpoint_from_tinker_path(one).result()
        with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
            rest.copy_weights(one, PROJECT).result(TIMEOUT_S)
    run_of(bucket, path).prune(grace_s=0.0)
    server.engine.kill()

    assert train(resumed, range(2, 4)) == undisturbed
    third = client.create_training_client_from_state_with_optimizer(again).result(TIMEOUT_S)
    assert train(third, range(2, 4)) == undisturbed


def test_a_copy_cannot_be_trained_on(server, connect, base, rest) -> None:
    path = new_model(connect(server), base).save_state("one").result(TIMEOUT_S).path
    run = run_id_in(rest.copy_weights(path, PROJECT).result(TIMEOUT_S))

    status, found = ask(server.url, "optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})

    assert (status, found["detail"]) == (404, f"there is no model {run}")


def public_in(rest: tinker.RestClient, model: tinker.TrainingClient) -> dict[str, bool]:
    return {item.checkpoint_id: item.public for item in rest.list_checkpoints(model.model_id).result().checkpoints}


def test_a_published_checkpoint_stays_so_while_its_model_trains_and_for_every_server(
    server, connect, base, bucket, rest, tmp_path
) -> None:
    model = new_model(connect(server), base)
    paths = [model.save_state(name).result(TIMEOUT_S).path for name in ("one", "two")]
    sampler = model.save_weights_for_sampler("one").result(TIMEOUT_S).path

    for path in (paths[0], paths[0], sampler):  # twice is as once
        rest.publish_checkpoint_from_tinker_path(path).result()
    train(model, range(1))
    model.save_state("three").result(TIMEOUT_S)
    rest.set_checkpoint_ttl_from_tinker_path(sampler, 3600).result()

    expected = {"weights/one": True, "weights/two": False, "sampler_weights/one": True, "weights/three": False}
    assert public_in(rest, model) == expected
    with tinker_server(base, bucket, tmp_path / "new.sqlite") as other:
        elsewhere = tinker.RestClient(base_url=other.url, api_key=KEY)
        assert public_in(elsewhere, model) == expected
        for path in (sampler, sampler, paths[1]):
            elsewhere.unpublish_checkpoint_from_tinker_path(path).result()
    assert public_in(rest, model) == {**expected, "sampler_weights/one": False}
    assert run_of(bucket, paths[1]).at("weights.two").scores == {}  # it has never been public


def test_copies_and_what_overwrites_a_published_checkpoint_are_not_public(server, connect, base, rest) -> None:
    model = new_model(connect(server), base)
    path = model.save_state("one").result(TIMEOUT_S).path
    rest.publish_checkpoint_from_tinker_path(path).result()

    copied = rest.copy_weights(path, PROJECT).result(TIMEOUT_S)
    model.save_state("one", overwrite=True).result(TIMEOUT_S)

    assert not rest.list_checkpoints(run_id_in(copied)).result().checkpoints[0].public
    assert public_in(rest, model) == {"weights/one": False}


def test_what_is_not_there_cannot_be_published(server, connect, base, rest) -> None:
    model = new_model(connect(server), base)
    path = model.save_state("one").result(TIMEOUT_S).path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()

    for change in (rest.publish_checkpoint_from_tinker_path, rest.unpublish_checkpoint_from_tinker_path):
        with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
            change(path).result()
    assert ask(server.url, "training_runs/x/checkpoints/weights/one/publish", {})[0] == 400
    model.save_state("one").result(TIMEOUT_S)
    assert public_in(rest, model) == {"weights/one": False}


def test_the_storage_usage_counts_what_is_listed_and_shared_bytes_once(connect, base, tmp_path) -> None:
    with tinker_server(base, f"file://{tmp_path}/bucket", tmp_path / "s.sqlite") as server:
        client = connect(server)
        rest, admin = (kind(base_url=server.url, api_key=KEY) for kind in (tinker.RestClient, tinker.AdminClient))
        assert admin.get_current_checkpoint_storage_usage().result().data == []
        model = new_model(client, base)
        path = model.save_state("state").result(TIMEOUT_S).path
        model.save_weights_for_sampler("sampler").result(TIMEOUT_S)
        model.save_weights_and_get_sampling_client()  # without a name, and not listed
        copied = rest.copy_weights(path, PROJECT).result()

        (usage,) = admin.get_current_checkpoint_storage_usage().result().data
        listed = rest.list_user_checkpoints().result().checkpoints
        rest.delete_checkpoint_from_tinker_path(path).result()
        (after,) = admin.get_current_checkpoint_storage_usage().result().data

    sizes = {item.tinker_path: item.size_bytes for item in listed}
    assert len(sizes) == 3
    assert usage.checkpoint_count == 3
    assert usage.size_bytes == sum(sizes.values()) - sizes[copied] > 0
    assert usage.size_gigabytes == usage.size_bytes / 1e9
    assert (after.checkpoint_count, after.size_bytes) == (2, sum(sizes.values()) - sizes[path])


@pytest.mark.parametrize("route", ["billing/usage/checkpoints/current", "training_runs"])
def test_a_project_is_refused_where_it_would_leave_something_out(server, route) -> None:
    status, answer = ask(server.url, f"{route}?project_id=mine")

    assert (status, "no projects" in answer["detail"]) == (400, True)


def test_the_sdks_command_shows_the_storage_usage(server, connect, base) -> None:
    new_model(connect(server), base).save_state("one").result(TIMEOUT_S)

    done = CliRunner().invoke(
        main_cli,
        ["-f", "json", "billing", "checkpoint-storage"],
        env={"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
    )

    assert done.exit_code == 0, done.output
    (usage,) = json.loads(done.stdout)["data"]
    assert usage["checkpoint_count"] >= 1
