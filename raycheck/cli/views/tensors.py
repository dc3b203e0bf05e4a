"""`raycheck tensors` and `raycheck diff`: the tensors of a checkpoint, and what changed between two."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from raycheck.cli.options import At, Json, Step, Storage, Text, Uri, out, print_json, print_table, settings_of
from raycheck.run import open_run
from raycheck.views.difference import CheckpointDifference
from raycheck.views.in_words import short_number, size
from raycheck.views.tensors import with_moments

if TYPE_CHECKING:
    from raycheck.views.tensor_change import TensorChange  # loads NumPy
    from raycheck.views.tensor_sample import TensorSample

Search = Annotated[str, typer.Option(help="Show only the tensors whose name contains this text.")]
Values = Annotated[str | None, typer.Option(metavar="TENSOR", help="Read values of this tensor and describe them.")]
MaxBytes = Annotated[int | None, typer.Option(help="How many bytes of the tensor to read; 4 MiB by default.")]
All = Annotated[bool, typer.Option("--all", help="Show equal tensors too.")]


def tensors(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    at: Step = None,
    search: Search = "",
    values: Values = None,
    max_bytes: MaxBytes = None,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """List a checkpoint's tensors: shape, type, size, and ranks, with moments under their parameter.

    The checkpoint is the head, or the one of --at. No tensor is read, except some values of TENSOR with --values.
    """
    checkpoint = open_run(uri, settings_of(storage)).at(at)
    if values is not None:
        _print_sample(checkpoint.sample(values, max_bytes=max_bytes), as_json=as_json)
        return
    found = [item for item in checkpoint.tensors() if search in item.name]
    if as_json:
        print_json([asdict(item) for item in found])
        return
    rows = []
    for item, moments in with_moments(found):
        for indent, row in [("", item), *(("  ", moment) for moment in moments)]:
            places = ", ".join("here" if place == checkpoint.key else place for place in row.directories)
            ranks = ", ".join(map(str, row.ranks[:8])) + (", ..." if len(row.ranks) > 8 else "")
            form = (row.dtype, list(row.shape), size(row.size_bytes), row.boxes)
            rows.append((indent + row.name, *form, ranks, places))
    print_table(("tensor", "type", "shape", "size", "boxes", "ranks", "lies in"), rows)
    total = size(sum(item.size_bytes for item in found))
    out.print(Text(f"\n{len(found)} tensors, {total}, of {checkpoint.key}"))


def _print_sample(found: "TensorSample", *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found))
        return
    share = "all" if found.sampled == found.count else "a sample"
    proof = ", checksums compared" if found.is_verified else ", checksums not compared"
    out.print(Text(f"{found.name} {found.dtype} {list(found.shape)}"))
    out.print(Text(f"{found.sampled} of {found.count} values ({share}), {size(found.bytes_read)} read{proof}\n"))
    for label, value in (("min", found.minimum), ("max", found.maximum), ("mean", found.mean), ("std", found.std)):
        out.print(Text(f"  {label:<12} {'-' if value is None else short_number(value)}"))
    for label, count in (("zeros", found.zeros), ("NaN", found.nans), ("infinite", found.infinities)):
        out.print(Text(f"  {label:<12} {count}"))
    most = max(found.counts, default=0)
    if most:
        out.print(Text(""))
    for start, count in zip(found.edges, found.counts, strict=False):
        out.print(Text(f"  {short_number(start):>12}  {'#' * round(40 * count / most)}"))


def diff(  # noqa: PLR0917  typer makes options of them
    uri: Uri,
    before: At,
    after: At,
    values: Values = None,
    max_bytes: MaxBytes = None,
    as_json: Json = False,
    show_all: All = False,
    storage: Storage = None,
) -> None:
    """Show which tensors changed between two checkpoints, by their checksums. No tensor is read.

    With --values TENSOR some of its values are read from both: norms, and the size of the change.
    """
    run = open_run(uri, settings_of(storage))
    if values is not None:
        _print_change(run.at(before).compare_values(run.at(after), values, max_bytes=max_bytes), as_json=as_json)
        return
    found = run.at(before).diff(run.at(after))
    if as_json:
        print_json(asdict(found) | {"counts": dict(found.counts)})
        return
    _print_difference(found, show_all=show_all)


def _print_change(found: "TensorChange", *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(found))
        return
    share = "all" if found.sampled == found.count else "a sample"
    out.print(Text(f"{found.name} {found.dtype} {list(found.shape)}"))
    out.print(Text(f"{found.sampled} of {found.count} values ({share}), {size(found.bytes_read)} read\n"))
    for label, value in (
        ("norm before", found.norm_before),
        ("norm after", found.norm_after),
        ("norm of the change", found.norm_change),
        ("largest change", found.max_change),
    ):
        out.print(Text(f"  {label:<18} {short_number(value)}"))
    for label, count in (("values changed", found.changed), ("not finite", found.not_finite)):
        out.print(Text(f"  {label:<18} {count}"))


def _print_difference(found: CheckpointDifference, *, show_all: bool) -> None:
    out.print(Text(f"from {found.before}"))
    out.print(Text(f"to   {found.after}\n"))
    shown = [item for item in found.tensors if show_all or item.change != "equal"]
    if shown:
        rows = []
        for item in shown:
            form = item.after or item.before or ""
            if item.change == "reformed":
                form = f"{item.before} -> {item.after}"
            part = "-" if item.changed_bytes is None else size(item.changed_bytes)
            rows.append((item.change, item.name, form, size(item.size_bytes), part))
        print_table(("", "tensor", "form", "size", "in blocks that changed"), rows)
        out.print(Text(""))
    counts = ", ".join(f"{count} {change}" for change, count in sorted(found.counts.items()))
    out.print(Text(f"tensors: {counts or 'none'}; no tensor was read"))
    for label, names in (
        ("values changed", found.values_changed),
        ("values added", found.values_added),
        ("values removed", found.values_removed),
    ):
        if names:
            out.print(Text(f"{label}: {', '.join(names)}"))
