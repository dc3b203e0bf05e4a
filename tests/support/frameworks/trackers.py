"""Installs MLflow, and trains with a logger: `python this-file JOB-AS-JSON`, as a new driver each time.

MLflow goes into a virtual environment beside the repository's, and finds all else in that one. The judges are MLflow's
client, and wandb's own reader of what an offline run has written, which releases after 0.27 do not have in Python.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VERSION = "3.17.2"
FOLDER = Path(__file__).parents[3] / ".venv-trackers"
PYTHON = FOLDER / "bin/python"
JUDGE, READER = FOLDER / "judge", "wandb==0.27.0"
NEEDS = (
    "huey<4", "fastapi<1", "cloudpickle<4", "importlib_metadata<10", "zipp", "sqlalchemy<3", "greenlet", "cachetools<8",
    "databricks-sdk<1", "google-auth", "pyasn1", "pyasn1-modules", "sqlparse<1", "uvicorn<1", "h11", "gitpython<4",
    "gitdb", "smmap", "starlette<2", "annotated-doc", "alembic<2", "Mako", "graphene<4", "graphql-core", "graphql-relay",
)  # fmt: skip
WITHIN_S = 120.0


def prepare() -> None:
    from tests.support.processes.virtual_environments import prepare_venv

    packages = [f"{name}=={VERSION}" for name in ("mlflow", "mlflow-skinny", "mlflow-tracing")]
    prepare_venv(FOLDER, f"mlflow-{VERSION}", "--no-deps", *packages, *NEEDS, finds_ours=True)
    if not JUDGE.exists():
        command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", f"{JUDGE}.new", READER]
        subprocess.run(command, check=True, timeout=600)
        Path(f"{JUDGE}.new").rename(JUDGE)


def run(*words: str, home: Path, is_killed: bool = False) -> Any:
    """Run this file, and return what it prints as JSON. is_killed: it has to die."""
    here = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "HOME": str(home),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    done = subprocess.run(
        [PYTHON, __file__, *words], capture_output=True, text=True, check=False, timeout=WITHIN_S, env=here
    )
    assert done.returncode == (9 if is_killed else 0), done.stderr[-4000:]
    assert is_killed or " failed: " not in done.stderr, done.stderr[-4000:]
    return None if is_killed else json.loads(done.stdout.splitlines()[-1])


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Serve MLflow from a SQLite database in `folder`. Return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}", "--workers=1"]
    command += [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", f"--artifacts-destination={folder}/artifacts"]
    quiet = os.environ | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "HOME": str(folder),
        "PATH": f"{FOLDER}/bin:{os.environ['PATH']}",
    }
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=quiet, cwd=folder, start_new_session=True)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + WITHIN_S
    try:
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            is_late = server.poll() is not None or time.monotonic() > deadline
            assert not is_late, (folder / "server.log").read_text()[-4000:]
            time.sleep(0.1)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
        server.wait(30)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train up to a step with saves every second step. dies_at: the MLflow call before which this process dies."""
    from uuid import uuid4

    import torch

    import raycheck
    from tests.support.processes.coordinator_in_thread import group_of

    (place,) = group_of(job["uri"], owner=uuid4().hex)
    task = getattr(raycheck.loggers, job["logger"])(*job["arguments"], **job.get("options", {}))
    if name := job.get("dies_at"):
        import mlflow

        setattr(mlflow.MlflowClient, name, lambda *_, **__: os._exit(9))
    settings = raycheck.SaveSettings(every_steps=2, after_commit=task)
    with raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, settings, group=place) as ckpt:
        at = ckpt.restore()
        for step in range(at.step + 1, job["until"] + 1):
            ckpt.end_step({"loss": 1.0 / step, "attempt": float(at.attempt)})
    live = raycheck.open_run(job["uri"]).checkpoints
    return {
        "start": at.step,
        "run_id": raycheck.open_run(job["uri"]).run_id,
        "live": [{"key": item.key, "step": item.step, "address": item.address, "digest": item.digest} for item in live],
    }


def judge_mlflow(address: str, experiment: str) -> dict[str, Any]:
    """What the server has of an experiment, by MLflow's client."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=address)
    at = client.get_experiment_by_name(experiment).experiment_id
    runs = client.search_runs([at])
    models = client.search_logged_models([at], order_by=[{"field_name": "creation_time", "ascending": True}])
    return {
        "runs": [
            {"name": run.info.run_name, "status": run.info.status, "tags": run.data.tags,
             "outputs": [output.step for output in run.outputs.model_outputs],
             **{name: [(item.step, item.value) for item in client.get_metric_history(run.info.run_id, name)]
                for name in run.data.metrics}}
            for run in runs
        ],
        "models": [
            {"name": model.name, "status": str(model.status), "tags": model.tags,
             "metrics": {item.key: item.value for item in model.metrics or []}}
            for model in models
        ],
    }  # fmt: skip


def judge_wandb(folder: str) -> dict[str, Any]:
    """What the offline runs in a folder have logged, by wandb's own reader of its files."""
    sys.path.insert(0, str(JUDGE))
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    found: dict[str, Any] = {"ids": [], "history": [], "artifacts": []}
    for path in sorted(Path(folder).glob("wandb/offline-run-*/*.wandb")):
        data = DataStore()
        data.open_for_scan(str(path))
        while (raw := data.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(raw)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["ids"].append(record.run.run_id)
            if kind == "history":
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found["history"].append({"step": record.history.step.num, **items})
            artifact = record.request.log_artifact.artifact if kind == "request" else record.artifact
            if artifact.name:
                (entry,) = artifact.manifest.contents
                found["artifacts"].append({
                    "name": artifact.name, "type": artifact.type, "aliases": [*artifact.aliases], "key": entry.path,
                    "address": entry.ref, "digest": entry.digest, "size": entry.size,
                    "metadata": json.loads(artifact.metadata),
                })  # fmt: skip
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        word, *rest = sys.argv[1:]
        acts: dict[str, Any] = {"mlflow": judge_mlflow, "wandb": judge_wandb}
        print(json.dumps(acts[word](*rest) if word in acts else train(json.loads(word))))
    else:
        sys.path.insert(0, str(Path(__file__).parents[3]))
        prepare()
