"""The command line: look at runs, verify them, go back, repair, see the demo. Browsing imports neither torch nor ray.

Exit codes: 0 fine, 1 something is damaged, 2 the command could not be carried out (the message says why).
"""

import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raycheck.bucket.catalog import Checkpoint
from raycheck.bucket.register import Register
from raycheck.bucket.repair import repair as repair_run
from raycheck.bucket.rewind import rewind as rewind_run
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, NotFoundError, RaycheckError
from raycheck.run import Run, open_run
from raycheck.settings import StorageSettings

app = typer.Typer(
    help="Checkpoints of Ray Train runs in a bucket: look, verify, go back, repair.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
out = Console(highlight=False)
Uri = Annotated[str, typer.Argument(help="The run: Ray's storage path and run name, e.g. s3://bucket/runs/my-run")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Storage = Annotated[Path | None, typer.Option(help="A YAML file with the fields of StorageSettings.")]
Step = Annotated[int | None, typer.Option(help="Only the checkpoint of this step.")]


def main() -> None:
    """Run the command line; typed errors become one line and exit code 2."""
    try:
        app()
    except RaycheckError as error:
        print(f"raycheck: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


@app.command()
def ls(uri: Uri, as_json: Json = False, storage: Storage = None) -> None:
    """List a run's committed checkpoints."""
    run = open_run(uri, _settings(storage))
    if as_json:
        _print_json([_facts(run, checkpoint) for checkpoint in run.checkpoints])
        return
    table = Table("", "step", "checkpoint", "size", "committed (UTC)", "metrics", box=None, pad_edge=False)
    for checkpoint in run.checkpoints:
        entry = checkpoint.entry
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in sorted(entry.metrics.items()))
        mark = "head" if entry.key == run.latest.head else ""
        row = (mark, str(entry.step), entry.key, size(entry.size_bytes), _time(entry.committed_at), metrics)
        table.add_row(*map(Text, row))
    out.print(table)


@app.command()
def show(uri: Uri, step: Step = None, as_json: Json = False, storage: Storage = None) -> None:
    """Show a run and one checkpoint of it (the head, or --step)."""
    run = open_run(uri, _settings(storage))
    checkpoint = run.head if step is None else run.at_step(step)
    attempts = [
        {name: getattr(item, name) for name in ("number", "world_size", "restore_key", "last_save", "claimed_at")}
        for item in run.latest.attempts
    ]
    facts: dict[str, Any] = {"run": uri, "run_id": run.latest.run_id, "head": run.latest.head, "attempts": attempts}
    if checkpoint is not None:
        facts["checkpoint"] = _facts(run, checkpoint) | _details(checkpoint)
    if as_json:
        _print_json(facts)
        return
    out.print(Text(f"run {uri}\nid {run.latest.run_id}, head {run.latest.head}, {len(run.checkpoints)} checkpoints\n"))
    table = Table("attempt", "ranks", "restored", "saves", "claimed (UTC)", box=None, pad_edge=False)
    for item in run.latest.attempts:
        ranks = item.world_size or "by hand"
        row = (item.number, ranks, item.restore_key or "fresh start", item.last_save, _time(item.claimed_at))
        table.add_row(*(Text(str(cell)) for cell in row))
    out.print(table)
    if checkpoint is not None:
        out.print(Text(f"\ncheckpoint {checkpoint.entry.key}"))
        for name, value in facts["checkpoint"].items():
            out.print(Text(f"  {name:<14} {value if not isinstance(value, list) else ', '.join(map(str, value))}"))


@app.command()
def verify(uri: Uri, step: Step = None, as_json: Json = False, storage: Storage = None) -> None:
    """Read every object of every checkpoint (or of --step) and compare size and checksum."""
    run = open_run(uri, _settings(storage))
    checkpoints = run.checkpoints if step is None else (run.at_step(step),)
    if not checkpoints:
        raise NotFoundError(f"{uri}: the run has no committed checkpoint to verify")
    found = [(item.entry.key, finding) for item in checkpoints for finding in item.verify()]
    bad = [finding for _, finding in found if finding.problem]
    if as_json:
        _print_json(
            {
                "checkpoints": [item.entry.key for item in checkpoints],
                "objects": len(found),
                "bytes": sum(finding.size_bytes for _, finding in found),
                "problems": [asdict(finding) for finding in bad],
            }
        )
    else:
        for key in dict.fromkeys(key for key, _ in found):
            own = [finding for name, finding in found if name == key]
            problems = [finding for finding in own if finding.problem]
            total = size(sum(finding.size_bytes for finding in own))
            out.print(Text(f"{'BAD' if problems else 'ok '}  {key}  {len(own)} objects, {total}"))
            for finding in problems:
                out.print(Text(f"     {finding.key}: {finding.problem}"))
    if bad:
        raise typer.Exit(1)


@app.command("export-hf")
def export_hf(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    dest: Annotated[str, typer.Argument(help="A new or empty folder, or a free place in a bucket.")],
    step: Step = None,
    entry: Annotated[str | None, typer.Option(help="The model's name in the state, when there are several.")] = None,
    merge_lora: Annotated[bool, typer.Option("--merge-lora", help="Merge a LoRA adapter into its model.")] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point weights, e.g. bfloat16.")] = None,
    config_from: Annotated[str | None, typer.Option(help="A folder with config.json, for a model without one.")] = None,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Write a checkpoint (the head, or --step) as a Hugging Face directory."""
    from raycheck.run import export_hf as export

    began = time.monotonic()
    written = export(
        uri,
        dest,
        storage=_settings(storage),
        step=step,
        entry=entry,
        merge_lora=merge_lora,
        dtype=dtype,
        config_from=config_from,
    )
    seconds = time.monotonic() - began
    if as_json:
        _print_json(
            {"dest": written.uri, "files": dict(written.files), "bytes": written.size_bytes, "seconds": seconds}
        )
        return
    table = Table("file", "size", box=None, pad_edge=False)
    for name, count in written.files.items():
        table.add_row(Text(name), Text(size(count)))
    out.print(table)
    out.print(
        Text(f"{len(written.files)} files, {size(written.size_bytes)}, {seconds:.1f} s in {written.uri}"),
        soft_wrap=True,
    )


@app.command()
def rewind(
    uri: Uri,
    to: Annotated[str, typer.Argument(metavar="STEP", help="A step, or a checkpoint's name as ls shows it.")],
    storage: Storage = None,
) -> None:
    """Make an earlier checkpoint the head: the next start restores it. A run that is still going is stopped."""
    run = open_run(uri, _settings(storage))
    checkpoint = run.at_step(int(to)) if to.isdecimal() else run.checkpoint(to)
    body = rewind_run(Register(run.store), checkpoint.entry.key)
    out.print(Text(f"head is {body.head}; later checkpoints stay listed until retention drops them"))


@app.command()
def repair(uri: Uri, storage: Storage = None) -> None:
    """Rebuild a lost, rolled back or damaged `latest` from the manifests. Stop the run first."""
    done = repair_run(open_store(uri, _settings(storage)))
    for entry in done.latest.live:
        out.print(Text(f"listed    {entry.key}  {size(entry.size_bytes)}"))
    for name, why in done.left_out:
        out.print(Text(f"left out  {name}: {why}"))
    out.print(Text(f"head is {done.latest.head}; the next start is attempt {done.latest.attempt.number + 1}"))


@app.command()
def demo(  # noqa: PLR0917  typer makes options of them
    root: Annotated[
        str | None, typer.Option(help="Bucket or folder for the run; default: an embedded S3 server.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Ray Train workers.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")] = 40,
    kill_step: Annotated[int, typer.Option(help="SIGKILL one worker after this step; 0: none.")] = 23,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between saves.")] = 5,
    as_json: Json = False,
) -> None:
    """Train a small Llama on Ray, save to a bucket, kill a worker, go on."""
    from raycheck.demo import run_demo

    run_demo(root=root, workers=workers, steps=steps, kill_step=kill_step, save_every=save_every, as_json=as_json)


def size(count: float) -> str:
    """Bytes for people: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _settings(file: Path | None) -> StorageSettings | None:
    if file is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--storage {file}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--storage {file}: it must hold name: value pairs")
    return StorageSettings.from_mapping(found)


def _facts(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    entry = checkpoint.entry
    return {
        "key": entry.key,
        "step": entry.step,
        "is_head": entry.key == run.latest.head,
        "size_bytes": entry.size_bytes,
        "committed_at": entry.committed_at,
        "metrics": dict(entry.metrics),
        "refs": list(entry.refs),
    }


def _details(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest()
    index = checkpoint.index(manifest)
    return {
        "epoch": manifest.epoch,
        "samples": manifest.samples,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "restored_from": manifest.restored_from,
        "tensors": len(index.tensors),
        "entries": sorted(set(index.values) - {"assets", "progress"}),
        "components": [part.name for part in manifest.components],
        "objects": sum(1 for _ in manifest.objects()) + 1,
        "blocked_s": max((rank.blocked_s for rank in manifest.ranks), default=0.0),
        "upload_s": max((rank.upload_s for rank in manifest.ranks), default=0.0),
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))  # noqa: T201
