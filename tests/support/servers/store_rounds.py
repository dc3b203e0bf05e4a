"""Counts how many answers of a store a program waits for, one after the other.

A proxy before the store holds all requests until the program can do nothing but wait for their answers: no request is
under way, and all threads sleep. Then it lets them through, which is a round. So the rounds are the longest chain of
requests that wait for one another, however slow the machine is.
"""

import threading
import time
from pathlib import Path
from typing import Self

from tests.support.servers.http_fault_proxy import FaultProxy, Rule

_EVERYTHING = 10**6
_LOOK_EVERY_S = 0.05
_LOOKS = 10
"""After so many looks in a row at which all threads slept, none of them is about to send a request."""
_QUIET_WITHIN_S = 120.0


class StoreRounds:
    """`done` has the requests of each round, as method and path, in the order in which they came."""

    def __init__(self, proxy: FaultProxy) -> None:
        self.done: list[list[str]] = []
        self._proxy = proxy
        self._problem = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-rounds", daemon=True)

    def __enter__(self) -> Self:
        self._at = len(self._proxy.requests)
        self._held = self._hold()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_QUIET_WITHIN_S)
        assert not self._problem, self._problem

    def _hold(self) -> Rule:
        return self._proxy.rule("hold", ".*", "", times=_EVERYTHING)

    def _run(self) -> None:
        while self._wait_until_quiet():
            begun, self._held = self._held, self._hold()
            begun.times = 0  # from here on requests meet the new rule
            end = self._at + len(begun.seen)
            self.done.append(self._proxy.requests[self._at : end])
            self._at = end
            begun.release()
        self._held.times = 0
        self._held.release()

    def _wait_until_quiet(self) -> bool:
        """Returns whether there is a round to let through; False when there will be no more."""
        quiet, deadline = 0, time.monotonic() + _QUIET_WITHIN_S
        while quiet < _LOOKS:
            if self._stop.wait(_LOOK_EVERY_S):
                return False
            held = len(self._held.seen)
            is_quiet = bool(held) and self._proxy.under_way == held and _others_sleep()
            quiet = quiet + 1 if is_quiet else 0
            if held and time.monotonic() > deadline:
                self._problem = f"there was no moment without work in {_QUIET_WITHIN_S:.0f} s"
                return False
        return True


def _others_sleep() -> bool:
    """Returns whether all threads of this process sleep but the one that asks."""
    mine = threading.get_native_id()
    for thread in Path("/proc/self/task").iterdir():
        try:
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        if state != "S" and int(thread.name) != mine:
            return False
    return True
