"""Runs several processes on one bucket in every order of their store calls.

Only the order of calls that notice each other matters: two calls on one object, one of them a write. The search is by
replay, depth first, and goes no further where bucket and processes are as they were in an order tried before. Processes
are deterministic, so the answers that one has heard are its whole state.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.support.histories.crash_enumeration import is_seen, state_of
from tests.support.histories.stepped_processes import Clock, Task
from tests.support.servers.fault_injection import Call, Wire, World

Work = Callable[[Wire], Any]


@dataclass
class Orders:
    """Runs all orders, and holds what was tried.

    touched: for each process, every call that it made in any order so far. reached: every bucket after any call in any
    order, one of each kind. max_switches: a limit for the switches from one process to another, 0 for none.
    """

    make: Callable[[], World]
    works: tuple[Work, ...]
    clock: Clock
    max_switches: int = 0
    count: int = 0
    touched: list[set[Call]] = field(default_factory=list)
    reached: dict[Any, World] = field(default_factory=dict)
    _begin: World = field(init=False)
    _known: list[set[Call]] = field(default_factory=list)
    _noticed: dict[tuple[int, Call], bool] = field(default_factory=dict)

    def all(self) -> Iterator[tuple[World, list[Any]]]:
        """Yield the world and the outcomes at the end of every order."""
        self._begin = self.make()
        self.touched, self._known = [set() for _ in self.works], [set() for _ in self.works]
        self._one((), [], set())  # one after another, for a first idea of what they touch
        ends: list[tuple[World, list[Any]]] = []
        while self._known != self.touched:  # again, in case an order has brought a process to new objects
            self._known = [calls.copy() for calls in self.touched]
            self._noticed.clear()
            ends = list(self._search())
        self.count = len(ends)
        self.clock.next_id = 1_000_000
        yield from ends

    def _search(self) -> Iterator[tuple[World, list[Any]]]:
        todo: list[tuple[int, ...]] = [()]
        seen: set[Any] = set()
        while todo:
            end = self._one(todo.pop(), todo, seen)
            if end is not None:
                yield end

    def _one(
        self, given: tuple[int, ...], todo: list[tuple[int, ...]], seen: set[Any]
    ) -> tuple[World, list[Any]] | None:
        """Run in the order `given`, and then always the first process that can go on; the other choices go to `todo`.

        Returns None when the rest is known from an earlier order.
        """
        world = self._begin.copy()
        self.clock.next_id = 1
        with ExitStack() as stack:
            tasks = [stack.enter_context(Task(world, work)) for work in self.works]
            made: tuple[int, ...] = ()
            while True:
                for number in range(len(tasks)):
                    while not tasks[number].is_done and not self._is_noticed(number, tasks):
                        self._go(number, tasks, world)
                able = [number for number, task in enumerate(tasks) if not task.is_done]
                if not able:
                    return world, [task.result() for task in tasks]
                if len(made) < len(given):
                    choice = given[len(made)]
                else:
                    last = made[-1] if made and made[-1] in able else None
                    switches = sum(a != b for a, b in pairwise(made))
                    bound = (last, switches) if self.max_switches else None
                    state = (state_of(world), tuple(tuple(task.wire.heard) for task in tasks), bound)
                    if state in seen:
                        return None
                    seen.add(state)
                    choice = able[0] if last is None else last
                    if last is None or not self.max_switches or switches < self.max_switches:
                        todo += [(*made, other) for other in able if other != choice]
                made = (*made, choice)
                self._go(choice, tasks, world)

    def _is_noticed(self, number: int, tasks: list[Task]) -> bool:
        call = tasks[number].pending
        assert call is not None
        known = self._noticed.get((number, call))
        if known is None:
            known = self._noticed[number, call] = any(
                are_ordered(call, item) for other in range(len(tasks)) if other != number for item in self._known[other]
            )
        return known

    def _go(self, number: int, tasks: list[Task], world: World) -> None:
        call = tasks[number].pending
        assert call is not None
        self.touched[number].add(call)
        tasks[number].go()
        if call.is_write and (state := state_of(world)) not in self.reached:
            self.reached[state] = world.copy()


def are_ordered(one: Call, other: Call) -> bool:
    """Return whether it can matter which of the two calls comes first."""
    if one.verb == other.verb == "delete":
        return False
    return (one.is_write and is_seen(one.key, other)) or (other.is_write and is_seen(other.key, one))
