"""Keeps `latest` small: moves all but the newest live entries to pages, which are written before the swap. Step 40.

Every swap computes its new body as if `latest` listed everything. Below it, this module decides where each entry is
listed: in the body itself, in a page that exists, or in a new page. A page never changes (I2): when an entry of one
changes or leaves, a new page takes its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from uuid import uuid4

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import Entry, Latest, Page, PageRef, PastPage
from raycheck.bucket.format.object_keys import PAGES_PREFIX, counter_of_page, page_key
from raycheck.bucket.pages import Pages
from raycheck.bucket.reading import read_newest
from raycheck.bucket.store import Store

MOST_NEWEST, MOST_NEWEST_BYTES = 128, 32 * 1024
"""Above either of these, the oldest entries of a body move to a page..."""
KEPT_NEWEST, KEPT_NEWEST_BYTES = 64, 16 * 1024
"""...until it lists no more than these, and no fewer than LEAST_NEWEST."""
LEAST_NEWEST = 8
PAGE_ENTRIES = 1000
"""The last page is replaced by a longer one until it lists this many; then a new one begins."""
MOST_PAGES = 64
"""Of more pages, the two neighbors that list the fewest become one. So a body never names more."""
WRITES_KEPT = 100
"""A page stays for this many writes of `latest` after the first body that does not name it: for slow readers, and for
whoever puts an older version of `latest` back."""

_Part = PageRef | tuple[Entry, ...]
"""A page that exists, or the entries of one to be written."""


def fold(new: Latest, old: Latest | None, pages: Pages) -> tuple[Latest, Mapping[str, bytes]]:
    """Return `new` as it is to be stored, and the pages to write before it, by key.

    new: the body to write, whole or with pages of `old`. old: the body that it replaces. Raises PageMissingError.
    """
    parts: list[_Part] = list(new.pages)
    newest: Sequence[Entry] = new.newest
    if old is not None and old.pages and not new.pages:
        parts, newest = _kept_in_pages(new, old, pages)
    moved = _too_old(newest, new.kept_newest)
    if moved:
        keys = {entry.key for entry in moved}
        newest = tuple(entry for entry in newest if entry.key not in keys)
        parts = _merged(_with_moved(parts, moved, pages), pages)
    written: dict[str, bytes] = {}
    refs = tuple(part if isinstance(part, PageRef) else _write(part, new, pages, written) for part in parts)
    return replace(new, newest=tuple(newest), pages=refs, past_pages=_past(new, old, refs)), written


def _past(new: Latest, old: Latest | None, refs: tuple[PageRef, ...]) -> tuple[PastPage, ...]:
    """Return the pages whose objects stay although the body with the pages `refs` does not name them."""
    named = {ref.key for ref in refs}
    left = [ref.key for ref in (old.pages if old is not None else ()) if ref.key not in named]
    stay = (page for page in new.past_pages if page.since > new.counter - WRITES_KEPT)
    return (*stay, *(PastPage(key=key, since=new.counter) for key in left))


def _kept_in_pages(new: Latest, old: Latest, pages: Pages) -> tuple[list[_Part], Sequence[Entry]]:
    """Find what of the whole body `new` the pages of `old` list. Return the pages, and the entries in none of them."""
    left = {entry.key: entry for entry in new.newest}
    here = new.kept_newest
    parts: list[_Part] = []
    for ref, before in zip(old.pages, pages.entries(*old.pages), strict=True):
        now = tuple(left.pop(entry.key) for entry in before if entry.key in left and entry.key not in here)
        if now:
            parts.append(ref if now == before else now)
    return parts, tuple(left.values())


def _too_old(newest: Sequence[Entry], here: frozenset[str]) -> tuple[Entry, ...]:
    """Return the entries of a body that move to a page, in order. here: the keys that do not."""
    sizes = [len(dump(entry)) for entry in newest]
    if len(newest) <= MOST_NEWEST and (sum(sizes) <= MOST_NEWEST_BYTES or len(newest) <= LEAST_NEWEST):
        return ()
    left, size = len(newest), sum(sizes)
    moved = []
    for entry, its_size in zip(newest, sizes, strict=True):
        if left <= LEAST_NEWEST or (left <= KEPT_NEWEST and size <= KEPT_NEWEST_BYTES):
            break
        if entry.key not in here:
            moved.append(entry)
            left, size = left - 1, size - its_size
    return tuple(moved)


def _with_moved(parts: list[_Part], moved: tuple[Entry, ...], pages: Pages) -> list[_Part]:
    """Return the pages with more entries at their end."""
    if moved and parts and _count(parts[-1]) + len(moved) <= PAGE_ENTRIES:
        return [*parts[:-1], (*_entries(parts[-1], pages), *moved)]
    return [*parts, *(moved[first : first + PAGE_ENTRIES] for first in range(0, len(moved), PAGE_ENTRIES))]


def _merged(parts: list[_Part], pages: Pages) -> list[_Part]:
    """Return no more than MOST_PAGES pages."""
    while len(parts) > MOST_PAGES:
        counts = [_count(one) + _count(other) for one, other in pairwise(parts)]
        at = counts.index(min(counts))
        parts[at : at + 2] = [(*_entries(parts[at], pages), *_entries(parts[at + 1], pages))]
    return parts


def _count(part: _Part) -> int:
    return part.count if isinstance(part, PageRef) else len(part)


def _entries(part: _Part, pages: Pages) -> tuple[Entry, ...]:
    return pages.entries(part)[0] if isinstance(part, PageRef) else part


def _write(entries: tuple[Entry, ...], body: Latest, pages: Pages, written: dict[str, bytes]) -> PageRef:
    """Add the page with these entries to `written`, and return the reference to it."""
    key = page_key(body.counter, uuid4().hex[:8])
    data = written[key] = dump(Page(run_id=body.run_id, live=entries))
    pages.remember(key, entries)
    return PageRef(
        key=key,
        crc32=crc32(data),
        size_bytes=len(data),
        count=len(entries),
        first=entries[0].key,
        last=entries[-1].key,
    )


def sweep_pages(store: Store) -> None:
    """Delete the pages that no body of `latest` will ever name again.

    A body names only pages that were written for it, and pages that the body it replaces names. So if the one that is
    read here does not name a page that was written for it or for an earlier one, no later body names it (I6).
    """
    body = read_newest(store)
    spared = {page.key for page in body.pages} | {page.key for page in body.past_pages}
    for item in list(store.list_objects(PAGES_PREFIX)):
        counter = counter_of_page(item.key)
        if counter is not None and counter <= body.counter and item.key not in spared:
            store.delete(item.key)
