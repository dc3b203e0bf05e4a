"""Sends many requests, of which as many are in flight at a time as a window allows: parts up, and ranges down."""

import time
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from raycheck.bucket.store.request_window import Flight, RequestWindow, Share
from raycheck.bucket.store.retry import noting_refusals

T = TypeVar("T")
P = TypeVar("P", bound=Sized)
REPEAT_AFTER_S = 5.0
"""How long a request lasts at least before it is sent a second time."""
SLOWER = 3.0
"""How many times as long as nine out of ten others it must last, too."""
LOOK_EVERY_S = 0.25


def send_each(
    items: Iterable[P], start: Callable[[int, P], Future[T]], *, window: RequestWindow, may_repeat: bool = False
) -> list[T]:
    """Return the result of `start` for each item; it is called with the item's number, from 1, and the item.

    `start` starts a request and returns its future. An item is pulled before its request may begin, and its length is
    the number of bytes that are sent or fetched. may_repeat: once all requests have begun, one that lasts much longer
    than the others is sent a second time, and the first result counts; the other request may still be running when this
    returns. If this raises, every request that was started has ended: the buffers behind the items are free again.
    """
    sent: list[_Sent[P, T]] = []
    with Share(window) as share:
        try:
            for number, item in enumerate(items, 1):
                share.wait_to_begin()
                if share.has_failed:
                    _undecided(sent)  # raises the error
                one: _Sent[P, T] = _Sent(number, item if may_repeat else None)
                one.begin(share, len(item), partial(start, number, item))
                sent.append(one)
            _wait_for_all(sent, share, start)
            return [one.result() for one in sent]
        except BaseException:
            share.has_failed = True  # the others are not needed
            wait(
                [future for one in sent for future in one.futures]
            )  # each ends by its tries, as it is no longer needed
            raise


@dataclass(slots=True)
class _Sent(Generic[P, T]):
    """The request for one item, and the second one if there is one. item: None if there will be none.

    lasted_s: how long the first request took; None until it has succeeded.
    """

    number: int
    item: P | None
    futures: list[Future[T]] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)
    lasted_s: float | None = None

    def begin(self, share: Share, size_bytes: int, start: Callable[[], Future[T]]) -> None:
        """Send a request, and count it as in flight until it has ended."""
        flight = share.begin()
        try:
            with noting_refusals(flight.refused):
                future = start()
        except BaseException:
            flight.end(0)
            raise
        self.futures.append(future)
        future.add_done_callback(partial(self._ended, flight, size_bytes))

    def _ended(self, flight: Flight, size_bytes: int, future: Future[T]) -> None:
        is_whole = not future.cancelled() and future.exception() is None
        if is_whole and future is self.futures[0]:
            self.lasted_s = time.monotonic() - self.began_at
        if not is_whole and self.is_decided() and not self.has_succeeded():
            flight.share.has_failed = True
        flight.end(size_bytes if is_whole else 0)

    @property
    def lasts_s(self) -> float:
        """Return how long ago the first request began."""
        return time.monotonic() - self.began_at

    def is_decided(self) -> bool:
        """Return whether a request has succeeded, or all have failed."""
        return self.has_succeeded() or all(future.done() for future in self.futures)

    def has_succeeded(self) -> bool:
        """Return whether a request has succeeded."""
        ended = (future for future in self.futures if future.done() and not future.cancelled())
        return any(future.exception() is None for future in ended)

    def result(self) -> T:
        """Return the first result. Raises the first request's error if all have failed."""
        whole = (future for future in self.futures if future.done() and future.exception() is None)
        return next(whole, self.futures[0]).result()


def _wait_for_all(sent: "list[_Sent[P, T]]", share: Share, start: Callable[[int, P], Future[T]]) -> None:
    """Wait for all requests, and send those a second time that may be and that last much longer than the others.

    Raises the error of the first one that has failed.
    """
    undecided = sent
    while undecided := _undecided(undecided):
        open_ones = [future for one in undecided for future in one.futures if not future.done()]
        wait(open_ones, LOOK_EVERY_S, FIRST_COMPLETED)
        late = [one for one in undecided if one.item and len(one.futures) == 1 and one.lasts_s > REPEAT_AFTER_S]
        lasted = sorted(one.lasted_s for one in sent if one.lasted_s is not None) if late else []
        for one in late:
            if lasted and one.lasts_s > SLOWER * lasted[len(lasted) * 9 // 10] and one.item and share.may_begin():
                one.begin(share, len(one.item), partial(start, one.number, one.item))


def _undecided(requests: "list[_Sent[P, T]]") -> "list[_Sent[P, T]]":
    """Return those that have neither succeeded nor failed. Raises the error of one that has failed."""
    left = []
    for one in requests:
        if one.is_decided():
            one.result()
        else:
            left.append(one)
    return left
