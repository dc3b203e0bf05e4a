"""Tests that neither raycheck nor the clients of its stores draw from the global random generators."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import raycheck

MAKE = {
    "s3": "open_store('s3://bucket/run?region=us-east-1')",
    "gs": "open_store('gs://bucket/run?anonymous=true')._api._connect()",
    "az": "open_store('az://bucket/run?account_name=me&anonymous=true')",
}
FIND = """
import random, sys
from raycheck.bucket.store import open_store
{make}
clients = ("aiobotocore", "aiohttp", "adlfs", "azure", "botocore", "fsspec", "gcsfs", "google", "obstore", "requests",
           "s3fs", "urllib3")
print(*sorted(
    name for name, module in sys.modules.items()
    if name.partition(".")[0] in clients and vars(module).get("random") is random
    or name.startswith("botocore") and any(
        random.random in (getattr(vars(made).get("__init__"), "__defaults__", None) or ())
        for made in vars(module).values() if isinstance(made, type)
    )
))
"""
HARMLESS = {
    "aiohttp._websocket.writer": "web sockets",
    "azure.storage.blob._shared.policies": "makes a Random of its own",
    "azure.storage.blob._shared.policies_async": "makes a Random of its own",
    "google.api_core.retry.retry_base": "gRPC's clients, which gcsfs imports and raycheck keeps it from using",
    "google.cloud.storage._media._upload": "Google's own client, which gcsfs imports and does not use",
    "google.resumable_media._helpers": "Google's own client",
    "google.resumable_media._upload": "Google's own client",
    "requests.packages.urllib3.util.retry": "draws for a jitter that is 0 unless one is asked for",
    "urllib3.util.retry": "draws for a jitter that is 0 unless one is asked for",
}


@pytest.mark.parametrize("kind", MAKE)
def test_no_module_of_a_stores_clients_draws_from_the_global_generator(kind: str):
    code = FIND.format(make=MAKE[kind])

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)

    assert not set(found.stdout.split()) - set(HARMLESS)


def test_raycheck_uses_generators_of_its_own():
    """`random.Random` is fine; where the module itself is used, it is to seed a loader's worker or to save its state."""
    allowed = {
        "state/random_state.py": {"getstate", "setstate", "seed"},
        "state/entries/random_generators.py": {"_inst"},  # to leave the global one alone
        "data/sample_seeding.py": {"seed"},
        "frameworks/accelerate/order.py": {"getstate", "setstate"},  # leaves the script's draws as they were
    }
    root = Path(raycheck.__file__).parent

    for path in root.rglob("*.py"):
        used = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
        }
        assert used <= {"Random", "SystemRandom", "random"} | allowed.get(str(path.relative_to(root)), set()), path
