"""Tests that when one rank fails, the others learn which one and why, in whatever phase they wait for it."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, SaveFailedError, StoreError
from tests.support.processes.coordinator_in_thread import InProcess, group_of

WITHIN_S = 60.0
SETTINGS = raycheck.SaveSettings(every_steps=1, save_timeout_s=2 * WITHIN_S)


class Fragile:
    """An object with a state_dict and a load_state_dict; `fails` names the one that raises."""

    def __init__(self, fails: str = "", error: Exception | None = None) -> None:
        self.fails = fails
        self.error = error or ValueError("it broke")

    def state_dict(self) -> dict[str, int]:
        if self.fails == "state_dict":
            raise self.error
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state
        if self.fails == "load_state_dict":
            raise self.error


def train(group: InProcess, own: object, in_loop: Callable[[int], None] = lambda _: None, *, steps: int = 2) -> None:
    """One rank's training. in_loop: called with the number of each step before it is complete."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    with raycheck.Checkpointer({"model": model, "own": own}, SETTINGS, group=group) as ckpt:
        ckpt.restore()
        for step in range(1, steps + 1):
            in_loop(step)
            ckpt.end_step()


def errors_of(*calls: Callable[[], None]) -> list[BaseException | None]:
    """Return what the call of each rank has raised, in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.exception(WITHIN_S) for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid4().hex}"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("own", [object(), Fragile("state_dict")], ids=["constructor", "check"])
def test_before_the_claim(uri: str, failing: int, own: object) -> None:
    group = group_of(uri, world_size=2)

    found = errors_of(*(lambda r=rank: train(group[r], own if r == failing else Fragile()) for rank in range(2)))

    assert all(isinstance(error, ConfigError) for error in found)
    assert str(found[failing]).startswith("state['own']")
    assert str(found[1 - failing]) == f"rank {failing}: {found[failing]}"


def test_at_the_second_start_before_the_claim(uri: str) -> None:
    group = group_of(uri, world_size=2)
    assert errors_of(*(lambda r=rank: train(group[r], Fragile()) for rank in range(2))) == [None, None]
    again = group_of(uri, world_size=2)

    found = errors_of(lambda: train(again[0], Fragile()), lambda: train(again[1], Fragile("state_dict")))

    assert str(found[0]).endswith("rank 1: state['own'].state_dict() raised ValueError: it broke")


def test_at_the_restore(uri: str) -> None:
    group = group_of(uri, world_size=2)
    assert errors_of(*(lambda r=rank: train(group[r], Fragile()) for rank in range(2))) == [None, None]
    again = group_of(uri, world_size=2)

    found = errors_of(lambda: train(again[0], Fragile()), lambda: train(again[1], Fragile("load_state_dict")))

    text = "state['own'].load_state_dict() raised ValueError: it broke"
    assert isinstance(found[0], ConfigError)
    assert str(found[0]).startswith("rank 1: restore of step-000000002-a1-s2: ")
    assert str(found[0]).endswith(text)
    assert str(found[1]) == text


@pytest.mark.parametrize("error", [ValueError("it broke"), ConnectionResetError("it broke")])
@pytest.mark.parametrize("at", [1, 3], ids=["at the agreement", "at a later copy"])
def test_at_a_save(uri: str, at: int, error: Exception) -> None:
    """A lost connection is raised unchanged, since a restart may cure it. The others are told nevertheless."""
    group = group_of(uri, world_size=2)
    own = Fragile(error=error)

    def break_own(step: int) -> None:
        own.fails = "state_dict" if step == at else ""

    found = errors_of(lambda: train(group[0], Fragile(), steps=4), lambda: train(group[1], own, break_own, steps=4))

    assert isinstance(found[1], ConfigError if isinstance(error, ValueError) else ConnectionResetError)
    assert isinstance(found[0], ConfigError | SaveFailedError | StoreError)
    assert f"{type(error).__name__}: it broke" in str(found[0])
    assert "rank 1: " in str(found[0])


@pytest.mark.filterwarnings("ignore")
def test_in_the_loop_what_is_in_flight_is_committed_and_the_others_hear_at_their_next_save(uri: str) -> None:
    group = group_of(uri, world_size=2)

    def stop_after_the_second(step: int) -> None:
        if step == 3:
            raise ValueError("it broke")

    found = errors_of(
        lambda: train(group[0], Fragile(), steps=4), lambda: train(group[1], Fragile(), stop_after_the_second, steps=4)
    )

    assert str(found[1]) == "it broke"
    assert isinstance(found[0], SaveFailedError | StoreError)
    assert "rank 1: ValueError: it broke" in str(found[0])
    assert [entry.step for entry in read_latest(open_store(uri)).live] == [1, 2]


def test_at_the_end(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 waits for all ranks there. What it had to save is committed, so it says so and ends well."""
    group = group_of(uri, world_size=2)

    def fail_at_the_end(step: int) -> None:
        if step == 3:
            raise ValueError("it broke")

    with caplog.at_level(logging.WARNING, logger="raycheck"):
        found = errors_of(
            lambda: train(group[0], Fragile()), lambda: train(group[1], Fragile(), fail_at_the_end, steps=3)
        )

    assert (found[0], str(found[1])) == (None, "it broke")
    assert "latest does not say so: rank 1: ValueError: it broke" in caplog.text
    assert not read_latest(open_store(uri)).is_finished
