"""AReaL's actor, critic and driver are saved as one checkpoint, by the code that the guide shows.

AReaL's own recovery, of the same training, shows what is lost without it.
"""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.frameworks import rl_frameworks
from tests.support.histories.invariants import assert_invariants
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = pytest.mark.slow
LR, CRITIC_LOSS = 2, 3
"""Their places in what a training reports of each step."""


def asked(
    way: str, folder: Path, *, actors: int = 2, critics: int = 1, until: int = 10, **options: Any
) -> dict[str, Any]:
    """Return what to ask of `train`. way: AReaL's "own" recovery, or raycheck's."""
    return {"way": way, "folder": str(folder), "sizes": {"actor": actors, "critic": critics}, "until": until, **options}


def train(*trainings: dict[str, Any]) -> list[dict[str, Any]]:
    rl_frameworks.prepare()
    found = rl_frameworks.run("areal_training", *trainings)
    assert not [each["error"] for each in found if "error" in each]
    return found


def after(step: int, found: dict[str, Any], what: str = "losses") -> dict[int, list[float]]:
    return {int(number): values for number, values in found[what].items() if int(number) > step}


def test_a_killed_worker_costs_the_steps_after_the_last_save(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    undisturbed, died, again = train(
        asked("own", tmp_path / "own"),
        asked("raycheck", tmp_path / "files", uri=uri, dies_at=8),
        asked("raycheck", tmp_path / "files", uri=uri, seed=7),
    )

    assert (died["start"], died["died"], again["start"], again["died"]) == (0, "WorkerFailedError", 6, "")
    assert after(6, again) == after(6, undisturbed)
    assert after(6, again, "read") == after(6, undisturbed, "read")
    assert again["has_weights_of"] == [6]
    assert [item.step for item in raycheck.open_run(uri).checkpoints] == [3, 6, 9]
    assert_invariants(open_store(uri))


def test_a_worker_that_is_killed_in_a_save_costs_the_steps_after_the_save_before(s3: str, tmp_path: Path) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        upload = proxy.rule("hold", "PUT", "step-000000006-a1-.*/__1_0.distcp")

        undisturbed, died, again = train(
            asked("own", tmp_path / "own"),
            asked("raycheck", tmp_path / "files", uri=uri, dies_at=7, dies_in_save=True),
            asked("raycheck", tmp_path / "files", uri=uri, seed=7),
        )

        assert upload.reached.is_set()
        assert (died["start"], died["died"], again["start"], again["died"]) == (0, "WorkerFailedError", 3, "")
        assert list(after(0, died)) == [1, 2, 3, 4, 5, 6]
        for what in ("losses", "read"):
            assert after(3, again, what) == after(3, undisturbed, what), what
        assert [item.step for item in raycheck.open_run(uri).checkpoints] == [3, 6, 9]
        assert_invariants(open_store(uri))


def test_each_model_may_have_another_number_of_workers(tmp_path: Path) -> None:
    files = tmp_path / "files"

    undisturbed, died, on_others = train(
        asked("own", tmp_path / "own", dropout=0.0),
        asked("raycheck", files, dropout=0.0, dies_at=8),
        asked("raycheck", files, dropout=0.0, actors=1, critics=2, seed=7),
    )

    assert (died["died"], on_others["start"]) == ("WorkerFailedError", 6)
    assert list(after(6, on_others)) == [7, 8, 9, 10]
    assert after(6, on_others, "read") == after(6, undisturbed, "read")
    for step, found in after(6, on_others).items():
        assert found == pytest.approx(after(6, undisturbed)[step], rel=1e-4, abs=1e-6), step
    assert_invariants(open_store(f"file://{files}/run"))


def test_areal_s_own_recovery_loses_the_critic_the_schedules_and_the_order_of_the_data(tmp_path: Path) -> None:
    own = tmp_path / "own"

    undisturbed, died, again, other = train(
        asked("own", tmp_path / "undisturbed", dropout=0.0),
        asked("own", own, dropout=0.0, dies_at=8),
        asked("own", own, dropout=0.0, until=8, seed=7),
        asked("own", own, dropout=0.0, until=8, seed=8),
    )

    assert (died["died"], again["start"], other["start"]) == ("WorkerFailedError", 6, 6)
    assert again["losses"]["7"][CRITIC_LOSS] != other["losses"]["7"][CRITIC_LOSS]  # it began with fresh weights
    assert again["losses"]["7"][LR] == undisturbed["losses"]["1"][LR] > undisturbed["losses"]["7"][LR]
    assert after(6, again, "read") != after(6, undisturbed, "read")
