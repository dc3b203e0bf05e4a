"""Sampled sequences and prompt scores, as plain values and in the SDK's format."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raycheck.tinker.wire.training_data import FloatArray

IntArray32 = npt.NDArray[np.int32]
UNSCORED = -99999.0
"""The log-probability with which the SDK marks an unscored position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCells:
    """The tokens to score at each position: a tensor with a row for each prompt token except the first.

    tokens: of all cells, or of the listed ones; -1 is not scored. crow, col: see wire.tensors.Cells.
    """

    shape: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    crow: tuple[int, ...] | None = None
    col: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "TargetCells":
        """Parse target cells from JSON."""
        plain: dict[str, Any] = {name: None if value is None else tuple(value) for name, value in given.items()}
        return cls(**plain)


@dataclass(frozen=True, kw_only=True, slots=True)
class LikeliestTokens:
    """The most likely tokens at each position, most likely first, and their log-probabilities. A row of token 0 and
    UNSCORED marks an unscored position."""

    tokens: IntArray32
    logprobs: FloatArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """One sampled sequence. logprobs: of each token. is_stopped: whether a stop ended it, not its length. likeliest:
    the most likely tokens at each token, if requested."""

    tokens: IntArray32
    logprobs: FloatArray
    is_stopped: bool
    likeliest: LikeliestTokens | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """The requested scores of a prompt. logprobs: of its tokens; NaN for unscored ones. targets: of the cells of
    `SampleOrder.targets`; 0 for unscored ones."""

    logprobs: FloatArray | None = None
    likeliest: LikeliestTokens | None = None
    targets: FloatArray | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """The sampled sequences and the scores of the prompt."""

    sequences: tuple[SampledTokens, ...]
    prompt: PromptScores


def sample_in_protobuf(output: SampleOutput, targets: TargetCells | None) -> bytes:
    """Return a SampleResponse. targets: the order's, whose shape the response has."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.SampleResponse()
    for found in output.sequences:
        sequence = message.sequences.add()
        sequence.stop_reason = public_pb.STOP_REASON_STOP if found.is_stopped else public_pb.STOP_REASON_LENGTH
        sequence.tokens = np.ascontiguousarray(found.tokens, np.int32).tobytes()
        sequence.logprobs = np.ascontiguousarray(found.logprobs, np.float32).tobytes()
        if found.likeliest is not None:
            _write_likeliest(sequence.topk_sampled_logprobs, found.likeliest)
    prompt = output.prompt
    if prompt.logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(prompt.logprobs, np.float32).tobytes()
    if prompt.likeliest is not None:
        _write_likeliest(message.topk_prompt_logprobs, prompt.likeliest)
    if prompt.targets is not None and targets is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype = public_pb.DTYPE_FLOAT32
        tensor.shape.extend(targets.shape)
        if targets.crow is None or targets.col is None:
            tensor.dense = prompt.targets.tobytes()
        else:
            tensor.sparse_csr.values = prompt.targets.tobytes()
            tensor.sparse_csr.crow_indices = np.asarray(targets.crow, np.int64).tobytes()
            tensor.sparse_csr.col_indices = np.asarray(targets.col, np.int64).tobytes()
    return bytes(message.SerializeToString())


def _write_likeliest(message: Any, found: LikeliestTokens) -> None:
    message.length, message.k = found.tokens.shape
    message.token_ids = np.ascontiguousarray(found.tokens, np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(found.logprobs, np.float32).tobytes()


def sample_in_json(data: bytes) -> dict[str, Any]:
    """Return the JSON form of what `sample_in_protobuf` wrote, for clients that do not read protobuf.

    Fields unknown to older clients are present only if requested: topk_logprobs of a sequence, named as in the SDK's
    SampledSequence, and target_prompt_logprobs, in the SDK's JSON form of a tensor."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.SampleResponse()
    message.ParseFromString(data)
    prompt = np.frombuffer(message.prompt_logprobs, np.float32).tolist() if message.prompt_logprobs else None
    has_likeliest = message.HasField("topk_prompt_logprobs")
    found: dict[str, Any] = {
        "type": "sample",
        "sequences": [_sequence_in_json(sequence) for sequence in message.sequences],
        "prompt_logprobs": None if prompt is None else [None if math.isnan(value) else value for value in prompt],
        "topk_prompt_logprobs": _likeliest_in_json(message.topk_prompt_logprobs) if has_likeliest else None,
    }
    if message.HasField("target_prompt_logprobs"):
        found["target_prompt_logprobs"] = _floats_in_json(message.target_prompt_logprobs)
    return found


def _sequence_in_json(message: Any) -> dict[str, Any]:
    from tinker.proto import tinker_public_pb2 as public_pb

    found = {
        "stop_reason": "stop" if message.stop_reason == public_pb.STOP_REASON_STOP else "length",
        "tokens": np.frombuffer(message.tokens, np.int32).tolist(),
        "logprobs": np.frombuffer(message.logprobs, np.float32).tolist(),
    }
    if message.HasField("topk_sampled_logprobs"):
        found["topk_logprobs"] = _likeliest_in_json(message.topk_sampled_logprobs)
    return found


def _floats_in_json(tensor: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": "float32", "shape": list(tensor.shape)}
    if not tensor.HasField("sparse_csr"):
        return {"data": np.frombuffer(tensor.dense, np.float32).tolist(), **found}
    return {
        "data": np.frombuffer(tensor.sparse_csr.values, np.float32).tolist(),
        **found,
        "sparse_crow_indices": np.frombuffer(tensor.sparse_csr.crow_indices, np.int64).tolist(),
        "sparse_col_indices": np.frombuffer(tensor.sparse_csr.col_indices, np.int64).tolist(),
    }


def _likeliest_in_json(message: Any) -> list[Any]:
    tokens = np.frombuffer(message.token_ids, np.int32).reshape(-1, message.k).tolist()
    logprobs = np.frombuffer(message.logprobs, np.float32).reshape(-1, message.k).tolist()
    rows = [list(zip(*pair, strict=True)) for pair in zip(tokens, logprobs, strict=True)]
    return [None if row[0] == (0, UNSCORED) else row for row in rows]
