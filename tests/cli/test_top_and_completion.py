"""`raycheck top` at every state of a run and in a real terminal, and what a shell is offered."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raycheck.bucket.attempt_records import ResumeRecord, SlowRecord, record_failure, record_resume, record_slow
from raycheck.bucket.format.object_keys import checkpoint_prefix
from raycheck.bucket.store import open_store
from raycheck.page.pages import PageScope, run_view
from raycheck.page.rendering import render
from raycheck.views.history import SLOW_FRESH_S, read_history
from raycheck.views.live import RunWatch
from tests.support.processes.command_line import raycheck
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.http_fault_proxy import FaultProxy

ENDED = re.compile(r"\x1b\[\?1049l")
DEADLINE_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, Driver]:
    """A run with two commits, whose second worker group trains."""
    uri = f"file://{tmp_path}/runs/mine"
    driver = Driver(open_store(uri))
    driver.claim("g1")
    driver.save(1, 1)
    driver.claim("g2", world_size=2)
    driver.save(2, 1)
    return uri, driver


def seen(uri: str) -> dict:
    return json.loads(raycheck("top", uri, "--json").stdout)


def test_a_frame_shows_step_attempts_and_the_last_commit(run: tuple[str, Driver]) -> None:
    done = raycheck("top", run[0])

    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^state +running", done.stdout, re.MULTILINE)
    assert re.search(r"^step +\d+ *$", done.stdout, re.MULTILINE)
    assert re.search(r"^last commit +\d+ s ago", done.stdout, re.MULTILINE)
    assert re.search(r"^save +none under way", done.stdout, re.MULTILINE)
    rows = done.stdout.splitlines()[-2:]
    assert [row.split()[:2] for row in rows] == [["2", "2"], ["1", "1"]]
    assert raycheck("top", run[0], "--once").stdout.count("attempt") == 1


def test_no_run_is_an_error_in_words(tmp_path: Path) -> None:
    done = raycheck("top", f"file://{tmp_path}/nothing")

    assert (done.returncode, done.stdout) == (2, "")
    assert "no run here" in done.stderr
    assert "raycheck runs" in done.stderr


def test_a_save_under_way_is_shown_until_it_is_committed(run: tuple[str, Driver]) -> None:
    uri, driver = run
    store = open_store(uri)
    head = next(reversed(driver.look().live)).key
    own = [item.size_bytes for item in store.list_objects(checkpoint_prefix(head))]
    store.put(f"{checkpoint_prefix('step-000000099-a2-s9')}one", b"x" * 5)

    save = seen(uri)["save"]

    assert (save["key"], save["objects"], save["size_bytes"]) == ("step-000000099-a2-s9", 1, 5)
    assert save["expected_objects"] == len(own) - 1, "all that the head's save wrote but its manifest"
    assert 0 < save["share"] < 1
    line = next(line for line in raycheck("top", uri).stdout.splitlines() if line.startswith("save"))
    assert f"step 99: {'█' * round(30 * save['share'])}" in line
    assert "5 B of about" in line
    driver.save(2, 10)
    assert seen(uri)["save"] is None, "a later commit says that this one failed"


def test_a_slow_rank_is_named_while_its_record_is_new(run: tuple[str, Driver]) -> None:
    uri, driver = run
    store = open_store(uri)
    now = RunWatch(store).look().history.status.now
    save = "step-000000099-a2-s9"
    record = SlowRecord(
        attempt=2,
        at=now,
        checkpoint=save,
        is_restore=False,
        rank=17,
        node="gpu-3",
        object=f"checkpoints/{save}/train/__17_0.distcp",
        done_bytes=300_000_000,
        wanted_bytes=4_100_000_000,
        seconds=41.2,
        finished=31,
        world_size=32,
    )
    words = f"save of {save}: rank 17 on node gpu-3 has sent 0.3 of 4.1 GB in 41 s, and is at {record.object}; "
    store.put(f"{checkpoint_prefix(save)}one", b"x")
    assert seen(uri)["slow"] is None
    record_slow(store, record)

    shown = seen(uri)["slow"]

    assert (shown["rank"], shown["node"], shown["done_bytes"]) == (17, "gpu-3", 300_000_000)
    assert shown["text"] == str(record) == words + "the others have finished"
    line = next(line for line in raycheck("top", uri).stdout.splitlines() if line.startswith("slow"))
    assert "rank 17 on node gpu-3 has sent" in line
    page = render("run.html", PageScope(prefix=uri), **run_view(PageScope(prefix=uri), ""))
    assert f"Slow {record}" in page
    record_slow(store, replace(record, at=now - 2 * SLOW_FRESH_S))
    assert seen(uri)["slow"] is None, "nobody has written it for long"
    record_slow(store, record)
    driver.save(2, 10)
    assert seen(uri)["slow"] is None, "nothing is under way"


@pytest.mark.parametrize(("is_over", "is_shown"), [(False, True), (True, False)])
def test_a_slow_restore_is_named_until_all_ranks_have_restored(tmp_path: Path, is_over: bool, is_shown: bool) -> None:
    store = open_store(f"file://{tmp_path}/runs/mine")
    driver = Driver(store)
    driver.claim("g1")
    driver.save(1, 1)
    driver.claim("g2", world_size=2)
    now = RunWatch(store).look().history.status.now
    record = SlowRecord(
        attempt=2,
        at=now,
        checkpoint="step-000000001-a1-s1",
        is_restore=True,
        rank=1,
        node="gpu-3",
        object="",
        done_bytes=0,
        wanted_bytes=None,
        seconds=30.0,
        finished=0,
        world_size=2,
    )
    record_slow(store, record)
    if is_over:
        record_resume(
            store,
            ResumeRecord(
                attempt=2,
                after=1,
                cause="",
                restored=record.checkpoint,
                step=1,
                world_size_before=1,
                world_size=2,
                lost_steps=0,
                lost_s=0.0,
                since_commit_s=1.0,
                restore_s=1.0,
                restore_bytes=1,
                what="",
            ),
        )

    assert (RunWatch(store).look().history.slow == record) is is_shown
    assert (read_history(store).slow == record) is is_shown


def test_what_an_earlier_attempt_left_is_no_save_under_way(run: tuple[str, Driver]) -> None:
    open_store(run[0]).put(f"{checkpoint_prefix('step-000000099-a1-s9')}one", b"x")

    assert seen(run[0])["save"] is None


def test_the_speed_is_that_of_the_live_attempts_commits(run: tuple[str, Driver]) -> None:
    uri, driver = run
    assert seen(uri)["steps_per_s"] is None, "one commit has no speed"
    time.sleep(1.1)
    driver.save(2, 2)

    found = seen(uri)

    commits = [entry for entry in driver.look().live if "-a2-" in entry.key]
    took = commits[1].committed_at - commits[0].committed_at
    assert found["steps_per_s"] == pytest.approx((commits[1].step - commits[0].step) / took)


def test_one_watch_sees_commits_and_the_end_that_latest_does_not_tell(run: tuple[str, Driver]) -> None:
    uri, driver = run
    watch = RunWatch(open_store(uri))
    before = watch.look()
    driver.save(2, 2)
    after = watch.look()
    assert after.step > before.step
    record_failure(open_store(uri), driver.look().attempt, at=time.time(), cause="rank 0: no memory", is_final=False)

    ended = watch.look()

    assert ended.history.status.state == "died"
    assert ended.history.attempts[-1].ending == "gave up"
    assert watch.look().history.status.state == "died"


@pytest.mark.server
def test_a_look_at_a_run_where_nothing_happened_is_three_requests(wire: FaultProxy) -> None:
    store = open_store(wire.uri)
    driver = Driver(store)
    driver.claim("g1")
    driver.save(1, 1)
    watch = RunWatch(store)
    watch.look()
    before = len(wire.requests)

    watch.look()

    asked = wire.requests[before:]
    assert len(asked) == 3, asked
    assert len([line for line in asked if "/latest" in line]) == 1


def read_until(terminal: int, wanted: str) -> str:
    text, deadline = "", time.monotonic() + DEADLINE_S
    while not re.search(wanted, text):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
    assert re.search(wanted, text), text
    return text


def test_in_a_terminal_it_moves_and_ctrl_c_ends_it(run: tuple[str, Driver]) -> None:
    uri, driver = run
    terminal, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    command = [sys.executable, "-m", "raycheck", "top", uri, "--every", "0.5"]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        try:
            read_until(terminal, r"Ctrl-C ends it")
            driver.save(2, 7)
            step = driver.look().live[-1].step
            read_until(terminal, rf"step +{step}\b")
            process.send_signal(signal.SIGINT)
            text = read_until(terminal, r"\x1b\[\?1049l[\s\S]*why it ended")
            assert re.search(rf"step +{step}\b", ENDED.split(text)[-1]), (
                "the last frame stays when the screen is given back"
            )
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            os.close(terminal)


BASH = """
source <(_RAYCHECK_COMPLETE=source_bash raycheck)
COMP_WORDS=({words} "$1"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_raycheck_completion raycheck
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def offered(words: str, begun: str) -> list[str]:
    """What bash has after a Tab, by the script that the command installs."""
    program = Path(sys.executable).parent / "raycheck"
    script = BASH.format(words=words)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script, "bash", begun],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_is_offered_commands_runs_and_steps(run: tuple[str, Driver]) -> None:
    uri, driver = run
    folder = uri.rpartition("/")[0]
    assert {"top", "tensors"} <= set(offered("raycheck", "t"))
    assert offered("raycheck ls", f"{folder}/m") == [uri]
    assert raycheck("name", uri, str(driver.look().live[0].step), "chosen").returncode == 0

    steps = [str(entry.step) for entry in reversed(driver.look().live)]

    assert offered(f"raycheck diff {uri}", "") == [*dict.fromkeys(steps), "chosen"]
    assert offered(f"raycheck show {uri} --at", "ch") == ["chosen"]
    assert offered(f"raycheck pin {uri}x", "") == []


def test_a_hostile_name_is_not_offered(run: tuple[str, Driver], tmp_path: Path) -> None:
    for name in ("m;reboot", "m$(id)", "m\x1b[2J", "m x"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "latest").touch()

    assert offered("raycheck ls", f"{run[0].rpartition('/')[0]}/m") == [run[0]]
