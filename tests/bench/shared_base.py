"""Counts what a LoRA run sends to its bucket with `SaveSettings(base=)`, and what it sends without.

    python -m tests.bench.shared_base

Ranks and coordinator run in this process; the store is moto behind a proxy that keeps every request's head.
"""

import tempfile
from collections import Counter
from pathlib import Path
from uuid import uuid4

from rich.table import Table

import raycheck
from raycheck.bucket.store.address import join_uri
from raycheck.cli.options import out
from raycheck.demo.server import s3_server
from raycheck.views.in_words import size
from tests.group.worker.test_base_run import lora, train
from tests.support.samples.hf_models import llama
from tests.support.servers.http_fault_proxy import FaultProxy, Head, fault_proxy

SAVES = 3
LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "vocab_size": 8192}


def run_once(proxy: FaultProxy, folder: Path, *, base: str | None) -> list[Head]:
    """Trains SAVES steps, each with a save, on two ranks. Returns all requests."""
    before = len(proxy.heads)
    settings = {} if base is None else {"base": base}
    train(join_uri(proxy.uri, uuid4().hex), lambda: lora(folder, 1), steps=SAVES, world_size=2, **settings)
    return proxy.heads[before:]


def main() -> None:
    table = Table("a LoRA run on two ranks", "requests", "bytes sent")
    with tempfile.TemporaryDirectory() as text, s3_server() as s3, fault_proxy(s3) as proxy:
        folder = Path(text)
        llama(**LARGE).save_pretrained(folder)
        base = join_uri(proxy.uri, "base")
        raycheck.catalog.import_checkpoint(str(folder), base)
        for label, given in (("uploads its own base model", None), ("base=, which lies in the bucket", base)):
            heads = run_once(proxy, folder, base=given)
            counts = Counter(head.method for head in heads)
            sent = sum(int(head.headers.get("content-length", 0)) for head in heads if head.method in ("PUT", "POST"))
            kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
            table.add_row(f"{label}, {SAVES} saves", kinds, size(sent))
    out.print(table)


if __name__ == "__main__":
    main()
