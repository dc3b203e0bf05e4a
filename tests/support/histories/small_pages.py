"""Makes `latest` move entries to pages when it lists more than one or two, so that tiny runs have several pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from unittest import mock

from raycheck.bucket.protocol import paging


@contextmanager
def small_pages(*, newest: int = 1, page: int = 2, pages: int = 3, writes: int = 2) -> Iterator[None]:
    """newest: how many entries `latest` lists itself. page: how many a page lists. pages: how many pages there are.

    writes: for how many writes of `latest` a page stays.
    """
    numbers = count()

    def token() -> SimpleNamespace:
        return SimpleNamespace(hex=f"{next(numbers):08x}")

    with mock.patch.multiple(
        paging,
        MOST_NEWEST=newest,
        KEPT_NEWEST=newest,
        LEAST_NEWEST=1,
        PAGE_ENTRIES=page,
        MOST_PAGES=pages,
        WRITES_KEPT=writes,
        uuid4=token,
    ):
        yield
