"""Lets a restore return before the tensors of optimizers are read: whoever looks at these optimizers waits for them.

Until they are there, `optimizer.state` is an object that waits before it gives anything away. So a step waits, however
it is called, and so do state_dict(), a save, and a script that looks itself. Torch's hooks would be too little: a step
that was compiled with torch.compile calls none.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from raycheck.bucket.assembly.role import RankPlace
from raycheck.bucket.store.moved_bytes import MovedBytes, moved_bytes
from raycheck.errors import ConfigError, StoppedError
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.restore_matching import CheckpointMatch
from raycheck.transfer.read.aliased_tensors import overlapping
from raycheck.transfer.read.replica_broadcast import own_group
from raycheck.transfer.read.restore_proof import not_restored, shares_memory
from raycheck.transfer.stage.gather_cache import local_of

LEAVE_S = 10.0
"""How long the end of the process waits for requests that are on their way."""


class DeferredTensors:
    """The tensors of optimizers that a restore leaves for later. One for each restore.

    boxes: what is read later. at_once: all others. seconds, bytes_fetched: how long this rank has taken to read
    `boxes`, and what it has fetched.
    """

    def __init__(self, match: CheckpointMatch, read: Callable[..., int], *, place: RankPlace) -> None:
        """read: fills boxes, and proves it; see read_tensors. It returns the bytes fetched. place: this rank's."""
        names = {name for entry in match.wanted if isinstance(entry, OptimizerEntry) for name in entry.deferrable}
        apart = {id(box) for box in overlapping(match.boxes)}
        self.boxes = [
            box for box in match.boxes if id(box) not in apart and names.issuperset((box.name, *dict(box.aliases)))
        ]
        later = set(map(id, self.boxes))
        self.at_once = [box for box in match.boxes if id(box) not in later]
        self._names = {name for box in self.boxes for name in (box.name, *dict(box.aliases))}
        self.seconds, self.bytes_fetched = 0.0, 0
        self._read = read
        self._place = place
        self._group: dist.ProcessGroup | None = None
        self._complete: Callable[[float], None] = lambda _: None
        self._states: list[_AwaitedState] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.RLock()
        self._outcome: Future[None] | None = None  # from `begin` on
        self._has_read = threading.Event()
        self._moved: MovedBytes | None = None
        self._leave: Callable[[], None] = lambda: None
        self._is_abandoned = self._is_over = False

    def loaded(self, entry: OptimizerEntry, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have those who look at the entry's optimizer wait from now on.

        tensors: those that the entry has loaded, by name. Of some, the optimizer may hold a copy, such as its steps on
        another device: it is made again later. Raises ConfigError for one that it has changed.
        """
        live = entry.slots() if self._names & tensors.keys() else {}
        for name in self._names & tensors.keys():
            if name not in live:
                raise not_restored(name, "it was loaded, but the optimizer does not hold it")
            if not shares_memory(live[name], tensors[name]):
                here, read = local_of(live[name].detach()), local_of(tensors[name].detach())
                if (here.shape, here.dtype) != (read.shape, read.dtype):
                    raise not_restored(name, "the optimizer changes it when it is loaded")
                self._copies.append((here, read))
        if live:
            self._states.append(_AwaitedState(entry.optimizer, self))

    @property
    def is_abandoned(self) -> bool:
        return self._is_abandoned

    @contextmanager
    def not_awaited(self) -> Iterator[None]:
        """Let the block look at the optimizers without waiting. It must not use what their tensors hold."""
        with self._lock:
            for state in self._states:
                state.take_away()
            try:
                yield
            finally:
                for state in self._states if not self._is_over else ():
                    state.put_in_place()

    def begin(self, decide: Callable[[Callable[[], int]], None], complete: Callable[[float], None]) -> None:
        """Read in a thread from now on. A collective.

        decide: is called there with what reads. It returns when all ranks have read theirs, or raises what every rank
        is to raise. complete: is called at the end of the first wait, with its seconds.
        """
        self._group = own_group(self.boxes, self._place.world_size)
        self._complete = complete
        outcome = self._outcome = Future()

        def run() -> None:
            try:
                decide(self._read_now)
            except BaseException as error:  # noqa: BLE001  whoever waits raises it
                outcome.set_exception(error)
            else:
                outcome.set_result(None)
            finally:
                self._has_read.set()
                if self._group is not None:
                    with suppress(ValueError):  # the script has destroyed all groups
                        dist.destroy_process_group(self._group)

        thread = threading.Thread(target=run, name="raycheck-deferred", daemon=True)

        def leave() -> None:
            self.abandon()
            thread.join(LEAVE_S)

        self._leave = leave
        atexit.register(leave)  # a thread of gloo's that is still there at the end aborts the process
        thread.start()

    def _read_now(self) -> int:
        began = time.monotonic()
        self._moved = moved_bytes()
        try:
            if self._is_abandoned:
                raise StoppedError("the rest of a restore was stopped")
            # A thread must not use the script's process group: without one of its own, it reads alone.
            shared_by = None if self._group is None else self._place
            self.bytes_fetched = self._read(self.boxes, shared_by=shared_by, group=self._group)
        finally:
            self.seconds = time.monotonic() - began
            self._has_read.set()
        return self.bytes_fetched

    def wait(self) -> None:
        """Return once all ranks have their tensors. Raises, each time, the error that all ranks raise without them."""
        with self._lock:
            if self._is_over:
                return
            if self._is_abandoned and not self._has_succeeded:
                raise StoppedError(
                    "the optimizer's state is not there: the attempt was over before all of it was read; restore again"
                )
            if self._outcome is None:
                raise ConfigError(
                    "the optimizer was looked at before its tensors are there; call restore() without defer_optimizer"
                )
            self._await_outcome(self._outcome)
            self._is_over = True
            for state in self._states:
                state.take_away()
            atexit.unregister(self._leave)

    @property
    def _has_succeeded(self) -> bool:
        outcome = self._outcome
        return outcome is not None and outcome.done() and outcome.exception() is None

    def _await_outcome(self, outcome: Future[None]) -> None:
        began = time.monotonic()
        outcome.result()
        with torch.no_grad():
            for live, read in self._copies:
                live.copy_(read)
        self._complete(time.monotonic() - began)

    def abandon(self) -> None:
        """Stop reading, since the attempt is over. Whoever looks at the optimizers gets an error, until `give_up`."""
        self._is_abandoned = True
        if self._outcome is None:
            self._has_read.set()
        if self._moved is not None:
            self._moved.stop()

    def give_up(self) -> None:
        """After `abandon`: return once nothing writes into the tensors any more, with the optimizers as they are."""
        self._has_read.wait()
        with self._lock:
            self._is_over = True
            for state in self._states:
                state.take_away()


class _AwaitedState:
    """The stand-in for an optimizer's `state`: it waits, and is then what was there."""

    def __init__(self, optimizer: Optimizer, deferred: DeferredTensors) -> None:
        self.__dict__.update(_optimizer=optimizer, _real=optimizer.state, deferred=deferred)
        self.put_in_place()

    def put_in_place(self) -> None:
        if vars(self._optimizer)["state"] is self._real:  # the script may have loaded another one
            vars(self._optimizer)["state"] = self

    def take_away(self) -> None:
        if vars(self._optimizer)["state"] is self:
            vars(self._optimizer)["state"] = self._real

    def _awaited(self) -> Any:
        self.deferred.wait()
        return self._real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._awaited(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._awaited()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._awaited()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._awaited()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._awaited()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._awaited())

    def __len__(self) -> int:
        return len(self._awaited())

    def __eq__(self, other: object) -> bool:
        return bool(self._awaited() == other)

    __hash__ = None  # type: ignore[assignment]  # a dict has none either

    def __repr__(self) -> str:
        return repr(self._awaited())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._awaited().__reduce_ex__(protocol)


def give_up_abandoned(optimizer: Optimizer) -> None:
    """Free an optimizer of a restore that is over without having read all of its tensors, so that another may begin."""
    state = vars(optimizer).get("state")
    if isinstance(state, _AwaitedState) and state.deferred.is_abandoned:
        state.deferred.give_up()
