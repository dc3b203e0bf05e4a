"""People are told what happens to a run, once for each thing that happens, whoever notices it and how often."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner

import raycheck
from raycheck import alerts as alerts_module
from raycheck.alerts import AlertSender, Happening, died
from raycheck.bucket.attempt_records import AttemptRecord
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import Attempt
from raycheck.bucket.format.object_keys import attempt_key
from raycheck.bucket.store import open_store
from raycheck.bucket.store.interface import Written
from raycheck.catalog.watch_runs import RunsWatch
from raycheck.cli import app
from raycheck.errors import ConfigError, DeniedError, NotFoundError, SaveFailedError
from raycheck.group.coordinator.messages import SaveFailure
from raycheck.group.coordinator.run_alerts import RunAlerts
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all, start_on_all
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of
from tests.support.processes.replicated_rank import Holder
from tests.support.samples.many_runs import DAY_S, a_run, mixed_runs, place
from tests.support.samples.sample_checkpoints import latest_tree, put_latest_tree
from tests.support.servers.memory_store import DictStore
from tests.support.servers.webhook_server import SECRET, Webhook, webhook_server

NOTE = "import os, sys; open(sys.argv[1], 'a').write(sys.stdin.read() + os.environ['RAYCHECK_ALERT'] + '\\n')"


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook_server() as found:
        yield found


def sent(place: InProcess) -> None:
    """Wait until a coordinator has received what it was told, in this order, and has sent its alerts."""
    place.ask("has_trained", timeout_s=60.0, what="what it was told before")
    place.coordinator._coordinator._alerts._wait()


def ranks(uri: str, hook: Webhook, *, places: list[InProcess] | None = None, **settings) -> list[Holder]:
    """Two ranks of a new driver that have restored. places: of another group of a driver that is there."""
    told = raycheck.Alerts(webhook=hook.url)
    places = places or group_of(uri, world_size=2, owner=uuid4().hex)
    pair = [Holder(place, alerts=told, **settings) for place in places]
    on_all(pair, "restore")
    return pair


def die(pair: list[Holder]) -> None:
    """End the ranks as if their processes were killed: they tell nobody."""
    for holder in pair:
        holder.ckpt._stop()


def kinds(uri: str) -> list[str]:
    return sorted(item.key.removeprefix("alerts/") for item in open_store(uri).list_objects("alerts/"))


def test_the_end_of_a_run_is_told_once_by_all_ranks_and_starts_and_again_after_more_training(
    hook: Webhook, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/run"

    for steps in (2, 0, 2):
        pair = ranks(uri, hook)
        on_all(pair, "train", steps)
        on_all(pair, "close")

    first, second = "step-000000002-a1-s1", "step-000000004-a3-s1"
    assert hook.texts == [f"raycheck: {uri}: the run has finished with {key}" for key in (first, second)]
    assert kinds(uri) == [f"run_finished-{key}.json" for key in (first, second)]
    assert_invariants(open_store(uri))


def test_a_death_is_told_once_by_the_controller_and_by_the_next_claims_of_this_and_of_other_drivers(
    hook: Webhook, tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/run"

    first = ranks(uri, hook)
    on_all(first, "train", 2)
    on_all(first, "wait")
    for _ in range(2):
        first[0].place.ask("group_failed", ["rank 1: <its process> died"], timeout_s=60, what="")
    die(first)
    second = ranks(uri, hook, places=again([holder.place for holder in first]))
    sent(second[0].place)
    assert hook.texts == [f"raycheck: {uri}: attempt 1 has died: rank 1: &lt;its process&gt; died"]
    die(second)
    third = ranks(uri, hook)
    sent(third[0].place)
    third[0].place.ask("give_up", "ValueError: no", True, timeout_s=60, what="")
    die(third)
    fourth = ranks(uri, hook)
    sent(fourth[0].place)
    die(fourth)

    assert [text.partition(": ")[2].partition(": ")[2] for text in hook.texts[1:]] == [
        "attempt 2 has died: its driver was killed or replaced by another one",
        "the driver has given up the run in attempt 3: ValueError: no",
    ]


def test_failed_saves_are_told_by_one_rank_and_the_last_before_the_end_as_what_it_is(
    hook: Webhook, tmp_path: Path
) -> None:
    uri, blocker = f"file://{tmp_path}/run", tmp_path / "run/checkpoints"
    pair = ranks(uri, hook, max_failed_saves=3)

    blocker.write_text("a file is no folder")
    on_all(pair, "train_and_save", 1)
    on_all(pair, "wait")
    blocker.unlink()
    on_all(pair, "train_and_save", 1)
    on_all(pair, "wait")
    blocker.rename(tmp_path / "away")
    blocker.write_text("a file is no folder")
    for call in start_on_all(pair, "train", 8):
        with pytest.raises(SaveFailedError, match=r"3 failed save\(s\) in a row"):
            call.join()
    sent(pair[0].place)

    told = [text.partition(": ")[2].partition(": ")[2].partition("):")[0] for text in hook.texts]
    assert told == [
        "the save of step 1 has failed (1 of at most 3 saves in a row have failed",
        "the save of step 4 has failed (1 of at most 3 saves in a row have failed",
        "the next failed save ends the training: the save of step 6 has failed (2 of at most 3 saves in a row have failed",
        "the save of step 8 has failed (3 of at most 3 saves in a row have failed",
    ]
    assert kinds(uri) == []


def test_the_webhook_is_in_no_object_of_the_run_and_in_no_line_of_the_log(
    hook: Webhook, tmp_path: Path, caplog
) -> None:
    uri = f"file://{tmp_path}/run"
    hook.answers = [404]

    (holder,) = [Holder(place, alerts=raycheck.Alerts(webhook=hook.url)) for place in group_of(uri)]
    holder.restore()
    holder.train(2)
    holder.ckpt.close()

    assert len(hook.posts) == 1
    assert "the webhook of an alert failed: status 404" in caplog.text
    assert SECRET not in caplog.text
    assert "alerts=Alerts(webhook)" in raycheck.open_run(uri).head.details().settings
    found = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(found) > 5
    assert not [path for path in found if SECRET.encode() in path.read_bytes()]
    assert SECRET not in repr(holder.ckpt.settings)


def test_a_command_gets_the_alert_and_its_failure_is_a_warning_without_its_arguments(tmp_path: Path, caplog) -> None:
    store, file = DictStore(), tmp_path / "told"
    good = AlertSender(store, raycheck.Alerts(command=[sys.executable, "-c", NOTE, str(file)]))
    bad = AlertSender(store, raycheck.Alerts(command=[sys.executable, "-c", "import sys; sys.exit(3)", SECRET]))

    told = [good.tell(died(1, "a reason")), good.tell(died(1, "a reason")), bad.tell(died(2, "another"))]

    assert told == [True, False, True]
    facts, _, kind = file.read_text().rpartition("}")
    assert json.loads(facts + "}") == {
        "alert": "attempt_died",
        "run": store.uri,
        "text": "attempt 1 has died: a reason",
    }
    assert kind == "attempt_died\n"
    assert f"the command of an alert failed: {sys.executable} ended with status 3" in caplog.text
    assert SECRET not in caplog.text


def test_of_many_that_notice_the_same_at_once_one_tells(hook: Webhook) -> None:
    store = DictStore()
    senders = [AlertSender(store, raycheck.Alerts(webhook=hook.url)) for _ in range(8)]

    told = [call.join() for call in [InThread(lambda one=one: one.tell(died(7, "why"))) for one in senders]]

    assert sorted(told) == [False] * 7 + [True]
    assert len(hook.posts) == 1


@pytest.mark.parametrize(("answers", "posts"), [([503, 429, 200], 3), ([503] * 3, 3), ([500], 1), ([404], 1)])
def test_a_post_is_repeated_only_if_it_was_certainly_not_taken(
    answers: list[int], posts: int, hook: Webhook, monkeypatch
) -> None:
    monkeypatch.setattr(alerts_module, "WEBHOOK_PAUSES_S", (0.0, 0.0))
    hook.answers = list(answers)

    AlertSender(DictStore(), raycheck.Alerts(webhook=hook.url)).tell(died(1, "why"))

    assert len(hook.posts) == posts


def test_an_alert_that_cannot_be_marked_is_not_sent_until_it_can_be(hook: Webhook, tmp_path: Path, caplog) -> None:
    blocker = tmp_path / "alerts"
    blocker.write_text("a file is no folder")
    sender = AlertSender(open_store(f"file://{tmp_path}"), raycheck.Alerts(webhook=hook.url))

    first = sender.tell(died(1, "why"))
    blocker.unlink()

    assert (first, sender.tell(died(1, "why")), len(hook.posts)) == (False, True, 1)
    assert "an alert is not sent: it cannot be marked" in caplog.text


class ReadOnly(DictStore):
    """A bucket in which this reader may write nothing."""

    def put_if_absent(self, key: str, data: bytes) -> Written:
        raise DeniedError(f"{self}: {key}: access denied")


def test_a_watcher_without_the_right_to_write_tells_once(hook: Webhook) -> None:
    sender = AlertSender(ReadOnly(), raycheck.Alerts(webhook=hook.url))

    assert [sender.tell(died(1, "why")) for _ in range(2)] == [True, False]
    assert len(hook.posts) == 1


def test_what_happens_before_the_settings_are_known_waits_and_only_what_is_asked_for_is_told(hook: Webhook) -> None:
    one = RunAlerts(DictStore())
    failure = SaveFailure(attempt=1, save=1, step=2, message="why", in_a_row=2, limit=3)

    one.group_failed(1, ["rank 0: why"])
    one.save_failed(failure)
    one.send_by(raycheck.Alerts(webhook=hook.url, on=["save_failed"]))
    one.save_failed(failure)
    one._wait()

    assert [text.rpartition(": ")[0].partition(": ")[2].partition(": ")[2] for text in hook.texts] == [
        "the save of step 2 has failed (2 of at most 3 saves in a row have failed)"
    ]


def bucket(tmp_path: Path, runs: dict[str, object]) -> str:
    uri = f"file://{tmp_path}"
    for name, objects in runs.items():
        place(open_store(uri), name, objects)
    return uri


def test_a_watch_tells_once_of_what_is_silent_died_or_finished_and_not_of_old_things(
    hook: Webhook, tmp_path: Path
) -> None:
    uri = bucket(tmp_path, {name: objects for name, (_, objects) in mixed_runs().items()})
    place(open_store(uri), "quiet", a_run(ago_s=3600.0))
    place(open_store(uri), "dead", a_run(ago_s=600.0, state="died"))
    place(open_store(uri), "ancient", a_run(ago_s=2 * DAY_S, state="finished"))
    told = raycheck.Alerts(webhook=hook.url)

    watch = RunsWatch(uri, told)
    first, second = watch.look(), watch.look()
    third = RunsWatch(uri, told).look()

    assert (second, third) == ([], [])
    assert len(first) == len(hook.posts)
    said = {text.removeprefix(f"raycheck: {uri}/").partition(":")[0]: text for text in hook.texts}
    assert len(said) == len(hook.texts)
    assert (
        {"quiet", "dead", "ann/finished"}
        <= said.keys()
        <= {"quiet", "dead", "ann/finished", "bob/silent", "bob/died", "bob/hopeless", "young"}
    )
    assert "the run is silent: no sign of life for 60 min" in said["quiet"]
    assert said["dead"].endswith(": the driver has given up the run in attempt 1: rank 0: out of memory")


def test_a_run_that_is_silent_again_after_a_commit_is_told_of_again_and_its_own_alerts_are_not_repeated(
    hook: Webhook, tmp_path: Path
) -> None:
    """The watch and the run share their marks."""
    uri = bucket(tmp_path, {"run": a_run(steps=2, ago_s=3600.0)})
    told = raycheck.Alerts(webhook=hook.url)
    watch = RunsWatch(uri, told)

    first = watch.look()
    place(open_store(uri), "run", a_run(steps=3, ago_s=3600.0))
    second = watch.look()
    AlertSender(open_store(f"{uri}/run"), told).tell(
        Happening(kind="attempt_died", what="000001-given-up", text="the driver has given up")
    )
    place(open_store(uri), "run", a_run(steps=3, ago_s=3600.0, state="died"))
    third = watch.look()

    assert [len(first), len(second), len(third)] == [1, 1, 0]
    assert len(hook.posts) == 3


def attempt(number: int, cause: str, *, ago_s: float = 60.0, by_hand: bool = False, by_itself: bool = False) -> bytes:
    """Return the record of an ended attempt. by_itself: its driver gave it up; by_hand: a person made the attempt."""
    ended = Attempt(
        number=number,
        owner="owner",
        group="group",
        coordinator="coordinator",
        claimed_at=0.0,
        world_size=0 if by_hand else 1,
        restore_key=None,
        last_save=0,
    )
    ended_by = number if by_itself or by_hand else number + 1
    return dump(AttemptRecord(attempt=ended, ended_by_attempt=ended_by, ended_at=time.time() - ago_s, cause=cause))


def started_often(tmp_path: Path, records: dict[int, bytes], *, live: int) -> str:
    """Return the URI of a run with these records whose live attempt has this number."""
    store = DictStore()
    for key, data in a_run().items():
        store.put(key, data)
    tree = latest_tree(store)
    put_latest_tree(store, tree | {"attempts": [tree["attempts"][0] | {"number": live}]})
    for number, data in records.items():
        store.put(attempt_key(number), data)
    return bucket(tmp_path, {"run": dict(store.objects)})


def test_watches_of_a_timer_tell_once_of_the_attempts_that_have_died_and_were_replaced_in_the_last_day(
    hook: Webhook, tmp_path: Path
) -> None:
    """The records say how an attempt ended, and the marks what was told: no watch remembers anything."""
    told = raycheck.Alerts(webhook=hook.url)
    records = {
        1: attempt(1, "rank 0: long ago", ago_s=2 * DAY_S),
        2: attempt(2, "rank 0: out of memory"),
        3: attempt(3, "ValueError: no", by_itself=True),
        4: attempt(4, "the run was rewound to step-000000001-a1-s1"),
        5: attempt(5, "rewound the run to step-000000001-a1-s1", by_hand=True),
        6: attempt(6, "it had finished"),
    }
    uri = started_often(tmp_path, records, live=8)
    late = f"file://{tmp_path}/run"

    first, second = RunsWatch(uri, told).look(), RunsWatch(uri, told).look()
    open_store(late).put(attempt_key(7), attempt(7, "rank 0: its record came late"))
    third, fourth = RunsWatch(uri, told).look(), RunsWatch(uri, told).look()

    assert first == [
        "attempt 2 has died: rank 0: out of memory",
        "the driver has given up the run in attempt 3: ValueError: no",
    ]
    assert third == ["attempt 7 has died: rank 0: its record came late"]
    assert (second, fourth) == ([], [])


def test_a_driver_that_gave_up_is_told_once_also_after_the_next_has_begun(hook: Webhook, tmp_path: Path) -> None:
    given = {1: attempt(1, "ValueError: no", by_itself=True)}
    watch = RunsWatch(f"file://{tmp_path}", raycheck.Alerts(webhook=hook.url))

    started_often(tmp_path, given, live=1)
    first = watch.look()
    started_often(tmp_path, given, live=2)

    assert first == ["the driver has given up the run in attempt 1: ValueError: no"]
    assert watch.look() == []


def test_a_watch_tells_of_an_attempt_that_another_has_replaced(hook: Webhook, tmp_path: Path) -> None:
    uri, told = f"file://{tmp_path}/run", raycheck.Alerts(webhook=hook.url)
    deadline, sent = time.monotonic() + 60, []

    for _ in range(2):
        pair = [Holder(place) for place in group_of(uri, owner=uuid4().hex)]
        on_all(pair, "restore")
        sent += RunsWatch(uri, told).look()
        die(pair)
    while not sent:  # the record of the end is written in the background
        assert time.monotonic() < deadline
        sent += RunsWatch(uri, told).look()

    assert sent == ["attempt 1 has died: its driver was killed or replaced by another one"]
    assert RunsWatch(uri, told).look() == []


def test_a_watch_of_a_place_without_runs_fails_and_one_that_stays_waits_for_the_first(
    hook: Webhook, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("RAYCHECK_ALERT_WEBHOOK", hook.url)
    uri = f"file://{tmp_path}/mistyped"

    done = CliRunner().invoke(app, ["watch", uri, "--once"])

    assert isinstance(done.exception, NotFoundError)
    assert f"{uri}: no run is here" in str(done.exception)
    assert not (tmp_path / "mistyped").exists()

    watch = RunsWatch(uri, raycheck.Alerts(webhook=hook.url))
    with pytest.raises(NotFoundError):
        watch.look()
    place(open_store(uri), "run", a_run(state="finished"))
    assert len(watch.look()) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (raycheck.Alerts, "give webhook=..., command=..., or both"),
        (lambda: raycheck.Alerts(webhook=f"ftp://x/{SECRET}"), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"https://x/{SECRET} "), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"http://[bad/{SECRET}"), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"https://x:99999/{SECRET}"), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"https://x:0/{SECRET}"), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"https://x:y/{SECRET}"), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"https://a..b/{SECRET}"), "not an http or https URL"),
        (lambda: raycheck.Alerts(webhook=f"https://me:{SECRET}@x/y"), "has no user, password"),
        (lambda: raycheck.Alerts(webhook=f"https://x/{SECRET}\u00e9"), "not an http or https URL"),
        (lambda: raycheck.Alerts(command=["x", f"{SECRET}\0"]), "a program and its arguments"),
        (lambda: raycheck.Alerts(command="notify me"), "a program and its arguments"),
        (lambda: raycheck.Alerts(command=[]), "a program and its arguments"),
        (lambda: raycheck.Alerts(command=["x"], on=["died"]), "Alerts\\(on='died'\\): give some of attempt_died"),
        (lambda: raycheck.Alerts(command=["x"], on=[]), "Alerts\\(on=nothing\\)"),
        (lambda: raycheck.SaveSettings(alerts=f"https://x/{SECRET}"), "raycheck.Alerts"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_and_the_secret_is_not_repeated(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["http://[::1]:8065/hooks/x?a=b#c", "https://b\u00fccher.example", "http://x:1/%C3%A9"])
def test_each_webhook_to_which_a_request_can_be_sent_is_taken(url: str) -> None:
    assert raycheck.Alerts(webhook=url).webhook == url


def test_a_command_that_is_not_there_is_refused_before_the_run_is_claimed(tmp_path: Path) -> None:
    (rank,) = group_of(f"file://{tmp_path}/run")
    holder = Holder(rank, alerts=raycheck.Alerts(command=["no-such-program", "now"]))

    with pytest.raises(ConfigError, match=r"no program 'no-such-program' where the coordinator runs"):
        holder.restore()

    assert not (tmp_path / "run/latest").exists()


def test_the_command_line_watches_once_and_takes_the_webhook_from_the_environment(
    hook: Webhook, tmp_path: Path, monkeypatch
) -> None:
    uri = bucket(tmp_path, {"run": a_run(ago_s=3600.0)})
    monkeypatch.setenv("RAYCHECK_ALERT_WEBHOOK", hook.url)

    done = [CliRunner().invoke(app, ["watch", uri, "--once"]) for _ in range(2)]
    other = CliRunner().invoke(app, ["watch", uri, "--once", "--on", "run_ended"])

    assert [item.exit_code for item in done] == [0, 0], done[0].output
    assert len(hook.posts) == 1
    assert SECRET not in done[0].output
    assert "Alerts(on='run_ended')" in str(other.exception)


def test_a_command_with_an_open_quotation_is_refused_without_its_text(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["watch", f"file://{tmp_path}", "--once", "--command", f"tell '{SECRET}"])

    assert isinstance(done.exception, ConfigError)
    assert "--command: No closing quotation" in str(done.exception)
    assert SECRET not in str(done.exception)
