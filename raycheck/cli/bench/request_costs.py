"""Counts the requests that a checkpoint costs, from FORMAT.md (steps 13 to 21); nothing is observed.

Left out are retries, claims, restores, the storage of the bytes, and what a store charges for their transfer.
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
    """Holds numbers of requests. puts: all that are priced as a PUT, which POST and LIST are."""

    puts: int = 0
    gets: int = 0
    deletes: int = 0

    def __add__(self, other: "Requests") -> "Requests":
        return Requests(puts=self.puts + other.puts, gets=self.gets + other.gets, deletes=self.deletes + other.deletes)

    def __mul__(self, count: int) -> "Requests":
        return Requests(puts=self.puts * count, gets=self.gets * count, deletes=self.deletes * count)

    def cost(self, *, put_price: float = PUT_PRICE, get_price: float = GET_PRICE) -> float:
        """Returns the price of these requests. Prices are per 1,000 requests; the answer is in their currency."""
        return (self.puts * put_price + self.gets * get_price) / 1000


def of_rank(kind: str, *, size_bytes: int, part_bytes: int) -> Requests:
    """Returns the requests of one rank's upload of one shard (step 13).

    kind: the kind of store, as `address.kind_of` names it. Other stores than s3, gs and az have no requests.
    """
    if kind not in _OPEN_AND_CLOSE:
        return Requests()
    parts = -(-size_bytes // part_bytes)
    return Requests(puts=1 if parts <= 1 else parts + _OPEN_AND_CLOSE[kind])


def of_commit(*, components: int = 1) -> Requests:
    """Returns the requests of a commit: index, manifest and one `.metadata` per component (step 16), and the swap of
    `latest` (step 17), which is not read when nobody else has written it."""
    return Requests(puts=3 + components)


def of_pointer() -> Requests:
    """Returns the requests of the pointer that Ray is given (step 18), at most every 5 s."""
    return Requests(puts=1)


def of_delete(*, ranks: int, components: int = 1) -> Requests:
    """Returns the requests that delete a dropped checkpoint (step 20): manifest, listing, index, and each component's
    directory. The swap that several deletes share (step 21) is left out."""
    deletes = 2 + components * (1 + ranks)
    return Requests(puts=-(-deletes // 1000), deletes=deletes)
