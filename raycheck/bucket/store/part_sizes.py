"""Says how large objects are cut into parts, for each store.

A part is small enough that its request ends within the time-out on a slow link, and large enough that the request's own
cost does not matter. More parts in flight gained nothing on the stores that were measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSizes:
    """part_bytes: of each part but the last. max_parts: what the service allows, larger
    objects get larger parts; None where it sets no limit. in_flight: parts of one object that are sent at a time."""

    part_bytes: int = 16 * 1024 * 1024
    max_parts: int | None = 10_000
    in_flight: int = 4

    def part_bytes_of(self, size_bytes: int) -> int:
        """How long the parts of an object of this size are."""
        smallest = 0 if self.max_parts is None else -(-size_bytes // self.max_parts)
        return max(self.part_bytes, smallest)


MIN_PART_BYTES = 5 * 1024 * 1024
"""What S3 takes for a part that is not the last one."""
MAX_COPIED_BYTES = 256 * 1024 * 1024
"""Of one range that a store copies itself: it answers within the time-out of a request."""
PART_SIZES = {
    "s3": PartSizes(),
    "gs": PartSizes(max_parts=None, in_flight=1),  # chunks of a resumable upload, one after another
    "az": PartSizes(max_parts=50_000),
}
