"""Checkpoints by the real SDK: saved, loaded, listed, deleted, exported. What they are is asked of the bucket."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

import raycheck
from raycheck.bucket.store.address import join_uri, parse_uri
from raycheck.tinker.checkpoint_paths import folder_of
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, datum, loss_of, new_model, result_of, train
from tests.support.servers.s3_engines import clients_made
from tests.support.servers.tinker_server import RunningServer, tinker_server, write_base_model
from tests.tinker.conftest import KEY


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


def run_of(bucket: str, model: tinker.TrainingClient) -> raycheck.Run:
    return raycheck.open_run(f"{bucket}/{folder_of(model.model_id)}")


def test_a_resumed_model_goes_on_exactly_where_the_saved_one_was(server, connect, base) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(3))
    path = model.save_state("three").result(TIMEOUT_S).path

    undisturbed = train(model, range(3, 6))
    resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)

    assert path == f"tinker://{model.model_id}/weights/three"
    assert train(resumed, range(3, 6)) == undisturbed


def test_a_load_without_the_optimizer_has_the_weights_and_begins_adam_anew(server, connect, base) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(3))
    path = model.save_state("three").result(TIMEOUT_S).path

    fresh = client.create_training_client_from_state(path).result(TIMEOUT_S)
    again = client.create_training_client_from_state(path).result(TIMEOUT_S)

    assert loss_of(fresh) == loss_of(model)
    losses = train(fresh, range(3, 6))
    assert losses[0] == train(model, range(3, 4))[0]
    assert losses[1:] != train(model, range(4, 6))
    assert losses == train(again, range(3, 6))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_state_is_loaded_into_a_model_that_has_done_nothing(server, connect, base, with_optimizer) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(3))
    path = model.save_state("three").result(TIMEOUT_S).path
    other = new_model(client, base, seed=9)

    load = other.load_state_with_optimizer if with_optimizer else other.load_state
    load(path).result(TIMEOUT_S)

    assert (train(other, range(3, 6)) == train(model, range(3, 6))) == with_optimizer


def test_a_load_after_anything_else_is_refused(server, connect, base) -> None:
    model = new_model(connect(server), base)
    train(model, range(1))
    path = model.save_state("one").result(TIMEOUT_S).path

    with pytest.raises(tinker.APIStatusError, match="LoadWeights is not permitted with seq_id 4"):
        model.load_state(path).result(TIMEOUT_S)

    assert train(model, range(1, 2))


@pytest.mark.parametrize("more", [{}, {"base_model": None}, {"base_model": "the base model's name"}])
def test_a_load_that_comes_twice_makes_one_model(server, connect, base, rest, more) -> None:
    """Also when its source was deleted in between."""
    client = connect(server)
    model = new_model(client, base)
    path = model.save_state("one").result(TIMEOUT_S).path
    body = {"session_id": client.holder.get_session_id(), "model_seq_id": 5, "path": path, "optimizer": True}
    body |= {name: value and base for name, value in more.items()}

    first = ask(server.url, "load_weights", body)
    result = result_of(server.url, first[1]["request_id"])
    rest.delete_checkpoint_from_tinker_path(path).result()
    again = ask(server.url, "load_weights", body)

    assert first == again
    assert result == {"type": "load_weights", "path": path, "model_id": f"{body['session_id']}:train:5"}


def test_a_fork_copies_no_tensor(server, connect, base, bucket) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(1))
    path = model.save_state("one").result(TIMEOUT_S).path

    resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)

    (source,) = run_of(bucket, resumed).borrowed
    assert source.endswith(folder_of(model.model_id))


def test_a_checkpoint_is_listed_with_what_its_save_said(server, connect, base, rest) -> None:
    model = new_model(connect(server), base, user_metadata={"renderer_name": "plain"})
    train(model, range(1))
    model.save_state("one", ttl_seconds=7200, user_metadata={"score": "7"}).result(TIMEOUT_S)
    model.save_weights_for_sampler("one").result(TIMEOUT_S)

    first, second = rest.list_checkpoints(model.model_id).result().checkpoints
    run = rest.get_training_run(model.model_id).result()

    assert (first.checkpoint_id, first.checkpoint_type) == ("weights/one", "training")
    assert (second.checkpoint_id, second.checkpoint_type) == ("sampler_weights/one", "sampler")
    assert first.user_metadata == {"score": "7"}
    assert (first.expires_at - first.time).total_seconds() == pytest.approx(7200, abs=1)
    assert second.expires_at is None
    assert first.size_bytes > 0
    assert run.user_metadata == {"renderer_name": "plain"}
    assert (run.last_checkpoint, run.last_sampler_checkpoint) == (first, second)
    assert run.lora_rank == 4
    newest = rest.list_user_checkpoints(limit=2).result()
    assert newest.checkpoints == [second, first]
    assert rest.list_training_runs(limit=1).result().training_runs[0].training_run_id == model.model_id


def test_the_shape_of_a_checkpoint_can_be_asked(server, connect, base, rest) -> None:
    model = new_model(connect(server), base, train_mlp=False, train_unembed=False)
    path = model.save_state("none").result(TIMEOUT_S).path

    found = rest.get_weights_info_by_tinker_path(path).result()

    assert (found.base_model, found.lora_rank) == (base, 4)
    assert (found.train_attn, found.train_mlp, found.train_unembed) == (True, False, False)


def test_a_name_that_is_taken_fails_at_once_and_the_model_goes_on(server, connect, base) -> None:
    model = new_model(connect(server), base)
    model.save_state("same").result(TIMEOUT_S)
    train(model, range(1))

    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        model.save_state("same").result(TIMEOUT_S)

    assert train(model, range(1, 2))


def test_overwrite_replaces_a_checkpoint_and_its_metadata(server, connect, base, rest) -> None:
    client = connect(server)
    model = new_model(client, base)
    path = model.save_state("same", user_metadata={"a": "b"}).result(TIMEOUT_S).path
    train(model, range(1))
    now = loss_of(model)

    model.save_state("same", overwrite=True).result(TIMEOUT_S)

    (found,) = rest.list_checkpoints(model.model_id).result().checkpoints
    assert found.user_metadata is None
    assert loss_of(client.create_training_client_from_state(path).result(TIMEOUT_S)) == now


def test_two_names_at_one_step_are_two_checkpoints(server, connect, base, rest) -> None:
    model = new_model(connect(server), base)
    train(model, range(1))

    model.save_state("a").result(TIMEOUT_S)
    model.save_state("b").result(TIMEOUT_S)

    found = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [item.checkpoint_id for item in found] == ["weights/a", "weights/b"]


def test_a_deleted_checkpoint_is_gone_and_the_other_kind_of_its_name_stays(server, connect, base, rest) -> None:
    client = connect(server)
    model = new_model(client, base)
    path = model.save_state("one").result(TIMEOUT_S).path
    model.save_weights_for_sampler("one").result(TIMEOUT_S)

    rest.delete_checkpoint_from_tinker_path(path).result()

    found = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [item.checkpoint_id for item in found] == ["sampler_weights/one"]
    with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
        client.create_training_client_from_state(path).result(TIMEOUT_S)
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()


def test_a_name_alone_is_refused_with_advice_and_changes_nothing(server, connect, base, rest) -> None:
    """It could mean either kind. The SDK raises at once for a 400, and its users read the text."""
    model = new_model(connect(server), base)
    model.save_state("publish").result(TIMEOUT_S)
    model.save_weights_for_sampler("publish").result(TIMEOUT_S)
    before = rest.list_checkpoints(model.model_id).result().checkpoints
    one = f"training_runs/{model.model_id}/checkpoints"

    with pytest.raises(tinker.BadRequestError, match=r"use weights/NAME, sampler_weights/NAME"):
        rest.delete_checkpoint(model.model_id, "publish").result()
    for method, path, body in (("PUT", "publish/ttl", {"ttl_seconds": 3600}), ("POST", "publish/publish", None)):
        status, answer = ask(server.url, f"{one}/{path}", body, method=method)
        assert (status, "use weights/NAME" in answer["detail"]) == (400, True)

    assert rest.list_checkpoints(model.model_id).result().checkpoints == before
    rest.delete_checkpoint(model.model_id, "weights/publish").result()
    assert [item.checkpoint_id for item in rest.list_checkpoints(model.model_id).result().checkpoints] == [
        "sampler_weights/publish"
    ]


def test_the_newest_checkpoint_can_be_deleted_too_and_its_name_given_again(server, connect, base, bucket, rest) -> None:
    model = new_model(connect(server), base)
    path = model.save_weights_external("one").result(TIMEOUT_S).path
    folder = Path(bucket.removeprefix("file://")) / folder_of(model.model_id) / "exports"
    assert list(folder.rglob("adapter_config.json"))

    rest.delete_checkpoint_from_tinker_path(path).result()

    assert rest.list_checkpoints(model.model_id).result().checkpoints == []
    assert not [item for item in folder.rglob("*") if item.is_file()]
    train(model, range(1))
    model.save_weights_external("one").result(TIMEOUT_S)
    assert len(run_of(bucket, model).checkpoints) == 1  # the deleted one has gone with this commit


def test_an_expiry_can_be_taken_off_and_set(server, connect, base, rest) -> None:
    model = new_model(connect(server), base)
    path = model.save_state("one", ttl_seconds=7200).result(TIMEOUT_S).path

    def expiry():
        return rest.list_checkpoints(model.model_id).result().checkpoints[0].expires_at

    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert expiry() is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert expiry() is not None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()


def test_an_expired_checkpoint_is_neither_listed_nor_loaded(server, connect, base, bucket, rest) -> None:
    client = connect(server)
    model = new_model(client, base)
    path = model.save_state("one").result(TIMEOUT_S).path

    run_of(bucket, model).name_checkpoint("weights.one", "weights.one", expire_after_s=0.001)

    assert rest.list_checkpoints(model.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
        client.create_training_client_from_state(path).result(TIMEOUT_S)
    model.save_state("one").result(TIMEOUT_S)
    assert len(rest.list_checkpoints(model.model_id).result().checkpoints) == 1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers for it
def test_external_weights_are_an_adapter_that_peft_loads(server, connect, base, bucket) -> None:
    model = new_model(connect(server), base)
    train(model, range(3))
    expected = model.forward([datum(8, 5)], "cross_entropy").result(TIMEOUT_S).loss_fn_outputs[0]["logprobs"].to_torch()

    path = model.save_weights_external("final").result(TIMEOUT_S).path

    assert path == f"tinker://{model.model_id}/external_weights/final"
    folder = Path(bucket.removeprefix("file://")) / folder_of(model.model_id) / "exports"
    (adapter,) = (item.parent for item in folder.rglob("adapter_config.json"))
    assert {".lora_A." in name or ".lora_B." in name for name in load_file(adapter / "adapter_model.safetensors")} == {
        True
    }
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        logprobs = torch.log_softmax(loaded(input_ids=torch.arange(5, 13)[None]).logits[0], -1)
    torch.testing.assert_close(logprobs[torch.arange(8), torch.arange(6, 14)], expected)


def test_another_server_lists_and_loads_what_is_in_the_bucket(server, connect, base, bucket, tmp_path) -> None:
    """The machine with the state file is lost: nothing that a checkpoint needs was there alone."""
    model = new_model(connect(server), base, user_metadata={"renderer_name": "plain"})
    train(model, range(2))
    path = model.save_state("two").result(TIMEOUT_S).path

    with tinker_server(base, bucket, tmp_path / "new.sqlite") as other:
        resumed = connect(other).create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        run = tinker.RestClient(base_url=other.url, api_key=KEY).get_training_run(model.model_id).result()
        losses = train(resumed, range(2, 4))

    assert losses == train(model, range(2, 4))
    assert run.user_metadata == {"renderer_name": "plain"}
    assert run.last_checkpoint.tinker_path == path


def test_the_storage_settings_reach_the_engine(s3, connect, base, tmp_path) -> None:
    """They are given once, beside a URI that does not have them."""
    at = parse_uri(s3)
    with tinker_server(base, f"s3://{at.bucket}/{uuid4().hex}", tmp_path / "s.sqlite", storage=at.said) as server:
        client = connect(server)
        model = new_model(client, base)
        train(model, range(2))
        path = model.save_state("two").result(TIMEOUT_S).path
        model.save_weights_for_sampler("two").result(TIMEOUT_S)

        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)

        assert train(resumed, range(2, 4)) == train(model, range(2, 4))


def test_a_save_for_the_sampler_makes_no_client_of_a_store(wire, connect, base, tmp_path, monkeypatch) -> None:
    """Each one reads botocore's description of S3 again, and connects."""
    with tinker_server(base, join_uri(wire.uri, uuid4().hex), tmp_path / "s.sqlite") as server:
        model = new_model(connect(server), base)
        model.save_weights_for_sampler("first").result(TIMEOUT_S)
        made, before = clients_made(monkeypatch), len(wire.heads)

        model.save_weights_for_sampler("second").result(TIMEOUT_S)

    assert made == []
    assert [head.target for head in wire.heads[before:] if "exports" in head.target] == []  # until somebody downloads


def test_an_adapter_of_another_base_model_is_refused(server, connect, base, bucket, tmp_path) -> None:
    path = new_model(connect(server), base).save_state("one").result(TIMEOUT_S).path
    foreign = write_base_model(tmp_path / "foreign", seed=1)

    with (
        tinker_server(foreign, bucket, tmp_path / "new.sqlite") as other,
        pytest.raises(tinker.BadRequestError, match="other weights than this server's base model"),
    ):
        connect(other).create_training_client_from_state(path).result(TIMEOUT_S)


def test_a_save_between_a_pass_and_its_step_keeps_the_gradients_of_the_live_model(server, connect, base) -> None:
    client = connect(server)
    model, plain = new_model(client, base), new_model(client, base)
    for one in (model, plain):
        one.forward_backward([datum(6)], "cross_entropy").result(TIMEOUT_S)
        if one is model:
            one.save_state("between").result(TIMEOUT_S)
        one.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)

    assert loss_of(model) == loss_of(plain)


@pytest.mark.parametrize("name", ["a/b", "", "..", "a b", "x" * 81, "é"])
def test_a_name_that_cannot_be_one_is_refused_and_the_model_goes_on(server, connect, base, name) -> None:
    model = new_model(connect(server), base)

    with pytest.raises(tinker.UnprocessableEntityError, match="checkpoint's name"):
        model.save_state(name).result(TIMEOUT_S)

    assert train(model, range(1))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("training_runs/..%2F..%2Fetc/checkpoints/weights/x", 400),
        ("training_runs/session_x:train:0/checkpoints/weights/..%2Fx", 400),
        ("training_runs/session_x:train:0/checkpoints/other/x", 400),
        ("training_runs/session_x:train:0/checkpoints/weights/x", 404),
        ("training_runs/session_x:train:0/checkpoints/x", 400),
        ("training_runs/session_x:train:0/checkpoints/weights", 400),
        ("training_runs/session_x:train:0/checkpoints/x/publish", 400),
        ("training_runs/session_x:train:0/checkpoints/weights/x/y", 404),
    ],
)
def test_hostile_paths_delete_nothing(server, path, status) -> None:
    found = ask(server.url, path, method="DELETE")

    assert found[0] == status
    assert found[1]["detail"]
