"""`raycheck submit` against a real job server: the driver dies, and is submitted again while that helps."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobSubmissionClient

from raycheck.bucket.attempt_records import record_failure
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.cli.submit import _reason_to_stop, _SubmittedJob
from tests.support.processes.command_line import raycheck
from tests.support.processes.ray_cluster import Arena, Story, arena, wait_for
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.ports import free_port

SCRIPT = "from tests.support.processes.driver_process import main\nmain()\n"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Arena, str]]:
    """A cluster with a job server, and its address."""
    port, agent = (free_port() for _ in range(2))  # else another Ray on this machine may have them
    with arena(include_dashboard=True, dashboard_port=port, dashboard_agent_listen_port=agent) as made:
        made.add(2)
        yield made, f"http://127.0.0.1:{port}"


MISTAKEN = """
import ray.train.torch, torch, raycheck
from ray.train import RunConfig, ScalingConfig

def train_fn():
    model = torch.nn.Linear(2, 2)
    with raycheck.Checkpointer({{"model": model}}) as ckpt:
        ckpt.restore()
        model.no_such_thing()

raycheck.fit(ray.train.torch.TorchTrainer(train_fn, scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="run", storage_path="{storage}")))
"""


class Submitting:
    def __init__(self, folder: Path, address: str, uri: str, script: str, *args: str) -> None:
        work = folder / "work"
        work.mkdir()
        (work / "train.py").write_text(script)
        self._log = folder / "submit.log"
        command = ["submit", "--run", uri, "--address", address, "--working-dir", str(work), "--no-send-raycheck"]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "raycheck", *command, "--", sys.executable, "train.py", *args],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def join(self, *, within_s: float) -> int:
        try:
            return self.process.wait(within_s)
        finally:
            self.process.kill()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_driver_that_is_killed_is_submitted_again_and_the_run_goes_on(
    server: tuple[Arena, str], s3: str, tmp_path: Path
) -> None:
    storage = join_uri(s3, tmp_path.name)
    config: dict[str, Any] = {"folder": str(tmp_path), "uri": storage, "name": "run", "workers": 2, "steps": 40}
    config |= {"pause_s": 0.1, "settings": {"every_steps": 5}}
    submitting = Submitting(tmp_path, server[1], join_uri(storage, "run"), SCRIPT, json.dumps(config))
    story = Story(tmp_path)

    def is_there() -> bool:
        assert submitting.process.poll() is None, submitting.log
        return 1 in story.attempts and story.attempts[1].last_step >= 17

    wait_for(is_there, within_s=180, why="step 17")

    os.kill(int((tmp_path / "driver.pid").read_text()), signal.SIGKILL)

    assert submitting.join(within_s=240) == 0, submitting.log
    story.assert_order(40)
    assert story.attempts[2].start["step"] in (10, 15)
    assert submitting.log.count("raycheck: submitted") == 2
    assert "FAILED, newest commit: step 15" in submitting.log or "FAILED, newest commit: step 10" in submitting.log
    assert "SUCCEEDED, newest commit: step 40" in submitting.log
    jobs = JobSubmissionClient(server[1]).list_jobs()
    assert {job.metadata["raycheck_run"] for job in jobs} == {join_uri(storage, "run").partition("?")[0]}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_script_that_commits_nothing_between_two_failures_is_not_tried_again(
    server: tuple[Arena, str], s3: str, tmp_path: Path
) -> None:
    """A signal kills it, which tells nothing about the script, so it is submitted once more."""
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    submitting = Submitting(tmp_path, server[1], join_uri(s3, tmp_path.name), script)

    assert submitting.join(within_s=120) == 1, submitting.log

    assert submitting.log.count("raycheck: submitted") == 2
    assert "nothing was committed since the previous failure" in submitting.log


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_script_that_ends_by_itself_before_it_claims_the_run_is_not_tried_again(
    server: tuple[Arena, str], s3: str, tmp_path: Path
) -> None:
    submitting = Submitting(tmp_path, server[1], join_uri(s3, tmp_path.name), "raise SystemExit('a mistake')")

    assert submitting.join(within_s=120) == 1, submitting.log

    assert submitting.log.count("raycheck: submitted") == 1
    assert "before it had claimed the run; it is not submitted again" in submitting.log
    assert "a mistake" in submitting.log, "the job's own output is handed on"


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_job_that_fails_after_its_run_has_finished_is_not_submitted_again(
    server: tuple[Arena, str], s3: str, tmp_path: Path
) -> None:
    storage = join_uri(s3, tmp_path.name)
    config: dict[str, Any] = {"folder": str(tmp_path), "uri": storage, "name": "run", "workers": 2, "steps": 6}
    config |= {"pause_s": 0.0, "settings": {}}
    script = SCRIPT + "raise SystemExit('the evaluation after it failed')"
    submitting = Submitting(tmp_path, server[1], join_uri(storage, "run"), script, json.dumps(config))

    assert submitting.join(within_s=240) == 1, submitting.log

    assert submitting.log.count("raycheck: submitted") == 1
    assert "the run has finished at step 6" in submitting.log
    assert "it is not submitted again" in submitting.log


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_mistake_in_the_training_function_is_not_submitted_again(
    server: tuple[Arena, str], s3: str, tmp_path: Path
) -> None:
    """It has claimed the run by then; the driver says in the bucket that it was final."""
    storage = join_uri(s3, tmp_path.name)
    submitting = Submitting(tmp_path, server[1], join_uri(storage, "run"), MISTAKEN.format(storage=storage))

    assert submitting.join(within_s=240) == 1, submitting.log

    assert submitting.log.count("raycheck: submitted") == 1, submitting.log
    assert "its driver gave up: AttributeError: 'Linear' object has no attribute 'no_such_thing'" in submitting.log
    assert "it is not submitted again" in submitting.log


@pytest.mark.parametrize(
    ("code", "seconds", "is_told"),
    [(1, 3, True), (127, 3, True), (1, 500, False), (-9, 3, False), (137, 3, False), (None, 3, False)],
)
def test_only_a_script_that_ended_by_itself_and_at_once_is_held_against_it(
    tmp_path: Path, code: int | None, seconds: int, is_told: bool
) -> None:
    store = open_store(f"file://{tmp_path}/run")
    job = _SubmittedJob(None, "a-job", store, print)
    job._details = SimpleNamespace(driver_exit_code=code, start_time=1_000_000, end_time=1_000_000 + 1000 * seconds)

    assert bool(_reason_to_stop(store, job, before=0)) is is_told


def test_after_a_claim_only_what_the_bucket_says_counts(tmp_path: Path) -> None:
    driver = Driver(open_store(f"file://{tmp_path}/run"))
    job = _SubmittedJob(None, "a-job", driver.store, print)
    job._details = SimpleNamespace(driver_exit_code=1, start_time=0, end_time=1)
    attempt, _ = driver.claim("g1")

    assert _reason_to_stop(driver.store, job, before=0) == "", "nobody knows why it failed"
    driver.finish("g1")
    assert "finished" in _reason_to_stop(driver.store, job, before=0)
    attempt, _ = driver.claim("g2")
    record_failure(driver.store, attempt, at=attempt.claimed_at, cause="too many failures", is_final=False)
    assert _reason_to_stop(driver.store, job, before=0) == "", "another driver may have better luck"
    attempt, _ = driver.claim("g3")
    record_failure(driver.store, attempt, at=attempt.claimed_at, cause="TypeError: x", is_final=True)
    assert "TypeError: x" in _reason_to_stop(driver.store, job, before=0)


class WantsAToken(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """It has the standard error of the command."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"Unauthorized: Missing authentication token")


def submit(folder: Path, address: str) -> "subprocess.CompletedProcess[str]":
    where = ["--run", f"file://{folder}/run", "--address", address, "--working-dir", str(folder)]
    return raycheck("submit", *where, "--no-send-raycheck", "--", sys.executable, "train.py")


def test_a_job_server_that_wants_a_token_is_a_matter_of_settings(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), WantsAToken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ended = submit(tmp_path, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()

    assert ended.returncode == 2
    assert (ended.stdout + ended.stderr).count("\n") == 1, ended
    assert "requires a token, set RAY_AUTH_MODE=token: " in ended.stderr


def test_without_a_job_server_it_says_so(tmp_path: Path) -> None:
    ended = submit(tmp_path, f"http://127.0.0.1:{free_port()}")

    assert ended.returncode == 2
    assert "no job server at http://127.0.0.1:" in ended.stderr
