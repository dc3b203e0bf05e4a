"""What clients really ask a store for: the heads of all requests, as a proxy before it sees them.

Requests on a shard object carry tensor data, the beginning and the completion of its multipart upload included, which
are a part of sending it; a HEAD of it does not. Bytes are those that ranges and bodies name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from raycheck.bucket.store import Store
from raycheck.bucket.store.address import parse_uri
from tests.support.servers.http_fault_proxy import FaultProxy, Head, fault_proxy

SHARD = ".distcp"


@dataclass(frozen=True, slots=True)
class Wire:
    """A bucket behind a proxy. uri: of the bucket through it."""

    _proxy: FaultProxy
    uri: str

    def since(self, mark: int) -> list[Head]:
        return self._proxy.heads[mark:]

    @property
    def mark(self) -> int:
        """Now, for `since`."""
        return len(self._proxy.heads)


@contextmanager
def watched(uri: str) -> Iterator[Wire]:
    with fault_proxy(uri) as proxy:
        yield Wire(proxy, proxy.uri)


def without_data(heads: Sequence[Head]) -> list[str]:
    """The requests that carry no tensor data, as they would stand in a log."""
    return [f"{head.method} {head.target}" for head in heads if not _carries_data(head)]


def bytes_sent(heads: Sequence[Head]) -> int:
    return sum(int(head.headers.get("content-length", 0)) for head in heads if head.method in ("PUT", "POST"))


def bytes_read(heads: Sequence[Head], store: Store) -> int:
    """Of all GETs, ranges cut at the object's end. `store`: the same bucket, not watched, rooted where all keys lie."""
    return sum(_body_bytes(head, store) for head in heads if head.method == "GET" and "list-type" not in head.target)


def _body_bytes(head: Head, store: Store) -> int:
    size = store.head(_key_of(head, store))
    wanted = head.headers.get("range", "").removeprefix("bytes=")
    if not wanted:
        return size
    start, _, last = wanted.partition("-")
    return min(int(last or size) + 1, size) - int(start)


def _key_of(head: Head, store: Store) -> str:
    at = parse_uri(store.uri)
    return unquote(urlsplit(head.target).path).removeprefix(f"/{at.bucket}/").removeprefix(f"{at.prefix}/")


def _carries_data(head: Head) -> bool:
    return urlsplit(head.target).path.endswith(SHARD) and head.method in ("GET", "PUT", "POST")
