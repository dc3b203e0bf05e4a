"""Makes `latest` move entries and owners to pages when it lists more than one or two, so that tiny runs have several."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.protocol import paging


@contextmanager
def small_pages(*, newest: int = 1, page: int = 2, pages: int = 3, writes: int = 2) -> Iterator[None]:
    """newest: how many entries or owners `latest` lists itself. page: how many a page lists. pages: how many pages there are.

    writes: for how many writes of `latest` a page stays.
    """

    def token() -> SimpleNamespace:
        """Make the token of a page depend on its content alone, so that equal histories leave equal objects."""
        page = sys._getframe(1).f_locals["page"]
        return SimpleNamespace(hex=f"{crc32(dump(page)):08x}")

    with mock.patch.multiple(
        paging,
        MOST_NEWEST=newest,
        KEPT_NEWEST=newest,
        LEAST_NEWEST=1,
        PAGE_ENTRIES=page,
        PAGE_OWNERS=page,
        MOST_PAGES=pages,
        WRITES_KEPT=writes,
        uuid4=token,
    ):
        yield
