"""The command line: look at runs, verify them, keep and drop, go back, repair, measure a bucket, submit a training,
watch a node, see the demo. Browsing imports neither torch nor ray.

Exit codes: 0 fine, 1 something is damaged, 2 the command could not be carried out (the message says why).
"""

import sys
import time
from typing import Annotated

import typer
from rich.table import Table

import raycheck
from raycheck.cli.bench.command import COMMANDS as MEASURING
from raycheck.cli.browse import COMMANDS as LOOKING
from raycheck.cli.docs import COMMANDS as READING
from raycheck.cli.manage import COMMANDS as KEEPING
from raycheck.cli.options import Json, Step, Storage, Text, Uri, out, print_json, settings_of, size, with_flags
from raycheck.cli.submit_command import COMMANDS as SUBMITTING
from raycheck.cli.watch_node import COMMANDS as WATCHING
from raycheck.errors import RaycheckError
from raycheck.terminal import printable_lines

app = typer.Typer(
    help="Checkpoints of Ray Train runs in a bucket: look, verify, keep and drop, go back, repair.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
for command in LOOKING + KEEPING + MEASURING + SUBMITTING + WATCHING + READING:
    app.command()(with_flags(command))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        out.print(Text(f"raycheck {raycheck.__version__}"))
        raise typer.Exit


def main() -> None:
    """Run the command line; typed errors become one line. No error exits with 1, which means damage."""
    try:
        app()
    except (RaycheckError, OSError) as error:
        print(f"raycheck: {printable_lines(str(error))}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except Exception:  # noqa: BLE001  a bug of ours says nothing about the run
        sys.excepthook(*sys.exc_info())
        sys.exit(2)


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


@app.command("export-hf")
@with_flags
def export_hf(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    dest: Annotated[str, typer.Argument(help="A new or empty folder, or a free place in a bucket.")],
    step: Step = None,
    entry: Annotated[str | None, typer.Option(help="The model's name in the state, when there are several.")] = None,
    files: Annotated[
        list[str] | None, typer.Option(help="A tokenizer or processor to go along, by its name; may be repeated.")
    ] = None,
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
        storage=settings_of(storage),
        step=step,
        entry=entry,
        files=files or None,
        merge_lora=merge_lora,
        dtype=dtype,
        config_from=config_from,
    )
    seconds = time.monotonic() - began
    if as_json:
        print_json({"dest": written.uri, "files": dict(written.files), "bytes": written.size_bytes, "seconds": seconds})
        return
    table = Table("file", "size", box=None, pad_edge=False)
    for name, count in written.files.items():
        table.add_row(Text(name), Text(size(count)))
    out.print(table)
    out.print(Text(f"{len(written.files)} files, {size(written.size_bytes)}, {seconds:.1f} s in {written.uri}"))


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
