"""The clouds' notices, from servers that answer as documented, and as they do when they are not well."""

import json
import threading

import pytest

from raycheck.errors import ConfigError
from raycheck.on_ray.watch_node import cloud_notices
from raycheck.on_ray.watch_node.cloud_notices import REBALANCE, Azure, Ec2, Gce, Notice, source_of
from raycheck.on_ray.watch_node.metadata_service import ask
from tests.support.servers.metadata_servers import AzureService, Ec2Service, GceService, Reply, Service, serving
from tests.support.servers.ports import free_port

AT = 1505722920.0
"""2017-09-18T08:22:00Z, AWS's own example."""
ACTION = "GET /latest/meta-data/spot/instance-action"
RECOMMENDATION = "GET /latest/meta-data/events/recommendations/rebalance"
TOKEN = "PUT /latest/api/token"


def busy() -> Reply:
    return 503, "Service Unavailable", {"Metadata-Flavor": "Google"}


def test_ec2_is_asked_with_one_token_for_many_looks() -> None:
    service = Ec2Service()
    with serving(service) as endpoint:
        source = Ec2(endpoint)

        found = [source.notices(0.0) for _ in range(3)]

    assert found == [(), (), ()]
    assert service.paths() == [TOKEN, *[ACTION, RECOMMENDATION] * 3]
    assert service.requests[0].headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
    assert {asked.headers["X-aws-ec2-metadata-token"] for asked in service.requests[1:]} == set(service.tokens)


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_ec2_says_when_it_will_act(action: str) -> None:
    service = Ec2Service()
    service.interrupt(AT, action)
    service.items["events/recommendations/rebalance"] = '{"noticeTime": "2017-09-18T08:20:00Z"}'
    with serving(service) as endpoint:
        (found,) = Ec2(endpoint).notices(0.0)

    assert (found.cloud, found.kind, found.deadline) == ("aws", action, AT)
    assert service.paths() == [TOKEN, ACTION], "what is asked after it could fail, and hide it"


def test_a_rebalance_recommendation_has_no_deadline() -> None:
    service = Ec2Service(items={"events/recommendations/rebalance": '{"noticeTime": "2020-10-27T08:22:00Z"}'})
    with serving(service) as endpoint:
        (found,) = Ec2(endpoint).notices(0.0)

    assert (found.kind, found.deadline) == (REBALANCE, None)
    assert "2020-10-27T08:22:00Z" in found.message


def test_ec2s_token_is_renewed_long_before_it_ends_and_whenever_it_is_refused() -> None:
    service, now = Ec2Service(), [0.0]
    with serving(service) as endpoint:
        source = Ec2(endpoint, clock=lambda: now[0])
        source.notices(0.0)
        now[0] = Ec2.TOKEN_TTL_S / 2
        source.notices(0.0)
        service.tokens.clear()
        service.interrupt(AT)
        (found,) = source.notices(0.0)

    assert found.deadline == AT
    assert service.paths() == [*[TOKEN, ACTION, RECOMMENDATION] * 2, ACTION, TOKEN, ACTION]


def test_compute_engine_preempts_within_30_s() -> None:
    service = GceService()
    with serving(service) as endpoint:
        source = Gce(endpoint)
        before = source.notices(AT)
        service.items["preempted"] = "TRUE"

        (found,) = source.notices(AT)

    assert before == ()
    assert (found.cloud, found.kind, found.deadline) == ("gce", "preempted", AT + 30)
    assert {asked.headers["Metadata-Flavor"] for asked in service.requests} == {"Google"}


@pytest.mark.parametrize(
    ("event", "kinds"), [("TERMINATE_ON_HOST_MAINTENANCE", ["maintenance"]), ("MIGRATE_ON_HOST_MAINTENANCE", [])]
)
def test_host_maintenance_counts_only_where_it_ends_the_vm(event: str, kinds: list[str]) -> None:
    service = GceService(items={"preempted": "FALSE", "maintenance-event": event})
    with serving(service) as endpoint:
        found = Gce(endpoint).notices(AT)

    assert [notice.kind for notice in found] == kinds
    assert [notice.deadline for notice in found] == [AT + 3600] * len(kinds)


def test_a_server_without_googles_header_is_not_believed() -> None:
    class Portal(Service):
        def answer(self, asked) -> Reply:
            return 200, "TRUE", {}

    with serving(Portal()) as endpoint, pytest.raises(ConnectionError, match="Metadata-Flavor"):
        Gce(endpoint).notices(AT)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_azures_events_that_end_this_vm_are_notices(kind: str) -> None:
    service = AzureService()
    service.schedule(kind, "Mon, 19 Sep 2016 18:29:47 GMT", names=("WestNO_1", "westno_0"))
    with serving(service) as endpoint:
        (found,) = Azure(endpoint).notices(0.0)

    assert (found.cloud, found.kind, found.deadline) == ("azure", kind.lower(), 1474309787.0)
    assert [asked.headers["Metadata"] for asked in service.requests] == ["true", "true"]


def test_azures_event_loses_its_time_when_it_begins_and_stays_the_same_notice() -> None:
    service = AzureService()
    service.schedule("Preempt", "Mon, 19 Sep 2016 18:29:47 GMT")
    with serving(service) as endpoint:
        source = Azure(endpoint)
        (before,) = source.notices(0.0)
        service.schedule("Preempt", "", status="Started")

        (found,) = source.notices(0.0)

    assert found == Notice(cloud="azure", kind="preempt", deadline=None, message=before.message)


def test_azures_freezes_and_the_events_of_other_vms_pass() -> None:
    service = AzureService()
    with serving(service) as endpoint:
        source = Azure(endpoint)
        service.schedule("Freeze", "Mon, 19 Sep 2016 18:29:47 GMT")
        freeze = source.notices(0.0)
        service.schedule("Preempt", "Mon, 19 Sep 2016 18:29:47 GMT", names=("WestNO_1", "WestNO_00"))
        other = source.notices(0.0)

    assert freeze == other == ()
    assert sum("/compute/name" in path for path in service.paths()) == 1, "a VM keeps its name"


def test_azure_may_take_its_time_for_the_first_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_notices, "TIMEOUT_S", 1.0)
    service, answers = AzureService(), threading.Event()

    def late() -> Reply:
        answers.wait(1.5)
        return 200, '{"Events": []}', {}

    service.trouble = [None, late, late]
    with serving(service) as endpoint:
        source = Azure(endpoint)

        assert source.notices(0.0) == ()
        with pytest.raises(ConnectionError, match="timed out"):
            source.notices(0.0)
        answers.set()


@pytest.mark.parametrize("make", [Ec2, Gce, Azure])
def test_a_service_that_is_away_for_a_while_may_be_asked_again(make) -> None:
    service = {Ec2: Ec2Service, Gce: GceService, Azure: AzureService}[make]()
    service.trouble = [busy, busy]
    with serving(service) as endpoint:
        source = make(endpoint)
        for _ in range(2):
            with pytest.raises(ConnectionError, match="503"):
                source.notices(0.0)

        assert source.notices(0.0) == ()


@pytest.mark.parametrize(
    "text", ["<html>", "", "[]", "{}", "null", '{"action": "stop", "time": "soon"}', '{"action": "stop", "time": 5}']
)
def test_garbage_from_ec2_is_an_error_that_shows_it(text: str) -> None:
    service = Ec2Service(items={"spot/instance-action": text})

    with serving(service) as endpoint, pytest.raises(ConnectionError, match="not as documented") as raised:
        Ec2(endpoint).notices(0.0)

    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    "events",
    [
        {},
        {"Events": None},
        {"Events": [{"EventType": "Preempt"}]},
        {"Events": [{"EventType": "Reboot", "EventId": "1", "Resources": ["WestNO_0"], "NotBefore": "soon"}]},
        {"Events": [{"EventType": "Reboot", "EventId": "1", "Resources": [None]}]},
    ],
)
def test_garbage_from_azure_is_an_error(events: object) -> None:
    service = AzureService()
    service.trouble = [None, lambda: (200, json.dumps(events), {})]

    with serving(service) as endpoint, pytest.raises(ConnectionError, match="not as documented"):
        Azure(endpoint).notices(0.0)


def test_what_is_no_http_is_an_error_and_so_is_a_redirect() -> None:
    service = GceService()
    with serving(service) as endpoint:
        service.trouble = [lambda: (302, "", {"Location": f"{endpoint}/elsewhere", "Metadata-Flavor": "Google"})]
        with pytest.raises(ConnectionError, match="302"):
            Gce(endpoint).notices(0.0)
        assert len(service.requests) == 1
    port = free_port()
    with pytest.raises(ConnectionError, match="refused"):
        Gce(f"http://127.0.0.1:{port}").notices(0.0)


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving(GceService()) as endpoint:
        assert Gce(endpoint).notices(0.0) == ()


@pytest.mark.parametrize(("service", "kind"), [(Ec2Service(), Ec2), (GceService(), Gce), (AzureService(), Azure)])
def test_the_cloud_is_found_by_its_answers(service: Service, kind: type) -> None:
    with serving(service) as endpoint:
        source = source_of(None, endpoint + "/")

    assert type(source) is kind
    assert source.endpoint == endpoint


def test_a_cloud_is_found_although_another_ones_question_hangs() -> None:
    service, answers, has_ended = Ec2Service(), threading.Event(), threading.Event()

    def hang() -> Reply:
        answers.wait(60)
        has_ended.set()
        return 404, "", {}

    service.trouble = [hang]
    with serving(service) as endpoint:
        source = source_of(None, endpoint)
        is_waited_for = has_ended.is_set()
        answers.set()

    assert type(source) is Ec2
    assert not is_waited_for


def test_no_cloud_is_an_error_that_says_what_to_give() -> None:
    with serving(Service()) as endpoint, pytest.raises(ConfigError, match="--cloud aws, azure or gce"):
        source_of(None, endpoint)
    with pytest.raises(ConfigError, match="--cloud ec2: there are: aws, azure, gce"):
        source_of("ec2")
    with pytest.raises(ConfigError, match="plain HTTP"):
        source_of("aws", "https://169.254.169.254")


def test_a_silent_server_is_given_up_in_time() -> None:
    service, answers = Service(), threading.Event()

    def hang() -> Reply:
        answers.wait(10)
        return 200, "", {}

    service.trouble = [hang]
    with serving(service) as endpoint:
        with pytest.raises(ConnectionError, match="timed out"):
            ask(f"{endpoint}/any", {}, timeout_s=0.2)
        answers.set()
