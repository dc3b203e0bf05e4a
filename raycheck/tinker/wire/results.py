"""Writes the results of passes in the SDK's format: protobuf on request, else JSON."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from raycheck.tinker.wire.samples import sample_in_json
from raycheck.tinker.wire.training_data import FloatArray

PROTOBUF = "application/x-protobuf"


def pass_in_protobuf(logprobs: Sequence[FloatArray], losses: Sequence[FloatArray], loss_sum: float) -> bytes:
    """Return a ForwardBackwardOutput with two arrays per datum: its log-probabilities, and its losses by token.

    A record of the message holds consecutive data with the same number of targets per token.
    """
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, group in groupby(zip(logprobs, losses, strict=True), lambda pair: pair[0].shape[1:]):
        pairs = list(group)
        record = message.loss_fn_outputs.add()
        record.type_tag = "ArrayRecord"
        record.num_datums = len(pairs)
        for name, arrays in zip(("logprobs", "elementwise_loss"), zip(*pairs, strict=True), strict=True):
            batched = record.fields[name]
            batched.dtype = public_pb.DTYPE_FLOAT32
            batched.data = b"".join(np.ascontiguousarray(array, np.float32).tobytes() for array in arrays)
            offsets = np.cumsum([0, *(array.size * 4 for array in arrays)], dtype=np.int64)
            batched.offsets = offsets.tobytes()
            batched.trailing_shape.extend(trailing)
    message.metrics["loss:sum"] = loss_sum
    return bytes(message.SerializeToString())


def pass_in_json(data: bytes) -> dict[str, Any]:
    """Return the JSON form of what `pass_in_protobuf` wrote, for clients that do not read protobuf."""
    from tinker.proto import tinker_public_pb2 as public_pb

    message = public_pb.ForwardBackwardOutput()
    message.ParseFromString(data)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        data_of_record: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
        for name, batched in record.fields.items():
            values = np.frombuffer(batched.data, np.float32)
            offsets = np.frombuffer(batched.offsets, np.int64) // 4
            for output, begin, end in zip(data_of_record, offsets, offsets[1:], strict=False):
                found = values[begin:end].reshape(-1, *batched.trailing_shape)
                output[name] = {"data": found.ravel().tolist(), "dtype": "float32", "shape": list(found.shape)}
        outputs += data_of_record
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


FORMS: Mapping[str, Any] = {"pass": pass_in_json, "sample": sample_in_json}
"""Functions that convert a stored protobuf result into JSON, by the result's form."""
