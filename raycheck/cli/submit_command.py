"""Submitting a training to a Ray cluster, again and again while it makes progress."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from raycheck.cli.options import Storage, settings_of, yaml_of


def submit(  # noqa: PLR0917  typer makes options of them
    entrypoint: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="E.g. -- python train.py --lr 1e-4")],
    run: Annotated[str, typer.Option(help="URI of the run that the script trains: storage path and run name.")],
    address: Annotated[str | None, typer.Option(help="The cluster, e.g. http://127.0.0.1:8265.")] = None,
    working_dir: Annotated[str | None, typer.Option(help="A folder to send along, in which the command runs.")] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="A YAML file with the rest of Ray's runtime env.")] = None,
    send_raycheck: Annotated[bool, typer.Option(help="Send this raycheck along; else the cluster's is used.")] = True,
    retries: Annotated[int, typer.Option(min=0, help="How often to submit again after a failure.")] = 3,
    storage: Storage = None,
) -> None:
    """Submit a training script as a Ray job, follow it, and submit it again when it fails.

    It stops after --retries, when nothing was committed between two failures, and when another try cannot help: the
    run had finished, the driver said so, or the script ended at once. Exit codes: 0 it succeeded, 1 it
    failed or was stopped. Ctrl-C leaves the job running.
    """
    from raycheck.cli.submit import submit as submit_job
    from raycheck.cli.submit import with_raycheck

    env = yaml_of(runtime_env, option="--runtime-env") if runtime_env else {}
    if working_dir is not None:
        env["working_dir"] = working_dir
    state = submit_job(
        shlex.join(entrypoint),
        uri=run,
        address=address,
        runtime_env=with_raycheck(env) if send_raycheck else env,
        retries=retries,
        storage=settings_of(storage),
        tell=_print,
    )
    if state != "SUCCEEDED":
        raise typer.Exit(1)


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


COMMANDS = (submit,)
