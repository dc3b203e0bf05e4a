"""A thread pool whose threads obey the deadline of the thread that submitted the work.

A deadline for requests (raycheck/bucket/store/retry.py) applies in the context that set it, but a pool's threads have
separate contexts. A page view needs one deadline for all of its requests.
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
    """A thread pool that runs each call in a copy of the context of the thread that calls `submit`."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return super().submit(partial(copy_context().run, fn, *args, **kwargs))


@contextmanager
def reads_for(seconds: float) -> Iterator[None]:
    """Limit the time of every request started inside the block, in this thread or in a ContextPool's.

    After that time no request is started or retried, and each raises StoreError; see ends_by. An earlier deadline also
    applies.
    """
    with ends_by(min(deadline(), time.monotonic() + seconds)):
        yield
