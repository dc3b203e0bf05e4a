"""Writes results as the SDK reads them: protobuf for passes and samples where it asks for that, else JSON."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raycheck.tinker.wire.training_data import FloatArray

PROTOBUF = "application/x-protobuf"


def pass_in_protobuf(logprobs: Sequence[FloatArray], losses: Sequence[FloatArray], loss_sum: float) -> bytes:
    """Returns a ForwardBackwardOutput with two arrays per datum: its log-probabilities, and its losses by token."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add()
    record.type_tag = "ArrayRecord"
    record.num_datums = len(logprobs)
    for name, arrays in (("logprobs", logprobs), ("elementwise_loss", losses)):
        batched = record.fields[name]
        batched.dtype = public_pb.DTYPE_FLOAT32
        batched.data = b"".join(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays)
        offsets = np.cumsum([0, *(array.size * 4 for array in arrays)], dtype=np.int64)
        batched.offsets = offsets.tobytes()
    message.metrics["loss:sum"] = loss_sum
    return bytes(message.SerializeToString())


def pass_in_json(data: bytes) -> dict[str, Any]:
    """Returns the JSON form of what `pass_in_protobuf` wrote, for clients that do not read protobuf."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.ForwardBackwardOutput()
    message.ParseFromString(data)
    (record,) = message.loss_fn_outputs
    outputs: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
    for name, batched in record.fields.items():
        values = np.frombuffer(batched.data, np.float32)
        offsets = np.frombuffer(batched.offsets, np.int64) // 4
        for output, begin, end in zip(outputs, offsets, offsets[1:], strict=False):
            output[name] = {
                "data": values[begin:end].tolist(),
                "dtype": "float32",
                "shape": [int(end - begin)],
            }
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def sample_in_protobuf(
    sequences: Sequence[tuple[npt.NDArray[Any], FloatArray, bool]], prompt_logprobs: FloatArray | None
) -> bytes:
    """Returns a SampleResponse. sequences: tokens, their log-probabilities, and whether a stop ended the sequence."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.SampleResponse()
    for tokens, logprobs, is_stopped in sequences:
        sequence = message.sequences.add()
        sequence.stop_reason = public_pb.STOP_REASON_STOP if is_stopped else public_pb.STOP_REASON_LENGTH
        sequence.tokens = np.ascontiguousarray(tokens, np.int32).tobytes()
        sequence.logprobs = np.ascontiguousarray(logprobs, np.float32).tobytes()
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(prompt_logprobs, np.float32).tobytes()
    return bytes(message.SerializeToString())


def sample_in_json(data: bytes) -> dict[str, Any]:
    """Returns the JSON form of what `sample_in_protobuf` wrote."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.SampleResponse()
    message.ParseFromString(data)
    prompt = np.frombuffer(message.prompt_logprobs, np.float32).tolist() if message.prompt_logprobs else None
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop" if sequence.stop_reason == public_pb.STOP_REASON_STOP else "length",
                "tokens": np.frombuffer(sequence.tokens, np.int32).tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, np.float32).tolist(),
            }
            for sequence in message.sequences
        ],
        "prompt_logprobs": None if prompt is None else [None if math.isnan(value) else value for value in prompt],
    }


FORMS: Mapping[str, Any] = {"pass": pass_in_json, "sample": sample_in_json}
"""What turns a stored protobuf result into JSON, by the result's form."""
