"""A restore sends a request a second time that lasts much longer than the others, and takes the first answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import replace
from uuid import uuid4

import pytest
import torch

from raycheck.bucket.store import Store, open_store, send_each
from raycheck.bucket.store.request_window import RequestWindow
from raycheck.bucket.store.retry import OverloadedError, note_refusal
from raycheck.errors import StoreError
from raycheck.state.train_state import TrainState
from tests.support.processes.background_call import InThread
from tests.support.processes.save_without_ray import save_state
from tests.support.samples.sample_checkpoints import Around

LIMIT_S = 60.0
ROWS = 12 * 1024  # of 1 KiB: 12 MiB, which are read in several requests


class Withholds(Around):
    """A store whose first answer to a read of a shard, the one at `held_at`, comes when `answers` is set.

    asked: the start of each read that has come, in order. again: what is done at a second read of the same range.
    """

    def __init__(self, inner: Store, again: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self.answers = threading.Event()
        self.has_answered = threading.Event()
        self.asked: list[tuple[str, int]] = []
        self.first_fails = False
        self._again = again
        self._lock = threading.Lock()

    @property
    def held_at(self) -> tuple[str, int]:
        return self.asked[0]

    def get_range(self, key: str, start: int, stop: int):
        with self._lock:
            self.asked.append((key, start))
            is_first, is_again = len(self.asked) == 1, self.asked.count(self.held_at) == 2
        if is_first:
            try:
                assert self.answers.wait(LIMIT_S), "nobody has released the first answer"
                if self.first_fails:
                    raise StoreError("the first request has failed")
            finally:
                self.has_answered.set()
        elif is_again and (key, start) == self.held_at:
            self._again()
        return self.inner.get_range(key, start, stop)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a request be slow after an instant, if only it lasts longer than the others did."""
    monkeypatch.setattr(send_each, "REPEAT_AFTER_S", 0.1)
    monkeypatch.setattr(send_each, "LOOK_EVERY_S", 0.01)


def restore(again: Callable[["Withholds"], None]) -> tuple[Withholds, torch.Tensor, torch.Tensor]:
    """Restore a model from a store that withholds an answer. Returns the store, the weights, and what they must be."""
    saved, model = (torch.nn.Linear(256, ROWS, bias=False) for _ in range(2))
    checkpoint = save_state(open_store(f"memory://{uuid4().hex}"), {"model": saved})
    store = Withholds(checkpoint.store, lambda: again(store))
    TrainState({"model": model}, rank=0, world_size=1).apply(replace(checkpoint, store=store))
    return store, model.weight.detach(), saved.weight.detach()


def test_a_restore_does_not_wait_for_an_answer_that_does_not_come() -> None:
    store, live, saved = restore(lambda _: None)

    assert torch.equal(live, saved)
    assert not store.has_answered.is_set()
    assert store.asked.count(store.held_at) == 2
    assert len(store.asked) == len(set(store.asked)) + 1, "no other request is sent twice"
    store.answers.set()


def test_the_late_answer_does_not_reach_the_tensors_which_are_trained_on_by_then() -> None:
    store, live, _ = restore(lambda _: None)
    live.fill_(7.0)

    store.answers.set()
    assert store.has_answered.wait(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("raycheck-read"):
            thread.join(LIMIT_S)

    assert torch.all(live == 7.0)


def test_the_first_answer_counts_although_it_is_that_of_the_first_request() -> None:
    def answer_first(store: Withholds) -> None:
        store.answers.set()
        assert store.has_answered.wait(LIMIT_S)
        raise StoreError("the second request has failed")

    store, live, saved = restore(answer_first)

    assert torch.equal(live, saved)
    assert store.asked.count(store.held_at) == 2


def test_a_first_request_that_fails_at_last_does_no_harm_once_the_second_has_its_answer() -> None:
    def fail_first(store: Withholds) -> None:
        store.first_fails = True
        store.answers.set()
        assert store.has_answered.wait(LIMIT_S)

    _, live, saved = restore(fail_first)

    assert torch.equal(live, saved)


def test_when_both_fail_the_restore_fails() -> None:
    def fail_both(store: Withholds) -> None:
        store.first_fails = True
        store.answers.set()
        raise StoreError("the second request has failed")

    with pytest.raises(StoreError, match="the first request has failed"):
        restore(fail_both)


def test_a_request_that_loses_to_its_second_one_leaves_the_others_needed() -> None:
    """A request that is refused is sent again as long as it is needed."""
    begun: dict[str, list[Future[str]]] = {item: [] for item in "abc"}
    contexts: dict[str, Context] = {}
    is_repeated = threading.Event()

    def start(_: int, item: str) -> Future[str]:
        future: Future[str] = Future()
        begun[item].append(future)
        contexts[item] = copy_context()
        if item == "c" or (item == "a" and len(begun["a"]) == 2):
            future.set_result(item)
            if item == "a":
                is_repeated.set()
        return future

    window = RequestWindow(least=8, most=8)
    sending = InThread(lambda: send_each.send_each("abc", start, window=window, may_repeat=True))
    assert is_repeated.wait(LIMIT_S)
    begun["a"][0].set_exception(StoreError("the first request has failed"))
    is_needed = contexts["b"].run(note_refusal, OverloadedError("too many"))
    begun["b"][0].set_result("b")

    assert (is_needed, sending.join()) == (True, ["a", "b", "c"])
