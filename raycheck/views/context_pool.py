"""Has threads that obey the deadline of the thread that gave them work.

A deadline for requests (raycheck/bucket/store/retry.py) holds in the context that set it, and a pool's threads have
contexts of their own. What reads for a page needs one deadline for all of its requests.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

from raycheck.bucket.store.retry import deadline, ends_by

P = ParamSpec("P")
T = TypeVar("T")


class ContextPool(ThreadPoolExecutor):
    """Is a pool of threads, each of which works in a copy of the context of the thread that calls `submit`."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(partial(copy_context().run, fn, *args, **kwargs))


@contextmanager
def reads_for(seconds: float) -> Iterator[None]:
    """Lets no request that is begun inside the block, in this thread or a ContextPool's, last longer than that.

    After it none is begun or repeated, and each raises StoreError; see ends_by. A deadline that was set before holds
    too.
    """
    with ends_by(min(deadline(), time.monotonic() + seconds)):
        yield
