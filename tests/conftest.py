"""Fixtures that all tests share: real stores, and a limit on how long a test may take."""

import faulthandler
import gc
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.demo.server import s3_server
from tests.support.processes.child_processes import LONG_TEST_S
from tests.support.processes.forked_ray_workers import forked_workers
from tests.support.servers.alike_clients import make_clients_alike
from tests.support.servers.azurite_server import azurite
from tests.support.servers.gcs_server import BUCKET, START_TIMEOUT_S, gcs_server
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

pytest_plugins = ["tests.support.processes.rank_fixtures", "tests.support.processes.ray_fixtures"]
_STDERR = pytest.StashKey[int]()
EMULATOR = os.environ.get("RAYCHECK_TEST_GCS", "").rstrip("/")
GOOGLES = ["gs", "emulator"] if EMULATOR else ["gs"]
"""The servers of the GCS API: ours, and beside it the one whose URL RAYCHECK_TEST_GCS names, Google's own
storage-testbench for example. It is given a bucket."""
SERVERS = {"s3", "s3fs", "obstore", "gcs", "gs", "emulator", "azure", "az", "ministack", "ceph", "seaweed"}
"""The fixtures that start a server, and the parameters that make a test ask for one of them."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(RAY_worker_niceness="0")  # Ray's 15 starves its workers beside the tests that run meanwhile
    # Two of Ray's processes on each node look around all the time, for log files and for what each worker uses.
    os.environ.update(RAY_LOG_MONITOR_MANY_FILES_THRESHOLD="0", LOG_NAME_UPDATE_INTERVAL_S="2")
    os.environ.update(REPORTER_UPDATE_INTERVAL_MS="60000")
    _choose_profile(config)
    make_clients_alike()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    config.stash[_STDERR] = os.dup(2)  # while a test runs, 2 is pytest's own file, which is lost with the process


def _choose_profile(config: pytest.Config) -> None:
    """Has property tests draw the same inputs in every run, whatever the machine's speed is; with --all more of them, and
    with --search new ones."""
    repeatable = settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
    )
    settings.register_profile("all", repeatable, max_examples=100)
    settings.register_profile("default", repeatable, max_examples=40)
    settings.register_profile("quick", repeatable, max_examples=20)
    settings.register_profile("search", repeatable, derandomize=False, print_blob=True)
    settings.load_profile(next((name for name in ("search", "quick", "all") if config.getoption(name)), "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only what needs no server and no Ray and enumerates nothing")
    parser.addoption("--all", action="store_true", help="also the long profiles")
    parser.addoption("--search", action="store_true", help="property tests draw new inputs; see tests/long/search.py")
    parser.addoption("--gpu", action="store_true", help="also what needs an accelerator")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m ray`, leaves out the files that have no such test: to import them all takes as long as a dozen tests."""
    is_file = config.getoption("-m") == "ray" and collection_path.suffix == ".py" and collection_path.is_file()
    return True if is_file and "mark.ray" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests by their markers: `slow` ones run only with --all, `gpu` ones only with --gpu, and --quick leaves
    out those of `ray`, `server` and `enumeration`. They are deselected, which pytest counts in its summary; none is
    skipped."""
    left_out = {mark for mark, option in (("slow", "--all"), ("gpu", "--gpu")) if not config.getoption(option)}
    left_out |= {"ray", "server", "enumeration"} if config.getoption("--quick") else set()
    for item in items:
        if _needs_server(item):
            item.add_marker("server")
    config.hook.pytest_deselected(items=[item for item in items if left_out & set(item.keywords)])
    items[:] = [item for item in items if not left_out & set(item.keywords)]


def _needs_server(item: pytest.Item) -> bool:
    """Returns whether a test starts a store's server: by one of its fixtures, or since it runs on the store of that
    name. Others say so by the marker itself."""
    parameters = (
        item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    )
    words = {word for parameter in parameters if isinstance(parameter, str) for word in parameter.split()}
    return bool(SERVERS & (set(getattr(item, "fixturenames", ())) | words))


def pytest_collection_finish() -> None:
    """Makes full collections of garbage rare, and spares them what the imports made. With Python's own threshold every
    few clients of S3 cause one, and a walk through all of torch, Ray and botocore takes up to two seconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test waits for ever: after its limit all threads' stacks are printed and the process ends."""
    limit = LONG_TEST_S if {"ray", "slow", "training"} & set(request.keywords) else 240
    if request.config.getoption("--search"):
        limit = 3600  # a failing input is made small first
    faulthandler.dump_traceback_later(limit, exit=True, file=request.config.stash[_STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module", autouse=True)
def forgotten_objects() -> Iterator[None]:
    """Takes out of the memory of `memory://` what the tests of a file have put there. All stores of a process are in one
    mapping, and each listing goes through all of it."""
    before = MemoryFileSystem.store.copy()
    yield
    for path in MemoryFileSystem.store.keys() - before.keys():
        MemoryFileSystem.store.pop(path, None)


@pytest.fixture(scope="session")
def may_start_servers(pytestconfig: pytest.Config) -> None:
    assert not pytestconfig.getoption("--quick"), "this test starts a server: mark it so, see _needs_server"


@pytest.fixture(scope="session")
def s3(may_start_servers: None) -> Iterator[str]:
    """URI of a bucket on a real S3 server over HTTP, for the whole session."""
    with s3_server() as uri:
        yield uri


@pytest.fixture
def wire(s3: str) -> Iterator[FaultProxy]:
    """The S3 server behind a proxy that records requests and makes faults."""
    with fault_proxy(s3) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def forks(pytestconfig: pytest.Config) -> Iterator[None]:
    """Has the workers of each Ray that is started here begin as forks; with --all Ray starts them itself."""
    with nullcontext() if pytestconfig.getoption("--all") else forked_workers():
        yield


@pytest.fixture(scope="session")
def gcs(may_start_servers: None) -> Iterator[str]:
    """Endpoint of a server of the GCS API with one bucket; gs:// URIs of this process lead there."""
    with gcs_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        yield endpoint


@pytest.fixture(scope="session")
def emulator() -> str:
    """URI of a bucket on the server that RAYCHECK_TEST_GCS names."""
    request = urllib.request.Request(
        f"{EMULATOR}/storage/v1/b?project=raycheck",
        json.dumps({"name": BUCKET}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=START_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 409:  # it may be there already
            raise
    scheme, _, address = EMULATOR.partition("://")
    return f"gs://{BUCKET}?endpoint_override={address}&scheme={scheme}&anonymous=true"


@pytest.fixture(scope="session")
def azure(may_start_servers: None) -> Iterator[str]:
    """Connection string of an Azurite with one container; az:// URIs of this process lead there."""
    with azurite() as connection, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
        yield connection


@pytest.fixture(params=["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("file", "s3"))])
def uri(request: pytest.FixtureRequest, tmp_path) -> str:
    """The root of a run that does not exist yet. In memory, as that a folder and S3 behave alike is what the store's
    conformance tests say; on those, too, with --all."""
    return new_root(request, tmp_path)


@pytest.fixture(params=[*GOOGLES, pytest.param("az", marks=pytest.mark.slow)])
def cloud_uri(request: pytest.FixtureRequest, tmp_path) -> str:
    return new_root(request, tmp_path)


def new_root(request: pytest.FixtureRequest, tmp_path) -> str:
    name = uuid4().hex
    if request.param == "memory":
        return f"memory://{name}"
    if request.param == "file":
        return f"file://{tmp_path}/run"
    if request.param == "s3":
        return join_uri(request.getfixturevalue("s3"), name)
    if request.param == "gs":
        request.getfixturevalue("gcs")
        return f"gs://{BUCKET}/{name}"
    if request.param == "emulator":
        return join_uri(request.getfixturevalue("emulator"), name)
    request.getfixturevalue("azure")
    return f"az://raycheck/{name}?account_name=devstoreaccount1"


@pytest.fixture
def store(uri: str) -> Store:
    return open_store(uri)
