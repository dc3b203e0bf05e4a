"""Registers committed checkpoints with the trackers where a team keeps its list: MLflow, Weights & Biases, TensorBoard.

Each function returns an after-commit task for `SaveSettings(after_commit=...)`. A checkpoint is registered by
reference: its address, step, metrics, size and digest. No byte of it is copied. A tracker's package is imported only
where the task runs.

Every task is a `CheckpointList` (checkpoint_list.py), which decides what is missing in the tracker. A tracker that was
out of reach gets what it has missed at a later commit.
"""

from raycheck.loggers.mlflow_list import MLflow
from raycheck.loggers.tensorboard_list import TensorBoard
from raycheck.loggers.wandb_list import WandB
from raycheck.settings import AfterCommit

__all__ = ["mlflow", "tensorboard", "wandb"]


def mlflow(tracking_uri: str, *, experiment: str = "Default") -> AfterCommit:
    """Return the task that registers every checkpoint with an MLflow tracking server. Needs MLflow 3.

    The training run is one MLflow run of the experiment, with the run's name. Each checkpoint is an external model of
    it. A restart resumes that MLflow run.

    tracking_uri: the server's address, or that of its database, such as "http://mlflow:5000". Its credentials are in
        MLflow's own environment variables. experiment: its name; it is created if it does not exist.

    Raises ConfigError for an address that cannot work, or that contains a password. A missing package is refused
    before the first step.
    """
    return AfterCommit(MLflow(tracking_uri=tracking_uri, experiment=experiment), every_save=True, mode="async")


def wandb(project: str, *, entity: str | None = None, offline: bool = False, folder: str | None = None) -> AfterCommit:
    """Return the task that registers every checkpoint with Weights & Biases.

    The training run is one run there, with the run's name. Each checkpoint is a version of an artifact that refers to
    it. A restart resumes that run.

    project, entity: where the run is; None: your default entity. offline: write to `folder` only; `wandb sync` uploads
        it. folder: an absolute path for wandb's files, which must survive a restart. None: the home directory's
        .cache/raycheck.

    Raises ConfigError for values that cannot work. A missing package is refused before the first step.
    """
    return AfterCommit(
        WandB(project=project, entity=entity, offline=offline, folder=folder), every_save=True, mode="async"
    )


def tensorboard(log_dir: str) -> AfterCommit:
    """Return the task that writes every checkpoint to a log directory of TensorBoard. Needs the tensorboard package.

    The training run is a folder of `log_dir` with the run's name. Each checkpoint is one event file in it, with the
    metrics as scalars, and with a text.

    log_dir: an absolute path that all nodes share, or a URI of any store that raycheck can write to.

    Raises ConfigError for any other path. A missing package is refused before the first step.
    """
    return AfterCommit(TensorBoard(log_dir=log_dir), every_save=True, mode="async")
