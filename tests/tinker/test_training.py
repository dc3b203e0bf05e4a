"""Clients of the real SDK train against a server in this process."""

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from raycheck.tinker.engine.base_model import fingerprint_of
from raycheck.tinker.engine.lora_model import LoraModel
from raycheck.tinker.engine.lora_shape import LoraShape
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, datum, loss_of, new_model, result_of, train
from tests.support.servers.tinker_server import base_model

IN_JSON = {
    "data": [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            "loss_fn_inputs": {"target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]}},
        }
    ],
    "loss_fn": "cross_entropy",
}


def test_a_model_trains_and_its_first_loss_is_the_base_models(server, connect, base) -> None:
    model = new_model(connect(server), base)
    with torch.no_grad():
        logits = base_model(base).model(input_ids=torch.arange(5, 13)[None]).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(6, 14), reduction="sum")

    first = loss_of(model)
    losses = train(model, range(8))

    assert first == pytest.approx(expected.item(), rel=1e-5)
    assert loss_of(model) < first
    assert len(set(losses)) == 8


def test_each_target_token_has_its_log_probability(server, connect, base) -> None:
    model = new_model(connect(server), base)

    output = model.forward([datum(6), datum(3), datum(9)], "cross_entropy").result(TIMEOUT_S)

    assert [item["logprobs"].shape for item in output.loss_fn_outputs] == [[6], [3], [9]]
    total = sum(np.sum(item["logprobs"].to_numpy()) for item in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(-total, rel=1e-5)


def test_two_passes_before_a_step_count_as_one_over_both_batches(server, connect, base) -> None:
    client = connect(server)
    together, apart = new_model(client, base), new_model(client, base)

    together.forward_backward([datum(6), datum(6, 9)], "cross_entropy").result(TIMEOUT_S)
    apart.forward_backward([datum(6)], "cross_entropy")
    apart.forward_backward([datum(6, 9)], "cross_entropy").result(TIMEOUT_S)
    for model in (together, apart):
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)

    assert loss_of(together) == pytest.approx(loss_of(apart), rel=1e-5)


def test_a_forward_pass_leaves_no_gradient(server, connect, base) -> None:
    model = new_model(connect(server), base)
    before = loss_of(model)

    metrics = model.optim_step(types.AdamParams(learning_rate=1.0)).result(TIMEOUT_S).metrics

    assert metrics == {"grad_norm": 0.0}
    assert loss_of(model) == before


def test_gradients_are_clipped_to_the_norm_asked_for(base) -> None:
    """Against a step of torch's own AdamW with torch's own clipping."""
    ours, theirs = (LoraModel(base_model(base), LoraShape(rank=4, seed=1)) for _ in range(2))
    gradients = [torch.full_like(parameter, 0.3) for parameter in ours.parameters]
    ours.add_gradients([gradient.clone() for gradient in gradients])
    from raycheck.tinker.engine.lora_shape import AdamParams

    norm = ours.step(AdamParams(learning_rate=1e-2, grad_clip_norm=0.5, eps=1e-8))["grad_norm"]

    for parameter, gradient in zip(theirs.parameters, gradients, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(theirs.parameters, 0.5)
    torch.optim.AdamW(theirs.parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    assert norm == pytest.approx(0.3 * sum(p.numel() for p in ours.parameters) ** 0.5)
    assert all(map(torch.equal, ours.parameters, theirs.parameters))


def test_models_share_the_base_weights_and_nothing_else(server, connect, base) -> None:
    client = connect(server)
    trained, untouched = new_model(client, base), new_model(client, base, seed=4)
    before = loss_of(untouched)

    train(trained, range(3))

    assert loss_of(untouched) == before
    found = server.engine._base
    assert fingerprint_of(found.model) == found.fingerprint == base_model(base).fingerprint


def test_a_custom_loss_is_computed_at_the_client(server, connect, base) -> None:
    """forward_backward_custom: one pass for log-probabilities, and one with their gradients as weights."""
    client = connect(server)
    custom, plain = new_model(client, base), new_model(client, base)

    def loss(data, logprobs):
        return -sum(values.sum() for values in logprobs), {"seen:sum": float(len(data))}

    result = custom.forward_backward_custom([datum(6), datum(4, 7)], loss).result(TIMEOUT_S)
    plain.forward_backward([datum(6), datum(4, 7)], "cross_entropy").result(TIMEOUT_S)
    for model in (custom, plain):
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)

    assert result.metrics["seen:sum"] == 2.0
    assert loss_of(custom) == loss_of(plain)


def soft_datum(targets: torch.Tensor, weights: torch.Tensor) -> types.Datum:
    """A sequence whose tokens have several targets each. The SDK makes tensors of torch sparse where that is shorter."""
    inputs = {"target_tokens": targets, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(list(range(len(targets)))), loss_fn_inputs=inputs)


SOFT = torch.tensor([[9, 1], [8, 2], [7, 3]]), torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]])
LAST = (
    torch.tensor([[0] * 6, [0] * 6, [7, 3, 5, 2, 1, 4]]),
    torch.tensor([[0.0] * 6, [0.0] * 6, [0.2, 0.8, 0, 0, 0, 0]]),
)


def test_a_token_has_several_targets_each_with_its_weight(server, connect, base) -> None:
    client = connect(server)
    soft, plain = new_model(client, base), new_model(client, base)
    columns = [soft_datum(SOFT[0][:, n], SOFT[1][:, n]) for n in (0, 1)]

    together = soft.forward_backward([soft_datum(*SOFT)], "cross_entropy").result(TIMEOUT_S)
    apart = plain.forward_backward(columns, "cross_entropy").result(TIMEOUT_S)
    for model in (soft, plain):
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)

    found = together.loss_fn_outputs[0]["logprobs"].to_numpy()
    single = [item["logprobs"].to_numpy() for item in apart.loss_fn_outputs]
    assert found.shape == (3, 2)
    assert found == pytest.approx(np.stack(single, -1), abs=1e-5)
    assert together.metrics["loss:sum"] == pytest.approx(apart.metrics["loss:sum"], rel=1e-5)
    assert loss_of(soft) == pytest.approx(loss_of(plain), rel=1e-5)


def test_sequences_of_one_batch_have_one_target_or_several_also_as_sparse_rows(server, connect, base) -> None:
    model = new_model(connect(server), base)
    sparse = soft_datum(*LAST)

    output = model.forward([datum(6), sparse, soft_datum(*SOFT), datum(3)], "cross_entropy").result(TIMEOUT_S)

    assert sparse.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    assert [item["logprobs"].shape for item in output.loss_fn_outputs] == [[6], [3, 6], [3, 2], [3]]
    alone = model.forward([soft_datum(*SOFT)], "cross_entropy").result(TIMEOUT_S).loss_fn_outputs[0]
    assert output.loss_fn_outputs[2]["logprobs"].to_numpy() == pytest.approx(alone["logprobs"].to_numpy(), abs=1e-5)


def test_a_custom_loss_sees_the_log_probabilities_of_all_targets(server, connect, base) -> None:
    """As the cookbook's decisions do: a loss of the chances of the choices at the last token."""
    model = new_model(connect(server), base)

    def loss(data, logprobs):
        chances = torch.softmax(logprobs[0][-1], -1)
        return ((chances - data[0].loss_fn_inputs["weights"].to_torch()[-1]) ** 2).sum(), {}

    losses = []
    for _ in range(4):
        passed = model.forward_backward_custom([soft_datum(*LAST)], loss)
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result(TIMEOUT_S)
        losses.append(passed.result(TIMEOUT_S).metrics["loss:sum"])

    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


def test_a_policy_gradient_runs(server, connect, base) -> None:
    model = new_model(connect(server), base)
    inputs = {"logprobs": [-4.0] * 6, "advantages": [1.0] * 6}

    for loss_fn in ("importance_sampling", "ppo", "cispo", "gspo", "dro", "dppo"):
        output = model.forward_backward([datum(6, **inputs)], loss_fn).result(TIMEOUT_S)
        assert np.isfinite(output.metrics["loss:sum"])


def test_an_older_client_sends_and_reads_json(server, connect, base) -> None:
    """As SDK 0.24.1 does by itself, without the flags that this server gives it."""
    model = new_model(connect(server), base)

    status, future = ask(server.url, "forward", {"model_id": model.model_id, "seq_id": 1, "forward_input": IN_JSON})
    output = result_of(server.url, future["request_id"])
    body = {"model_id": model.model_id, "seq_id": 2, "forward_backward_input": IN_JSON}
    second = result_of(server.url, ask(server.url, "forward_backward", body)[1]["request_id"])

    assert status == 200
    assert output == second
    assert output["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]
    assert output["metrics"]["loss:sum"] == pytest.approx(-sum(output["loss_fn_outputs"][0]["logprobs"]["data"]))


def test_a_request_that_comes_twice_is_run_once(server, connect, base) -> None:
    model = new_model(connect(server), base)
    body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}, "type": "optim_step"}

    first = ask(server.url, "optim_step", body)
    result_of(server.url, first[1]["request_id"])
    calls = server.engine.calls.count("optim_step")
    again = ask(server.url, "optim_step", dict(reversed(body.items())))

    assert again == first
    assert result_of(server.url, again[1]["request_id"]) == {"metrics": {"grad_norm": 0.0}}
    assert server.engine.calls.count("optim_step") == calls


def test_a_number_that_is_used_twice_is_refused_and_not_repeated_by_the_sdk(server, connect, base) -> None:
    model = new_model(connect(server), base)
    body = {"model_id": model.model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    ask(server.url, "optim_step", body)

    status, found = ask(server.url, "optim_step", {**body, "adam_params": {"learning_rate": 0.2}})

    assert status == 400
    assert "different content" in found["detail"]


def test_requests_run_in_the_order_of_their_numbers_however_they_come(server, connect, base) -> None:
    model = new_model(connect(server), base)

    def send(seq: int, kind: str, body: dict) -> str:
        return ask(server.url, kind, {"model_id": model.model_id, "seq_id": seq, **body})[1]["request_id"]

    step = send(2, "optim_step", {"adam_params": {"learning_rate": 1e-2}})
    passed = send(1, "forward_backward", {"forward_backward_input": IN_JSON})

    assert result_of(server.url, passed)["metrics"]["loss:sum"] > 0
    assert result_of(server.url, step)["metrics"]["grad_norm"] > 0


def test_a_session_is_created_once_for_one_idempotency_key(server) -> None:
    headers = {"x-idempotency-key": "stainless-python-retry-1"}

    answers = [ask(server.url, "create_session", {"tags": [], "type": "create_session"}, headers=headers) for _ in "12"]

    assert answers[0] == answers[1]
    assert ask(server.url, "create_session", {"tags": []})[1] != answers[0][1]


def test_a_model_is_created_once(server, connect, base) -> None:
    session = connect(server).holder.get_session_id()
    body = {"session_id": session, "model_seq_id": 7, "base_model": base, "lora_config": {"rank": 4, "seed": 1}}

    answers = [ask(server.url, "create_model", body) for _ in "12"]

    assert answers[0] == answers[1]
    assert result_of(server.url, answers[0][1]["request_id"])["model_id"] == f"{session}:train:7"


def test_an_unloaded_model_answers_no_more(server, connect, base) -> None:
    model = new_model(connect(server), base)

    future = ask(server.url, "unload_model", {"model_id": model.model_id, "type": "unload_model"})[1]["request_id"]

    assert result_of(server.url, future)["status"] == "unloaded"
    with pytest.raises(tinker.NotFoundError, match="was unloaded"):
        loss_of(model)


def test_a_finished_session_has_no_heartbeat_and_its_models_are_unloaded(server, connect, base) -> None:
    client = connect(server)
    model = new_model(client, base)
    session = client.holder.get_session_id()
    assert ask(server.url, "session_heartbeat", {"session_id": session})[0] == 200

    client.close("success").result(TIMEOUT_S)

    assert ask(server.url, "session_heartbeat", {"session_id": session})[0] == 410
    assert ask(server.url, "session_heartbeat", {"session_id": "session_unknown"})[0] == 404
    assert model.model_id not in server.engine._tenants._tenants


def test_the_server_says_which_model_it_has(server, base) -> None:
    found = tinker.RestClient(base_url=server.url, api_key="tml-for-tests-only").get_server_capabilities().result()

    assert [item.model_name for item in found.supported_models] == [base]


def test_a_session_shows_its_training_runs_and_samplers(server, connect, base) -> None:
    client = connect(server)
    model = new_model(client, base)
    client.create_sampling_client(base_model=base).result(TIMEOUT_S)
    rest = tinker.RestClient(base_url=server.url, api_key="tml-for-tests-only")
    session = client.holder.get_session_id()

    found = rest.get_session(session).result()

    assert found.training_run_ids == [model.model_id]
    assert len(found.sampler_ids) == 1
    assert rest.get_sampler(found.sampler_ids[0]).result().base_model == base
    assert session in rest.list_sessions(limit=100).result().sessions
    with pytest.raises(tinker.NotFoundError):
        rest.get_session("session_unknown").result()
