"""Reads the pages of `latest`: immutable objects that list the live checkpoints which are not the newest. Step 40.

A body of `latest` names the pages with their checksums, so the body and its pages are one value, read in several
requests. A page is deleted only long after the last body that named it was replaced; a reader that is slower than that
reads `latest` again.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Entry, Latest, PageRef, in_order, load_page
from raycheck.bucket.store import Got, Store
from raycheck.errors import CorruptError, NotFoundError

AT_ONCE = 32
Read = Callable[[], tuple[Latest, Got]]


class PageMissingError(Exception):
    """A page that a body names is not there: the body was replaced long ago, or the page was lost."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class Pages:
    """The pages of one run. Each is read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._entries: dict[str, tuple[Entry, ...]] = {}

    def entries(self, *refs: PageRef) -> list[tuple[Entry, ...]]:
        """Return what each of these pages lists. Raises PageMissingError, and CorruptError for damaged bytes."""
        unread = [ref for ref in refs if ref.key not in self._entries]
        for first in range(0, len(unread), AT_ONCE):
            batch = unread[first : first + AT_ONCE]
            read = self._store.together(*(partial(self._read, ref) for ref in batch))
            self._entries.update(zip((ref.key for ref in batch), read, strict=True))
        return [self._entries[ref.key] for ref in refs]

    def __str__(self) -> str:
        return str(self._store)

    def remember(self, key: str, entries: tuple[Entry, ...]) -> None:
        """Remember what the page `key`, which is about to be written, lists."""
        self._entries[key] = entries

    def whole(self, body: Latest) -> Latest:
        """Return `body` with the entries of its pages, as a whole body. Raises the errors of `entries`."""
        if not body.pages:
            return body
        entries = [entry for page in self.entries(*body.pages) for entry in page]
        self._entries = {ref.key: self._entries[ref.key] for ref in body.pages}
        return replace(body, newest=in_order((*entries, *body.newest)), pages=())

    def _read(self, ref: PageRef) -> tuple[Entry, ...]:
        def read() -> tuple[Entry, ...]:
            try:
                data = self._store.get(ref.key, ref.size_bytes).data
            except NotFoundError:
                raise PageMissingError(ref.key) from None
            if len(data) != ref.size_bytes or crc32(data) != ref.crc32:
                raise CorruptError(
                    f"{self._store}: {ref.key}, which lists {ref.count} checkpoints, is damaged. Put an earlier "
                    "version of it back (bucket versioning), or rebuild the list with 'raycheck repair'"
                )
            return load_page(data, what=f"{self._store}: {ref.key}").live

        return again_if_corrupt(read)


def read_whole(read: Read, pages: Pages) -> tuple[Latest, Got]:
    """Read `latest`, by `read`, and its pages. Raises what `read` raises, and CorruptError when a page is lost."""
    missing = ""
    while True:
        body, got = read()
        try:
            return pages.whole(body), got
        except PageMissingError as error:
            if error.key == missing:
                raise lost_page_error(pages, error.key) from None
            missing = error.key


def lost_page_error(pages: Pages, key: str) -> CorruptError:
    return CorruptError(
        f"{pages}: {key} is missing, although latest names it: checkpoints that it lists are not in the list. Training "
        "and restoring the newest checkpoint need no page. Put it back (bucket versioning), or rebuild the list with "
        "'raycheck repair'"
    )
