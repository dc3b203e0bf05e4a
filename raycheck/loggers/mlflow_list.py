"""Registers checkpoints with MLflow: each is an external model of one MLflow run, and its metrics are values of it.

What is registered is read from the server alone. A model is READY once all of it is written; a task that finds one that
is not, because another task died, completes it.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar
from urllib.parse import urlsplit

from raycheck.errors import ConfigError
from raycheck.loggers.checkpoint_list import CheckpointList, TrackedRun, identity_of, name_of
from raycheck.run import CommittedCheckpoint, Run

MAX_TAG = 4000
RUN, IDENTITY, STEP = "raycheck.run_id", "raycheck.identity", "raycheck.step"


@dataclass(frozen=True, kw_only=True)
class MLflow(CheckpointList):
    """An MLflow tracking server. See raycheck.loggers.mlflow."""

    tracking_uri: str
    experiment: str

    package: ClassVar[str] = "mlflow"

    def __post_init__(self) -> None:
        is_text = isinstance(self.tracking_uri, str) and "://" in self.tracking_uri
        if not is_text:
            raise ConfigError("tracking_uri=...: give the address of an MLflow server, such as http://mlflow:5000")
        if urlsplit(self.tracking_uri).scheme in ("http", "https") and urlsplit(self.tracking_uri).password is not None:
            raise ConfigError(
                "tracking_uri=...: it contains a password; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
                "where rank 0 runs instead"
            )
        if not isinstance(self.experiment, str) or not self.experiment:
            raise ConfigError(f"experiment={self.experiment!r}: give the name of an MLflow experiment")

    def check(self) -> None:
        super().check()
        for package in ("mlflow", "mlflow-skinny"):
            try:
                found = version(package)
            except PackageNotFoundError:
                continue
            if int(found.partition(".")[0]) < 3:
                raise ConfigError(
                    f"raycheck.loggers.mlflow needs MLflow 3, and {found} is installed: pip install -U mlflow"
                )
            return

    @contextmanager
    def opened(self, run: Run) -> Iterator["MLflowRun"]:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.tracking_uri)
        experiment = _experiment(client, self.experiment)
        run_id = _find_run(client, experiment, run.run_id) or _start_run(client, experiment, run)
        yield MLflowRun(client, experiment, run_id)
        client.set_terminated(run_id)  # it is resumed by writing to it


class MLflowRun(TrackedRun):
    """The MLflow run of one training run."""

    def __init__(self, client: Any, experiment: str, run_id: str) -> None:
        self._client = client
        self._experiment = experiment
        self._run_id = run_id

    def has(self, checkpoint: CommittedCheckpoint) -> bool:
        model = self._find(IDENTITY, identity_of(checkpoint))
        return model is not None and str(model.status) == "READY"

    def add(self, checkpoint: CommittedCheckpoint) -> None:
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus

        step, identity = checkpoint.step, identity_of(checkpoint)
        begun = self._find(IDENTITY, identity)
        is_new = begun is None and self._find(STEP, str(step)) is None
        model = begun or self._client.create_logged_model(
            self._experiment,
            name=checkpoint.key,
            source_run_id=self._run_id,
            tags=_tags(checkpoint),
            model_type="checkpoint",
        )
        self._log_metrics(checkpoint, model.model_id, is_new=is_new)
        if begun is None or model.model_id not in self._outputs():
            self._client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, step)])
        self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)

    def _outputs(self) -> set[str]:
        """Return the ids of the models that the run lists as its own."""
        known = self._client.get_run(self._run_id).outputs
        return {output.model_id for output in (known.model_outputs if known else ())}

    def _log_metrics(self, checkpoint: CommittedCheckpoint, model_id: str, *, is_new: bool) -> None:
        """Log the metrics that the run does not have at this step. is_new: it has none."""
        from mlflow.entities import Metric

        at, step = int(checkpoint.committed_at * 1000), checkpoint.step
        values = [
            Metric(name, value, at, step, model_id=model_id, run_id=self._run_id)
            for name, value in checkpoint.metrics.items()
            if is_new or all(old.step != step for old in self._client.get_metric_history(self._run_id, name))
        ]
        if values:
            self._client.log_batch(self._run_id, metrics=values)

    def _find(self, tag: str, value: str) -> Any:
        """Return the first model of the run with this tag, or None."""
        words = f"source_run_id = '{self._run_id}' AND tags.`{tag}` = '{value}'"
        order = [{"field_name": "creation_time", "ascending": True}]
        found = self._client.search_logged_models(
            [self._experiment], filter_string=words, max_results=1, order_by=order
        )
        return found[0] if found else None


def _tags(checkpoint: CommittedCheckpoint) -> dict[str, str]:
    metrics = json.dumps(dict(checkpoint.metrics))
    return {
        "mlflow.model.isExternal": "true",
        IDENTITY: identity_of(checkpoint),
        STEP: str(checkpoint.step),
        "raycheck.address": checkpoint.address,
        "raycheck.digest": checkpoint.digest,
        "raycheck.size_bytes": str(checkpoint.size_bytes),
        **({"raycheck.metrics": metrics} if len(metrics) <= MAX_TAG else {}),
    }


def _experiment(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name))
        except MlflowException:  # another run has just created it
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _find_run(client: Any, experiment: str, run_id: str) -> str | None:
    words = f"tags.`{RUN}` = '{run_id}'"
    found = client.search_runs([experiment], words, max_results=1, order_by=["attributes.start_time ASC"])
    return str(found[0].info.run_id) if found else None


def _start_run(client: Any, experiment: str, run: Run) -> str:
    """Create the MLflow run. If two drivers do so at once, both use the first one."""
    tags = {RUN: run.run_id}
    made = client.create_run(experiment, start_time=int(time.time() * 1000), tags=tags, run_name=name_of(run))
    first = _find_run(client, experiment, run.run_id) or made.info.run_id
    if first != made.info.run_id:
        client.delete_run(made.info.run_id)
    return str(first)
