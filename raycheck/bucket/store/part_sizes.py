"""Defines how large objects are cut into parts, for each store.

A part is small enough that its request ends within the timeout on a slow link, and large enough that the overhead of a
request does not matter. More parts in flight brought no gain on the stores that were measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """The sizes of the parts into which one store's objects are cut.

    part_bytes: the size of each part but the last. max_parts: how many the service allows, so that larger objects get
    larger parts; None where there is no limit. in_flight: how many parts of one object are sent at a time.
    """

    part_bytes: int = 16 * 1024 * 1024
    max_parts: int | None = 10_000
    in_flight: int = 4

    def part_bytes_of(self, size_bytes: int) -> int:
        """Return the size in bytes of the parts of an object of this size."""
        smallest = 0 if self.max_parts is None else -(-size_bytes // self.max_parts)
        return max(self.part_bytes, smallest)


MIN_PART_BYTES = 5 * 1024 * 1024
"""The least that S3 accepts for a part that is not the last one."""
MAX_COPIED_BYTES = 256 * 1024 * 1024
"""The longest range that a store is asked to copy itself: its response must arrive within the timeout of a request."""
PART_SIZES = {
    "s3": PartSizes(),
    "gs": PartSizes(max_parts=None, in_flight=1),  # chunks of a resumable upload, one after another
    "az": PartSizes(max_parts=50_000),
}
