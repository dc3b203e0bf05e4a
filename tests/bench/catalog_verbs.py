"""Counts the requests and bytes of each command on a run of 20 checkpoints.

    python -m tests.bench.catalog_verbs

The commands run in this process, one after the other; the stores are two of moto's S3 servers behind proxies that count.
Bytes are those of requests' bodies, and of answers with their heads.
"""

import argparse
import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.cli.options import Text, out
from raycheck.demo.server import s3_server
from raycheck.run import open_run
from raycheck.views.in_words import size
from tests.group.worker.test_base_run import train
from tests.support.processes.command_line import raycheck
from tests.support.samples.hf_models import llama
from tests.support.servers.copied_part_proofs import prover
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

CHECKPOINTS = 20
LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 4096}
VERBS = (
    ("ls", "ls RUN"),
    ("runs", "runs BUCKET"),
    ("show", "show RUN"),
    ("pin", "pin RUN 3"),
    ("name", "name RUN 4 good"),
    ("verify, all 20", "verify RUN"),
    ("fork", "fork RUN BUCKET/fork"),
    ("fork --copy", "fork RUN BUCKET/copied-fork --copy"),
    ("cp in one bucket, first", "cp RUN BUCKET/mirror"),
    ("cp in one bucket, repeated", "cp RUN BUCKET/mirror"),
    ("cp to another store, first", "cp RUN OTHER/mirror"),
    ("cp to another store, repeated", "cp RUN OTHER/mirror"),
    ("cp --at, in one bucket", "cp RUN BUCKET/one --at 5"),
    ("download", "download RUN 5 HERE/dcp"),
    ("pack, to a local file", "pack RUN 5 HERE/one.tar"),
    ("unpack, from a local file", "unpack HERE/one.tar BUCKET/unpacked"),
    ("import, from a local folder", "import HERE/model BUCKET/imported"),
    ("export-hf, to a local folder", "export-hf RUN HERE/exported"),
    ("export-hf, into the bucket", "export-hf RUN BUCKET/exported"),
    ("delete --grace 0", "delete RUN 5 --grace 0 --yes"),
    ("prune --keep-last 2 --grace 0", "prune RUN --keep-last 2 --grace 0"),
    ("delete-run of the mirror", "delete-run BUCKET/mirror --yes --live"),
)
"""What each row is called, and its command line: RUN has 20 checkpoints, BUCKET is around it, OTHER another server's."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Says what one command came to. requests: their numbers, by method."""

    label: str
    requests: Counter[str]
    sent_bytes: int
    answered_bytes: int


def counted(label: str, words: Sequence[str], proxies: Sequence[FaultProxy]) -> Counted:
    """Run one command, and count what the proxies saw of it. Raises RuntimeError when the command fails."""
    heads = [len(proxy.heads) for proxy in proxies]
    answered = sum(proxy.answered_bytes for proxy in proxies)
    done = raycheck(*words)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr}")
    new = [head for proxy, before in zip(proxies, heads, strict=True) for head in proxy.heads[before:]]
    return Counted(
        label=label,
        requests=Counter(head.method for head in new),
        sent_bytes=sum(int(head.headers.get("content-length", 0)) for head in new),
        answered_bytes=sum(proxy.answered_bytes for proxy in proxies) - answered,
    )


def measured(folder: Path, *, checkpoints: int, **model: int) -> tuple[list[Counted], int]:
    """Make the run, and count every verb of VERBS. Returns the counts, and a checkpoint's size in bytes."""
    with s3_server() as one, s3_server() as two, fault_proxy(one) as near, fault_proxy(two) as far:
        bucket = join_uri(near.uri, "runs")
        run = join_uri(bucket, "mine")
        llama(**model).save_pretrained(folder / "model")
        train(run, lambda: llama(**model), steps=checkpoints, keep_last=checkpoints)
        head = open_run(run).head
        assert head is not None
        # What S3 answers when it copies a part, and moto leaves out: the CRC-32 of the bytes that it has copied.
        near.rule("edit", "PUT", ".*partNumber", times=10**6, edit=prover(open_store(join_uri(one, "runs"))))
        places = {"RUN": run, "BUCKET": bucket}
        found = []
        for label, line in VERBS:
            words = [word.replace("HERE", str(folder)) for word in line.split()]
            words = [join_uri(bucket, word[7:]) if word.startswith("BUCKET/") else word for word in words]
            words = [join_uri(far.uri, word[6:]) if word.startswith("OTHER/") else word for word in words]
            found.append(counted(label, [places.get(word, word) for word in words], (near, far)))
        return found, head.size_bytes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.catalog_verbs", description=__doc__)
    parser.parse_args()
    logging.getLogger("raycheck").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        found, size_bytes = measured(Path(folder), checkpoints=CHECKPOINTS, **LARGE)
    out.print(Text(f"{CHECKPOINTS} checkpoints of {size(size_bytes)} each\n"))
    out.print(Text("| | requests | bytes sent | bytes answered |"))
    out.print(Text("|---|---|---|---|"))
    for row in found:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(row.requests.items()))
        out.print(Text(f"| {row.label} | {kinds or 'none'} | {size(row.sent_bytes)} | {size(row.answered_bytes)} |"))


if __name__ == "__main__":
    main()
