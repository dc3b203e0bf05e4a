"""Trains a real run that loses a worker and resumes, and shows it live (`raycheck demo`).

server.py is the bucket, job.py is the training function as a user writes it, and this file starts both and prints what
happens.
"""

import io
import json
import logging
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.demo.server import s3_server
from raycheck.errors import ConfigError, RaycheckError
from raycheck.run import Run, export_hf, open_run

RUN = "demo"
POLL_S = 0.3


def run_demo(
    *, root: str | None, workers: int, steps: int, kill_step: int, save_every: int, as_json: bool
) -> dict[str, Any]:
    """Run the demo and print what happens; with `as_json` the result is one JSON object instead of a table.

    Returns that object. Raises ConfigError for conflicting options.
    """
    if kill_step >= steps:
        raise ConfigError(f"--kill-step {kill_step} must be below --steps {steps}; 0 kills no worker")
    screen = Console(file=sys.stderr if as_json else sys.stdout, highlight=False)
    screen.print("raycheck demo: loading torch and Ray ...")
    with _bucket(root) as uri:
        config = {"steps": steps, "kill_step": kill_step, "save_every": save_every}
        screen.print(Text(f"the run is {join_uri(uri, RUN)}"), soft_wrap=True)
        with redirect_stdout(io.StringIO()):  # Ray also reports the worker's death, at length
            events = _train(screen, uri, workers, config)
        run = open_run(join_uri(uri, RUN))
        where = join_uri(uri, RUN) if root is not None else f"file://{_keep(run)}/{RUN}"
        if root is None:
            run = open_run(where)
    result = _result(where, run, events)
    folder, text = _hugging_face(run)
    if as_json:
        print(json.dumps(result))
    else:
        _epilogue(screen, run, result, folder=folder, text=text, steps=steps)
    return result


@contextmanager
def _bucket(root: str | None) -> Iterator[str]:
    """Yield the URI for the run: `root`, or that of an embedded server that runs during the block."""
    if root is not None:
        yield root if "://" in root else str(Path(root).absolute())
    else:
        with s3_server() as uri:
            yield join_uri(uri, "runs")


def _train(screen: Console, uri: str, workers: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    # Ray's output is suppressed because the demo shows what happens. Ray's log lines stay in its session folder.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
    import ray
    import ray.train.torch
    import torch

    import raycheck
    from raycheck.demo.job import Board, train_fn

    gpu = torch.cuda.device_count() >= workers
    ray.init(num_cpus=max(workers + 1, 4), log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        board: Any = cast("Any", Board).remote()  # ray.remote is untyped
        trainer = ray.train.torch.TorchTrainer(
            train_fn,
            train_loop_config={**config, "board": board},
            scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=gpu),
            run_config=ray.train.RunConfig(name=RUN, storage_path=uri),
        )
        screen.print(f"starting {workers} workers ({'GPU' if gpu else 'CPU'}) ...")
        with _shown(screen, board, join_uri(uri, RUN)):
            raycheck.fit(trainer)
        events: list[dict[str, Any]] = ray.get(board.read.remote(0))
    finally:
        ray.shutdown()
    return events


@contextmanager
def _shown(screen: Console, board: Any, uri: str) -> Iterator[None]:
    """Print events as they occur, from the board and from the run's `latest`, until the block ends."""
    import ray

    over = threading.Event()

    def show() -> None:
        told, seen = 0, set[str]()
        with suppress(RaycheckError):
            seen = {checkpoint.key for checkpoint in open_run(uri).checkpoints}
        while True:
            last = over.is_set()
            events = ray.get(board.read.remote(told))
            told += len(events)
            for event in events:
                _print_event(screen, event)
            with suppress(RaycheckError):
                for checkpoint in open_run(uri).checkpoints:
                    if checkpoint.key not in seen:
                        seen.add(checkpoint.key)
                        mb = checkpoint.size_bytes / 1e6
                        screen.print(f"[green]        committed {checkpoint.key} ({mb:.1f} MB)[/green]")
            if last:
                return
            over.wait(POLL_S)

    thread = threading.Thread(target=show, name="raycheck-demo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=30.0)


def _print_event(screen: Console, event: dict[str, Any]) -> None:
    if event["kind"] == "step":
        screen.print(f"step {event['step']:4d}  loss {event['loss']:.4f}")
    elif event["kind"] == "kill":
        text = f"SIGKILL rank {event['rank']} (pid {event['pid']}) after step {event['step']}"
        screen.print(f"[bold red]{text}; Ray restarts the workers ...[/bold red]")
    elif event["step"]:
        text = f"attempt {event['attempt']}: restored step {event['step']} on {event['ranks']} workers"
        screen.print(f"[bold yellow]{text}[/bold yellow]")
    else:
        screen.print(f"attempt {event['attempt']}: fresh start on {event['ranks']} workers")


def _keep(run: Run) -> Path:
    """Copy the run out of the embedded server, which keeps it only in memory. Returns the folder."""
    folder = Path(tempfile.mkdtemp(prefix="raycheck-demo-"))
    kept = open_store(f"file://{folder}/{RUN}")
    served = open_store(run.uri)
    for item in served.list_objects(""):
        kept.put(item.key, served.get(item.key).data)
    return folder


def _hugging_face(run: Run) -> tuple[Path, str]:
    """Export the head as a Hugging Face directory, load it with transformers, and generate some bytes.

    Returns the directory and the generated text.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="raycheck-demo-hf-"))
    export_hf(run.at(None), str(folder))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    prompt = torch.tensor([list(b"def ")])
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=60, do_sample=True, top_k=5)
    return folder, bytes(written[0].tolist()).decode("utf-8", errors="replace")


def _result(where: str, run: Run, events: list[dict[str, Any]]) -> dict[str, Any]:
    kill = next((event for event in events if event["kind"] == "kill"), None)
    after = [event for event in events[events.index(kill) :] if event["kind"] == "start"] if kill else []
    restored = after[0]["step"] if after else None
    return {
        "run_uri": where,
        "killed_rank": kill["rank"] if kill else None,
        "killed_at_step": kill["step"] if kill else None,
        "restored_step": restored,
        "steps_lost": kill["step"] - restored if kill and restored is not None else 0,
        "final_step": run.head.step if run.head else 0,
        "attempts": run.attempt,
        "checkpoints": [checkpoint.key for checkpoint in run.checkpoints],
    }


def _epilogue(screen: Console, run: Run, result: dict[str, Any], *, folder: Path, text: str, steps: int) -> None:
    table = Table("step", "attempt", "size", "training blocked", "upload", "MB/s per worker", box=None, pad_edge=False)
    for checkpoint in run.checkpoints:
        details = checkpoint.details()
        table.add_row(
            str(checkpoint.step),
            str(details.attempt),
            f"{checkpoint.size_bytes / 1e6:.1f} MB",
            f"{1000 * details.blocked_s:.0f} ms",
            f"{details.upload_s:.2f} s",
            f"{details.upload_bytes / 1e6 / max(details.upload_s, 1e-9):.0f}",
        )
    screen.print()
    if result["restored_step"] is not None:
        lost = f"{result['steps_lost']} steps were lost: killed after {result['killed_at_step']}"
        screen.print(f"{lost}, restored {result['restored_step']}; {result['attempts']} attempts in all\n")
    screen.print(table)
    command = f"{Path(sys.executable).parent}/raycheck"
    where = result["run_uri"]
    root = where.removesuffix(f"/{RUN}")
    screen.print(
        Text(
            f"\nHugging Face directory of the last checkpoint: {folder}\nIt writes: {text!r}\n\n"
            f"The run is kept in {where}\nNext:\n"
            f"  {command} ls {where}\n"
            f"  {command} show {where}\n"
            f"  {command} verify {where}\n"
            f"  {command} demo --root {root} --steps {steps + 20} --kill-step 0     # resumes the run"
        ),
        soft_wrap=True,
    )
