"""`raycheck tinker`: a server for the training API of the tinker SDK."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from raycheck.cli.closed_pipe import continue_without_reader
from raycheck.cli.options import AllowHost, Host, Port, Storage, Text, out, settings_of
from raycheck.errors import ConfigError

KEY_VARIABLE = "RAYCHECK_TINKER_API_KEY"
"""The environment variable with the key: an argument would appear in the process list."""
BaseModel = Annotated[
    str, typer.Option(help="The model that clients train adapters of: a folder, or a name on the hub.")
]
ModelName = Annotated[str | None, typer.Option(help="What clients call it; by default as --base-model.")]
Checkpoints = Annotated[str, typer.Option(help="The folder of the training runs, e.g. s3://bucket/tinker")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"A file with the key that clients must show as TINKER_API_KEY; or give {KEY_VARIABLE}. "
        "By default a key is made, printed and kept in --state."
    ),
]
NoKey = Annotated[bool, typer.Option("--no-key", help="Ask for no key: every program of this machine may do all.")]
MaxModels = Annotated[int, typer.Option(help="How many models may be loaded; each has a process of 130 MB.", min=1)]
State = Annotated[Path, typer.Option(help="The server's own state: sessions and requests. It must survive restarts.")]
RayAddress = Annotated[str | None, typer.Option(help="Of a running Ray, such as auto. By default one is started here.")]
Dtype = Annotated[str, typer.Option(help="The type of the base model's weights: float32, bfloat16 or float16.")]
NumGpus = Annotated[float, typer.Option(help="How many GPUs Ray reserves for each rank.", min=0)]
Ranks = Annotated[int, typer.Option(help="Over how many actors the base model is sharded, and a batch split.", min=1)]
SessionTimeout = Annotated[
    float, typer.Option(help="Seconds without a sign of life after which a session ends; -1 for never.")
]
DirectDownloads = Annotated[
    bool,
    typer.Option(help="Sign addresses of the bucket for downloads, which then do not pass this server; s3:// only."),
]


def tinker(  # noqa: PLR0917  typer makes options of them
    base_model: BaseModel,
    checkpoints: Checkpoints,
    model_name: ModelName = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: ApiKeyFile = None,
    no_key: NoKey = False,
    allow_host: AllowHost = None,
    state: State = Path("tinker.sqlite"),
    ray_address: RayAddress = None,
    dtype: Dtype = "float32",
    num_gpus: NumGpus = 0,
    ranks: Ranks = 1,
    session_timeout_s: SessionTimeout = 300,
    max_models: MaxModels = 32,
    direct_downloads: DirectDownloads = False,
    storage: Storage = None,
) -> None:
    """Serve the training API of the tinker SDK: clients train, save, load, and resume LoRA models here.

    Give clients its address as base_url. If it is killed, start it again with the same options, and it resumes.
    """
    try:
        from raycheck.tinker.checkpoint_store import CheckpointStore
        from raycheck.tinker.command import run_server
        from raycheck.tinker.engine.actor import RayEngine
        from raycheck.tinker.service import ServerSettings
    except ImportError as error:
        raise ConfigError(
            f"the server needs {error.name}, which is not installed: pip install 'raycheck[tinker]'"
        ) from None
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype={dtype}: give float32, bfloat16 or float16")
    continue_without_reader()
    source = str(Path(base_model).absolute()) if Path(base_model).is_dir() else base_model
    place = checkpoints if "://" in checkpoints else Path(checkpoints).absolute().as_uri()
    run_server(
        ServerSettings(
            base_model=model_name or base_model,
            session_timeout_s=None if session_timeout_s < 0 else session_timeout_s,
            direct_downloads=direct_downloads,
            max_models=max_models,
        ),
        engine=RayEngine(source, dtype=dtype, ranks=ranks, num_gpus=num_gpus),
        checkpoints=CheckpointStore(place, settings_of(storage)),
        state=str(state),
        ray_address=ray_address,
        host=host,
        port=port,
        key=_key(api_key_file, no_key=no_key),
        allow_hosts=allow_host or (),
        on_start=partial(_say_start, model_name or base_model),
    )


def _say_start(model: str, address: str, made_key: str) -> None:
    out.print(Text(f"Serving {model} at {address}  (Ctrl-C ends it)"))
    if made_key:
        out.print(Text("Clients need this key:"))
        out.print(Text(f"  export TINKER_API_KEY={made_key}"))


def _key(file: Path | None, *, no_key: bool) -> str | None:
    """Return the key that clients must send: None if the server generates one, "" for none."""
    if file is not None and no_key:
        raise ConfigError("give --api-key-file or --no-key, not both")
    if no_key:
        return ""
    return os.environ.get(KEY_VARIABLE) or None if file is None else _key_in(file)


def _key_in(file: Path) -> str:
    try:
        found = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}") from None
    if not found:
        raise ConfigError(f"--api-key-file {file}: it is empty; write a key that begins with 'tml-' into it")
    return found
