"""Keeps `latest` small: moves all but the newest entries to pages, which are written before the swap. Step 40.

Every swap computes its new body as if `latest` listed everything. Below it, this module decides where each checkpoint
and each owner is listed: in the body itself, in a page that exists, or in a new page. A page never changes (I2): when
what one lists changes or leaves, a new page takes its place. Live checkpoints, evicted ones and owners are listed
apart, in the same way.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar
from uuid import uuid4

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import (
    ROOMY_BYTES,
    Entry,
    Evicted,
    Latest,
    Page,
    PageRef,
    PastPage,
    full_error,
    in_order,
)
from raycheck.bucket.format.object_keys import PAGES_PREFIX, counter_of_page, page_key
from raycheck.bucket.pages import PageMissingError, Pages
from raycheck.bucket.reading import read_newest
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError

MOST_NEWEST, MOST_NEWEST_BYTES = 128, 32 * 1024
"""Above either of these, the oldest entries of a body move to a page..."""
KEPT_NEWEST, KEPT_NEWEST_BYTES = 64, 16 * 1024
"""...until it lists no more than these, and no fewer than LEAST_NEWEST."""
LEAST_NEWEST = 8
PAGE_ENTRIES, PAGE_OWNERS = 1000, 16_000
"""The last page is replaced by a longer one until it lists this many; then a new one begins."""
MOST_PAGES = 64
"""Of more pages, the two neighbors that list the fewest become one. So a body never names more."""
WRITES_KEPT = 100
"""A page stays for this many writes of `latest` after the first body that does not name it: for slow readers, and for
whoever puts an older version of `latest` back."""
MOST_PAST = 200
"""Of more such pages, the first are deleted earlier."""

LOST = (PageMissingError, CorruptError)
"""The errors for a page that cannot be read. A swap that would only make it longer then begins a new one instead."""

Item = TypeVar("Item", bound=Entry | Evicted | str)


def fold(new: Latest, old: Latest | None, pages: Pages) -> tuple[Latest, Mapping[str, bytes]]:
    """Return `new` as it is to be stored, and the pages to write before it, by key.

    new: the body to write, whole or with some of the pages of `old`. old: the body that it replaces. Raises
    PageMissingError.
    """
    written: dict[str, bytes] = {}

    def write(page: Page) -> PageRef:
        key = page_key(new.counter, uuid4().hex[:8])
        data = written[key] = dump(page)
        pages.remember(key, page)
        keys = [*map(_key, page.live), *map(_key, page.evicted), *page.owners]
        steps = [entry.step for entry in page.live]
        return PageRef(
            key=key,
            crc32=crc32(data),
            size_bytes=len(data),
            count=len(keys),
            first=keys[0],
            last=keys[-1],
            steps=(min(steps), max(steps)) if steps else (),
            is_unnamed=bool(steps) and all(entry.name is None for entry in page.live),
        )

    live: _List[Entry] = _List(
        read=lambda ref: pages.read([ref])[0].live,
        write=lambda items: write(Page(run_id=new.run_id, live=in_order(items))),
        stay=new.kept_newest,
    )
    evicted: _List[Evicted] = _List(
        read=lambda ref: pages.read([ref])[0].evicted,
        write=lambda items: write(Page(run_id=new.run_id, evicted=items)),
    )
    owners: _List[str] = _List(
        read=lambda ref: pages.read([ref])[0].owners,
        write=lambda items: write(Page(run_id=new.run_id, owners=items)),
        most=PAGE_OWNERS,
    )
    newest, refs = live.divide(new.newest, new.pages, old.pages if old else ())
    newest_evicted, evicted_refs = evicted.divide(
        new.newest_evicted, new.evicted_pages, old.evicted_pages if old else ()
    )
    newest_owners, owner_refs = owners.divide(new.newest_owners, new.owner_pages, old.owner_pages if old else ())
    stored = replace(
        new,
        newest=newest,
        pages=refs,
        newest_evicted=newest_evicted,
        evicted_pages=evicted_refs,
        newest_owners=newest_owners,
        owner_pages=owner_refs,
    )
    return replace(stored, past_pages=_past(stored, old)), written


def _past(new: Latest, old: Latest | None) -> tuple[PastPage, ...]:
    """Return the pages whose objects stay although the body `new` does not name them."""
    named = {ref.key for ref in new.all_pages}
    left = [ref.key for ref in (old.all_pages if old else ()) if ref.key not in named]
    stay = (page for page in new.past_pages if page.since > new.counter - WRITES_KEPT)
    return (*stay, *(PastPage(key=key, since=new.counter) for key in left))[-MOST_PAST:]


@dataclass(frozen=True, slots=True)
class _List(Generic[Item]):
    """A list that is divided into pages and the newest items, which the body lists itself.

    read: returns what a page lists. write: makes a page. stay: the keys of items that no page may list. most: how many
    items the last page lists before a new one begins; None: PAGE_ENTRIES.
    """

    read: Callable[[PageRef], tuple[Item, ...]]
    write: Callable[[tuple[Item, ...]], PageRef]
    stay: frozenset[str] = frozenset()
    most: int | None = None

    def divide(
        self, newest: tuple[Item, ...], refs: tuple[PageRef, ...], old: tuple[PageRef, ...]
    ) -> tuple[tuple[Item, ...], tuple[PageRef, ...]]:
        """Return the items that the new body lists itself, and its pages.

        newest: the items of the new body. refs: the pages that it names again. old: the pages of the body that it
        replaces. Items of an old page that is not among refs are in newest.
        """
        parts: list[PageRef | tuple[Item, ...]] = list(refs)
        unread = {ref.key for ref in refs}
        if any(ref.key not in unread for ref in old):
            parts, newest = self._in_pages(newest, old, unread)
        moved = self._too_old(newest)
        if moved:
            keys = set(map(_key, moved))
            newest = tuple(item for item in newest if _key(item) not in keys)
            parts = self._merged(self._with_moved(parts, moved))
        return newest, tuple(part if isinstance(part, PageRef) else self.write(part) for part in parts)

    def _in_pages(
        self, items: tuple[Item, ...], old: tuple[PageRef, ...], unread: Collection[str]
    ) -> tuple[list[PageRef | tuple[Item, ...]], tuple[Item, ...]]:
        """Find what of the items the old pages list. Return the pages, and the items in none of them.

        unread: the keys of old pages that stay, and list none of the items.
        """
        left = {_key(item): item for item in items}
        parts: list[PageRef | tuple[Item, ...]] = []
        for ref in old:
            if ref.key in unread:
                parts.append(ref)
                continue
            before = self.read(ref)
            now = tuple(
                left.pop(key)
                for item in before
                if (key := _key(item)) in left and key not in self.stay and not self._moved_on(item, left[key])
            )
            if now:
                parts.append(ref if now == before else now)
        return parts, tuple(left.values())

    @staticmethod
    def _moved_on(before: Item, now: Item) -> bool:
        """Return whether an item has left its place: a checkpoint was evicted again, now as the newest one."""
        return isinstance(before, Evicted) and before != now

    def _too_old(self, newest: Sequence[Item]) -> tuple[Item, ...]:
        """Return the items of a body that move to a page, in order."""
        left = len(newest)
        if left <= LEAST_NEWEST:
            return ()
        sizes = [len(item) if isinstance(item, str) else len(dump(item)) for item in newest]
        size = sum(sizes)
        if left <= MOST_NEWEST and size <= MOST_NEWEST_BYTES:
            return ()
        moved = []
        for item, its_size in zip(newest, sizes, strict=True):
            if left <= LEAST_NEWEST or (left <= KEPT_NEWEST and size <= KEPT_NEWEST_BYTES):
                break
            if _key(item) not in self.stay:
                moved.append(item)
                left, size = left - 1, size - its_size
        return tuple(moved)

    def _with_moved(
        self, parts: list[PageRef | tuple[Item, ...]], moved: tuple[Item, ...]
    ) -> list[PageRef | tuple[Item, ...]]:
        """Return the pages with more items at their end: in the last page, unless that is full or lost."""
        most = self.most or PAGE_ENTRIES
        if parts and _count(parts[-1]) + len(moved) <= most:
            with suppress(*LOST):
                return [*parts[:-1], (*self._items(parts[-1]), *moved)]
        return [*parts, *(moved[first : first + most] for first in range(0, len(moved), most))]

    def _merged(self, parts: list[PageRef | tuple[Item, ...]]) -> list[PageRef | tuple[Item, ...]]:
        """Return no more than MOST_PAGES pages. A page that is lost remains as it is."""
        while len(parts) > MOST_PAGES and (found := self._shortest_pair(parts)):
            at, both = found
            parts[at : at + 2] = [both]
        return parts

    def _shortest_pair(self, parts: list[PageRef | tuple[Item, ...]]) -> tuple[int, tuple[Item, ...]] | None:
        """Return the place and the items of the two neighbors that list the fewest, among pages that can be read."""
        counts = [_count(one) + _count(other) for one, other in pairwise(parts)]
        for at in sorted(range(len(counts)), key=counts.__getitem__):
            with suppress(*LOST):
                return at, (*self._items(parts[at]), *self._items(parts[at + 1]))
        return None

    def _items(self, part: PageRef | tuple[Item, ...]) -> tuple[Item, ...]:
        return self.read(part) if isinstance(part, PageRef) else part


def _key(item: Entry | Evicted | str) -> str:
    return item if isinstance(item, str) else item.key


def _count(part: PageRef | tuple[object, ...]) -> int:
    return part.count if isinstance(part, PageRef) else len(part)


def check_room(body: Latest) -> None:
    """Refuse a body that would leave no room for claims and commits. Checkpoints count with as much as they ever take.

    Call it before a swap that adds holds or loans: only these are not limited in another way. Raises ConfigError.
    """
    kept = tuple(entry for entry in body.newest if entry.key in body.kept_newest)
    size = len(dump(replace(body, newest=kept, newest_evicted=()))) + 2 * MOST_NEWEST_BYTES
    if size > ROOMY_BYTES:
        raise full_error(body, size)


def sweep_pages(store: Store) -> None:
    """Delete the pages that no body of `latest` will ever name again.

    A body names only pages that were written for it, and pages that the body it replaces names. So if the one that is
    read here does not name a page that was written for it or for an earlier one, no later body names it (I6). The pages
    are listed before: if an older `latest` was put back since, its next bodies have the same counters.
    """
    listed = list(store.list_objects(PAGES_PREFIX))
    body = read_newest(store)
    spared = {page.key for page in body.all_pages} | {page.key for page in body.past_pages}
    for item in listed:
        counter = counter_of_page(item.key)
        if counter is not None and counter <= body.counter and item.key not in spared:
            store.delete(item.key)
