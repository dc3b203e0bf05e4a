"""What is wrong gets a 4xx with words, which the SDK does not repeat, and the server goes on as before."""

import json
import tracemalloc

import numpy as np
import pytest
import tinker
import zstandard
from tinker.proto import tinker_public_pb2 as public_pb

from raycheck.tinker.wire.tensors import MalformedDataError, cells_in_json, cells_in_protobuf
from raycheck.tinker.wire.training_data import MAX_SPARSE_CELLS, Limits, batch_in_protobuf
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, datum, new_model, result_of, train
from tests.support.servers.tinker_server import tinker_server

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.mark.parametrize("body", [b"", b"\xff\xff\xff", b"\x0a\x00", b"{}", b"\x0a\x05ab", b"\x00" * 1000])
def test_an_unparsable_message_is_refused(server, body) -> None:
    status, found = ask(server.url, "forward_backward", body, headers=PROTOBUF)

    assert status == 422
    assert "ForwardBackwardRequest" in found["detail"]


def test_a_fault_of_the_server_is_said_once(server, monkeypatch) -> None:
    """The SDK repeats a 500 for five minutes."""

    def broken(*_: object) -> str:
        raise ZeroDivisionError("a mistake of the server's")

    monkeypatch.setattr(type(server.service), "submit_json", broken)

    status, answer = ask(server.url, "optim_step", {"model_id": "a", "seq_id": 1})

    assert status == 400
    assert "ZeroDivisionError: a mistake of the server's" in answer["detail"]


@pytest.mark.parametrize(
    "path", ["create_session", "create_model", "forward", "optim_step", "save_weights", "load_weights"]
)
@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"3", b'{"a":' * 3000, b"{}\x00", b'{"a":' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_json_object_is_refused(server, path, body) -> None:
    status, found = ask(server.url, path, body)

    assert status == 422
    assert found["detail"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("create_model", {"session_id": 1, "model_seq_id": 0, "base_model": "x", "lora_config": {"rank": 4}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "base_model": "other", "lora_config": {"rank": 4}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "lora_config": {"rank": 0}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "lora_config": {"rank": 10**9}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "lora_config": {"rank": 1, "train_mlp": "no"}}),
        ("create_model", {"session_id": "s", "model_seq_id": -1, "lora_config": {"rank": 1}}),
        ("create_model", {"session_id": "s", "model_seq_id": 0, "lora_config": {"rank": 1}, "model_role": "critic"}),
        ("create_model", {"session_id": "s", "model_seq_id": 0}),
        ("retrieve_future", {}),
        ("retrieve_future", {"request_id": 7}),
        ("session_heartbeat", {"session_id": None}),
        ("optim_step", {"model_id": ["x"], "adam_params": {}}),
    ],
)
def test_fields_of_a_wrong_type_are_refused(server, path, body) -> None:
    assert ask(server.url, path, body)[0] == 422


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("retrieve_future", {"request_id": "nobody's"}),
        ("optim_step", {"model_id": "nobody's", "adam_params": {}}),
        ("get_info", {"model_id": "nobody's"}),
        ("create_model", {"session_id": "nobody's", "model_seq_id": 0, "lora_config": {"rank": 1}}),
        (
            "load_weights",
            {"session_id": "s", "model_seq_id": 0, "path": "tinker://s:train:0/weights/x", "optimizer": True},
        ),
        ("weights_info", {"tinker_path": "tinker://s:train:0/weights/x"}),
        ("no_such_route", {}),
    ],
)
def test_what_is_not_there_is_404(server, base, path, body) -> None:
    body = {"base_model": base, **body} if path == "create_model" else body

    status, found = ask(server.url, path, body)

    assert status == 404
    assert found["detail"]


@pytest.mark.parametrize(
    "path",
    ["x", "tinker://a/b", "tinker://r/weights/x", "tinker://s:train:0/other/x", "tinker://s:train:0/weights/../x"],
)
def test_a_path_that_cannot_be_one_is_refused(server, path) -> None:
    assert ask(server.url, "weights_info", {"tinker_path": path})[0] == 400


def protobuf(model_id: str, seq: int, **change) -> bytes:
    """A pass of four tokens with something wrong."""
    message = public_pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq, loss_fn=change.get("loss_fn", "cross_entropy")
    )
    item = message.data.add()
    tokens = np.asarray(change.get("tokens", [1, 2, 3, 4]), np.int32).tobytes()
    item.model_input.add().encoded_text.tokens = tokens + change.get("more", b"")
    for name, values in {"target_tokens": [2, 3, 4, 5], **change.get("inputs", {})}.items():
        if values is not None:
            whole = all(isinstance(value, int) for value in values)
            tensor = item.loss_fn_inputs[name]
            tensor.dtype = public_pb.DTYPE_INT64 if whole else public_pb.DTYPE_FLOAT32
            tensor.dense = np.asarray(values, np.int64 if whole else np.float32).tobytes()
            tensor.shape.extend(change.get("shape", [len(values)]))
    for name, value in change.get("config", {}).items():
        message.loss_fn_config[name] = value
    if change.get("image"):
        item.model_input.add().image.data = b"png"
    if change.get("empty"):
        del message.data[:]
    return message.SerializeToString()


WRONG = {
    "a token outside of the vocabulary": {"tokens": [1, 2, 3, 64]},
    "a negative token": {"tokens": [1, -2, 3, 4]},
    "no tokens": {"tokens": []},
    "torn tokens": {"more": b"\x00"},
    "too many tokens": {"tokens": [1] * 65, "inputs": {"target_tokens": [1] * 65}},
    "no targets": {"inputs": {"target_tokens": None}},
    "too few targets": {"inputs": {"target_tokens": [1]}},
    "targets that are no tokens": {"inputs": {"target_tokens": [0.5, 1.0, 1.0, 1.0]}},
    "a target outside of the vocabulary": {"inputs": {"target_tokens": [1, 2, 3, 1 << 40]}},
    "too few weights": {"inputs": {"weights": [1.0]}},
    "a weight that is no number": {"inputs": {"weights": [1.0, float("nan"), 1.0, 1.0]}},
    "a shape that is not the data's": {"shape": [1 << 40]},
    "a negative shape": {"shape": [-1, -4]},
    "a shape that numpy cannot hold": {"inputs": {"target_tokens": []}, "shape": [0, 1 << 62]},
    "more dimensions than numpy has": {"shape": [4, *[1] * 69]},
    "two targets for each token": {"shape": [2, 2]},
    "an unknown loss": {"loss_fn": "no_such_loss"},
    "a loss without its inputs": {"loss_fn": "ppo"},
    "a loss for a critic": {"loss_fn": "ppo_critic", "inputs": {"values": [0.0] * 4, "returns": [0.0] * 4}},
    "a setting that the loss has not": {"config": {"clip_low_threshold": 0.5}},
    "an image": {"image": True},
    "no datum": {"empty": True},
}


@pytest.mark.parametrize("what", WRONG)
def test_data_that_cannot_be_trained_on_is_refused_and_its_number_is_used(server, connect, base, what) -> None:
    model = new_model(connect(server), base)

    answers = [
        ask(server.url, "forward_backward", protobuf(model.model_id, 1, **WRONG[what]), headers=PROTOBUF) for _ in "12"
    ]

    assert answers[0][0] == 422, answers
    assert answers[0][1]["detail"]
    assert answers[1] == answers[0]
    good = ask(server.url, "forward_backward", protobuf(model.model_id, 2), headers=PROTOBUF)
    assert result_of(server.url, good[1]["request_id"])["metrics"]["loss:sum"] > 0


HUGE = 10**400
IN_JSON = {"data": [2, 3, 4, 5], "dtype": "int64", "shape": [4]}


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"data": [HUGE] * 4, "dtype": "float32", "shape": [4]}},
        {"target_tokens": {**IN_JSON, "data": [HUGE] * 4}},
        {"target_tokens": {**IN_JSON, "data": [], "shape": [0, 1 << 62]}},
        {"target_tokens": {**IN_JSON, "shape": [4, *[1] * 69]}},
        {"target_tokens": {**IN_JSON, "data": [], "shape": [HUGE, 0]}},
        {"loss_fn_config": {"clip_low_threshold": HUGE}},
    ],
    ids=["value", "target", "size", "dimensions", "huge size", "setting"],
)
def test_a_json_number_beyond_every_range_is_refused_and_its_number_is_used(server, connect, base, change) -> None:
    model = new_model(connect(server), base)

    def passed(seq: int, **more) -> tuple[int, dict]:
        config = more.pop("loss_fn_config", None)
        floats = {"data": [1.0] * 4, "dtype": "float32", "shape": [4]}
        inputs = {"target_tokens": IN_JSON, "logprobs": floats, "advantages": floats, **more}
        item = {"model_input": {"chunks": [{"tokens": [1, 2, 3, 4]}]}, "loss_fn_inputs": inputs}
        given = {"data": [item], "loss_fn": "ppo", "loss_fn_config": config}
        body = {"model_id": model.model_id, "seq_id": seq, "forward_backward_input": given}
        return ask(server.url, "forward_backward", body)

    status, found = passed(1, **change)

    assert status == 422, found
    assert "internal error" not in found["detail"]
    assert "metrics" in result_of(server.url, passed(2)[1]["request_id"])


def test_a_zstd_body_is_read_and_a_zstd_bomb_is_refused(server, connect, base) -> None:
    model = new_model(connect(server), base)
    headers = {**PROTOBUF, "Content-Encoding": "zstd"}
    small = zstandard.compress(protobuf(model.model_id, 1))
    bomb = zstandard.compress(b"\x00" * (300 * 1024 * 1024))

    refused, _ = ask(server.url, "forward_backward", bomb, headers=headers)
    status, found = ask(server.url, "forward_backward", small, headers=headers)

    assert refused in (400, 413)
    assert status == 200, found
    assert result_of(server.url, found["request_id"])["metrics"]["loss:sum"] > 0


@pytest.mark.parametrize(
    "params",
    [
        None,
        {"learning_rate": "x"},
        {"learning_rate": HUGE},
        {"learning_rate": -1.0},
        {"beta1": 1.0},
        {"type": "dimuon"},
        {"eps": True},
    ],
)
def test_a_step_that_cannot_be_made_is_refused_and_its_number_is_used(server, connect, base, params) -> None:
    model = new_model(connect(server), base)

    status, found = ask(server.url, "optim_step", {"model_id": model.model_id, "seq_id": 1, "adam_params": params})

    assert status == 422
    assert found["detail"]
    body = {"model_id": model.model_id, "seq_id": 2, "adam_params": {}}
    assert result_of(server.url, ask(server.url, "optim_step", body)[1]["request_id"])["metrics"]


def test_a_loss_that_is_not_finite_fails_and_adds_no_gradient(server, connect, base) -> None:
    model = new_model(connect(server), base)
    odd = datum(4, weights=[3e38, 3e38, 3e38, 3e38])

    with pytest.raises(tinker.RequestFailedError, match="no gradient was added"):
        model.forward_backward([odd], "cross_entropy").result(TIMEOUT_S)

    assert model.optim_step(tinker.types.AdamParams()).result(TIMEOUT_S).metrics == {"grad_norm": 0.0}


@pytest.mark.parametrize("ttl_s", [0, 60, 3599, 10**12, 7200.5, "7200"])
def test_an_expiry_that_cannot_be_is_refused(server, connect, base, ttl_s) -> None:
    model = new_model(connect(server), base)

    status, found = ask(
        server.url, "save_weights", {"model_id": model.model_id, "seq_id": 1, "path": "x", "ttl_seconds": ttl_s}
    )

    assert status == 422
    assert "ttl_seconds" in found["detail"]


def test_metadata_that_no_checkpoint_could_hold_is_refused(server, connect, base) -> None:
    model = new_model(connect(server), base)

    with pytest.raises(tinker.APIStatusError, match="user_metadata has"):
        model.save_state("x", user_metadata={"text": '"' * 900}).result(TIMEOUT_S)

    model.save_state("y", user_metadata={"text": "x" * 900}).result(TIMEOUT_S)


def test_only_who_has_the_key_is_answered(base, connect, tmp_path) -> None:
    with tinker_server(base, f"file://{tmp_path}/bucket", tmp_path / "s.sqlite", key="tml-0123456789") as server:
        assert ask(server.url, "healthz")[0] == 200
        for key in ("", "tml-other-key", "tml-012345678\xe9"):
            assert ask(server.url, "create_session", {}, headers={"x-api-key": key})[0] == 401
        with pytest.raises(tinker.AuthenticationError):
            connect(server, key="tml-wrong-key-").holder.get_session_id()

        assert train(new_model(connect(server, key="tml-0123456789"), base), range(1))


def test_a_hostile_json_number_does_not_end_the_server(server, connect, base) -> None:
    model = new_model(connect(server), base)
    text = json.dumps({"model_id": model.model_id, "seq_id": 1, "adam_params": {"learning_rate": 0}}).replace(
        "0}", "1e999}"
    )

    assert ask(server.url, "optim_step", text.encode())[0] == 422
    assert ask(server.url, "healthz")[0] == 200


SPARSE = {
    "data": [4, 5],
    "dtype": "int64",
    "shape": [3, 2],
    "sparse_crow_indices": [0, 1, 1, 2],
    "sparse_col_indices": [1, 0],
}


def test_sparse_rows_are_read_with_zeros_between() -> None:
    assert cells_in_json("x", SPARSE).dense().tolist() == [[0, 4], [0, 0], [5, 0]]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3]},
        {"shape": [3, 1]},
        {"shape": [2, 2]},
        {"shape": [3, -2]},
        {"shape": [3, 1 << 40]},
        {"sparse_col_indices": [1, 2]},
        {"sparse_col_indices": [1, -1]},
        {"sparse_col_indices": [1]},
        {"sparse_col_indices": None},
        {"sparse_crow_indices": [0, 2, 1, 2]},
        {"sparse_crow_indices": [0, 1, 1, 3]},
        {"sparse_crow_indices": [1, 1, 1, 2]},
        {"sparse_crow_indices": []},
        {"sparse_crow_indices": [0, 2, 2, 2], "sparse_col_indices": [1, 1]},
        {"sparse_crow_indices": [0, 2, 2, 2], "sparse_col_indices": [1, 0]},
        {"shape": [0, 1 << 62], "data": [], "sparse_crow_indices": [0], "sparse_col_indices": []},
        {"data": [4]},
        {"data": [[4], [5]]},
    ],
    ids=str,
)
def test_sparse_rows_that_do_not_lie_in_their_shape_are_refused(change) -> None:
    with pytest.raises(MalformedDataError, match="x "):
        cells_in_json("x", {**SPARSE, **change})


def wide_rows(
    count: int, *, tokens: int, shape: list[int], used: str = "target_tokens"
) -> public_pb.ForwardBackwardRequest:
    """A request with data whose input `used` is sparse, with no value listed."""
    message = public_pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    for _ in range(count):
        item = message.data.add()
        item.model_input.add().encoded_text.tokens = np.zeros(tokens, np.int32).tobytes()
        item.loss_fn_inputs["target_tokens"].dtype = public_pb.DTYPE_INT64
        item.loss_fn_inputs["target_tokens"].dense = np.zeros(tokens, np.int64).tobytes()
        tensor = public_pb.Tensor(dtype=public_pb.DTYPE_INT64, shape=shape)
        tensor.sparse_csr.crow_indices = np.zeros(shape[0] + 1, np.int64).tobytes()
        item.loss_fn_inputs[used].CopyFrom(tensor)
    return message


def peak_bytes(message: public_pb.ForwardBackwardRequest, vocab_size: int, match: str) -> int:
    """How much memory it takes to refuse a request."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedDataError, match=match):
            batch_in_protobuf(message, Limits(vocab_size=vocab_size, max_tokens=0))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("used", "shape", "match"),
    [
        ("target_tokens", [1, 1 << 22], "at most the vocabulary's 1000"),
        ("target_tokens", [3, 1000], "model_input 1 tokens"),
        ("weights", [1, 1 << 22], r"the shape \[1\], as target_tokens"),
    ],
)
def test_a_sparse_tensor_of_another_shape_than_its_tokens_is_never_filled(used, shape, match) -> None:
    message = wide_rows(1, tokens=1, shape=shape, used=used)

    assert peak_bytes(message, 1000, match) < 1 << 20


def test_sparse_cells_are_counted_over_the_whole_request() -> None:
    message = wide_rows(1000, tokens=1, shape=[1, 1 << 17])

    peak = peak_bytes(message, 1 << 17, "datum 128: up to here the sparse tensors")

    assert peak < 16 * MAX_SPARSE_CELLS


def test_a_cell_that_is_listed_twice_in_protobuf_is_refused() -> None:
    tensor = public_pb.Tensor(dtype=public_pb.DTYPE_INT64, shape=[1, 2])
    tensor.sparse_csr.values, tensor.sparse_csr.col_indices = (
        np.array(values, np.int64).tobytes() for values in ([4, 5], [1, 1])
    )
    tensor.sparse_csr.crow_indices = np.array([0, 2], np.int64).tobytes()

    with pytest.raises(MalformedDataError, match="list each cell once"):
        cells_in_protobuf("x", tensor)
