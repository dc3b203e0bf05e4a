"""Compares each storage setting, for each client, with what arrives at a server: the rows of store/client_options.py.

The server is a real one behind a recording proxy. `ray` is the file system with which Ray would write: pyarrow's own
S3 file system if its URI can express the settings, otherwise the one that raycheck builds.
"""

import json
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from botocore.loaders import JSONFileLoader
from pyarrow.fs import FileSelector, FileSystem

from raycheck import StorageSettings
from raycheck.bucket.store import open_store, retry
from raycheck.bucket.store.address import join_uri, with_settings
from raycheck.bucket.store.part_sizes import PART_SIZES, PartSizes
from raycheck.bucket.store.ray_filesystem import ray_filesystem
from raycheck.bucket.store.s3.obstore_store import FastS3Store
from raycheck.bucket.store.s3.private_obstore import own_obstore
from raycheck.bucket.store.s3.s3fs_store import S3Store
from raycheck.errors import ConfigError, RaycheckError, StoreError
from tests.support.servers.http_fault_proxy import FaultProxy, Head, fault_proxy
from tests.support.servers.s3_engines import clients_made, forbid_s3fs_bytes

Drive = Callable[[str], None]
PART = 5 * 1024 * 1024
WRITES = ("PUT", "POST")
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


def by_s3fs(uri: str) -> None:
    """Make every request that S3Store can make."""
    store = open_store(uri)
    assert isinstance(store, S3Store)
    store.put("a", b"one")
    store.put_if_absent("b", b"one")
    store.put_if_match("b", b"two", store.get("b").version)
    store.put_parts("c", (memoryview(bytes(PART)) for _ in range(2)), 2 * PART)
    with pytest.raises(KeyError):
        store.put_parts("d", failing_parts(), 2 * PART)
    assert store.get_range("a", 1, 3) == b"ne"
    assert store.head("c") == 2 * PART
    assert [item.key for item in store.list_objects("")] == ["a", "b", "c"]
    store.delete("a")


def failing_parts() -> Iterator[memoryview]:
    yield memoryview(bytes(PART))
    raise KeyError


def by_obstore(uri: str) -> None:
    """Make every request that obstore makes itself."""
    store = open_store(uri)
    assert isinstance(store, FastS3Store)
    with pytest.MonkeyPatch.context() as patch:
        forbid_s3fs_bytes(patch)
        move_bytes(store)


def move_bytes(store: FastS3Store) -> None:
    store.put("a", b"one")
    store.put_parts("b", iter([memoryview(b"two")]), 3)
    store.put_parts("c", (memoryview(bytes(PART)) for _ in range(2)), 2 * PART)
    with pytest.raises(KeyError):
        store.put_parts("d", failing_parts(), 2 * PART)
    assert store.get_range("a", 1, 3) == b"ne"


def by_ray(uri: str) -> None:
    """Use the file system as Ray's StorageContext does."""
    path, files = ray_filesystem(uri) or reversed(FileSystem.from_uri(uri))
    files.create_dir(path)
    with files.open_output_stream(f"{path}/a") as stream:
        stream.write(b"one")
    with files.open_input_stream(f"{path}/a") as stream:
        assert stream.read() == b"one"
    assert [item.base_name for item in files.get_file_info(FileSelector(path))] == ["a"]
    files.delete_file(f"{path}/a")


@pytest.fixture(params=["s3fs", "obstore", "ray"])
def drive(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Drive:
    monkeypatch.setitem(PART_SIZES, "s3", PartSizes(part_bytes=PART))
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    return {"s3fs": by_s3fs, "obstore": by_obstore, "ray": by_ray}[request.param]


def sent(drive: Drive, wire: FaultProxy, settings: StorageSettings) -> list[Head]:
    """Return the requests of one drive with the settings in the URI, as they are passed on."""
    drive(with_settings(join_uri(wire.uri, uuid4().hex), settings))
    assert wire.heads
    return wire.heads


def of_objects(heads: list[Head]) -> list[Head]:
    """Return the requests for objects and listings of the run, without a file system's requests for the bucket."""
    return [
        head for head in heads if len(head.target.partition("?")[0].strip("/").split("/")) > 1 or "?" in head.target
    ]


def test_endpoint_is_where_the_requests_go(drive, wire, s3):
    bare = f"s3://raycheck/{uuid4().hex}?region=us-east-1"
    endpoint = f"http://127.0.0.1:{wire.port}"

    drive(with_settings(bare, StorageSettings(endpoint=endpoint)))

    assert {head.headers["host"] for head in wire.heads} == {f"127.0.0.1:{wire.port}"}


def test_region_is_what_requests_are_signed_for(drive, wire):
    heads = sent(drive, wire, StorageSettings(region="eu-west-3"))

    assert {head.region for head in heads} == {"eu-west-3"}


def test_profile_is_whose_keys_sign(drive, wire, monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[trainer]\naws_access_key_id = FROMPROFILE\naws_secret_access_key = hush\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    heads = sent(drive, wire, StorageSettings(profile="trainer"))

    assert {head.key_id for head in heads} == {"FROMPROFILE"}


def test_role_is_assumed_on_top_of_the_credentials_found(drive, wire, s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3_endpoint(s3))

    heads = sent(drive, wire, StorageSettings(role_arn="arn:aws:iam::123456789012:role/train", external_id="us"))

    assert all(head.key_id.startswith("ASIA") for head in heads), "temporary keys"
    assert all(head.headers["x-amz-security-token"] for head in heads)


def test_anonymous_signs_nothing(drive, wire, s3):
    bucket = f"public-{uuid4().hex}"
    allow = {"Effect": "Allow", "Principal": "*", "Action": "s3:*", "Resource": f"arn:aws:s3:::{bucket}/*"}
    for query, body in (("", b""), ("?policy", json.dumps({"Version": "2012-10-17", "Statement": [allow]}).encode())):
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{s3_endpoint(s3)}/{bucket}{query}", body, headers, method="PUT")
        urllib.request.urlopen(request, timeout=60).close()

    drive(with_settings(wire.uri.replace("s3://raycheck", f"s3://{bucket}/run"), StorageSettings(anonymous=True)))

    assert wire.heads
    assert not any("authorization" in head.headers for head in wire.heads)


def test_requester_pays_is_said_on_every_request_for_an_object(drive, wire):
    heads = of_objects(sent(drive, wire, StorageSettings(requester_pays=True)))

    assert {head.method for head in heads} >= {"GET", "PUT"}
    for head in heads:
        assert head.headers.get("x-amz-request-payer") == "requester", (head.method, head.target)


@pytest.mark.parametrize("encryption", ["AES256", "aws:kms"])
def test_encryption_is_asked_for_by_every_request_that_creates_an_object(drive, wire, encryption):
    key = "arn:aws:kms:us-east-1:123456789012:key/k" if encryption == "aws:kms" else None

    heads = sent(drive, wire, StorageSettings(encryption=encryption, kms_key_id=key))

    creating = [head for head in heads if creates(head)]
    assert creating
    for head in creating:
        assert head.headers.get("x-amz-server-side-encryption") == encryption, (head.method, head.target)
        assert head.headers.get("x-amz-server-side-encryption-aws-kms-key-id") == key
    assert not any("x-amz-server-side-encryption" in head.headers for head in heads if not creates(head))


def creates(head: Head) -> bool:
    is_part_or_end = "partNumber=" in head.target or "uploadId=" in head.target
    is_deletion = "?delete" in head.target
    return head.method in WRITES and not is_part_or_end and not is_deletion


def test_path_style_puts_the_bucket_into_the_path(drive, wire):
    heads = sent(drive, wire, StorageSettings(path_style=True))

    assert [head.target for head in heads if not head.target.startswith("/raycheck")] == []
    assert {head.headers["host"] for head in heads} == {f"127.0.0.1:{wire.port}"}


def test_virtual_host_style_puts_the_bucket_into_the_host_name(drive, wire, monkeypatch):
    """No name server here knows the bucket's host: the recorder is the client's HTTP proxy instead."""
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{wire.port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    settings = StorageSettings(endpoint="http://s3.example.test", path_style=False)

    heads = sent(drive, wire, settings)

    assert {head.headers["host"] for head in heads} == {"raycheck.s3.example.test"}
    assert not any("/raycheck" in head.target for head in heads)


# --- TLS ---


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA of our own and a server certificate that it has signed."""
    folder = tmp_path_factory.mktemp("ca")
    ca = "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=raycheck-test-ca"
    request = "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=127.0.0.1"
    sign = "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out server.pem -days 2 -extfile ext"
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (ca, request, sign):
        openssl = [shutil.which("openssl"), *command.split()]
        subprocess.run(openssl, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def tls(s3: str, authority: Path) -> Iterator[FaultProxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    with fault_proxy(s3, context) as proxy:
        yield proxy


def test_ca_bundle_is_whom_the_client_trusts(drive, tls, authority):
    settings = StorageSettings(endpoint=f"https://127.0.0.1:{tls.port}", ca_bundle=str(authority / "ca.pem"))

    heads = sent(drive, tls, settings)

    assert {head.method for head in heads} >= {"GET", "PUT"}


@pytest.mark.parametrize("engine", ["s3fs", "obstore"])
def test_without_the_ca_bundle_no_request_reaches_the_server(engine, tls, monkeypatch):
    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts
    store = open_store(
        with_settings(join_uri(tls.uri, "run"), StorageSettings(endpoint=f"https://127.0.0.1:{tls.port}"))
    )

    with pytest.raises((StoreError, own_obstore().exceptions.BaseError)):
        own_obstore().head(store._without_retries, "a") if engine == "obstore" else store.head("a")

    assert tls.heads == []


@pytest.fixture
def other_tls(gcs: str, authority: Path) -> Iterator[FaultProxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    with fault_proxy(f"gs://raycheck?endpoint_override={gcs.removeprefix('http://')}", context) as proxy:
        yield proxy


@pytest.mark.parametrize("uri", ["gs://raycheck/tls", "az://raycheck/tls?account_name=me&anonymous=true"])
def test_ca_bundle_is_whom_store_and_ray_trust_on_other_clouds(uri, other_tls, authority):
    """Any response will do: the server is Google's, and it does not matter what Azure's client makes of it."""
    settings = StorageSettings(endpoint=f"https://127.0.0.1:{other_tls.port}", ca_bundle=str(authority / "ca.pem"))

    with pytest.raises(RaycheckError):
        open_store(uri, settings).head("none")
    by_store = len(other_tls.heads)
    _, files = ray_filesystem(with_settings(uri, settings))
    with pytest.raises(OSError, match=r"tls/none"):
        files.open_input_stream("raycheck/tls/none").read()

    assert 0 < by_store < len(other_tls.heads)


def test_ray_s_file_system_on_other_clouds_keeps_scheme_and_identity_as_the_store_does(monkeypatch):
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGk=")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", "/nonexistent")

    _, azure = ray_filesystem("az://c/p?account_name=me&endpoint_override=127.0.0.1:10000&scheme=http")

    assert azure.handler.fs.service_client.url.startswith("http://127.0.0.1:10000")
    with pytest.raises(ConfigError, match="no Google credentials"):
        ray_filesystem("gs://b/p?requester_pays=true")


def s3_endpoint(uri: str) -> str:
    return f"http://{uri.partition('endpoint_override=')[2].partition('&')[0]}"


def test_botocores_descriptions_of_s3_are_read_once_in_a_process(s3, monkeypatch) -> None:
    """Each store has a client of its own, and reading them is most of what a client costs."""
    open_store(s3).list_names("")
    read = []
    load = JSONFileLoader.load_file
    monkeypatch.setattr(JSONFileLoader, "load_file", lambda *place: read.append(place) or load(*place))

    made = clients_made(monkeypatch)
    open_store(join_uri(s3, "another")).list_names("")

    assert len(made) == 1
    assert [path for _, path in read if "/s3/" in path] == []
