"""What a checkpoint costs in requests: counted from FORMAT.md (steps 13 to 21), not observed.

Retries, claims, restores and the bytes themselves are left out, and so are what a store charges for transfer.
"""

from dataclasses import dataclass

PUT_PRICE = 0.005
GET_PRICE = 0.0004
"""List prices of S3 Standard in us-east-1, in USD per 1,000 requests: PUT, POST and LIST; GET. DELETE is free there.
They differ by region and class, and change: an estimate."""
_OPEN_AND_CLOSE = {"s3": 2, "gs": 1, "az": 1}
"""Requests of an upload in parts besides its parts: opened and completed; opened; its blocks committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """puts: what is priced as a PUT, with POST and LIST."""

    puts: int = 0
    gets: int = 0
    deletes: int = 0

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(puts=self.puts + other.puts, gets=self.gets + other.gets, deletes=self.deletes + other.deletes)

    def __mul__(self, count: int) -> "Requests":
        return Requests(puts=self.puts * count, gets=self.gets * count, deletes=self.deletes * count)

    def cost(self, *, put_price: float = PUT_PRICE, get_price: float = GET_PRICE) -> float:
        """Prices are per 1,000 requests; the answer is in their currency."""
        return (self.puts * put_price + self.gets * get_price) / 1000


def of_rank(kind: str, *, size_bytes: int, part_bytes: int) -> Requests:
    """One rank's upload of one shard (13). kind: of the store, as `address.kind_of` has it. No requests
    elsewhere than at s3, gs and az."""
    if kind not in _OPEN_AND_CLOSE:
        return Requests()
    parts = -(-size_bytes // part_bytes)
    return Requests(puts=1 if parts <= 1 else parts + _OPEN_AND_CLOSE[kind])


def of_commit(*, components: int = 1) -> Requests:
    """Index, manifest and one `.metadata` per component (16), and the swap of `latest` (17)."""
    return Requests(puts=3 + components, gets=1)


def of_pointer() -> Requests:
    """What Ray is told of (18), at most every 5 s."""
    return Requests(puts=1)


def of_delete(*, ranks: int, components: int = 1) -> Requests:
    """Of a checkpoint that retention dropped (20): manifest, listing, index, and each component's directory. The swap
    that several share (21) is left out."""
    deletes = 2 + components * (1 + ranks)
    return Requests(puts=-(-deletes // 1000), deletes=deletes)
