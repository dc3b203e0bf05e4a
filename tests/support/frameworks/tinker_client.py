"""What tests do with the tinker SDK, and single requests beside it."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types

from tests.support.servers.tinker_server import VOCABULARY

TIMEOUT_S = 60.0


def datum(length: int, offset: int = 0, **inputs: Sequence[float]) -> types.Datum:
    """A sequence of consecutive tokens, each of which is followed by the next one."""
    tokens = [(offset + place) % VOCABULARY for place in range(length)]
    targets = [(token + 1) % VOCABULARY for token in tokens]
    loss_fn_inputs = {"target_tokens": types.TensorData(data=targets, dtype="int64", shape=[length])}
    for name, values in inputs.items():
        loss_fn_inputs[name] = types.TensorData(data=list(values), dtype="float32", shape=[length])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=loss_fn_inputs)


def new_model(client: tinker.ServiceClient, base: str, seed: int = 3, **options: Any) -> tinker.TrainingClient:
    return client.create_lora_training_client(base_model=base, rank=4, seed=seed, **options).result(TIMEOUT_S)


def batch(step: int) -> list[types.Datum]:
    return [datum(6, step), datum(9, 2 * step)]


def train(model: tinker.TrainingClient, steps: range) -> list[float]:
    """Make these steps, and return the loss of each. What a step trains on depends on its number alone."""
    losses = []
    for step in steps:
        passed = model.forward_backward(batch(step), "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result(TIMEOUT_S).metrics["loss:sum"])
        stepped.result(TIMEOUT_S)
    return losses


def loss_of(model: tinker.TrainingClient) -> float:
    """The loss on a fixed batch, without a gradient."""
    return float(model.forward([datum(8, 5)], "cross_entropy").result(TIMEOUT_S).metrics["loss:sum"])


def ask(
    url: str, path: str, body: object = None, *, method: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """Make one request. Returns its status, and its JSON; None for an empty body. body: bytes are sent as they are."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    found = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, found, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, _parsed(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parsed(error.read())


def _parsed(data: bytes) -> Any:
    return json.loads(data) if data else None


def result_of(url: str, request_id: str) -> Any:
    """The result of a request, once it is there."""
    status, found = ask(url, "retrieve_future", {"request_id": request_id})
    while status == 408:
        status, found = ask(url, "retrieve_future", {"request_id": request_id})
    assert status == 200, found
    return found
