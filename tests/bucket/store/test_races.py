"""Tests that exactly one of sixteen processes wins each race, the promise of a store on which everything else is built.

What a process is told must agree with what the object contains afterwards. In theory, a winner may be told that it has
lost: aiohttp sends a PUT again when its connection breaks (see store/retry.py), and the second PUT finds the first. No
connection breaks here, so the tests do not allow for that.
"""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES
from tests.support.histories.racing_writers import Outcome, Processes, Threads, race_once

SMALL = 24
FEW = {SMALL: 10, MAX_CONDITIONAL_BYTES: 4}
HUNDRED = {SMALL: 100, MAX_CONDITIONAL_BYTES: 100}
STORES = ["file", "s3", "gs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("az", "ministack", "ceph"))]
ANSWERS_500 = "ceph"
"""About one in five that lose a swap on RGW 16 hear of an inner error, not of their condition: judged by effect."""
sizes = pytest.mark.parametrize("size", [SMALL, MAX_CONDITIONAL_BYTES], ids=["small", "1MiB"])
rounds = pytest.mark.parametrize("rounds", [FEW, pytest.param(HUNDRED, marks=pytest.mark.slow)], ids=["few", "hundred"])


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    racers = Processes()
    yield racers
    racers.stop()


@pytest.fixture(params=STORES)
def uri(request: pytest.FixtureRequest, tmp_path) -> str:
    """Return one root for each server, so that each process makes a server's client once."""
    if request.param == "file":
        return f"file://{tmp_path}/races"
    if request.param == "gs":
        request.getfixturevalue("gcs")
        return "gs://raycheck/races"
    if request.param == "az":
        request.getfixturevalue("azure")
        return "az://raycheck/races?account_name=devstoreaccount1"
    return join_uri(request.getfixturevalue(request.param), "races")


def race(racers: Processes | Threads, uri: str, *, rounds: int, size: int) -> list[Outcome]:
    """Let all writers create one new object, then swap it, once per round."""
    store = open_store(uri)
    folder = uuid4().hex
    return [
        race_once(store, racers, f"{folder}/{number}", size=size, swap=swap)
        for number in range(rounds)
        for swap in (False, True)
    ]


@sizes
@rounds
def test_of_sixteen_processes_exactly_one_creates_and_exactly_one_swaps(processes, uri, rounds, size, request):
    outcomes = race(processes, uri, rounds=rounds[size], size=size)

    assert len(outcomes) == 2 * rounds[size]
    assert [outcome for outcome in outcomes if not outcome.has_one_winner] == []
    unclear = {told.rpartition(": ")[2] for outcome in outcomes for told in outcome.unclear}
    is_clear = request.node.callspec.params["uri"] != ANSWERS_500
    assert unclear <= (set() if is_clear else {"the store answered 500 UnknownError"})


@sizes
@rounds
def test_of_sixteen_threads_exactly_one_creates_and_exactly_one_swaps(rounds, size):
    threads = Threads()

    outcomes = race(threads, f"memory://{uuid4().hex}", rounds=rounds[size], size=size)

    threads.stop()
    assert len(outcomes) == 2 * rounds[size]
    assert [outcome for outcome in outcomes if not outcome.has_one_winner or outcome.unclear] == []


def test_every_racer_wins_now_and_then(processes, tmp_path):
    """Else they do not race: the first to be told would always be the first to arrive."""
    outcomes = race(processes, f"file://{tmp_path}/races", rounds=20, size=SMALL)

    assert len({outcome.author for outcome in outcomes}) >= 4
