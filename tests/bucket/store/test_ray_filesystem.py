"""Tests the translation between URIs and Ray's file systems: pyarrow gets what it understands, and no secret is passed
on."""

import pickle
import subprocess
import sys

import pytest
import s3fs
from pyarrow import fs

from raycheck import StorageSettings
from raycheck.bucket.store.address import parse_uri, with_settings
from raycheck.bucket.store.ray_filesystem import ray_filesystem, uri_of
from raycheck.errors import ConfigError


def name_of(value: object) -> str:
    """Return a name of the case that is equal in both processes of a test run, so that they collect alike."""
    return value if isinstance(value, str) else type(value).__name__


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)


@pytest.mark.parametrize(
    "uri",
    [
        "/runs",
        "file:///runs",
        "s3://bucket/runs",
        "s3://bucket/runs?region=us-east-1",
        "gs://bucket/runs",
        "abfss://container@me.dfs.core.windows.net/runs",
    ],
)
def test_what_pyarrow_can_say_is_left_to_it(uri):
    assert ray_filesystem(uri) is None


ALL = StorageSettings(
    endpoint="http://127.0.0.1:9000",
    region="eu-west-3",
    profile="trainer",
    requester_pays=True,
    encryption="aws:kms",
    kms_key_id="k",
    path_style=False,
)


def test_rays_file_system_carries_the_uri_and_no_secret(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    uri = with_settings("s3://bucket/runs", ALL)

    path, files = ray_filesystem(uri)

    assert path == "bucket/runs"
    assert b"hush-hush" not in pickle.dumps(files)
    again = pickle.loads(pickle.dumps(files))
    assert again == files
    assert again != ray_filesystem(with_settings("s3://bucket/other", ALL))[1]
    assert parse_uri(uri_of(again, "bucket/runs/my-run")).said == ALL


def test_rays_file_system_reads_the_environment_where_it_is_unpickled(monkeypatch):
    _, files = ray_filesystem("s3://bucket/runs?requester_pays=true")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).handler.fs.client_kwargs['region_name'])"
    monkeypatch.setenv("AWS_REGION", "of-the-worker")

    found = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(files), capture_output=True, check=True, timeout=60
    )

    assert found.stdout.strip() == b"of-the-worker"


def test_settings_of_the_environment_reach_ray_too(monkeypatch):
    monkeypatch.setenv("RAYCHECK_STORAGE_ENDPOINT", "http://127.0.0.1:9000")

    _, files = ray_filesystem("s3://bucket/of-the-environment")

    assert files.handler.fs.endpoint_url == "http://127.0.0.1:9000"


def test_an_emulator_of_google_reaches_ray_too(monkeypatch):
    """pyarrow's own client does not know this variable, and would look for credentials for a quarter of an hour."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")

    path, files = ray_filesystem("gs://bucket/runs")

    assert path == "bucket/runs"
    assert uri_of(files, "bucket/runs/r") == "gs://bucket/runs/r"


def test_azure_is_given_as_a_file_system_where_its_scheme_is_not_pyarrows():
    path, files = ray_filesystem("az://container/runs?account_name=me&anonymous=true")

    assert path == "container/runs"
    assert pickle.loads(pickle.dumps(files)) == files
    assert parse_uri(uri_of(files, "container/runs/r")).account == "me"
    assert parse_uri(uri_of(files, "container/runs/r")).said.anonymous


def test_google_is_given_as_a_file_system_where_pyarrow_lacks_the_setting():
    path, files = ray_filesystem("gs://bucket/runs?anonymous=true")

    assert path == "bucket/runs"
    assert pickle.loads(pickle.dumps(files)) == files
    assert uri_of(files, "bucket/runs/r") == "gs://bucket/runs/r?anonymous=true"


def fsspec(**options) -> fs.PyFileSystem:
    return fs.PyFileSystem(fs.FSSpecHandler(s3fs.S3FileSystem(skip_instance_cache=True, **options)))


@pytest.mark.parametrize(
    ("filesystem", "path", "uri"),
    [
        (fs.LocalFileSystem(), "/runs/my run", "file:///runs/my%20run"),
        (fs.SubTreeFileSystem("/base", fs.LocalFileSystem()), "runs", "file:///base/runs"),
        (fs.S3FileSystem(region="eu-west-3"), "b/p", "s3://b/p?region=eu-west-3"),
        (
            fs.S3FileSystem(region="x", endpoint_override="127.0.0.1:9", scheme="http", anonymous=True),
            "b/p",
            "s3://b/p?endpoint_override=127.0.0.1:9&scheme=http&region=x&anonymous=true",
        ),
        (
            fs.S3FileSystem(region="x", force_virtual_addressing=True, tls_ca_file_path="/ca.pem"),
            "b",
            "s3://b?region=x&tls_ca_file_path=/ca.pem&path_style=false",
        ),
        (fs.GcsFileSystem(anonymous=True), "b/p", "gs://b/p?anonymous=true"),
        (fs.AzureFileSystem("me"), "c/p", "az://c/p?account_name=me"),
        (
            fs.AzureFileSystem("me", blob_storage_authority="127.0.0.1:10000", blob_storage_scheme="http"),
            "c/p",
            "az://c/p?account_name=me&endpoint_override=127.0.0.1:10000&scheme=http",
        ),
        (fsspec(anon=True, use_listings_cache=False), "b/p", "s3://b/p?anonymous=true"),
        (
            fsspec(
                endpoint_url="http://127.0.0.1:9",
                requester_pays=True,
                s3_additional_kwargs={"ServerSideEncryption": "AES256"},
                client_kwargs={"region_name": "x", "verify": "/ca.pem"},
                config_kwargs={"s3": {"addressing_style": "path"}},
            ),
            "b/p",
            "s3://b/p?endpoint_override=127.0.0.1:9&scheme=http&region=x&requester_pays=true&encryption=AES256&tls_ca_file_path=/ca.pem&path_style=true",
        ),
        (fsspec(profile="me"), "s3://b/p", "s3://b/p?profile=me"),
    ],
    ids=name_of,
)
def test_a_file_system_that_can_be_read_is_its_uri(filesystem, path, uri):
    assert uri_of(filesystem, path) == uri


@pytest.mark.parametrize(
    "filesystem",
    [
        fs.S3FileSystem(access_key="AKIA", secret_key="hush-hush", region="x"),
        fs.AzureFileSystem("me", account_key="aHVzaC1odXNo"),
        fsspec(key="AKIA", secret="hush-hush"),
        fsspec(client_kwargs={"aws_access_key_id": "AKIA", "aws_secret_access_key": "hush-hush"}),
    ],
    ids=name_of,
)
def test_explicit_keys_are_refused_with_advice_and_not_repeated(filesystem):
    with pytest.raises(ConfigError, match=r"profile.*environment") as caught:
        uri_of(filesystem, "b/p")

    assert "hush" not in str(caught.value)
    assert "aHVz" not in str(caught.value)


class Strange(s3fs.S3FileSystem):
    pass


@pytest.mark.parametrize(
    ("filesystem", "name"),
    [
        (fs.PyFileSystem(fs.FSSpecHandler(Strange(skip_instance_cache=True))), "Strange"),
        (fsspec(client_kwargs={"verify": False}), "verify"),
        (fsspec(version_aware=True), "version_aware"),
        (fs.S3FileSystem(region="x", proxy_options="http://localhost:8020"), "proxy"),
        (fs.GcsFileSystem(target_service_account="someone@else"), "target_service_account"),
        (object(), "object"),
    ],
    ids=name_of,
)
def test_what_cannot_be_read_or_honoured_is_refused_by_name(filesystem, name):
    with pytest.raises(ConfigError, match=name):
        uri_of(filesystem, "b/p")


def test_a_relative_path_is_refused():
    with pytest.raises(ConfigError, match="absolute"):
        uri_of(fs.LocalFileSystem(), "runs")
