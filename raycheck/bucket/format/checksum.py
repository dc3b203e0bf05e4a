"""Computes CRC-32 with the zip polynomial: one value serves a torch record, the index, the manifest and the store.

isal computes it at memory speed outside the GIL; the stdlib's zlib gives the same numbers.
"""

from collections.abc import Iterable

from isal import isal_zlib

SUB_BLOCK = 4 * 1024 * 1024
"""The payload bytes under one checksum: the smallest amount that a partial read can verify."""

READS = 2
"""The number of readings before bytes in the bucket count as damaged: they may be corrupted on the way."""


def crc32(data: bytes | bytearray | memoryview, start: int = 0) -> int:
    return int(isal_zlib.crc32(data, start))


def sub_block_crcs(payload: memoryview) -> list[int]:
    """Return the CRC-32 of each 4 MiB sub-block, the last one shorter; none for an empty payload."""
    return [crc32(payload[at : at + SUB_BLOCK]) for at in range(0, len(payload), SUB_BLOCK)]


def combined(parts: Iterable[tuple[int, int]], start: int = 0) -> int:
    """Return the CRC-32 of a concatenation, from (crc32, length in bytes) of its parts.

    start: the CRC-32 of the bytes before them.
    """
    total = start
    for crc, length in parts:
        total = int(isal_zlib.crc32_combine(total, crc, length))
    return total


def sub_block_lengths(size: int) -> list[int]:
    return [min(SUB_BLOCK, size - at) for at in range(0, size, SUB_BLOCK)]
