"""`raycheck bench`: shows how fast a bucket is from this machine, what raycheck gets of that, and what requests cost.

It needs no run at the URI. All that it writes lies below one scratch prefix and is deleted, however the command ends.
It recommends nothing: raycheck's own part size and concurrency are fixed.
"""

import signal
import sys
from dataclasses import asdict
from typing import Annotated, Any
from uuid import uuid4

import typer
from rich.table import Table

from raycheck.bucket.format import object_keys
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import kind_of
from raycheck.cli.bench import request_costs as counted
from raycheck.cli.bench.measurement import MIB, MIN_ROUNDS, Direction, Measured, Series, Way, measure
from raycheck.cli.bench.request_costs import GET_PRICE, PUT_PRICE, Requests
from raycheck.cli.options import Json, Storage, Text, out, print_json, settings_of

Where = Annotated[str, typer.Argument(help="A place in the bucket, e.g. s3://bucket/runs/my-run; it may be empty.")]
_LABELS = {"get": "GET of 4 kB", "create": "PUT, If-None-Match", "swap": "PUT, If-Match"}


def bench(  # noqa: PLR0917  typer makes options of them
    uri: Where,
    size: Annotated[int, typer.Option(min=16, help="MiB per object; three times that is held in memory.")] = 512,
    seconds: Annotated[float, typer.Option(min=1, help="Stop measuring after about this many seconds.")] = 120.0,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the checkpoint whose requests are counted.")] = 8,
    put_price: Annotated[
        float, typer.Option(min=0, help="Price per 1,000 PUT and LIST; default: S3 Standard.")
    ] = PUT_PRICE,
    get_price: Annotated[float, typer.Option(min=0, help="Price per 1,000 GET; default: S3 Standard.")] = GET_PRICE,
    as_json: Json = False,
    storage: Storage = None,
) -> None:
    """Measure how fast a bucket is from this machine.

    Shows latencies, speeds by part size and concurrency, how close raycheck comes to them, and what requests cost.
    Writes random bytes below probes/ and deletes them again, also after Ctrl-C or SIGTERM. No run there is touched.
    """
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # by which schedulers end a job; it must not leave objects behind
    store = open_store(uri, settings_of(storage))
    token = uuid4().hex
    print(  # noqa: T201
        f"measuring {store} for about {seconds:.0f} s with objects of up to {size} MiB below "
        f"{object_keys.scratch_prefix(token)}, all of which are deleted at the end",
        file=sys.stderr,
        flush=True,
    )
    found = measure(store, token=token, size_bytes=size * MIB, budget_s=seconds)
    part_bytes = store.part_bytes(size * MIB)
    requests = _requests(kind_of(uri), ranks=ranks, size_bytes=size * MIB, part_bytes=part_bytes)
    cost = sum(requests.values(), Requests()).cost(put_price=put_price, get_price=get_price)
    if as_json:
        facts = _facts(found) | {"ranks": ranks, "requests": {name: asdict(item) for name, item in requests.items()}}
        print_json(facts | {"estimated_cost": cost, "put_price": put_price, "get_price": get_price})
        return
    _show_latencies(found)
    _show("writing", "PUT", found.writing)
    _show("reading", "GET", found.reading)
    _show_limits(found, size * MIB)
    if requests:
        is_listed = (put_price, get_price) == (PUT_PRICE, GET_PRICE)
        _show_requests(requests)
        prices = "USD at the list prices of S3 Standard in us-east-1" if is_listed else "at the prices given"
        _say(f"estimate for {ranks} ranks of {size} MiB: {cost:.5f} {prices}; without storage and transfer")


def _requests(kind: str, *, ranks: int, size_bytes: int, part_bytes: int) -> dict[str, Requests]:
    """Returns the requests of one checkpoint by occasion; empty for a store that has no priced requests."""
    of_rank = counted.of_rank(kind, size_bytes=size_bytes, part_bytes=part_bytes)
    if not of_rank.puts:
        return {}
    return {
        "upload by all ranks": of_rank * ranks,
        "commit": counted.of_commit(),
        "pointer for Ray": counted.of_pointer(),
        "delete, once dropped": counted.of_delete(ranks=ranks),
    }


def _facts(found: Measured) -> dict[str, Any]:
    return {
        "latency_s": {
            name: {"median": item.median, "worst": max(item.samples), "count": len(item.samples)}
            for name, item in found.latencies.items()
        },
        "sample_bytes": found.size_bytes,
        "writing": _direction(found.writing),
        "reading": _direction(found.reading),
        "left_out": [asdict(way) for way in found.left_out],
    }


def _direction(found: Direction) -> dict[str, Any]:
    """Returns the measurements of one direction for --json. Speeds are in bytes per second."""
    return {
        "plain": [asdict(way) | _speed(item) for way, item in found.plain.items()],
        "raycheck": _speed(found.own),
        "share": found.share,
        "noise": found.noise,
        "best": asdict(found.best),
        "alike": [asdict(way) for way in found.alike],
    }


def _speed(item: Series) -> dict[str, Any]:
    return {"median": item.median, "samples": list(item.samples)}


def _show_latencies(found: Measured) -> None:
    table = Table("request", "median", "worst", "count", box=None, pad_edge=False)
    for name, item in found.latencies.items():
        row = (
            _LABELS[name],
            f"{item.median * 1e3:.1f} ms",
            f"{max(item.samples) * 1e3:.1f} ms",
            str(len(item.samples)),
        )
        table.add_row(*map(Text, row))
    out.print(table)


def _show(what: str, verb: str, found: Direction) -> None:
    counts = sorted({way.in_flight for way in found.plain})
    table = Table(f"{verb} in MB/s", *(f"{count} at once" for count in counts), box=None, pad_edge=False)
    for part in sorted({way.part_bytes for way in found.plain}):
        ways = [Way(part_bytes=part, in_flight=count) for count in counts]
        cells = [f"{found.plain[way].median / 1e6:.0f}" if way in found.plain else "" for way in ways]
        table.add_row(*map(Text, (_mib(part), *cells)))
    out.print(Text())
    out.print(table)
    own, best = found.own.median / 1e6, found.plain[found.best].median / 1e6
    _say(f"raycheck {what}: {own:.0f} MB/s, {found.share:.2f} of the best plain {verb} ({best:.0f})")
    rounds = len(found.own.samples)
    if rounds < MIN_ROUNDS:
        _say(f"fastest: {_label(found.best)}; measured {rounds} time(s) only, so the noise is unknown")
        return
    text = f"fastest: {_label(found.best)} ({rounds} rounds, noise {found.noise:.0%})"
    others = [_label(way) for way in found.alike if way != found.best]
    if not others:
        _say(f"{text}; all others are slower")
    elif len(others) == len(found.plain) - 1:
        _say(f"{text}; within the noise all others are as fast")
    else:
        _say(f"{text}; within the noise as fast: {', '.join(others)}")


def _show_limits(found: Measured, size_bytes: int) -> None:
    if found.size_bytes < size_bytes:
        _say(f"only objects of {_mib(found.size_bytes)} were measured; larger ones need more time (--seconds)")
    if found.left_out:
        _say(f"{len(found.left_out)} ways are blank above: they need larger objects (--size) or more time (--seconds)")


def _show_requests(requests: dict[str, Requests]) -> None:
    table = Table("requests per checkpoint", "PUT, LIST", "GET", "DELETE", box=None, pad_edge=False)
    for name, item in requests.items():
        table.add_row(*map(Text, (name, *map(str, (item.puts, item.gets, item.deletes)))))
    out.print(Text())
    out.print(table)


def _label(way: Way) -> str:
    return f"{_mib(way.part_bytes)} x {way.in_flight}"


def _mib(count: int) -> str:
    return f"{count // MIB} MiB"


def _say(text: str) -> None:
    out.print(Text(text))


COMMANDS = (bench,)
