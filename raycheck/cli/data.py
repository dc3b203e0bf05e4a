"""`raycheck data`: the samples of a run's steps, to find the cause of a loss spike and to leave it out."""

from dataclasses import asdict
from typing import Annotated

import typer

from raycheck.cli.options import Json, Step, Storage, Text, Uri, out, print_json, print_table, settings_of
from raycheck.errors import ConfigError
from raycheck.run import open_run

MAX_SHOWN = 12
"""The maximum number of samples shown per step."""
Steps = Annotated[
    str,
    typer.Option(
        metavar="FIRST:END",
        help="The steps from FIRST up to, but not including, END: 401:501 follow checkpoint 400 and end at 500.",
    ),
]


def data(uri: Uri, steps: Steps, at: Step = None, as_json: Json = False, storage: Storage = None) -> None:
    """Show which samples were trained on in these steps.

    Samples of all ranks are listed in training order, by epoch and index in the dataset. They are read from the head,
    or from the checkpoint given by --at. The last line is the argument for Batches(skip=...) that leaves these samples
    out after a rewind.
    """
    from raycheck.data.step_samples import skip_of

    first, end = _range(steps)
    checkpoint = open_run(uri, settings_of(storage)).at(at)
    found = checkpoint.samples(first, end)
    if as_json:
        print_json({"checkpoint": checkpoint.key, "steps": [asdict(item) for item in found], "skip": skip_of(found)})
        return
    rows = []
    for item in found:
        low, high = item.positions
        shown = " ".join(map(str, item.indices[:MAX_SHOWN])) or f"{low}:{high} of the stream"
        more = f" and {len(item.indices) - MAX_SHOWN} more" if len(item.indices) > MAX_SHOWN else ""
        rows.append((item.step, item.epoch, f"{item.batches[0]}:{item.batches[1]}", shown + more))
    print_table(("step", "epoch", "batches", "samples"), rows)
    out.print(Text(f"\nto leave these out: Batches(..., skip={skip_of(found)})"))


def _range(steps: str) -> tuple[int, int]:
    first, _, end = steps.partition(":")
    if not (first.isdecimal() and end.isdecimal() and len(steps) <= 40 and int(first) < int(end)):
        raise ConfigError(f"--steps {steps}: give FIRST:END, for example 401:501")
    return int(first), int(end)
