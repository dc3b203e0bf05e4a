"""`raycheck page`: a web page with the runs under a prefix."""

from pathlib import Path
from typing import Annotated

import typer

from raycheck.cli.closed_pipe import continue_without_reader
from raycheck.cli.options import AllowHost, Host, Port, Price, Storage, Text, out, settings_of
from raycheck.errors import ConfigError
from raycheck.views.in_words import PRICE

TOKEN_VARIABLE = "RAYCHECK_PAGE_TOKEN"  # noqa: S105  its name; an argument would show in a list of processes
Prefix = Annotated[str, typer.Argument(help="The folder whose runs are shown, or one run, e.g. s3://bucket/runs")]
Token = Annotated[
    str | None,
    typer.Option(help="What a browser must show; by default a random one. '' asks for none.", envvar=TOKEN_VARIABLE),
]
Edit = Annotated[
    bool, typer.Option("--edit", help="Offer to pin, name, rewind, verify, export, delete, prune and sweep, too.")
]
SaveTo = Annotated[Path | None, typer.Option("--save", help="Write the view of one run into this file, and end.")]


def page(  # noqa: PLR0917  typer makes options of them
    prefix: Prefix,
    host: Host = "127.0.0.1",
    port: Port = 8766,
    token: Token = None,
    allow_host: AllowHost = None,
    price_per_gib_month: Price = PRICE,
    save_to: SaveTo = None,
    edit: Edit = False,
    storage: Storage = None,
) -> None:
    """Serve a web page with all runs under a prefix, or with one run. Without --edit it changes nothing.

    It shows each run's attempts and why they ended, its commits and metrics, why each checkpoint is kept, every tensor
    with its statistics, and what changed between two checkpoints. Open the address that it prints.
    """
    try:
        from raycheck.page.pages import PageScope
        from raycheck.page.saved_page import save_run
        from raycheck.page.server import serve
    except ImportError as error:
        raise ConfigError(
            f"the page needs {error.name}, which is not installed: pip install 'raycheck[page]'"
        ) from None
    where = prefix if "://" in prefix else Path(prefix).absolute().as_uri()
    place = PageScope(
        prefix=where, storage=settings_of(storage), price=price_per_gib_month, can_edit=edit and save_to is None
    )
    if save_to is not None:
        save_run(place, save_to)
        out.print(Text(f"wrote {save_to}"))
        return
    continue_without_reader()
    serve(
        place,
        host=host,
        port=port,
        token=token,
        allow_hosts=allow_host or (),
        on_start=lambda address: out.print(Text(f"Open {address}  (Ctrl-C ends it)")),
    )
