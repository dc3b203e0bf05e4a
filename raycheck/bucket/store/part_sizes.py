"""Defines how large objects are cut into parts, for each store.

A part is small enough that its request ends within the timeout on a slow link, and large enough that the overhead of a
request does not matter. The more parts are in flight (request_window.py), the smaller they are. The more ranks send at
the same time, the larger they are, since stores limit the requests per second: S3 to 3,500 writes and 5,500 reads below
one prefix, until it has divided the prefix.
"""

from dataclasses import dataclass

_expected = {"ranks": 1}


def expect_ranks(count: int) -> None:
    """Set how many ranks send requests to the store of this process at the same time as it does."""
    _expected["ranks"] = count


def fewest_in_flight(least: int) -> int:
    """Return with how many requests in flight a rank begins: `least`, and one when there are thousands of ranks."""
    return max(1, min(least, least * RANKS_AT_LEAST // _expected["ranks"]))


def _least_bytes() -> int:
    """Return below which size requests for data are not cut, if there are many ranks."""
    return min(MOST_LEAST_BYTES, _expected["ranks"] // RANKS_AT_LEAST * 8 * 1024 * 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """The sizes of the parts into which one store's objects are cut.

    part_bytes: the size of each part but the last, at most. max_parts: how many the service allows, so that larger
    objects get larger parts; None where there is no limit. in_flight: how many parts are sent at a time at first.
    """

    part_bytes: int = 16 * 1024 * 1024
    max_parts: int | None = 10_000
    in_flight: int = 4

    def part_bytes_of(self, size_bytes: int, in_flight: int = 0) -> int:
        """Return the size in bytes of the parts of an object of this size.

        in_flight: how many of them are sent at a time; 0 if only one after another.
        """
        smallest = 0 if self.max_parts is None else -(-size_bytes // self.max_parts)
        return max(piece_bytes(size_bytes, in_flight, MIN_PART_BYTES, self.part_bytes), smallest)


def piece_bytes(size_bytes: int, in_flight: int, least: int, most: int) -> int:
    """Return the size of the pieces in which `size_bytes` are transferred, `in_flight` at a time; `most` if that is 0.

    They are small enough for each connection to have several, so that the last ones leave few connections idle. With
    many ranks they are larger than `most`.
    """
    larger = _least_bytes()
    most = max(most, larger)
    if not in_flight:
        return most
    each = max(larger, -(-size_bytes // (PIECES_EACH * in_flight)))
    return max(least, min(most, each, BYTES_IN_FLIGHT // in_flight))


RANKS_AT_LEAST = 256
"""With more ranks than these, requests are fewer and larger."""
MOST_LEAST_BYTES = 64 * 1024 * 1024
"""How large they become for so many ranks: a link of 1.1 MB/s still carries one within the timeout of a request."""
PIECES_EACH = 6
"""How many pieces each connection transfers, if they can be that small."""
BYTES_IN_FLIGHT = 256 * 1024 * 1024
"""About the most that the requests in flight in one direction hold in memory."""
MIN_PART_BYTES = 5 * 1024 * 1024
"""The least that S3 accepts for a part that is not the last one."""
MAX_COPIED_BYTES = 256 * 1024 * 1024
"""The longest range that a store is asked to copy itself: its response must arrive within the timeout of a request."""
PART_SIZES = {
    "s3": PartSizes(),
    "gs": PartSizes(max_parts=None, in_flight=1),  # chunks of a resumable upload, one after another
    "az": PartSizes(max_parts=50_000),
}
