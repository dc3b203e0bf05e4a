"""`raycheck publish`, `raycheck pull`: a run's weights as a series of versions, and a local folder that follows it."""

import os
import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer

from raycheck.bucket.store.address import shown_uri
from raycheck.cli.options import Json, Step, Storage, Text, Uri, out, print_json, settings_of
from raycheck.errors import ConfigError
from raycheck.views.in_words import size


def publish(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: Step = None,
    to: Annotated[str | None, typer.Option(help="Where the versions are; default: published/ in the run.")] = None,
    entry: Annotated[str | None, typer.Option(help="The model's name in the state, when there are several.")] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Merge a LoRA adapter into its model; default: the adapter only.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Convert floating-point weights, e.g. to bfloat16.")] = None,
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest versions stay.")] = 4,
    whole_every: Annotated[int, typer.Option(min=1, help="After how many versions one is whole again.")] = 16,
    whole: Annotated[
        bool, typer.Option("--whole", help="Write all files and no patch, when the versions before are damaged.")
    ] = False,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Publish a checkpoint's weights as the next version.

    The checkpoint is the head, or the one of --at. What changed since the version before is written, or everything.
    """
    from raycheck.run import open_run

    began = time.monotonic()
    done = open_run(uri, settings_of(storage)).publish(
        at,
        to=to,
        entry=entry,
        merge_lora=merge_lora,
        dtype=dtype,
        keep_last=keep_last,
        whole_every=whole_every,
        whole=whole,
    )
    seconds = time.monotonic() - began
    if as_json:
        found = (
            None
            if done is None
            else {
                "uri": done.uri,
                "version": done.version.number,
                "step": done.version.step,
                "checkpoint": done.version.checkpoint,
                "whole": done.version.is_whole,
                "bytes": done.bytes_written,
                "seconds": seconds,
            }
        )
        print_json(found)
    elif done is None:
        out.print(Text("nothing to do: this checkpoint is the newest version already"))
    else:
        how = "whole" if done.version.is_whole else f"as a patch of version {done.version.number - 1}"
        what = f"published {done.version.checkpoint} as version {done.version.number}, {how}"
        out.print(Text(f"{what}: {size(done.bytes_written)} in {seconds:.1f} s, to {shown_uri(done.uri)}"))


def pull(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    folder: Annotated[Path, typer.Argument(help="Where the versions are made. `latest` in it is the newest.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on with each newer version, until Ctrl-C.")] = False,
    poll_s: Annotated[float, typer.Option(help="Seconds between two looks, with --follow.")] = 1.0,
    run: Annotated[
        str | None, typer.Option(help="A shell command to run after each version, with its folder in $VERSION_DIR.")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest versions stay in the folder.")] = 2,
    no_lease: Annotated[
        bool, typer.Option("--no-lease", help="Write no record of this reader, which keeps what it needs.")
    ] = False,
    number: Annotated[
        int | None, typer.Option("--version", help="Fetch this version, not the newest one, by its number.")
    ] = None,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Fetch the newest published weights into a folder.

    Each version is a complete Hugging Face directory of its own, made from the one before it and what changed.
    """
    from raycheck.published.follower import follow as follow_versions

    if follow and number is not None:
        raise ConfigError(f"--follow --version {number}: give only one, since a version never changes")
    settings, lease = settings_of(storage), follow and not no_lease
    with follow_versions(
        uri, folder, storage=settings, poll_s=poll_s, keep=keep, lease=lease, version=number
    ) as versions:
        while True:
            version = versions.wait() if follow else versions.update(wait=True)
            if version is None:
                raise ConfigError(
                    f"{shown_uri(uri)}: nothing is published there; 'raycheck publish' or AfterCommit.publish does that"
                )
            if as_json:
                print_json(
                    {
                        "path": str(version.path),
                        "version": version.number,
                        "step": version.step,
                        "checkpoint": version.checkpoint,
                        "bytes": version.bytes_fetched,
                    }
                )
            else:
                what = f"version {version.number}, step {version.step}, {size(version.bytes_fetched)} fetched"
                out.print(Text(f"{what}: {version.path}"))
            if run is not None:
                with_folder = {**os.environ, "VERSION_DIR": str(version.path)}
                said = subprocess.run(["/bin/sh", "-c", run], env=with_folder, check=False)  # noqa: S603  the user's own
                if said.returncode and not follow:
                    raise ConfigError(f"--run {run}: it ended with status {said.returncode}")
            if not follow:
                return
