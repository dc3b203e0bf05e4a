"""Encodes the difference between two arrays of equal size, losslessly, and applies it in place.

Step 46. An array is cut into blocks of 4 MiB. Each becomes a byte for its kind, four bytes for the size of what follows
(little-endian), and that many bytes. The kinds are:

- 0: the block is unchanged; nothing follows.
- 1: every element is XORed with its base.
- 2: the changed elements only: the gaps between their positions, as 32-bit integers, then each XORed with its base.
- 3: the new elements.

What follows is one zstd frame. Inside it, integers are little-endian and in byte planes: first the lowest byte of all
elements, then the next one. After a small step most elements are equal, and the others differ in their lowest bits, so
that planes compress well.
"""

import struct
from typing import TYPE_CHECKING, Any

from raycheck.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger[Any]]

BLOCK_BYTES = 4 * 1024 * 1024
UNCHANGED, XOR, SPARSE, WHOLE = range(4)
SAMPLED = 256 * 1024
"""The number of elements on which the kind of a tensor's blocks is tried."""
LEVEL = 1
"""Of zstd. Higher ones take several times as long for a few percent."""
WIDTHS = (1, 2, 4, 8)
_GAP_BYTES = 4
_HEAD = struct.Struct("<BI")


def encode(base: memoryview, new: memoryview, width: int) -> bytes | None:
    """Return the patch that turns `base` into `new`; None if they are equal.

    Both have the same size. width: bytes per element. Which of kinds 1 and 2 is smaller is tried on some elements, from
    the first one that has changed.
    """
    blocks: list[bytes] = []
    kind = None
    for start in range(0, len(new), BLOCK_BYTES):
        before, after = (_elements(one[start : start + BLOCK_BYTES], width) for one in (base, new))
        changes = before ^ after
        if not changes.any():
            blocks.append(_HEAD.pack(UNCHANGED, 0))
            continue
        if kind is None:
            some = changes[int((changes != 0).argmax()) :][:SAMPLED]
            kind = XOR if len(_xor(some)) <= len(_sparse(some)) else SPARSE
        used, found = kind, _xor(changes) if kind == XOR else _sparse(changes)
        if len(found) >= after.nbytes:
            used, found = WHOLE, _xor(after)
        blocks.append(_HEAD.pack(used, len(found)) + found)
    return b"".join(blocks) if kind is not None else None


def apply(patch: memoryview, target: memoryview, width: int, *, what: str) -> None:
    """Turn the base in `target` into the new bytes. what: names the tensor in errors.

    Raises CorruptError for anything that `encode` does not write; `target` then has anything in it.
    """
    at = 0
    for start in range(0, len(target), BLOCK_BYTES):
        if at + _HEAD.size > len(patch):
            raise CorruptError(f"{what}: the patch ends too early")
        kind, size = _HEAD.unpack_from(patch, at)
        at += _HEAD.size
        if at + size > len(patch):
            raise CorruptError(f"{what}: the patch ends too early")
        _apply_block(kind, patch[at : at + size], _elements(target[start : start + BLOCK_BYTES], width), what)
        at += size
    if at != len(patch):
        raise CorruptError(f"{what}: the patch is longer than its tensor")


def _apply_block(kind: int, data: memoryview, target: "Elements", what: str) -> None:
    import numpy as np

    if kind == UNCHANGED:
        if data:
            raise CorruptError(f"{what}: an unchanged block has bytes")
        return
    if kind not in (XOR, SPARSE, WHOLE):
        raise CorruptError(f"{what}: {kind} is not a kind of block")
    plain = _decompressed(data, len(target) * (target.itemsize + _GAP_BYTES), what)
    if kind != SPARSE:
        if len(plain) != target.nbytes:
            raise CorruptError(f"{what}: a block has {len(plain)} bytes instead of {target.nbytes}")
        values = _from_planes(plain, target.dtype)
        np.copyto(target, values if kind == WHOLE else target ^ values)
        return
    count, rest = divmod(len(plain), _GAP_BYTES + target.itemsize)
    places = np.cumsum(_from_planes(plain[: count * _GAP_BYTES], np.dtype("<u4")).astype(np.int64) + 1) - 1
    if rest or not count or places[-1] >= len(target):
        raise CorruptError(f"{what}: a block changes elements outside of it")
    target[places] ^= _from_planes(plain[count * _GAP_BYTES :], target.dtype)


def _xor(changes: "Elements") -> bytes:
    return _compressed(_planes(changes))


def _sparse(changes: "Elements") -> bytes:
    import numpy as np

    places = np.flatnonzero(changes != 0)  # four times as fast as without the comparison
    gaps = (np.diff(places, prepend=-1) - 1).astype("<u4")
    return _compressed(_planes(gaps) + _planes(changes[places]))


def _elements(data: memoryview, width: int) -> "Elements":
    import numpy as np

    found: Elements = np.frombuffer(data, dtype=f"<u{width}")
    return found


def _planes(values: "Elements") -> bytes:
    import numpy as np

    planes = np.empty((values.itemsize, len(values)), np.uint8)
    for number, plane in enumerate(planes):
        np.right_shift(values, values.dtype.type(8 * number), out=plane, casting="unsafe")
    return planes.tobytes()


def _from_planes(data: bytes, dtype: "np.dtype[Any]") -> "Elements":
    import numpy as np

    planes = np.frombuffer(data, dtype=np.uint8).reshape(dtype.itemsize, -1)
    found: Elements = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    return found


def _compressed(data: bytes) -> bytes:
    return bytes(zstd().ZstdCompressor(level=LEVEL).compress(data))


def _decompressed(data: memoryview, max_bytes: int, what: str) -> bytes:
    """Return the bytes of one frame, which must say how many they are. A hostile frame could say nothing, and be as
    long as memory."""
    library = zstd()
    try:
        said = library.get_frame_parameters(data).content_size
        if said > max_bytes:
            raise CorruptError(f"{what}: a block of the patch says that it has {said} bytes")
        return bytes(library.ZstdDecompressor().decompress(data, max_output_size=said))
    except library.ZstdError as error:
        raise CorruptError(f"{what}: a block of the patch cannot be decompressed: {error}") from None


def zstd() -> Any:
    """Return the module zstandard. Raises ConfigError when it or NumPy is not installed."""
    try:
        import numpy as np
        import zstandard
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'raycheck[publish]'") from error
    del np
    return zstandard
