"""A group of torchrun's ranks saves and restores without Ray: rank 0's process runs the coordinator."""

from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.diagnosis.checks import check_rules
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, RaycheckError, StoreError
from raycheck.group.coordinator.messages import RankFailure
from raycheck.group.served_group import Served, ServedGroup, serve
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.gloo_ranks import Ranks
from tests.support.samples import hf_models
from tests.support.servers.http_fault_proxy import FaultProxy
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket


def train(rank: int, world_size: int, uri: str, at_step: int | None = None) -> tuple[int, list[Any]]:
    """Returns the restored step, and what `peek` says that each rank had saved."""
    group = raycheck.torchrun_group(uri)
    assert (group.rank, group.world_size, group.is_first_on_node) == (rank, world_size, rank == 0)
    torch.manual_seed(0)
    state = {"model": torch.nn.Linear(2, 1), "own": raycheck.PerRank({"rank": rank})}
    with raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=2, every_s=60), group=group) as ckpt:
        saved = [own["own"] for own in ckpt.peek(at=at_step).rank_values]
        at = ckpt.restore()
        for _ in range(3):
            ckpt.end_step()
    return at.step, saved


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_save_and_one_goes_on(pair: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    assert pair.run(train, 2, uri) == [(0, [])] * 2
    assert pair.run(train, 1, uri) == [(3, [{"rank": 0}, {"rank": 1}])]
    assert pair.run(train, 2, uri) == [(6, [{"rank": 0}])] * 2
    assert pair.run(train, 2, uri, 3) == [(3, [{"rank": 0}, {"rank": 1}])] * 2
    assert assert_invariants(open_store(uri)).attempt.number == 4


def test_the_place_is_examined_while_the_script_builds_its_state(wire: FaultProxy) -> None:
    examined = wire.rule("delay", "PUT", "probes")
    uri = join_uri(wire.uri, uuid4().hex)

    served = serve(uri)
    examined.wait()

    group = ServedGroup(id=uuid4().hex, uri=uri, rank=0, world_size=1, coordinator=served)
    group.ask("prepare", timeout_s=60.0, what="end of the examination")
    assert list(open_store(uri).list_objects("")) == []


def train_with_tasks(rank: int, world_size: int, uri: str) -> None:
    """Train a language model, whose last checkpoint is measured and exported."""

    def measure(uri: str, key: str) -> None:
        run = raycheck.open_run(uri)
        run.score(key, {"seen": run.at(key).step})

    settings = raycheck.SaveSettings(
        every_steps=2,
        after_commit=[raycheck.AfterCommit(measure, every_steps=2, mode="sync"), raycheck.AfterCommit.export()],
    )
    state = {"model": hf_models.llama()}
    with raycheck.Checkpointer(state, settings, group=raycheck.torchrun_group(uri)) as ckpt:
        ckpt.restore()
        for _ in range(3):
            ckpt.end_step()


@pytest.mark.filterwarnings("ignore")
def test_tasks_follow_commits_in_a_thread_of_rank_0_s_process(pair: Ranks, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    pair.run(train_with_tasks, 2, uri)

    first, last = assert_invariants(open_store(uri)).live
    assert (first.scores, last.scores) == ({"seen": 2}, {"seen": 3})
    assert (tmp_path / f"run/exports/{last.key}/model.safetensors.index.json").exists()


def fail_on(rank: int, world_size: int, uri: str, failing: int) -> str:
    """Returns the error of this rank when one rank's state cannot be saved."""
    group = raycheck.torchrun_group(uri)
    state = {"own": object() if rank == failing else torch.nn.Linear(1, 1)}
    try:
        with raycheck.Checkpointer(state, group=group) as ckpt:
            ckpt.restore()
    except ConfigError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_rank_fails_the_other_names_it_also_when_it_is_the_one_with_the_coordinator(
    pair: Ranks, failing: int
) -> None:
    found = pair.run(fail_on, 2, f"memory://{uuid4().hex}", failing)

    assert found[failing].startswith("state['own'] is a object without state_dict")
    assert found[1 - failing] == f"rank {failing}: {found[failing]}"


def train_until(rank: int, world_size: int, uri: str, failing: int) -> str:
    """Returns the error that ends this rank's training after a step."""
    state = {"model": torch.nn.Linear(1, 1)}
    try:
        with raycheck.Checkpointer(state, group=raycheck.torchrun_group(uri)) as ckpt:
            ckpt.restore()
            ckpt.end_step()
            if rank == failing:
                float("the loss")
            ckpt.save().result()
    except (ValueError, RaycheckError) as error:
        return str(error)
    return "none"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("failing", [0, 1])
def test_the_run_says_by_which_error_of_which_rank_its_training_has_ended(
    pair: Ranks, tmp_path: Path, failing: int
) -> None:
    uri = f"file://{tmp_path}/run"

    said = pair.run(train_until, 2, uri, failing)
    status = raycheck.open_run(uri).status()
    pair.run(train, 2, uri)
    ended = raycheck.open_run(uri).history().attempts[0]

    cause = f"rank {failing}: ValueError: could not convert string to float: 'the loss'"
    assert ["could not convert" in error for error in said] == [True, True], said
    assert status.state == "died"
    assert cause in status.text
    assert ended.cause.endswith(cause)


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"init_process_group first, and start the script by torchrun"):
        raycheck.torchrun_group("memory://run")


def place(served: Served) -> ServedGroup:
    return ServedGroup(id="group", uri="memory://run", rank=1, world_size=2, coordinator=served)


def begin(rank: int, world_size: int, uri: str) -> str:
    """Returns the error of this rank's restore."""
    state = {"model": torch.nn.Linear(1, 1)}
    try:
        with raycheck.Checkpointer(state, group=raycheck.torchrun_group(uri)) as ckpt:
            ckpt.restore()
    except ConfigError as error:
        return str(error)
    return "none"


@pytest.mark.filterwarnings("ignore")
def test_a_place_that_doctor_calls_wrong_is_refused_on_all_ranks_in_its_words(pair: Ranks, s3: str) -> None:
    uri = planted_bucket(s3, rules=[FROZEN_RULE])
    (finding,) = [item for item in check_rules(open_store(uri)) if item.state == "wrong"]

    found = pair.run(begin, 2, uri)

    assert [finding.sentence in text for text in found] == [True, True], found
    assert list(open_store(uri).list_objects("")) == []


def test_a_restart_by_torchrun_does_not_examine_the_place_again(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = planted_bucket(s3, rules=[FROZEN_RULE])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    place(serve(uri)).ask("claim", "group", 2, timeout_s=60, what="claim")

    assert assert_invariants(open_store(uri)).attempt.number == 1


def test_a_rank_whose_coordinator_is_gone_is_told_so() -> None:
    with pytest.raises(
        StoreError, match="rank 1: claim: the coordinator in rank 0's process does not answer: that process has "
    ):
        place(Served(address=("127.0.0.1", 9), key=b"x")).ask("claim", "group", 2, timeout_s=20, what="claim")


def test_a_rank_that_got_another_error_has_not_heard_of_a_failure() -> None:
    served = serve(f"memory://{uuid4().hex}")
    first, second = (
        ServedGroup(id="group", uri="memory://run", rank=rank, world_size=2, coordinator=served) for rank in range(2)
    )
    with pytest.raises(RaycheckError):
        second.ask("check_live", "another", timeout_s=60, what="look")
    failure = RankFailure(group="group", rank=0, error=ConfigError("it broke"))
    first.ask("rank_failed", failure, timeout_s=60, what="failure")
    assert not first._caller.wait_until_heard("it broke", 1, 0.0)

    with pytest.raises(ConfigError, match="rank 0: it broke"):
        second.ask("claim", "group", 2, 1, timeout_s=60, what="claim")

    assert first._caller.wait_until_heard("it broke", 1, 0.0)


def test_who_does_not_know_the_key_is_not_answered() -> None:
    served = serve("memory://run")

    with pytest.raises(AuthenticationError):
        place(Served(address=served.address, key=b"guessed")).ask("claim", "group", 2, timeout_s=20, what="claim")
