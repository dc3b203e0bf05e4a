"""SkyRL's data over several epochs, and models that share devices, are restored by the code that the guide shows.

SkyRL's own checkpoints, of the same training, show what is lost without it.
"""

from pathlib import Path

import pytest

from tests.frameworks.test_rl_frameworks import SKYRL, after

pytestmark = pytest.mark.slow
EPOCH, UNTIL = 4, 12
DATA = {"samples": 16, "until": UNTIL}


def test_each_epoch_has_the_same_data_after_a_failure(tmp_path: Path) -> None:
    runs = [f"file://{tmp_path}/{name}" for name in ("undisturbed", "at-its-end", "in-its-middle")]

    undisturbed, _, at_its_end, _, in_its_middle = SKYRL.train(
        SKYRL.asked("raycheck", runs[0], **DATA),
        SKYRL.asked("raycheck", runs[1], dies_at=EPOCH + 2, **DATA),
        SKYRL.asked("raycheck", runs[1], seed=7, **DATA),
        SKYRL.asked("raycheck", runs[2], dies_at=EPOCH + 4, **DATA),
        SKYRL.asked("raycheck", runs[2], seed=7, **DATA),
    )

    assert (at_its_end["start"], in_its_middle["start"]) == (EPOCH, EPOCH + 2)
    for again in (at_its_end, in_its_middle):
        for what in ("read", "losses", "drawn", "weights"):
            assert after(again["start"], again, what) == after(again["start"], undisturbed, what), what
        assert max(map(int, again["losses"])) == UNTIL


def test_each_epoch_has_the_same_data_after_a_failure_if_processes_read_it(tmp_path: Path) -> None:
    uri, options = f"file://{tmp_path}/run", {**DATA, "readers": 2}

    undisturbed, died, again = SKYRL.train(
        SKYRL.asked("raycheck", f"file://{tmp_path}/undisturbed", **options),
        SKYRL.asked("raycheck", uri, dies_at=EPOCH + 2, **options),
        SKYRL.asked("raycheck", uri, seed=7, **options),
    )

    assert (died["died"], again["start"], max(map(int, again["losses"]))) == (True, EPOCH, UNTIL)
    assert after(EPOCH, again, "read") == after(EPOCH, undisturbed, "read")


def test_skyrl_s_own_checkpoints_lose_an_epoch_or_the_order_of_the_next_ones(tmp_path: Path) -> None:
    own = [str(tmp_path / name) for name in ("undisturbed", "at-its-end", "in-its-middle")]

    undisturbed, _, at_its_end, _, in_its_middle = SKYRL.train(
        SKYRL.asked("own", own[0], **DATA),
        SKYRL.asked("own", own[1], dies_at=EPOCH + 2, **DATA),
        SKYRL.asked("own", own[1], seed=7, **DATA),
        SKYRL.asked("own", own[2], dies_at=EPOCH + 4, **DATA),
        SKYRL.asked("own", own[2], seed=7, **DATA),
    )

    assert (at_its_end["start"], max(map(int, at_its_end["losses"]))) == (EPOCH, UNTIL - EPOCH)
    assert in_its_middle["start"] == EPOCH + 2
    read, in_order = after(EPOCH + 2, in_its_middle, "read"), after(EPOCH + 2, undisturbed, "read")
    assert [step for step in in_order if read[step] != in_order[step]] == ["9", "10", "11", "12"]


def test_models_that_take_turns_on_shared_devices_are_saved_from_where_they_are(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    shared = {"is_colocated": True, "critics": 2}

    undisturbed, died, again, separate = SKYRL.train(
        SKYRL.asked("own", str(tmp_path / "own"), **shared),
        SKYRL.asked("raycheck", uri, dies_at=8, **shared),
        SKYRL.asked("raycheck", uri, seed=7, until=9, **shared),
        SKYRL.asked("raycheck", uri, seed=8),
    )

    assert (died["died"], again["start"], separate["start"]) == (True, 6, 9)
    for what in SKYRL.equal:
        assert after(6, again, what) == {step: undisturbed[what][step] for step in ("7", "8", "9")}, what
    for step, losses in after(9, separate).items():
        assert losses == pytest.approx(undisturbed["losses"][step], rel=SKYRL.tolerance)
