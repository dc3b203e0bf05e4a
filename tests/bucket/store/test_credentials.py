"""Tests the credentials that botocore finds, with both clients: they sign every request, and are renewed in time."""

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from raycheck import StorageSettings
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, StoreError
from tests.support.servers.http_fault_proxy import FaultProxy

ROLE = "arn:aws:iam::123456789012:role/train"


@pytest.fixture(autouse=True)
def alone(wire: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials but those that a test puts there."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{wire.port}")


@pytest.fixture(params=["s3fs", "obstore"])
def open_with(request: pytest.FixtureRequest, wire: FaultProxy, monkeypatch: pytest.MonkeyPatch):
    """Open a store that reads with one client or the other, on a run that has one object, `a`."""
    root = join_uri(wire.uri, uuid4().hex)
    open_store(root, StorageSettings(anonymous=True)).put("a", b"1")
    wire.heads.clear()
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)

    def open_one(**settings) -> Store:
        return open_store(root, StorageSettings(**settings))

    return open_one


def profile(folder: Path, name: str, **lines: str) -> None:
    with (folder / "config").open("a") as file:
        file.write(f"[profile {name}]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items()))


def keys(folder: Path, name: str, key_id: str) -> None:
    (folder / "credentials").write_text(f"[{name}]\naws_access_key_id = {key_id}\naws_secret_access_key = hush\n")


def process(folder: Path, *, lifetime_s: float) -> str:
    """A command that hands out a new key at each call, and notes when that key expires."""
    script = folder / "process.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"calls = pathlib.Path({str(folder / 'calls')!r})\n"
        "number = len(calls.read_text().splitlines()) if calls.exists() else 0\n"
        f"end = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds={lifetime_s})).isoformat()\n"
        "key = f'PROCESS{number}'\n"
        "calls.open('a').write(json.dumps([key, end]) + chr(10))\n"
        "print(json.dumps(dict(Version=1, AccessKeyId=key, SecretAccessKey='s', SessionToken='t', Expiration=end)))\n"
    )
    return f"{sys.executable} {script}"


def handed_out(folder: Path) -> dict[str, float]:
    lines = map(json.loads, (folder / "calls").read_text().splitlines())
    return {key: datetime.fromisoformat(end).timestamp() for key, end in lines}


def test_a_short_lived_key_is_renewed_before_it_expires(open_with, wire, tmp_path):
    profile(tmp_path, "short", credential_process=process(tmp_path, lifetime_s=20))
    store = open_with(profile="short")

    for _ in range(3):
        store.get_range("a", 0, 1)

    expiry = handed_out(tmp_path)
    assert len({head.key_id for head in wire.heads}) == 3, "botocore renews what has less than 10 minutes left"
    for head in wire.heads:
        assert head.at < expiry[head.key_id]


def test_a_long_lived_key_is_asked_for_once(open_with, wire, tmp_path):
    profile(tmp_path, "long", credential_process=process(tmp_path, lifetime_s=3600))
    store = open_with(profile="long")

    for _ in range(5):
        store.get_range("a", 0, 1)

    assert list(handed_out(tmp_path)) == ["PROCESS0"]
    assert {head.key_id for head in wire.heads} == {"PROCESS0"}


def test_both_engines_of_a_store_share_one_identity(wire, tmp_path):
    profile(tmp_path, "long", credential_process=process(tmp_path, lifetime_s=3600))
    store = open_store(join_uri(wire.uri, uuid4().hex), StorageSettings(profile="long"))

    store.put("a", b"1")
    store.get_range("a", 0, 1)

    assert len(handed_out(tmp_path)) == 1


def test_a_role_is_assumed_with_the_profiles_keys_and_again_before_it_expires(open_with, wire, tmp_path):
    keys(tmp_path, "source", "FROMPROFILE")
    store = open_with(profile="source", role_arn=ROLE)

    for _ in range(2):
        store.get_range("a", 0, 1)
    chain = store._chain
    now = chain._credentials._time_fetcher
    chain._credentials._time_fetcher = lambda: now() + timedelta(minutes=50)  # moto's roles last an hour
    chain._credentials._refresh_using.__self__._cache.clear()
    assert chain.frozen()

    asked = [head for head in wire.heads if head.method == "POST"]
    assert [head.key_id for head in asked] == ["FROMPROFILE"] * 2
    assert all(head.key_id.startswith("ASIA") for head in wire.heads if head.method == "GET")


def test_a_web_identity_is_exchanged_as_on_kubernetes(open_with, wire, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("a-service-account's-token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)

    open_with().get_range("a", 0, 1)

    assert [head.method for head in wire.heads] == ["POST", "GET"]
    assert wire.heads[1].key_id.startswith("ASIA")


def test_a_region_in_the_profile_holds_for_both_engines(wire, tmp_path, open_with):
    keys(tmp_path, "there", "KEY")
    profile(tmp_path, "there", region="ap-south-1")
    root = join_uri(wire.uri.replace("&region=us-east-1", ""), uuid4().hex)

    with pytest.raises(FileNotFoundError):
        open_store(root, StorageSettings(profile="there")).get("no-such")

    assert {head.region for head in wire.heads} == {"ap-south-1"}


def test_an_endpoint_in_the_profile_holds_for_both_engines(wire, tmp_path, open_with):
    keys(tmp_path, "there", "KEY")
    profile(tmp_path, "there", region="us-east-1", endpoint_url=f"http://127.0.0.1:{wire.port}")

    with pytest.raises(FileNotFoundError):
        open_store(f"s3://raycheck/{uuid4().hex}?profile=there").get("no-such")

    assert wire.heads


@pytest.mark.parametrize("name", ["AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"])
def test_hosts_that_only_botocore_knows_are_left_to_it(monkeypatch, name):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")

    for value, endpoint, is_left in (("true", None, True), ("false", None, False), ("true", "http://h:1", False)):
        monkeypatch.setenv(name, value)
        store = open_store("s3://bucket/run", StorageSettings(region="us-east-1", endpoint=endpoint))
        assert (store._without_retries is None) == is_left


def test_missing_credentials_are_a_configuration_error_with_advice(open_with):
    with pytest.raises(ConfigError, match=r"no credentials found.*AWS_PROFILE"):
        open_with().get("a")


def test_a_missing_profile_is_a_configuration_error_that_names_it(open_with):
    with pytest.raises(ConfigError, match="no-such-profile"):
        open_with(profile="no-such-profile").get("a")


def test_a_role_that_is_refused_is_a_configuration_error_that_names_it(open_with, wire, tmp_path):
    keys(tmp_path, "source", "FROMPROFILE")
    wire.rule("deny", "POST", "/", times=100)

    with pytest.raises(ConfigError, match="role/train could not be assumed"):
        open_with(profile="source", role_arn=ROLE).get("a")


def test_a_process_that_fails_is_an_error_of_the_store(open_with, tmp_path, monkeypatch):
    monkeypatch.setattr("raycheck.bucket.store.retry.CHANCE.uniform", lambda *_: 0.0)
    profile(tmp_path, "broken", credential_process=f"{sys.executable} -c 'raise SystemExit(3)'")

    with pytest.raises(StoreError, match="CredentialRetrievalError"):
        open_with(profile="broken").get("a")
