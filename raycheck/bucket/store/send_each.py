"""Sends many requests, of which as many are in flight at a time as a window allows: parts up, and ranges down."""

from collections.abc import Callable, Iterable, Sized
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from raycheck.bucket.store.request_window import Flight, RequestWindow, Share
from raycheck.bucket.store.retry import noting_refusals

T = TypeVar("T")
P = TypeVar("P", bound=Sized)


def send_each(items: Iterable[P], start: Callable[[int, P], Future[T]], *, window: RequestWindow) -> list[T]:
    """Return the result of `start` for each item; it is called with the item's number, from 1, and the item.

    `start` starts a request and returns its future. An item is pulled before its request may begin, and its length is
    the number of bytes that are sent or fetched. If this raises, every request that was started has ended: the buffers
    behind the items are free again.
    """
    sent: list[Future[T]] = []
    flying: list[Future[T]] = []
    try:
        with Share(window) as share:
            for number, item in enumerate(items, 1):
                share.wait_to_begin()
                flying = [future for future in flying if not _has_ended(future)]
                flight = share.begin()
                with noting_refusals(flight.refused):
                    future = _started(flight, len(item), partial(start, number, item))
                sent.append(future)
                flying.append(future)
            return [future.result() for future in sent]
    except BaseException:
        wait(sent)  # each ends by its attempts and their time-outs
        raise


def _started(flight: Flight, size_bytes: int, start: Callable[[], Future[T]]) -> Future[T]:
    try:
        future = start()
    except BaseException:
        flight.end(0)
        raise
    future.add_done_callback(lambda done: flight.end(0 if done.cancelled() or done.exception() else size_bytes))
    return future


def _has_ended(future: Future[T]) -> bool:
    """Return whether a request has ended. Raises its error."""
    return future.done() and (future.result(), True)[1]
