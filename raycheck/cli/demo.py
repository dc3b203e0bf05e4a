"""`raycheck demo`: trains a small model on this machine and kills a worker. The code is in raycheck/demo/."""

from typing import Annotated

import typer

from raycheck.cli.options import Json


def demo(  # noqa: PLR0917  typer makes options of them
    root: Annotated[
        str | None, typer.Option(help="Bucket or folder for the run; default: an embedded S3 server.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of Ray Train workers.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Number of optimizer steps in all.")] = 40,
    kill_step: Annotated[int, typer.Option(help="SIGKILL one worker after this step; 0: kill none.")] = 23,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two saves.")] = 5,
    as_json: Json = False,
) -> None:
    """Train on Ray, kill a worker, and watch the run resume.

    The model is a small Llama that is saved to a bucket.
    """
    from raycheck.demo import run_demo

    run_demo(root=root, workers=workers, steps=steps, kill_step=kill_step, save_every=save_every, as_json=as_json)
