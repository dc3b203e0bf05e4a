"""Forked loader workers read with obstore, s3fs or raycheck itself while raycheck's uploads go through obstore.

Each case is a process of its own, in which no thread of a store's runs: what is tested is whose the parent has started.
"""

import subprocess
import sys
import textwrap
from uuid import uuid4

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.processes.fork_server import run_code

SCRIPT = """
import sys, urllib.parse
import torch
from torch.utils.data import DataLoader, Dataset
from raycheck.bucket.store import open_store
from raycheck.bucket.store.s3.s3fs_store import S3Store
from tests.support.servers.s3_engines import by_s3fs_alone

S3FS_BYTES = S3Store.get_range, S3Store.put
URI = sys.argv[1]
at = urllib.parse.urlsplit(URI)
ENDPOINT = "http://" + urllib.parse.parse_qs(at.query)["endpoint_override"][0]
PLACE = at.netloc + at.path

class Samples(Dataset):
    def __len__(self):
        return 8

{dataset}

def train():
    store = open_store(URI)
    store.put("weights", bytes(1 << 20))
    assert bytes(store.get_range("weights", 0, 4)) == bytes(4)

S3Store.get_range = S3Store.put = None  # obstore must do it
train()
loader = DataLoader(Samples(), num_workers=2, batch_size=2, timeout=40, multiprocessing_context="fork")
for epoch in range(2):
    assert sorted(value for batch in loader for value in batch.tolist()) == list(range(8))
    train()
print("read all")
"""
DATASETS = {
    "obstore": """
    def __init__(self):
        from obstore.store import S3Store
        self.store = S3Store(at.netloc, prefix=at.path.strip("/"), endpoint=ENDPOINT, region="us-east-1",
                             client_options={"allow_http": True})
    def __getitem__(self, index):
        import obstore
        return int(bytes(obstore.get(self.store, f"sample-{index}").bytes()))
    """,
    "s3fs": """
    def __getitem__(self, index):
        import s3fs
        return int(s3fs.S3FileSystem(endpoint_url=ENDPOINT).cat_file(f"{PLACE}/sample-{index}"))
    """,
    "raycheck": """
    def __getitem__(self, index):
        store = open_store(URI)
        return int(bytes(store.get_range(f"sample-{index}", 0, 1)))
    """,
    "a raycheck store of the parent": """
    def __init__(self):
        self.store = open_store(URI)
        self.store.head("sample-0")
    def __getitem__(self, index):
        return int(bytes(self.store.get_range(f"sample-{index}", 0, 1)))
    """,
    "a raycheck store of the parent, by s3fs": """
    def __init__(self):
        S3Store.get_range, S3Store.put = S3FS_BYTES
        self.store = by_s3fs_alone(open_store(URI))
        self.store.head("sample-0")
    def __getitem__(self, index):
        return int(bytes(self.store.get_range(f"sample-{index}", 0, 1)))
    """,
}


@pytest.fixture
def samples(s3: str) -> str:
    uri = join_uri(s3, uuid4().hex)
    store = open_store(uri)
    for index in range(8):
        store.put(f"sample-{index}", str(index).encode())
    return uri


def run(dataset: str, uri: str) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.replace("{dataset}", textwrap.indent(textwrap.dedent(DATASETS[dataset]), "    "))
    return run_code(code, uri, timeout_s=110)


@pytest.mark.parametrize("dataset", ["obstore", "s3fs", "raycheck"])
def test_forked_workers_read_while_the_parent_uploads_with_obstore(samples: str, dataset: str):
    done = run(dataset, samples)

    assert done.stdout.strip() == "read all", done.stderr


@pytest.mark.parametrize("dataset", ["a raycheck store of the parent", "a raycheck store of the parent, by s3fs"])
def test_a_store_that_was_opened_before_the_fork_says_so_instead_of_waiting_for_ever(samples: str, dataset: str):
    done = run(dataset, samples)

    assert "ConfigError" in done.stderr
    assert "opened before this process was forked; open it again in here" in done.stderr


def test_where_no_copy_of_obstore_can_be_made_the_bytes_go_through_s3fs(samples: str):
    """A limit on the size of files stands for a system that allows no libraries in memory."""
    code = """
import resource, sys
from raycheck.bucket.store import open_store
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = open_store(sys.argv[1])
store.put("weights", b"1234")
print(bytes(store.get_range("weights", 1, 3)), bytes(store.get("sample-3").data), store._without_retries)
"""

    done = subprocess.run(
        [sys.executable, "-c", code, samples], capture_output=True, text=True, timeout=100, check=True
    )

    assert done.stdout.strip() == "b'23' b'3' None"
