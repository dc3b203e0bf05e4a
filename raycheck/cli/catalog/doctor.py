"""The command that examines a bucket."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from raycheck.bucket.store import open_store
from raycheck.catalog import BucketFinding, SavePlan, examine_bucket
from raycheck.catalog.doctor.plan import plan_of_run, with_given
from raycheck.cli.options import Json, Price, Storage, Text, bytes_of, out, print_json, settings_of
from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings
from raycheck.views.in_words import PRICE


def doctor(
    uri: Annotated[str, typer.Argument(help="Where runs are to be, e.g. s3://bucket/runs, or one run.")],
    *,
    address: Annotated[str | None, typer.Option(help="A Ray cluster, e.g. auto; its nodes are examined too.")] = None,
    save_size: Annotated[str | None, typer.Option(help="The size of a checkpoint, e.g. 50GB, for its cost.")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="The number of ranks that save it.")] = None,
    every_steps: Annotated[int | None, typer.Option(min=1, help="The steps between two saves.")] = None,
    step_s: Annotated[float | None, typer.Option(min=0, help="How many seconds a step takes.")] = None,
    keep_last: Annotated[int | None, typer.Option(min=1, help="How many checkpoints stay.")] = None,
    failure_hours: Annotated[float | None, typer.Option(min=0, help="The hours between two failures.")] = None,
    transfer_size: Annotated[str, typer.Option(help="The size of the object that measures throughput.")] = "128MiB",
    price_per_gib_month: Price = PRICE,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Examine a bucket before a training trusts it: rights, atomicity, rules that delete, speed, cost.

    Scratch objects below probes/ are written and removed. With a run's address, or with --save-size, it also says what
    saves cost and how often to save; the other options then replace what the run shows. The exit code is 1 if anything
    is wrong: a training refuses to start there, in these words.
    """
    given = {"world_size": ranks, "every_steps": every_steps, "step_s": step_s, "keep_last": keep_last}
    given |= {"failure_every_s": None if failure_hours is None else failure_hours * 3600}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings, plan = settings_of(storage), None
    if save_size is not None:
        plan = SavePlan(size_bytes=bytes_of(save_size, option="--save-size"), **chosen)
    elif chosen:
        plan = _plan_of_run(uri, settings, chosen)
    found = examine_bucket(
        uri,
        settings,
        address=address,
        plan=plan,
        transfer_bytes=bytes_of(transfer_size, option="--transfer-size"),
        price=price_per_gib_month,
        on_finding=(lambda _: None) if as_json else _print,
    )
    wrong = [finding for finding in found if finding.state == "wrong"]
    if as_json:
        print_json({"uri": uri, "is_fit": not wrong, "findings": [asdict(finding) for finding in found]})
    elif wrong:
        out.print(Text(f"\n{len(wrong)} wrong: raycheck refuses to train here"))
    if wrong:
        raise typer.Exit(1)


def _plan_of_run(uri: str, settings: StorageSettings | None, chosen: Mapping[str, Any]) -> SavePlan:
    plan = plan_of_run(open_store(uri, settings))
    if plan is None:
        raise ConfigError(
            "save_size= is missing: the cost of saves follows from the size of a checkpoint, and no run with a "
            "checkpoint can be read here"
        )
    return with_given(plan, chosen)


def _print(finding: BucketFinding) -> None:
    out.print(Text(f"{finding.state:<8} {finding.name:<28} {finding.sentence}"))
