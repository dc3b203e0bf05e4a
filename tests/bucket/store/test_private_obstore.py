"""Tests raycheck's private copy of obstore: a forked child starts its own, whichever files are open, and systems that
allow no library in memory use s3fs."""

import os
import subprocess
import sys

import pytest

from raycheck.bucket.store.s3 import private_obstore
from raycheck.bucket.store.s3.obstore_store import FastS3Store
from raycheck.storage_settings import StorageSettings

SCRIPT = """
import os, signal
from raycheck.bucket.store.s3.private_obstore import own_obstore

NUMBER = 40
numbers = []
make = os.memfd_create
os.memfd_create = lambda name: numbers.append(make(name)) or numbers[-1]

def request():
    held = []
    while not held or held[-1] < NUMBER - 1:
        held.append(os.open("/dev/null", os.O_RDONLY))
    module = own_obstore()
    for file in held:
        os.close(file)
    where = {"endpoint": "http://127.0.0.1:9", "region": "us-east-1", "skip_signature": True}
    often = {"retry_config": {"max_retries": 0}, "client_options": {"allow_http": True}}
    try:
        module.head(module._store.S3Store("bucket", **where, **often), "key")
    except module.exceptions.BaseError:
        print("answered, by a copy from file", numbers[-1], flush=True)

request()
for _ in range(2):  # a child, and a child of that
    child = os.fork()
    if child:
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    signal.alarm(20)
    request()
"""


def test_a_forked_child_has_its_own_copy_though_its_file_has_the_number_that_the_parents_had() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=90, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["answered, by a copy from file 40"] * 3


def test_where_there_are_no_files_in_memory_the_bytes_go_through_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_obstore, "_here", private_obstore._Process())
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "memfd_create")

    settings = StorageSettings(anonymous=True, region="us-east-1")
    store = FastS3Store("s3://bucket/run", bucket="bucket", prefix="run", settings=settings)

    assert store._without_retries is None
    assert store._with_retries is None
