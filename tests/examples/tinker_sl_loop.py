"""Runs tinker_cookbook's sl_loop against `raycheck tinker`, kills the server and then the recipe, and resumes.

    python -m tests.examples.tinker_sl_loop FOLDER

All of it runs on this machine: a tiny model made here, an S3 server with its objects in memory, and a Ray that the
server starts. The recipe is the cookbook's own, unmodified. In the end the metrics of the run that was killed twice are
compared, line by line, with those of a run that was not. The recipe gives no seed, so that each of its runs begins with
another model; here the undisturbed one begins from the first checkpoint of the other.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raycheck.demo.server import s3_server
from tests.support.frameworks import tinker_cookbook as cookbook
from tests.support.servers.ports import free_port

START_S = 120.0
RECIPE_S = 240.0
RECIPE = {"batch_size": 4, "max_steps": 9, "save_every": 3, "lora_rank": 4}


def main(folder: Path) -> None:
    cookbook.prepare()
    cookbook.make_workplace(folder)
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    with s3_server() as bucket:
        with server(folder, bucket, port) as process:
            recipe = cookbook.start_recipe(folder, url, "sl_loop", log_path=log, **RECIPE)
            wait_for_steps(recipe, log, 4)
            os.kill(process.pid, signal.SIGKILL)
            print(f"killed the server after {len(steps_in(log))} steps; the recipe waits for it")
        with server(folder, bucket, port):
            wait_for_steps(recipe, log, 7)
            print(f"the recipe went on: {len(steps_in(log))} steps")
            recipe.kill()
            recipe.wait()
            twice = cookbook.start_recipe(folder, url, "sl_loop", log_path=log, **RECIPE)
            assert twice.wait(RECIPE_S) == 0, (folder / "recipe.log").read_text()[-3000:]
            print("killed the recipe; started again, it resumed from its last checkpoint and came to its end")
            hurt = steps_in(log)
            whole = undisturbed(folder, url, log)
    assert list(hurt) == list(range(RECIPE["max_steps"]))
    assert {step: hurt[step] for step in whole} == whole, "the metrics differ"
    print(f"the metrics of steps {min(whole)} to {max(whole)} are those of an undisturbed run, to the last digit")


def undisturbed(folder: Path, url: str, log: Path) -> dict[int, dict[str, Any]]:
    """Returns the metrics of a run that begins from the first checkpoint of the other one, and is left alone."""
    first = (log / "checkpoints.jsonl").read_text().splitlines()[0]
    other = folder / "undisturbed"
    other.mkdir()
    (other / "checkpoints.jsonl").write_text(first + "\n")
    recipe = cookbook.start_recipe(folder, url, "sl_loop", log_path=other, **RECIPE)
    assert recipe.wait(RECIPE_S) == 0, (folder / "recipe.log").read_text()[-3000:]
    return steps_in(other)


@contextmanager
def server(folder: Path, bucket: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs `raycheck tinker` on the tiny model until the block ends."""
    place, _, query = bucket.partition("?")
    words = ["tinker", "--base-model", str(folder / cookbook.MODEL), "--model-name", cookbook.MODEL]
    words += ["--checkpoints", f"{place}/tinker?{query}", "--state", str(folder / "tinker.sqlite")]
    words += ["--port", str(port)]
    log = folder / "server.log"
    environment = {**os.environ, "RAYCHECK_TINKER_API_KEY": cookbook.KEY}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "raycheck", *words], stdout=file, stderr=file, env=environment
        )
        try:
            wait_until_serving(process, log)
            yield process
        finally:
            process.kill()
            process.wait()


def wait_until_serving(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while "Serving" not in log.read_text():
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, "the server did not start in time"
        time.sleep(0.2)


def wait_for_steps(recipe: subprocess.Popen[str], log: Path, count: int) -> None:
    deadline = time.monotonic() + RECIPE_S
    while len(steps_in(log)) < count:
        assert recipe.poll() is None, "the recipe ended"
        assert time.monotonic() < deadline, "the recipe came no further in time"
        time.sleep(0.1)


def steps_in(log: Path) -> dict[int, dict[str, Any]]:
    """Returns the last metrics of each step: a resume repeats some."""
    found = {line["step"]: line for line in cookbook.metrics_in(log) if "step" in line}
    return dict(sorted(found.items()))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    main(place)
