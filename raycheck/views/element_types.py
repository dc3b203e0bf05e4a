"""Converts the bytes of tensors into numbers using only NumPy, for machines without torch.

NumPy lacks torch's bfloat16 and 8-bit types; these are decoded from their bits.
"""

from typing import Any

import numpy as np

from raycheck.errors import ConfigError

_SAME = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "<i1",
    "uint8": "<u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "<u1",
    "complex64": "<c8",
    "complex128": "<c16",
}
_FLOAT8 = {"float8_e4m3fn": (4, 7, False), "float8_e5m2": (5, 15, True)}
"""Bits of the exponent, its bias, and whether the highest exponent means infinity as in IEEE 754."""


def item_bytes(dtype: str) -> int:
    """Return the size of an element of this type in bytes. Raises ConfigError for a type that cannot be read here."""
    if dtype in _SAME:
        return int(np.dtype(_SAME[dtype]).itemsize)
    if dtype == "bfloat16":
        return 2
    if dtype in _FLOAT8:
        return 1
    raise ConfigError(f"values of the type {dtype} cannot be shown; restore the tensor with torch to look at it")


def decode(data: Any, dtype: str) -> Any:
    """Return the elements in `data` as a flat float64 array; complex numbers become their absolute values.

    data: little-endian elements, a whole number of them. Integers above 2^53 are rounded. Raises ConfigError for a type
    that cannot be read here.
    """
    item_bytes(dtype)
    if dtype in _FLOAT8:
        return _float8(dtype)[np.frombuffer(data, "<u1")]
    if dtype == "bfloat16":
        found = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        found = np.frombuffer(data, _SAME[dtype])
    with np.errstate(invalid="ignore"):  # a signaling NaN becomes a quiet one
        return np.abs(found).astype(np.float64) if found.dtype.kind == "c" else found.astype(np.float64)


def _float8(dtype: str) -> Any:
    """Return the values of all 256 patterns of an 8-bit type."""
    bits, bias, is_ieee = _FLOAT8[dtype]
    fraction_bits = 7 - bits
    patterns = np.arange(256)
    exponent = (patterns >> fraction_bits) & ((1 << bits) - 1)
    fraction = (patterns & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    top = (1 << bits) - 1
    if is_ieee:
        size = np.where(exponent == top, np.where(fraction == 0, np.inf, np.nan), size)
    else:
        size = np.where(patterns & 0x7F == 0x7F, np.nan, size)
    return np.where(patterns & 0x80, -size, size)
