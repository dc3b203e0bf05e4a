"""Reads the tensors of requests, which are protobuf or JSON, dense or as sparse rows.

Nothing is trusted: a shape must match the values, and sparse rows (CSR) must lie within their shape. The SDK makes a
tensor sparse whenever that is shorter.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
MAX_CELLS = 1 << 22
"""The maximum number of cells of a sparse tensor, unlisted ones included: a few bytes could claim any number."""
MAX_DIMENSIONS = 2
"""The maximum number of dimensions of a tensor: no input of a loss and no scored tensor has more."""


class MalformedDataError(ValueError):
    """The data of a request cannot be trained on or scored. The message says where and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """A tensor as received.

    values: of all cells, or of the listed ones. crow, col: where row n starts in `values`, and the column of each
    value; None if all cells are listed.
    """

    shape: tuple[int, ...]
    values: Array
    crow: IntArray | None = None
    col: IntArray | None = None

    def dense(self) -> Array:
        """Return all cells; unlisted ones are 0."""
        if self.crow is None:
            return self.values.reshape(self.shape)
        found = np.zeros(self.shape, self.values.dtype)
        found[self.rows(), self.col] = self.values
        return found

    def rows(self) -> IntArray:
        """Return the row of each value of a two-dimensional tensor."""
        if self.crow is None:
            return np.repeat(np.arange(self.shape[0]), self.shape[1])
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow))


def cells_in_protobuf(what: str, tensor: Any) -> Cells:
    """Return a Tensor of the SDK. what: its name in errors. Raises MalformedDataError."""
    from tinker.proto import tinker_public_pb2 as public_pb

    dtypes: dict[int, np.dtype[Any]] = {
        public_pb.DTYPE_FLOAT32: np.dtype(np.float32),
        public_pb.DTYPE_INT64: np.dtype(np.int64),
        public_pb.DTYPE_INT32: np.dtype(np.int32),
    }
    if tensor.dtype not in dtypes:
        raise MalformedDataError(f"{what} has an unknown dtype {tensor.dtype}")
    if not tensor.HasField("sparse_csr"):
        flat = array_in(what, tensor.dense, dtypes[tensor.dtype])
        return _checked(what, list(tensor.shape) or [len(flat)], flat)
    values = array_in(what, tensor.sparse_csr.values, dtypes[tensor.dtype])
    places = [tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices]
    crow, col = (array_in(what, data, np.dtype(np.int64)) for data in places)
    return _checked(what, list(tensor.shape), values, crow, col)


def cells_in_json(what: str, value: Any) -> Cells:
    """Return a tensor in the SDK's JSON. Raises MalformedDataError."""
    if not isinstance(value, dict) or "data" not in value or "dtype" not in value:
        raise MalformedDataError(f"{what} is not a tensor: give data, dtype, and shape")
    if value["dtype"] == "int64":
        flat: Array = ints_in(what, value["data"])
    else:
        try:
            flat = np.asarray(value["data"], np.float32)
        except (TypeError, ValueError, OverflowError):
            raise MalformedDataError(f"{what} is not a list of numbers that float32 can hold") from None
    shape = value.get("shape") or [flat.size]
    if not isinstance(shape, list) or any(type(size) is not int for size in shape):
        raise MalformedDataError(f"{what} has no shape: {shape!r}")
    if value.get("sparse_crow_indices") is None:
        return _checked(what, shape, flat)
    crow, col = (ints_in(what, value.get(f"sparse_{name}_indices")) for name in ("crow", "col"))
    return _checked(what, shape, flat, crow, col)


def _checked(
    what: str, shape: list[int], values: Array, crow: IntArray | None = None, col: IntArray | None = None
) -> Cells:
    if len(shape) > MAX_DIMENSIONS or any(size > MAX_CELLS for size in shape):
        raise MalformedDataError(
            f"{what} claims a shape with {len(shape)} dimensions, the largest of size {max(shape)}: give at most "
            f"{MAX_DIMENSIONS}, each of at most {MAX_CELLS}"
        )
    if any(size < 0 for size in shape) or values.ndim != 1 or (crow is None and math.prod(shape) != len(values)):
        raise MalformedDataError(f"{what} claims the shape {shape} and has {values.size} values")
    if crow is not None and col is not None:
        if len(shape) != 2 or math.prod(shape) > MAX_CELLS:
            raise MalformedDataError(f"{what} is sparse and claims the shape {shape}: give at most {MAX_CELLS} cells")
        is_whole = len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(values) == len(col)
        if not is_whole or (np.diff(crow) < 0).any() or (col < 0).any() or (col >= shape[1]).any():
            raise MalformedDataError(f"{what} is sparse, but its rows and columns are not within the shape {shape}")
        in_one_row = np.diff(np.repeat(np.arange(shape[0]), np.diff(crow))) == 0
        if (np.diff(col)[in_one_row] <= 0).any():
            raise MalformedDataError(f"{what} is sparse, but the columns of a row do not increase: list each cell once")
    return Cells(shape=tuple(shape), values=values, crow=crow, col=col)


def array_in(what: str, data: bytes, dtype: np.dtype[Any]) -> Array:
    """Return the values in bytes. Raises MalformedDataError if the last one is incomplete."""
    if len(data) % dtype.itemsize:
        raise MalformedDataError(f"{what} has {len(data)} bytes, which is not a whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def ints_in(what: str, given: Any) -> IntArray:
    """Return a JSON list of integers as an array. Raises MalformedDataError."""
    if not isinstance(given, list) or any(type(value) is not int or abs(value) >= 1 << 62 for value in given):
        raise MalformedDataError(f"{what} is not a list of whole numbers")
    return np.asarray(given, np.int64)
