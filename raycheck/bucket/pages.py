"""Reads the pages of `latest`: immutable objects that list checkpoints and owners, all but the newest. Step 40.

A body of `latest` names the pages with their checksums, so the body and its pages are one value, read in several
requests. A page is deleted only long after the last body that named it was replaced; a reader that is slower than that
reads `latest` again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Latest, Page, PageRef, PagesNeededError, in_order, load_page
from raycheck.bucket.store import Got, Store
from raycheck.errors import CorruptError, NotFoundError

T = TypeVar("T")
U = TypeVar("U")
AT_ONCE = 32
Read = Callable[[], tuple[Latest, Got]]


class PageMissingError(Exception):
    """A page that a body names is not there: the body was replaced long ago, or the page was lost."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class Pages:
    """The pages of one run. Each is read once. Several threads may use them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read_pages: dict[str, Page] = {}

    def read(self, refs: Iterable[PageRef]) -> list[Page]:
        """Return these pages. Raises PageMissingError, and CorruptError for damaged bytes."""
        refs = tuple(refs)
        known = self._read_pages  # another thread may replace it meanwhile
        found = {ref.key: known[ref.key] for ref in refs if ref.key in known}
        unread = [ref for ref in refs if ref.key not in found]
        for first in range(0, len(unread), AT_ONCE):
            batch = unread[first : first + AT_ONCE]
            pages = self._store.together(*(partial(self._read, ref) for ref in batch))
            found.update(zip((ref.key for ref in batch), pages, strict=True))
        self._read_pages.update(found)
        return [found[ref.key] for ref in refs]

    def __str__(self) -> str:
        return str(self._store)

    def remember(self, key: str, page: Page) -> None:
        """Remember a page that is about to be written at `key`."""
        self._read_pages[key] = page

    def ask(self, body: Latest, question: Callable[[Latest], T]) -> T:
        """Return the answer of `body` to a question. Only pages on which the answer may depend are read.

        Raises the errors of `read`.
        """
        known = body
        while True:
            try:
                return question(known)
            except PagesNeededError as needed:
                if not needed.pages or needed.pages[0] not in known.all_pages:
                    raise
                known = _joined(known, needed.pages, self.read(needed.pages))

    def whole(self, body: Latest) -> Latest:
        """Return `body` with what its pages list, as a whole body. Raises the errors of `read`."""
        refs = body.all_pages
        if not refs:
            return body
        found = self.read(refs)
        self._read_pages = dict(zip((ref.key for ref in refs), found, strict=True))
        return _joined(body, refs, found)

    def readable(self, body: Latest) -> tuple[Latest, tuple[PageRef, ...]]:
        """Return `body` with what those of its pages list that can be read, as a whole body, and the other pages.

        A store that fails proves nothing: that raises StoreError.
        """
        lost = []
        for page in body.all_pages:
            try:
                self.read([page])
            except (PageMissingError, CorruptError):
                lost.append(page)
        live, evicted, owners = (
            tuple(page for page in refs if page not in lost)
            for refs in (body.pages, body.evicted_pages, body.owner_pages)
        )
        return self.whole(replace(body, pages=live, evicted_pages=evicted, owner_pages=owners)), tuple(lost)

    def _read(self, ref: PageRef) -> Page:
        def read() -> Page:
            try:
                data = self._store.get(ref.key, ref.size_bytes).data
            except NotFoundError:
                raise PageMissingError(ref.key) from None
            if len(data) != ref.size_bytes or crc32(data) != ref.crc32:
                raise CorruptError(
                    f"{self._store}: {ref.key}, which is a part of what latest lists, is damaged. Put an earlier "
                    "version of it back (bucket versioning), or stop training and rebuild the list: raycheck repair "
                    f"'{self._store}'"
                )
            return load_page(data, what=f"{self._store}: {ref.key}")

        return again_if_corrupt(read)


def _joined(body: Latest, refs: Sequence[PageRef], pages: Sequence[Page]) -> Latest:
    """Return `body` with what some of its pages list: any of live entries, all of another kind. It still refers to the
    other ones."""
    left, evicted_left, owners_left = (
        tuple(ref for ref in kind if ref not in refs) for kind in (body.pages, body.evicted_pages, body.owner_pages)
    )
    return replace(
        body,
        newest=in_order((*(entry for page in pages for entry in page.live), *body.newest)),
        pages=left,
        newest_evicted=(*(item for page in pages for item in page.evicted), *body.newest_evicted),
        evicted_pages=evicted_left,
        newest_owners=(*(owner for page in pages for owner in page.owners), *body.newest_owners),
        owner_pages=owners_left,
    )


def read_whole(read: Read, pages: Pages) -> tuple[Latest, Got]:
    """Read `latest`, by `read`, and its pages. Raises what `read` raises, and CorruptError when a page is lost."""
    return read_answer(read, pages, pages.whole)


def read_readable(read: Read, pages: Pages) -> tuple[Latest, Got, tuple[PageRef, ...]]:
    """Read `latest`, by `read`, and those of its pages that can be read, as a whole body. Return also the other pages.

    For people only: no decision may be made from a body that lacks something. Raises what `read` raises.
    """
    try:
        return (*read_whole(read, pages), ())
    except CorruptError:
        body, got = read()
        whole, lost = pages.readable(body)
        return whole, got, lost


def lost_page_text(store: Store, page: PageRef) -> str:
    """Return in words that a page cannot be read, and what to do."""
    return (
        f"{store}: {page.key}, which lists {page.count} checkpoints or owners, is missing or damaged. What it lists is "
        f"left out, or shown as far as the history knows it. {_CURE} raycheck repair '{store}'"
    )


_CURE = "Put it back (bucket versioning), or stop training and rebuild the list:"


def read_answer(read: Read, pages: Pages, question: Callable[[Latest], T]) -> tuple[T, Got]:
    """Read `latest`, by `read`, and return its answer to a question, and the store's response.

    Raises what `read` and the question raise, and CorruptError when a page is lost on which the answer depends.
    """

    def answer(found: tuple[Latest, Got]) -> tuple[T, Got]:
        return pages.ask(found[0], question), found[1]

    return again_if_missing(pages, read, answer)


def again_if_missing(pages: Pages, read: Callable[[], U], use: Callable[[U], T]) -> T:
    """Return the result of `use` for what `read` returns. If a page is missing, call both again. Step 40.

    Either the body that was read is an old one, or the page is lost. Raises what these raise, and CorruptError when the
    same page is missing twice.
    """
    missing = ""
    while True:
        found = read()
        try:
            return use(found)
        except PageMissingError as error:
            if error.key == missing:
                raise _lost_page_error(pages, error.key) from None
            missing = error.key


def _lost_page_error(pages: Pages, key: str) -> CorruptError:
    return CorruptError(
        f"{pages}: {key} is missing, although latest names it: the checkpoints, or the drivers that started the run, "
        f"that it lists are not known. {_CURE} raycheck repair '{pages}'"
    )
