"""Reads the tensors of requests, which come as protobuf or JSON, with every value or as sparse rows.

Nothing is believed: a shape must be that of the values, and sparse rows (CSR) must lie within theirs. The SDK itself
makes a tensor sparse where that is shorter.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
MAX_CELLS = 1 << 22
"""How many cells a sparse tensor may have with those that are not listed: few bytes could claim any number."""
MAX_DIMENSIONS = 2
"""How many dimensions a tensor may have: no input of a loss, and nothing that is scored, has more."""


class MalformedDataError(ValueError):
    """The data of a request cannot be trained on, or scored. The message says where and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """Holds a tensor as it came.

    values: of all cells, or of the listed ones. crow, col: where those of row n begin among `values`, and the column of
    each; None when all are there.
    """

    shape: tuple[int, ...]
    values: Array
    crow: IntArray | None = None
    col: IntArray | None = None

    def dense(self) -> Array:
        """Return all cells; those that are not listed are 0."""
        if self.crow is None:
            return self.values.reshape(self.shape)
        found = np.zeros(self.shape, self.values.dtype)
        found[self.rows(), self.col] = self.values
        return found

    def rows(self) -> IntArray:
        """Return the row of each value of a tensor with two dimensions."""
        if self.crow is None:
            return np.repeat(np.arange(self.shape[0]), self.shape[1])
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow))


def cells_in_protobuf(what: str, tensor: Any) -> Cells:
    """Return a Tensor of the SDK's. what: names it in errors. Raises MalformedDataError."""
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
        raise MalformedDataError(f"{what} is no tensor: give data, dtype and shape")
    if value["dtype"] == "int64":
        flat: Array = ints_in(what, value["data"])
    else:
        try:
            flat = np.asarray(value["data"], np.float32)
        except (TypeError, ValueError, OverflowError):
            raise MalformedDataError(f"{what} is no list of numbers that float32 can hold") from None
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
            raise MalformedDataError(f"{what} is sparse, and claims the shape {shape}: give at most {MAX_CELLS} cells")
        is_whole = len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(values) == len(col)
        if not is_whole or (np.diff(crow) < 0).any() or (col < 0).any() or (col >= shape[1]).any():
            raise MalformedDataError(f"{what} is sparse, and its rows and columns do not lie in the shape {shape}")
        in_one_row = np.diff(np.repeat(np.arange(shape[0]), np.diff(crow))) == 0
        if (np.diff(col)[in_one_row] <= 0).any():
            raise MalformedDataError(f"{what} is sparse, and the columns of a row do not rise: list each cell once")
    return Cells(shape=tuple(shape), values=values, crow=crow, col=col)


def array_in(what: str, data: bytes, dtype: np.dtype[Any]) -> Array:
    """Return the values in bytes. Raises MalformedDataError for a torn one."""
    if len(data) % dtype.itemsize:
        raise MalformedDataError(f"{what} has {len(data)} bytes, which are no {dtype} values")
    return np.frombuffer(data, dtype)


def ints_in(what: str, given: Any) -> IntArray:
    """Return a list of JSON as whole numbers. Raises MalformedDataError."""
    if not isinstance(given, list) or any(type(value) is not int or abs(value) >= 1 << 62 for value in given):
        raise MalformedDataError(f"{what} is no list of whole numbers")
    return np.asarray(given, np.int64)
