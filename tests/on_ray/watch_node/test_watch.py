"""A notice becomes a drain: tests of the loop, by a clock of their own."""

import logging

import pytest

from raycheck.on_ray.watch_node.cloud_notices import REBALANCE, Ec2, Notice
from raycheck.on_ray.watch_node.watch import FALLBACK_S, INTERVAL_S, NodeWatch, watch
from tests.support.servers.metadata_servers import Ec2Service, serving

NOW = 1_700_000_000.0


class Machine:
    """A source that says what the test wants, a clock that stands, and a drain that notes what it was told."""

    endpoint = "http://here"

    def __init__(self, rebalance_deadline_s: float | None = None) -> None:
        self.now = NOW
        self.said: tuple[Notice, ...] = ()
        self.is_away = False
        self.refusal = ""
        self.attempts = 0
        self.drained: list[float] = []
        self.watch = NodeWatch(self, self.drain, rebalance_deadline_s=rebalance_deadline_s, clock=lambda: self.now)

    def detect(self) -> bool:
        return True

    def notices(self, now: float) -> tuple[Notice, ...]:
        if self.is_away:
            raise ConnectionError("away")
        return self.said

    def drain(self, deadline: float, reason: str) -> None:
        self.attempts += 1
        if self.refusal:
            raise ConnectionError(self.refusal)
        self.drained.append(deadline - NOW)

    def look(self, *said: tuple[str, float | None], after: float = 0.0) -> None:
        """Look `after` seconds later, at notices of (kind, deadline from NOW)."""
        self.now += after
        self.said = tuple(
            Notice(cloud="aws", kind=kind, deadline=None if at is None else NOW + at, message=f"{kind} it is")
            for kind, at in said
        )
        self.watch.look()


def test_a_notice_drains_once() -> None:
    machine = Machine()

    for _ in range(3):
        machine.look(("terminate", 120), after=1)

    assert machine.drained == [120]


def test_nothing_pending_drains_nothing() -> None:
    machine = Machine()

    machine.look()

    assert machine.attempts == 0


def test_a_deadline_that_a_cloud_gives_as_a_span_stands_from_the_first_look() -> None:
    machine = Machine()

    for passed in range(40):
        machine.look(("preempted", passed + 30), after=min(passed, 1))

    assert machine.drained == [30]


def test_a_nearer_deadline_drains_again_and_a_farther_one_does_not() -> None:
    machine = Machine()

    for at in (600, 60, 60.5, 300):
        machine.look(("redeploy", at))

    assert machine.drained == [600, 60]


def test_of_several_notices_ray_is_told_the_nearest_deadline() -> None:
    machine = Machine()

    machine.look(("redeploy", 600))
    machine.look(("redeploy", 600), ("preempt", 30))
    machine.look(("redeploy", 600), ("preempt", 30), ("reboot", 900))

    assert machine.drained == [600, 30]


def test_a_notice_after_a_deadline_that_passed_drains_again() -> None:
    machine = Machine(rebalance_deadline_s=60)

    machine.look((REBALANCE, None))
    machine.look((REBALANCE, None), after=100)
    machine.look(("terminate", 220))

    assert machine.drained == [60, 220]


def test_a_notice_without_a_time_gets_what_ray_train_would_assume() -> None:
    machine = Machine()

    machine.look(("reboot", None))
    machine.look(("reboot", None), after=10)

    assert machine.drained == [FALLBACK_S]


def test_an_event_that_begins_and_so_loses_its_time_keeps_its_deadline() -> None:
    machine = Machine()

    machine.look(("preempt", 30))
    machine.look(("preempt", None), after=29)

    assert machine.drained == [30]


def test_a_rebalance_recommendation_is_only_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    machine, asked = Machine(), Machine(rebalance_deadline_s=600)

    machine.look((REBALANCE, None))
    machine.look((REBALANCE, None))
    logged = len(caplog.records)
    asked.look((REBALANCE, None))
    asked.look(("terminate", 120))

    assert machine.attempts == 0
    assert logged == 1
    assert asked.drained == [600, 120]


def test_a_withdrawn_notice_is_forgotten() -> None:
    machine = Machine()

    machine.look(("preempt", 30))
    machine.look()
    machine.look(("preempt", 30))

    assert machine.drained == [30, 30]


def test_a_drain_that_fails_is_tried_at_every_look_until_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.refusal = "no"

    with caplog.at_level(logging.ERROR, logger="raycheck"):
        for _ in range(50):
            machine.look(("terminate", 30), after=1)

    assert machine.attempts == 30, "the last at the deadline itself"
    assert len(caplog.records) == 2, "when it first failed, and when it was given up"


def test_a_drain_that_failed_is_done_when_ray_is_back_even_if_the_metadata_service_is_away() -> None:
    machine = Machine()
    machine.refusal = "no"
    machine.look(("terminate", 120))
    machine.refusal, machine.is_away = "", True

    machine.look(after=5)

    assert machine.drained == [120]


def test_a_metadata_service_that_is_away_is_said_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.is_away = True

    with caplog.at_level(logging.INFO, logger="raycheck"):
        for _ in range(5):
            machine.look()
        machine.is_away = False
        for _ in range(5):
            machine.look()

    assert len(caplog.records) == 2


def test_while_the_metadata_service_is_away_a_notice_is_not_taken_as_withdrawn() -> None:
    machine = Machine()
    machine.look(("terminate", 120))
    machine.is_away = True
    machine.look()
    machine.is_away = False

    machine.look(("terminate", 120))

    assert machine.drained == [120]


def test_the_loop_looks_every_second_and_once_more_when_it_is_ended() -> None:
    machine, slept = Machine(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            machine.said = (Notice(cloud="gce", kind="preempted", deadline=NOW + 30, message="now"),)
            raise SystemExit(0)

    with pytest.raises(SystemExit):
        watch(machine, machine.drain, clock=lambda: NOW, sleep=sleep)

    assert slept == [INTERVAL_S] * 3
    assert machine.drained == [30]


def test_the_loop_ends_at_once_when_the_metadata_service_is_away() -> None:
    machine = Machine()
    machine.is_away = True
    looks = []
    answer = machine.notices
    machine.notices = lambda now: (looks.append(now), answer(now))[1]

    def sleep(seconds: float) -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        watch(machine, machine.drain, clock=lambda: NOW, sleep=sleep)

    assert len(looks) == 1


def test_ec2s_outage_interrupts_nothing() -> None:
    machine, service = Machine(), Ec2Service()
    service.interrupt(NOW + 120)
    service.trouble = [lambda: (503, "", {}), lambda: (500, "", {})]
    with serving(service) as endpoint:
        state = NodeWatch(Ec2(endpoint), machine.drain, rebalance_deadline_s=None, clock=lambda: NOW)
        for _ in range(4):
            state.look()

    assert machine.drained == [120]
