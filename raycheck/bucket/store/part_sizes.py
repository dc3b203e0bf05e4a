"""Defines how large objects are cut into parts, for each store.

A part is small enough that its request ends within the timeout on a slow link, and large enough that the overhead of a
request does not matter. The more parts are in flight (request_window.py), the smaller they are. The more ranks send at
the same time, the larger they are, since stores limit the requests per second: S3 to 3,500 writes and 5,500 reads below
one prefix, until it has divided the prefix.
"""

import os
from dataclasses import dataclass


def ranks_in_group() -> int:
    """Return the number of ranks in this process's group. All of them use the store at the same time."""
    return _number_of_ranks("WORLD_SIZE")


def ranks_on_node() -> int:
    """Return the number of ranks of this process's group on this node."""
    return _number_of_ranks("LOCAL_WORLD_SIZE")


def _number_of_ranks(variable: str) -> int:
    """Return what torchrun and Ray's TorchTrainer have set; 1 where nobody has."""
    value = os.environ.get(variable, "")
    return max(1, int(value)) if value.isdecimal() else 1


def fewest_in_flight(least: int) -> int:
    """Return the least number of requests that a rank keeps in flight. It falls from `least` to one as the number of
    ranks grows."""
    return max(1, min(least, least * MANY_RANKS // ranks_in_group()))


def most_in_flight(most: int) -> int:
    """Return the largest number of requests that a rank keeps in flight. It falls from `most` as requests grow."""
    floor = floor_bytes(ranks_in_group())
    return min(most, BYTES_IN_FLIGHT // floor) if floor else most


def floor_bytes(ranks: int) -> int:
    """Return the smallest size of a request for data; 0 with few ranks."""
    return min(LARGEST_FLOOR_BYTES, ranks // MANY_RANKS * 16 * 1024 * 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """The sizes of the parts into which one store's objects are cut.

    part_bytes: the size of each part but the last, at most. max_parts: how many the service allows, so that larger
    objects get larger parts; None where there is no limit. in_flight: how many parts are sent at a time at least.
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
    many ranks they may be larger than `most`.
    """
    floor = min(size_bytes, floor_bytes(ranks_in_group()))
    most = max(most, floor)
    if not in_flight:
        return most
    each = max(floor, -(-size_bytes // (PIECES_EACH * in_flight)))
    return max(least, min(most, each, BYTES_IN_FLIGHT // in_flight))


MANY_RANKS = 256
"""From so many ranks on, requests are fewer and larger."""
LARGEST_FLOOR_BYTES = 64 * 1024 * 1024
"""A link of 1.1 MB/s still carries so much within the timeout of a request."""
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
