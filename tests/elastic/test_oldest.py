"""The oldest Ray that is supported does the main thing: a killed rank, and a run that goes on in the right order."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes import oldest_ray
from tests.support.processes.ray_cluster import ENV, Story


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_rank_on_the_oldest_ray(s3: str, tmp_path: Path) -> None:
    oldest_ray.prepare()
    storage = join_uri(s3, tmp_path.name)
    config = {"folder": str(tmp_path), "uri": storage, "name": "run", "workers": 2, "steps": 40, "pause_s": 0.1}
    config |= {"settings": {"every_steps": 5}, "hurt": ["kill", 1, 18]}
    environment = {**os.environ, **ENV, "RAYCHECK_TEST_LOCAL_CPUS": "3"}

    done = subprocess.run(
        [oldest_ray.PYTHON, "-m", "tests.support.processes.driver_process", json.dumps(config)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    story = Story(tmp_path)
    story.assert_order(40)
    assert len(story.attempts) == 2
    assert story.lost_steps(2) <= 8
    body = assert_invariants(open_store(join_uri(storage, "run")))
    assert body is not None
    assert body.entry(body.head).step == 40
