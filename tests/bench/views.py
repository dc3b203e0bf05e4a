"""Measures what the page's views ask of a distant bucket, and how long a first look takes.

    python -m tests.bench.views

Every request is answered after 40 ms, by a server that was given all objects (tests/support/servers/distant_bucket.py). The
runs have one, 100 and 1,000 live checkpoints of ten attempts; a listing is of as many runs. A view is made as the page
makes it, up to its HTML: with a new client first, and then by the connections that there are and with the documents
that are remembered. The best of three: other processes may have the cores.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from rich.table import Table

from raycheck.bucket.attempt_records import ResumeRecord, record_end, record_resume
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.bucket.format.latest import dump_latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.cli.options import out
from raycheck.page import pages
from raycheck.page.pages import PageScope
from raycheck.page.rendering import render
from raycheck.views.in_words import size
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.distant_bucket import distant_bucket, traffic
from tests.support.servers.memory_store import DictStore

DELAY_S = 0.04
COUNTS = (1, 100, 1000)
ATTEMPTS = 10
ROUNDS = 3
TENSORS, VALUES = 300, 4096
View = Callable[[PageScope], str]


def wide_index() -> Index:
    """The index of a checkpoint of TENSORS tensors, all of whose values lie in its one shard."""
    tensors = [
        Tensor(name=f"model.layers.{n}.weight", dtype="float32", shape=(VALUES,), path=("model", f"layers.{n}.weight"))
        for n in range(TENSORS)
    ]
    chunks = [
        Chunk(
            tensor=n,
            component="train",
            rank=0,
            offsets=(0,),
            sizes=(VALUES,),
            record_offset=0,
            record_size=4 * VALUES,
            payload_offset=0,
            payload_size=4 * VALUES,
            crcs=(0,),
        )
        for n in range(TENSORS)
    ]
    return index_of(tensors, chunks, values={"step": 1}, rank_values=[{}])


def a_run(checkpoints: int) -> Mapping[str, bytes]:
    """The objects of a run with this many live checkpoints, of ten attempts or of one.

    One of each attempt has its objects. The others are entries of `latest` alone, since no view reads more of them;
    they have no metrics, as the older ones have none when `latest` is full.
    """
    store = DictStore(at=time.time() - 1000.0)
    driver = Driver(store)
    attempts, wide = min(ATTEMPTS, checkpoints), wide_index()
    before = None
    for number in range(1, attempts + 1):
        attempt, entry = driver.claim(f"g{number}")
        if before is not None and entry is not None:
            record_end(store, before, by=attempt, cause="rank 0: its node was taken away")
            resume = ResumeRecord(
                attempt=number,
                after=before.number,
                cause="",
                restored=entry.key,
                step=entry.step,
                world_size_before=1,
                world_size=1,
                lost_steps=1,
                lost_s=1.0,
                since_commit_s=1.0,
                restore_s=1.0,
                restore_bytes=1,
                what="all",
            )
            record_resume(store, resume)
        step = number * checkpoints // attempts
        driver.save(number, 1, step=step, keep_last=None, began_at=store.at - 60.0, trained_s=30.0, index=wide)
        before = attempt
    body = driver.look()
    live = []
    for entry in body.live:
        name = CheckpointName.parse(entry.key)
        assert name is not None
        more = (replace(name, save=save, step=name.step + save) for save in range(2, checkpoints // attempts + 1))
        live += [entry, *(replace(entry, key=str(other), step=other.step, metrics={}) for other in more)]
    return dict(store.objects) | {object_keys.LATEST_KEY: dump_latest(replace(body, newest=tuple(live)))}


def views(key: str, other: str | None) -> dict[str, View]:
    found: dict[str, View] = {
        "a run": lambda scope: render("run.html", scope, **pages.run_view(scope, "run")),
        "a checkpoint": lambda scope: render("checkpoint.html", scope, **pages.checkpoint_view(scope, "run", key)),
        "what a live run's page asks": lambda scope: str(pages.live_version(scope, "run")),
    }
    if other is not None:
        found["a comparison"] = lambda scope: render("diff.html", scope, **pages.diff_view(scope, "run", other, key))
    return found


def measured(uri: str, view: View) -> tuple[int, int, float, float]:
    """Requests and bytes of a first look, and the least seconds of a first and of a second one."""
    took, again, asked = [], [], []
    for _ in range(ROUNDS):
        pages._remembered.cache_clear()
        traffic(uri)
        scope = PageScope(prefix=uri)
        began = time.perf_counter()
        view(scope)
        took.append(time.perf_counter() - began)
        asked.append(traffic(uri))
        began = time.perf_counter()
        view(scope)
        again.append(time.perf_counter() - began)
    assert len(set(asked)) == 1, asked
    return *asked[0], min(took), min(again)


def rows() -> list[tuple[str, int, int, int, float, float]]:
    """By view and number of checkpoints (of runs, for the list of runs): requests, bytes, seconds of two looks."""
    found = []
    for count in COUNTS:
        objects = a_run(count)
        keys = sorted(key.split("/")[1] for key in objects if key.endswith("/manifest.json"))
        with distant_bucket({f"run/{name}": data for name, data in objects.items()}, delay_s=DELAY_S) as uri:
            for name, view in views(keys[-1], keys[0] if count > 1 else None).items():
                found.append((name, count, *measured(uri, view)))
    latest = a_run(ATTEMPTS)[object_keys.LATEST_KEY]
    for count in COUNTS:
        many = {f"run-{number:04d}/{object_keys.LATEST_KEY}": latest for number in range(count)}
        with distant_bucket(many, delay_s=DELAY_S) as uri:
            found.append(("runs", count, *measured(uri, runs)))
    return found


def runs(scope: PageScope) -> str:
    return render("runs.html", scope, **pages.runs_view(scope))


def main() -> None:
    os.environ.update(AWS_ACCESS_KEY_ID="demo", AWS_SECRET_ACCESS_KEY="demo", AWS_EC2_METADATA_DISABLED="true")
    table = Table("view", "checkpoints", "requests", "bytes", "first look, s", "second, s")
    for name, count, requests, bytes_read, first_s, second_s in sorted(rows(), key=lambda row: (row[0], row[1])):
        table.add_row(name, str(count), str(requests), size(bytes_read), f"{first_s:.2f}", f"{second_s:.2f}")
    out.print(table)


if __name__ == "__main__":
    main()
