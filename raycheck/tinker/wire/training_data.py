"""Reads the data of forward_backward, which newer SDKs send as protobuf and older ones as JSON.

Nothing is trusted: tokens must be in the vocabulary, arrays must have their claimed lengths, and every loss must have
its inputs. Invalid data raises MalformedDataError, which names the datum, before anything runs.
"""

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raycheck.tinker.wire.tensors import (
    Cells,
    IntArray,
    MalformedDataError,
    array_in,
    cells_in_json,
    cells_in_protobuf,
    ints_in,
)

FloatArray = npt.NDArray[np.float32]
MAX_SPARSE_CELLS = 1 << 24
"""The maximum number of cells in all sparse tensors of a request: all of them are made dense before use."""
LOSS_INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "gspo": ("logprobs", "advantages"),
    "dro": ("logprobs", "advantages"),
    "dppo": ("logprobs", "advantages"),
}
"""The losses, with the inputs that each needs besides target_tokens. All accept `weights`, which default to 1."""
_CLIP = ("clip_low_threshold", "clip_high_threshold")
LOSS_CONFIG: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": _CLIP,
    "cispo": _CLIP,
    "gspo": _CLIP,
    "dro": ("beta",),
    "dppo": ("delta_low", "delta_high"),
}
"""The settings that each loss accepts in loss_fn_config."""
REFUSED_LOSSES: Mapping[str, str] = {
    "ppo_critic": "it trains the value head of a critic, but models of this server have no value head",
}
"""Losses that other servers offer, and why this one does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingDatum:
    """One sequence: tokens, their target_tokens, and the inputs of its loss, in the targets' shape.

    A token has one target; with cross_entropy it may have several, in a second dimension.
    """

    tokens: IntArray
    target_tokens: IntArray
    inputs: Mapping[str, FloatArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """The data of one training request. forward_only: no gradients are computed."""

    loss_fn: str
    data: tuple[TrainingDatum, ...]
    config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of the base model. max_tokens: the longest sequence; 0 for no limit."""

    vocab_size: int
    max_tokens: int


def address_in_protobuf(body: bytes) -> tuple[str, int | None, Any]:
    """Parse a ForwardBackwardRequest. Returns the model id, the seq_id, and the message. Raises MalformedDataError."""
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise MalformedDataError(f"the body is not a ForwardBackwardRequest: {error}") from None
    if not message.model_id:
        raise MalformedDataError("the body is not a ForwardBackwardRequest: it names no model")
    return message.model_id, message.seq_id or None, message


def batch_in_protobuf(message: Any, limits: Limits) -> TrainingBatch:
    """Return the batch of a ForwardBackwardRequest. Raises MalformedDataError."""
    config: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data: list[TrainingDatum] = []
    filled = 0
    for number, item in enumerate(message.data):
        tokens = [_tokens_in_chunk(number, chunk) for chunk in item.model_input]
        loss_inputs = item.loss_fn_inputs.items()
        inputs = {name: cells_in_protobuf(f"datum {number}: {name!r}", value) for name, value in loss_inputs}
        filled = _with_sparse_cells(number, filled, inputs)
        data.append(_datum(number, tokens, inputs, message.loss_fn, limits))
    return _batch(message.loss_fn, config, data, forward_only=message.forward_only)


def batch_in_json(body: Mapping[str, Any], limits: Limits, *, forward_only: bool) -> TrainingBatch:
    """Return the batch of a JSON body's forward_backward_input or forward_input. Raises MalformedDataError."""
    given = body.get("forward_input" if forward_only else "forward_backward_input")
    items = given.get("data") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(items, list):
        raise MalformedDataError("the body has no forward_backward_input (or forward_input) with a list `data`")
    loss_fn = given.get("loss_fn")
    if not isinstance(loss_fn, str):
        raise MalformedDataError("loss_fn is missing")
    data: list[TrainingDatum] = []
    filled = 0
    for number, item in enumerate(items):
        try:
            chunks, loss_inputs = item["model_input"]["chunks"], item["loss_fn_inputs"].items()
            tokens = [ints_in(f"datum {number}: tokens", _text_tokens(number, chunk)) for chunk in chunks]
            inputs = {name: cells_in_json(f"datum {number}: {name!r}", value) for name, value in loss_inputs}
        except (TypeError, KeyError, AttributeError) as error:
            raise MalformedDataError(f"datum {number} is not shaped as a Datum: {error!r}") from None
        filled = _with_sparse_cells(number, filled, inputs)
        data.append(_datum(number, tokens, inputs, loss_fn, limits))
    config = given.get("loss_fn_config") or {}
    return _batch(loss_fn, config, data, forward_only=forward_only)


def _batch(loss_fn: str, config: Any, data: list[TrainingDatum], *, forward_only: bool) -> TrainingBatch:
    if loss_fn not in LOSS_INPUTS:
        reason = f"{REFUSED_LOSSES[loss_fn]}. " if loss_fn in REFUSED_LOSSES else ""
        raise MalformedDataError(f"loss_fn={loss_fn!r}: {reason}this server has {', '.join(LOSS_INPUTS)}")
    if not data:
        raise MalformedDataError("there is no datum")
    if not isinstance(config, Mapping):
        raise MalformedDataError("loss_fn_config must be numbers by name")
    for name, value in config.items():
        if name not in LOSS_CONFIG[loss_fn]:
            known = ", ".join(LOSS_CONFIG[loss_fn]) or "none"
            raise MalformedDataError(f"loss_fn_config: {loss_fn} has no {name!r}; it has: {known}")
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise MalformedDataError(f"loss_fn_config: {name}={value!r}: give a finite number")
    numbers = {name: float(value) for name, value in config.items()}
    return TrainingBatch(loss_fn=loss_fn, data=tuple(data), config=numbers, forward_only=forward_only)


def _with_sparse_cells(number: int, filled: int, inputs: Mapping[str, Cells]) -> int:
    """Return how many cells the sparse tensors of a request have, including one more datum. Raises MalformedDataError
    if that exceeds the limit."""
    filled += sum(math.prod(cells.shape) for cells in inputs.values() if cells.crow is not None)
    if filled > MAX_SPARSE_CELLS:
        raise MalformedDataError(
            f"datum {number}: up to here the sparse tensors of the request have {filled} cells, unlisted ones "
            f"included; give at most {MAX_SPARSE_CELLS} in one request"
        )
    return filled


def _datum(
    number: int, chunks: Iterable[IntArray], inputs: Mapping[str, Cells], loss_fn: str, limits: Limits
) -> TrainingDatum:
    """Return a validated datum. number: its position in the request, for errors. No tensor is made dense before its
    shape is validated."""
    parts = list(chunks)
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    check_tokens(f"datum {number}", tokens, limits)
    if "target_tokens" not in inputs:
        raise MalformedDataError(f"datum {number} has no target_tokens")
    shape = inputs["target_tokens"].shape
    has_several = len(shape) == 2 and 0 < shape[1] <= limits.vocab_size and loss_fn == "cross_entropy"
    if shape[:1] != tokens.shape or not (len(shape) == 1 or has_several):
        raise MalformedDataError(
            f"datum {number}: target_tokens has the shape {list(shape)} and model_input {len(tokens)} tokens; give one "
            "target for each token, or with cross_entropy equally many for each, at most the vocabulary's "
            f"{limits.vocab_size}"
        )
    targets = inputs["target_tokens"].dense()
    if targets.dtype.kind != "i":
        raise MalformedDataError(f"datum {number}: target_tokens must be whole numbers")
    check_tokens(f"datum {number}: target_tokens", targets, limits)
    needed = LOSS_INPUTS.get(loss_fn, ())
    floats = {}
    for name in ("weights", *needed):
        if name not in inputs and name in needed:
            raise MalformedDataError(f"datum {number} has no {name!r}, which {loss_fn} needs")
        if name in inputs:
            is_shaped = inputs[name].shape == shape
            value = inputs[name].dense().astype(np.float32, copy=False) if is_shaped else None
            if value is None or not np.isfinite(value).all():
                raise MalformedDataError(
                    f"datum {number}: {name!r} must be finite numbers of the shape {list(shape)}, as target_tokens, "
                    f"but has the shape {list(inputs[name].shape)}"
                )
            floats[name] = value
    return TrainingDatum(tokens=tokens, target_tokens=targets.astype(np.int64, copy=False), inputs=floats)


def check_tokens(what: str, tokens: npt.NDArray[Any], limits: Limits) -> None:
    """Raises MalformedDataError for no tokens, too many tokens, and tokens outside the vocabulary."""
    if not len(tokens):
        raise MalformedDataError(f"{what} has no tokens")
    if limits.max_tokens and len(tokens) > limits.max_tokens:
        raise MalformedDataError(f"{what} has {len(tokens)} tokens; the base model accepts {limits.max_tokens}")
    if tokens.min() < 0 or tokens.max() >= limits.vocab_size:
        odd = int(tokens.min()) if tokens.min() < 0 else int(tokens.max())
        raise MalformedDataError(f"{what}: token {odd} is not in the vocabulary of {limits.vocab_size}")


def _tokens_in_chunk(number: int, chunk: Any) -> IntArray:
    if not chunk.HasField("encoded_text"):
        raise MalformedDataError(f"datum {number} has a chunk that is not text; this server trains on text only")
    return array_in(f"datum {number}: tokens", chunk.encoded_text.tokens, np.dtype(np.int32)).astype(np.int64)


def _text_tokens(number: int, chunk: Any) -> Any:
    if chunk.get("type", "encoded_text") != "encoded_text":
        raise MalformedDataError(f"datum {number} has a chunk {chunk['type']!r}; this server trains on text only")
    return chunk["tokens"]
