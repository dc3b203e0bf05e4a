"""Tests that a driver whose nodes lack a permission that the run needs fences nobody."""

from dataclasses import replace
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError
from raycheck.group.coordinator import actor
from raycheck.group.coordinator.messages import Claim, Pending
from raycheck.group.worker.group_restore import claim_run
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.servers.http_fault_proxy import fault_proxy


def test_a_driver_with_a_node_that_may_not_write_fences_no_other(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "WAIT_S", 0.5)
    name = uuid4().hex
    uri = join_uri(s3, name)
    (healthy,) = group_of(uri, owner="healthy")
    with raycheck.Checkpointer({"number": 1}, raycheck.SaveSettings(every_steps=1), group=healthy) as ckpt:
        ckpt.restore()
        ckpt.end_step()
        with fault_proxy(s3) as proxy:
            proxy.rule("deny", "PUT", "probes", times=100)
            first, second = group_of(uri, world_size=2, owner="other")

            with pytest.raises(ConfigError):
                claim_run(replace(first, uri=join_uri(proxy.uri, name)))
            answer = second.ask("claim", second.id, 2, 1, timeout_s=30.0, what="claim")

        assert isinstance(answer, Pending)
        assert read_latest(open_store(uri)).attempt.owner == "healthy"
        ckpt.end_step()


def test_ranks_that_came_first_claim_with_the_last_one(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "WAIT_S", 0.5)
    first, second = group_of(join_uri(s3, uuid4().hex), world_size=2)

    early = second.ask("claim", second.id, 2, 1, timeout_s=30.0, what="claim")
    last = claim_run(first)
    again = claim_run(second)

    assert isinstance(early, Pending)
    assert isinstance(last, Claim)
    assert again.attempt == last.attempt == 1


def test_a_rank_may_claim_without_the_others_in_the_end(s3: str) -> None:
    _, second = group_of(join_uri(s3, uuid4().hex), world_size=2)

    assert isinstance(second.ask("claim", second.id, 2, None, timeout_s=30.0, what="claim"), Claim)
