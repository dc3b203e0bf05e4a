"""`raycheck data`: the samples of steps, from a run that was trained at two world sizes, and what it cannot say."""

import json
import re
from pathlib import Path

import pytest

from raycheck.bucket.store import open_store
from raycheck.data.batches import Batches
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import Own, save_state


@pytest.fixture
def trained(tmp_path: Path) -> tuple[str, list[list[int]]]:
    """A run with checkpoints of steps 5 and 12, and the samples of each step in order."""
    uri, steps = f"file://{tmp_path}/runs/mine", list[list[int]]()
    ranks = [Batches(range(40), global_batch=4, rank=rank, world_size=2) for rank in range(2)]
    for number, end in enumerate((5, 12), 1):
        while len(steps) < end:
            loaders = [batches.loader() for batches in ranks]
            for shares in zip(*loaders, strict=True):
                steps.append([index for share in shares for index in share.tolist()])
                for batches in ranks:
                    batches.end_step()
                if len(steps) == end:
                    break
            else:
                for batches in ranks:
                    batches.end_epoch()
        own = Own({"inside": {"data": ranks[0].state_dict()}})  # as an adapter's state may have it
        save_state(open_store(uri), {"own": own} if end == 5 else {"data": ranks[0]}, save_number=number, step=end)
        state = ranks[0].state_dict()
        ranks = [Batches(range(40), global_batch=4, rank=rank, world_size=3) for rank in range(3)]
        for batches in ranks:
            batches.load_state_dict(state)
    return uri, steps


def test_it_says_by_number_what_each_step_was_trained_on(trained: tuple[str, list[list[int]]]) -> None:
    uri, steps = trained

    done = raycheck("data", uri, "--steps", "4:13", "--json")

    found = json.loads(done.stdout)
    assert [item["step"] for item in found["steps"]] == list(range(4, 13))
    assert [item["indices"] for item in found["steps"]] == steps[3:]
    assert [item["epoch"] for item in found["steps"]] == [0] * 7 + [1] * 2
    assert found["skip"] == [[0, 3, 10], [1, 0, 2]]


def test_people_are_shown_a_table_and_what_leaves_the_batches_out(trained: tuple[str, list[list[int]]]) -> None:
    uri, steps = trained

    done = raycheck("data", uri, "--steps", "4:6", "--at", "5")

    assert re.search(rf"^4 .* {' '.join(map(str, steps[3]))} *$", done.stdout, re.MULTILINE), "as logs count"
    assert done.stdout.splitlines()[-1] == "to leave these out: Batches(..., skip=[(0, 3, 5)])"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "3:14"), "records the samples of steps 1:13"),
        (("--steps", "0:3"), "records the samples of steps 1:13"),
        (("--steps", "3:7", "--at", "5"), "records the samples of steps 1:6"),
        (("--steps", "5:3"), "give FIRST:END"),
        (("--steps", "a:b"), "give FIRST:END"),
    ],
)
def test_what_it_cannot_say_is_one_line(
    trained: tuple[str, list[list[int]]], words: tuple[str, ...], message: str
) -> None:
    done = raycheck("data", trained[0], *words)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert message in done.stderr


def test_a_run_without_batches_is_said_to_have_none(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/runs/mine"
    save_state(open_store(uri), {"own": {"n": 1}}, step=5)

    done = raycheck("data", uri, "--steps", "3:5")

    assert done.returncode == 2
    assert "no raycheck.Batches was in the state" in done.stderr
