"""Weights for a sampling session are published: without a commit, and the same to the bit as a checkpoint's."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from uuid import uuid4

import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import raycheck
from raycheck.bucket.store.address import join_uri
from raycheck.tinker.checkpoint_paths import folder_of
from raycheck.tinker.engine import commits
from raycheck.tinker.engine.orders import SaveOrder
from raycheck.tinker.journal import Journal, LoggedRequest
from raycheck.tinker.model_queue import ModelQueue
from tests.published.weights import assert_equal
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, datum, new_model, result_of, train
from tests.support.servers.tinker_server import tinker_server, wait_until
from tests.tinker.test_deaths import Deaths
from tests.tinker.test_sampling import sampled


@pytest.fixture
def bucket(tmp_path) -> str:
    return f"file://{tmp_path}/bucket"


def uri_of(bucket: str, model: tinker.TrainingClient) -> str:
    return join_uri(bucket, folder_of(model.model_id))


def sampler_of(model: tinker.TrainingClient) -> tinker.SamplingClient:
    return model.save_weights_and_get_sampling_client().result(TIMEOUT_S)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_any_sampler_can_follow_what_the_client_samples_from(connect, base, bucket, tmp_path) -> None:
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        model = new_model(connect(server), base)
        with raycheck.follow(uri_of(bucket, model), tmp_path / "policy") as follower:
            for step in range(3):
                train(model, range(step, step + 1))
                sampler_of(model)
                version = follower.update()
                assert (version.number, version.step, version.checkpoint) == (step + 1, step + 1, None)
            asked = model.forward([datum(8, 5)], "cross_entropy").result(TIMEOUT_S)
            loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), version.path)
            model.save_weights_external("same").result(TIMEOUT_S)
        (export,) = (tmp_path / "bucket" / folder_of(model.model_id) / "exports").iterdir()

        with torch.no_grad():
            logprobs = torch.log_softmax(loaded(input_ids=torch.arange(5, 13)[None]).logits[0], -1)
        expected = asked.loss_fn_outputs[0]["logprobs"].to_torch()
        torch.testing.assert_close(logprobs[torch.arange(8), torch.arange(6, 14)], expected)
        weights = "adapter_model.safetensors"
        assert_equal(load_file(version.path / weights), load_file(export / weights))
        one, other = (json.loads((place / "adapter_config.json").read_text()) for place in (version.path, export))
        assert {**one, "target_modules": set(one["target_modules"])} == {
            **other,
            "target_modules": set(other["target_modules"]),
        }


def test_it_commits_nothing_and_costs_few_requests(wire, connect, base, tmp_path) -> None:
    with tinker_server(base, join_uri(wire.uri, uuid4().hex), tmp_path / "s.sqlite") as server:
        model = new_model(connect(server), base)
        sampler_of(model)
        before = len(wire.heads)

        sampler_of(model)

    paths = [(head.method, head.target.partition("?")[0].rpartition("/")[2]) for head in wire.heads[before:]]
    assert sorted(path for path in paths if path[0] == "PUT" or path[1] in ("latest", "versions.json")) == [
        ("GET", "latest"),  # whether this attempt is the newest
        ("PUT", "adapter_config.json"),
        ("PUT", "adapter_model.safetensors"),
        ("PUT", "version.json"),
        ("PUT", "versions.json"),
    ]
    assert raycheck.open_run(uri_of(server.service.checkpoints.root, model)).checkpoints == ()


@pytest.mark.parametrize("method", ["publish", "published"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_engine_dies_while_it_publishes_and_the_client_does_not_notice(
    base, connect, bucket, tmp_path, method, when
) -> None:
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses, expected = train(model, range(2)), train(undisturbed, range(2))
        setattr(server.engine, f"dies_{when}", Deaths(method, 1))

        found = sampled(sampler_of(model), 1, temperature=0.0)

        assert server.engine.life == 1
        assert found == sampled(sampler_of(undisturbed), 1, temperature=0.0)
        assert losses + train(model, range(2, 4)) == expected + train(undisturbed, range(2, 4))


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_requests_run_while_it_is_under_way_and_a_commit_waits(base, connect, bucket, tmp_path, dies) -> None:
    """What is published is the adapter as it was when the client asked."""
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses, expected = train(model, range(2)), train(undisturbed, range(2))
        server.engine.hides_versions = True
        waiting = model.save_weights_and_get_sampling_client()
        losses += train(model, range(2, 3))
        save = model.save_state("three")
        if dies:
            server.engine.kill()
        server.engine.hides_versions = False

        found, path = waiting.result(TIMEOUT_S), save.result(TIMEOUT_S).path

        assert sampled(found, 1, temperature=0.0) == sampled(sampler_of(undisturbed), 1, temperature=0.0)
        assert losses + train(model, range(3, 5)) == expected + (later := train(undisturbed, range(2, 5)))
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        assert train(resumed, range(3, 5)) == later[1:]


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_it_does_not_wait_for_a_commit(base, connect, bucket, tmp_path, dies) -> None:
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        losses = train(model, range(2))
        server.engine.hides_commits = True
        save = model.save_state("two")
        losses += train(model, range(2, 3))

        found = sampled(sampler_of(model), 1, temperature=0.0)

        if dies:
            server.engine.kill()
        server.engine.hides_commits = False
        resumed = client.create_training_client_from_state_with_optimizer(save.result(TIMEOUT_S).path).result(TIMEOUT_S)
        losses += train(model, range(3, 4))
        assert losses == train(undisturbed, range(3)) + (last := train(undisturbed, range(3, 4)))
        assert train(resumed, range(2, 4)) == [losses[2], *last]
        assert found != sampled(sampler_of(undisturbed), 1, temperature=0.0)


def test_a_commit_that_must_run_again_runs_before_what_was_published_after_it(
    base, connect, bucket, tmp_path, monkeypatch
) -> None:
    """The engine dies just before the publish begins, and the upload of the commit before it never ends."""
    uploads, deaths = [], []
    begin, must_end = commits.begin_save, ModelQueue._must_end_before

    def begin_save(checkpointer: raycheck.Checkpointer, order: SaveOrder) -> None:
        uploads.append(order.name)
        if len(uploads) > 1:
            begin(checkpointer, order)

    def must_end_before(queue: ModelQueue, request: LoggedRequest) -> object:
        found = must_end(queue, request)
        if request.kind == "save_weights_for_sampler" and queue._saves and found is None and not deaths:
            deaths.append(request.seq)
            asyncio.get_running_loop().call_soon(server.engine.kill)
        return found

    monkeypatch.setattr(commits, "begin_save", begin_save)
    monkeypatch.setattr(ModelQueue, "_must_end_before", must_end_before)
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        server.engine.hides_commits = True
        losses = train(model, range(2))
        save = model.save_state("two")
        losses += train(model, range(2, 3))
        waiting = model.save_weights_and_get_sampling_client()
        wait_until(lambda: deaths)
        server.engine.hides_commits = False

        waiting.result(TIMEOUT_S)
        resumed = client.create_training_client_from_state_with_optimizer(save.result(TIMEOUT_S).path).result(TIMEOUT_S)

        expected = train(undisturbed, range(4))
        assert uploads == ["weights.two", "weights.two"]
        assert train(resumed, range(2, 4)) == expected[2:]
        server.engine.kill()
        assert losses + train(model, range(3, 4)) == expected


def test_a_session_never_samples_from_what_took_the_place_of_its_weights(base, connect, bucket, tmp_path) -> None:
    with tinker_server(base, bucket, tmp_path / "s.sqlite") as server:
        model = new_model(connect(server), base)
        train(model, range(1))
        old = sampler_of(model)
        first = sampled(old, 1, temperature=0.0)
        shutil.rmtree(tmp_path / "bucket" / folder_of(model.model_id) / "published")
        train(model, range(1, 3))
        assert sampled(sampler_of(model), 1, temperature=0.0) != first

        assert sampled(old, 1, temperature=0.0) == first
        server.engine.kill()
        with pytest.raises(tinker.RequestFailedError, match="make a new sampling client"):
            sampled(old, 1, temperature=0.0)


def test_a_model_whose_steps_take_long_is_saved_for_a_recovery_while_it_trains(base, connect, bucket, tmp_path) -> None:
    with tinker_server(base, bucket, tmp_path / "s.sqlite", settings={"recovery_s": 0.0}) as server:
        client = connect(server)
        model, undisturbed = new_model(client, base), new_model(client, base)
        server.engine.hides_commits = True  # the save after the first step stays under way, and the others wait for it
        losses = train(model, range(3))
        assert server.engine.calls.count("save") == 1
        server.engine.hides_commits = False
        with closing(sqlite3.connect(tmp_path / "s.sqlite")) as db:
            steps_in_no_checkpoint = (
                "SELECT count(*) FROM requests WHERE kind = 'optim_step' AND body IS NOT NULL AND lane = ?"
            )
            wait_until(lambda: db.execute(steps_in_no_checkpoint, (model.model_id,)).fetchall() == [(2,)])
        losses += train(model, range(3, 4))
        wait_until(lambda: any(item.step == 4 for item in raycheck.open_run(uri_of(bucket, model)).checkpoints))
        server.engine.kill()
        steps = server.engine.calls.count("optim_step")

        losses += train(model, range(4, 5))

        assert server.engine.calls.count("optim_step") == steps + 1  # nothing is replayed
        assert losses == train(undisturbed, range(5))


def test_a_server_that_was_replaced_publishes_nothing(base, connect, bucket, tmp_path) -> None:
    """With a copy of the state file, so that only the bucket can tell the two apart."""
    state = tmp_path / "s.sqlite"
    with tinker_server(base, bucket, state) as first:
        model = new_model(connect(first), base)
        train(model, range(1))
        sampler_of(model)
        copied = Journal(str(state))  # counts the generation up
        copied._db.execute("VACUUM INTO ?", (str(tmp_path / "copy.sqlite"),))
        copied._db.execute("UPDATE server SET generation = generation - 1")
        copied.close()
        with tinker_server(base, bucket, tmp_path / "copy.sqlite") as second:
            body = {"model_id": model.model_id, "seq_id": 4, "path": "second", "type": "save_weights"}
            assert "error" not in result_of(second.url, ask(second.url, "save_weights", body)[1]["request_id"])

            with pytest.raises(tinker.RequestFailedError, match="attempt 2 has claimed the run"):
                sampler_of(model)

        (version,) = raycheck.open_run(uri_of(bucket, model)).published().versions
        assert version.number == 1
