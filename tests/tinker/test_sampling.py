"""Sampling by the real SDK: from the base model, from named weights, and from a model as it is now."""

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoTokenizer

from raycheck.tinker import sampling
from raycheck.tinker.engine.base_model import BaseModel
from tests.support.frameworks import tinker_cookbook
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, new_model, result_of, train
from tests.support.servers.tinker_server import base_model, tinker_server

PROMPT = types.ModelInput.from_ints([5, 6, 7])


def params(**more) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 6, "seed": 1, "stop": [], **more})


def sampled(client: tinker.SamplingClient, count: int = 2, **more) -> list[tuple[list[int], list[float]]]:
    found = client.sample(PROMPT, num_samples=count, sampling_params=params(**more)).result(TIMEOUT_S)
    return [(list(item.tokens), list(item.logprobs)) for item in found.sequences]


def test_the_base_model_is_sampled_with_its_own_log_probabilities(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    (tokens, logprobs), other = sampled(client)

    with torch.no_grad():
        whole = torch.tensor([[5, 6, 7, *tokens]])
        expected = torch.log_softmax(base_model(base).model(input_ids=whole).logits[0, 2:-1], -1)
    assert logprobs == pytest.approx(expected[torch.arange(6), torch.tensor(tokens)].tolist(), abs=1e-4)
    assert tokens != other[0]
    assert sampled(client) == [(tokens, logprobs), other]  # by its seed


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.7, "temperature": 1.3}], ids=str)
def test_sequences_of_one_request_are_those_of_single_requests(server, connect, base, more) -> None:
    """They are sampled in a batch, and each has the random numbers of its own seed."""
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    found = sampled(client, 5, **more)

    for number, (tokens, logprobs) in enumerate(found):
        ((alone, alone_logprobs),) = sampled(client, 1, **{**more, "seed": 1 + number})
        assert tokens == alone
        assert logprobs == pytest.approx(alone_logprobs, abs=1e-5)


def test_a_sequence_that_is_stopped_leaves_the_others_as_they_were(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)
    free = sampled(client, 4)
    stop = free[2][0][1]

    found = sampled(client, 4, stop=[stop])

    for (tokens, _), (whole, _) in zip(found, free, strict=True):
        assert tokens == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_at_temperature_0_the_likeliest_token_is_taken(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    ((tokens, logprobs),) = sampled(client, 1, temperature=0.0)

    with torch.no_grad():
        logits = base_model(base).model(input_ids=torch.tensor([[5, 6, 7, *tokens]])).logits[0, 2:-1]
    assert tokens == logits.argmax(-1).tolist()
    assert max(logprobs) < 0


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "as-it-is-now"])
def test_a_trained_model_is_sampled_as_it_was_saved(server, connect, base, is_named) -> None:
    client = connect(server)
    model = new_model(client, base)
    train(model, range(3))

    if is_named:
        path = model.save_weights_for_sampler("s").result(TIMEOUT_S).path
        sampler = client.create_sampling_client(model_path=path).result(TIMEOUT_S)
    else:
        sampler = model.save_weights_and_get_sampling_client().result(TIMEOUT_S)
    first = sampled(sampler, 1, temperature=0.0)
    train(model, range(3, 4))

    plain = client.create_sampling_client(base_model=base).result(TIMEOUT_S)
    assert sampled(plain, 1, temperature=0.0)[0][1] != first[0][1]
    assert sampled(sampler, 1, temperature=0.0) == first
    server.engine.kill()
    assert sampled(sampler, 1, temperature=0.0) == first


def test_the_log_probabilities_of_a_sample_are_those_of_a_forward_pass(server, connect, base) -> None:
    """So that the ratio of a policy gradient is 1 at first."""
    model = new_model(connect(server), base)
    train(model, range(2))
    ((tokens, logprobs),) = sampled(model.save_weights_and_get_sampling_client().result(TIMEOUT_S), 1)

    whole = [5, 6, 7, *tokens]
    targets = types.TensorData(data=whole[1:], dtype="int64", shape=[len(whole) - 1])
    item = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": targets})
    output = model.forward([item], "cross_entropy").result(TIMEOUT_S)

    assert output.loss_fn_outputs[0]["logprobs"].to_numpy()[2:].tolist() == pytest.approx(logprobs, abs=1e-4)


def test_the_prompt_is_scored_when_asked(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    found = client.compute_logprobs(PROMPT).result(TIMEOUT_S)

    with torch.no_grad():
        logits = torch.log_softmax(base_model(base).model(input_ids=torch.tensor([[5, 6, 7]])).logits[0], -1)
    assert found[0] is None or np.isnan(found[0])
    assert found[1:] == pytest.approx([logits[0, 6].item(), logits[1, 7].item()], abs=1e-4)


def prompt_scores(base: str) -> torch.Tensor:
    """The log-probabilities of all tokens after each one of PROMPT."""
    with torch.no_grad():
        return torch.log_softmax(base_model(base).model(input_ids=torch.tensor([[5, 6, 7]])).logits[0], -1)


def test_only_the_end_of_a_prompt_is_scored_when_asked(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    found = client.sample(
        PROMPT,
        num_samples=1,
        sampling_params=params(),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        prompt_logprobs_last_n=1,
    ).result(TIMEOUT_S)

    assert found.prompt_logprobs == [None, None, pytest.approx(prompt_scores(base)[1, 7].item(), abs=1e-4)]
    assert [row is None for row in found.topk_prompt_logprobs] == [True, True, False]


def test_the_likeliest_tokens_are_told_at_the_prompt_and_at_what_is_sampled(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    found = client.sample(
        PROMPT, num_samples=2, sampling_params=params(temperature=0.0), topk_prompt_logprobs=3, topk_sample_logprobs=4
    ).result(TIMEOUT_S)

    values, tokens = prompt_scores(base).topk(3)
    first, *rows = found.topk_prompt_logprobs
    assert first is None
    assert [[token for token, _ in row] for row in rows] == tokens[:2].tolist()
    assert [value for row in rows for _, value in row] == pytest.approx(values[:2].flatten().tolist(), abs=1e-4)
    for sequence in found.sequences:
        assert [len(row) for row in sequence.topk_logprobs] == [4] * 6
        assert [row[0] for row in sequence.topk_logprobs] == list(zip(sequence.tokens, sequence.logprobs, strict=True))
    assert found.prompt_logprobs is None


def test_an_older_client_reads_the_likeliest_tokens_as_json(server, base) -> None:
    body = {"base_model": base, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {"max_tokens": 1}}

    found = result_of(server.url, ask(server.url, "asample", {**body, "topk_prompt_logprobs": 1})[1]["request_id"])

    values, tokens = prompt_scores(base).max(-1)
    assert found["topk_prompt_logprobs"] == [
        None,
        *([[tokens[place].item(), pytest.approx(values[place].item(), abs=1e-4)]] for place in (0, 1)),
    ]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_a_client_without_protobuf_reads_all_that_it_asked_for_as_json(server, connect, base, is_sparse) -> None:
    tensor = {"data": [-1, 9], "dtype": "int64", "shape": [2, 1]}
    if is_sparse:
        tensor |= {"data": [9], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [0]}
    body = {
        "base_model": base,
        "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []},
        "topk_sample_logprobs": 3,
        "target_prompt_logprobs": tensor,
    }
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    found = result_of(server.url, ask(server.url, "asample", body)[1]["request_id"])

    expected = client.sample(
        PROMPT,
        num_samples=2,
        sampling_params=params(),
        topk_sample_logprobs=3,
        target_prompt_logprobs=types.TensorData(**tensor),
    ).result(TIMEOUT_S)
    for sequence, theirs in zip(found["sequences"], expected.sequences, strict=True):
        assert [[tuple(pair) for pair in row] for row in sequence["topk_logprobs"]] == theirs.topk_logprobs
    scores = types.TensorData(**found["target_prompt_logprobs"])
    assert scores.to_numpy().tolist() == expected.target_prompt_logprobs.to_numpy().tolist()
    assert found["target_prompt_logprobs"].keys() == tensor.keys()


def test_what_was_not_asked_for_is_not_in_the_json_of_an_older_client(server, base) -> None:
    body = {"base_model": base, "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}

    found = result_of(server.url, ask(server.url, "asample", body)[1]["request_id"])

    assert "target_prompt_logprobs" not in found
    assert "topk_logprobs" not in found["sequences"][0]


@pytest.mark.parametrize(
    ("change", "size"),
    [
        ({"topk_sample_logprobs": 2, "num_samples": 3, "sampling_params": {"max_tokens": 4}}, 24),
        ({"topk_prompt_logprobs": 8}, 24),
        ({"topk_prompt_logprobs": 4, "topk_sample_logprobs": 3, "sampling_params": {"max_tokens": 4}}, 24),
    ],
    ids=["sampled", "prompt", "both"],
)
def test_more_likeliest_tokens_than_an_answer_can_hold_are_refused(server, base, monkeypatch, change, size) -> None:
    body = {"base_model": base, "prompt": {"chunks": [{"tokens": [5, 6, 7]}]}, "sampling_params": {}, **change}

    monkeypatch.setattr(sampling, "MAX_LIKELIEST_CELLS", size)
    fits, _ = ask(server.url, "asample", body)
    monkeypatch.setattr(sampling, "MAX_LIKELIEST_CELLS", size - 1)
    status, found = ask(server.url, "asample", body)

    assert fits == 200
    assert status == 422
    assert f"at most {size - 1} together" in found["detail"]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_tokens_of_the_clients_choice_are_scored_at_the_prompt(server, connect, base, is_sparse) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)
    wanted = torch.tensor([[-1, -1, -1, -1], [9, -1, -1, 7]])
    tensor = types.TensorData.from_torch_sparse(wanted, pad_value=-1)
    tensor = tensor if is_sparse else types.TensorData.from_torch(wanted)

    found = client.sample(PROMPT, num_samples=1, sampling_params=params(), target_prompt_logprobs=tensor).result(
        TIMEOUT_S
    )

    scores = prompt_scores(base)
    expected = [0.0] * 4 + [scores[1, 9].item(), 0.0, 0.0, scores[1, 7].item()]
    assert found.target_prompt_logprobs.to_torch().flatten().tolist() == pytest.approx(expected, abs=1e-4)
    assert (found.target_prompt_logprobs.sparse_crow_indices is not None) == is_sparse


def test_a_stop_token_ends_a_sequence(server, connect, base) -> None:
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)
    ((free, _),) = sampled(client, 1)

    found = client.sample(PROMPT, num_samples=1, sampling_params=params(stop=[free[2]])).result(TIMEOUT_S).sequences[0]

    assert list(found.tokens) == free[: free.index(free[2]) + 1]
    assert found.stop_reason == "stop"
    whole = client.sample(PROMPT, num_samples=1, sampling_params=params()).result(TIMEOUT_S).sequences[0]
    assert whole.stop_reason == "length"


def test_a_stop_string_ends_a_sequence(connect, tmp_path) -> None:
    tinker_cookbook.make_workplace(tmp_path, rows=1)
    base = str(tmp_path / tinker_cookbook.MODEL)
    with tinker_server(base, f"file://{tmp_path}/bucket", tmp_path / "s.sqlite") as server:
        client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)
        tokenizer = AutoTokenizer.from_pretrained(base)
        ((free, _),) = sampled(client, 1, max_tokens=12)
        stop = tokenizer.decode(free[:3])[-2:]

        found = client.sample(PROMPT, num_samples=1, sampling_params=params(max_tokens=12, stop=[stop])).result(
            TIMEOUT_S
        )

        assert stop in tokenizer.decode(list(found.sequences[0].tokens))
        assert len(found.sequences[0].tokens) <= 4
        assert found.sequences[0].stop_reason == "stop"


def test_the_same_request_is_sampled_once(server, connect, base) -> None:
    session = connect(server).holder.get_session_id()
    made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
    sampler = ask(server.url, "create_sampling_session", made)[1]["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 4,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 2},
    }

    first, again = (ask(server.url, "asample", body) for _ in "12")
    other, _ = ask(server.url, "asample", {**body, "num_samples": 2})

    assert first == again
    assert other == 400
    assert ask(server.url, f"samplers/{sampler}")[1] == {"sampler_id": sampler, "base_model": base, "model_path": None}
    assert ask(server.url, "create_sampling_session", made)[1]["sampling_session_id"] == sampler


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": {"chunks": []}},
        {"prompt": {"chunks": [{"tokens": [64]}]}},
        {"prompt": {"chunks": [{"tokens": [-1]}]}},
        {"prompt": {"chunks": [{"type": "image", "data": "x"}]}},
        {"prompt": {"chunks": [{"tokens": [1] * 64}]}},
        {"num_samples": 0},
        {"num_samples": 10**6},
        {"sampling_params": {"max_tokens": 0}},
        {"sampling_params": {"temperature": -1}},
        {"sampling_params": {"temperature": 10**400}},
        {"sampling_params": {"top_p": 0}},
        {"sampling_params": {"top_k": 0}},
        {"sampling_params": {"stop": [1.5]}},
        {"sampling_params": {"stop": ["a", 1]}},
        {"topk_sample_logprobs": 65},
        {"topk_prompt_logprobs": -1},
        {"prompt_logprobs_last_n": 1},
        {"prompt_logprobs_last_n": 1, "prompt_logprobs": True},
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        {"target_prompt_logprobs": {"data": []}},
        {"target_prompt_logprobs": {"data": [1], "dtype": "float32", "shape": [0, 1]}},
        {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [0, 10**30]}},
        {"prompt_alt_tokens_k": 3},
        {"record_stability_info": True},
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused(server, base, change) -> None:
    body = {"base_model": base, "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, **change}

    status, found = ask(server.url, "asample", body)

    assert status == 422
    assert found["detail"]


def test_unknown_weights_are_refused(server, connect, base) -> None:
    client = connect(server)
    path = f"tinker://{client.holder.get_session_id()}:train:0/sampler_weights/x"

    with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
        client.create_sampling_client(model_path=path).result(TIMEOUT_S)
    session = client.holder.get_session_id()
    assert ask(server.url, "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9})[0] == 400
    assert (
        ask(server.url, "asample", {"sampling_session_id": "nobody's", "seq_id": 0, "prompt": {"chunks": []}})[0] == 404
    )


def test_the_engine_dies_while_it_samples(base, connect, tmp_path) -> None:
    with tinker_server(base, f"file://{tmp_path}/bucket", tmp_path / "s.sqlite") as server:
        client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)
        undisturbed = sampled(client, seed=None)
        expected = sampled(client)
        server.engine.dies_before = lambda method: method == "sample" and server.engine.life == 0

        assert sampled(client) == expected
        assert server.engine.life == 1
        assert undisturbed != expected


def test_a_fault_while_sampling_is_said_and_not_waited_for(server, connect, base, monkeypatch) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError("a mistake of the server's")

    monkeypatch.setattr("raycheck.tinker.sampling.sample_in_protobuf", broken)
    client = connect(server).create_sampling_client(base_model=base).result(TIMEOUT_S)

    with pytest.raises(tinker.RequestFailedError, match="ZeroDivisionError"):
        sampled(client)


def test_weights_of_a_sampling_session_that_were_dropped_are_said_to_be_gone(base, connect, tmp_path) -> None:
    """The newest four stay in the bucket; older ones live as long as the engine."""
    with tinker_server(base, f"file://{tmp_path}/bucket", tmp_path / "s.sqlite") as server:
        model = new_model(connect(server), base)
        samplers = []
        for step in range(5):
            train(model, range(step, step + 1))
            samplers.append(model.save_weights_and_get_sampling_client().result(TIMEOUT_S))
        server.engine.kill()

        with pytest.raises(tinker.RequestFailedError, match="make a new sampling client"):
            sampled(samplers[0])
        assert sampled(samplers[1])


def test_a_base_model_without_a_tokenizer_says_so(base) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        assert BaseModel(base).tokenizer
