"""Tests that storage settings that cannot work are refused, and that settings are equal from every source."""

import pickle
from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from raycheck import StorageSettings
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import is_same_place, join_uri, parse_uri, path_below, with_settings
from raycheck.errors import ConfigError

FIELDS = [field.name for field in fields(StorageSettings)]
texts = st.text(st.characters(categories=["L", "N"], include_characters=" /&=?#+%:@é"), min_size=1)
settings = st.builds(
    lambda identity, encryption, **rest: StorageSettings(**identity, **encryption, **rest),
    identity=st.one_of(
        st.fixed_dictionaries({}, optional={"anonymous": st.booleans()}),
        st.fixed_dictionaries({"profile": texts}),
        st.fixed_dictionaries({"role_arn": texts.map("arn:".__add__)}, optional={"external_id": texts}),
    ),
    encryption=st.one_of(
        st.fixed_dictionaries({}, optional={"encryption": st.just("AES256")}),
        st.fixed_dictionaries({"encryption": st.just("aws:kms")}, optional={"kms_key_id": texts}),
    ),
    endpoint=st.sampled_from([None, "http://127.0.0.1:9000", "https://s3.example.com"]),
    region=st.none() | texts,
    requester_pays=st.none() | st.booleans(),
    ca_bundle=st.none() | texts,
    path_style=st.none() | st.booleans(),
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"kms_key_id": "k"}, "kms_key_id"),
        ({"kms_key_id": "k", "encryption": "AES256"}, "kms_key_id"),
        ({"encryption": "rot13"}, "encryption"),
        ({"anonymous": True, "profile": "me"}, "profile"),
        ({"anonymous": True, "role_arn": "arn:aws:iam::1:role/r"}, "role_arn"),
        ({"external_id": "x"}, "external_id"),
        ({"role_arn": "train"}, "role_arn"),
        ({"endpoint": "127.0.0.1:9000"}, "endpoint"),
        ({"endpoint": "ftp://127.0.0.1"}, "endpoint"),
        ({"endpoint": "http://"}, "endpoint"),
        ({"endpoint": "http://host:port"}, "endpoint"),
        ({"region": ""}, "region"),
        ({"region": 3}, "region"),
        ({"anonymous": "yes"}, "anonymous"),
        ({"path_style": 1}, "path_style"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_field(wrong, name):
    with pytest.raises(ConfigError, match=name):
        StorageSettings(**wrong)


@pytest.mark.parametrize(
    "endpoint", ["https://me:hush-hush@host", "https://host/?sig=hush-hush", "https://h/#hush-hush"]
)
def test_credentials_in_an_endpoint_are_refused_and_not_repeated(endpoint):
    with pytest.raises(ConfigError) as caught:
        StorageSettings(endpoint=endpoint)

    assert "hush-hush" not in str(caught.value)


def test_an_unknown_key_of_a_file_is_named_with_the_known_ones_and_its_value_is_not():
    with pytest.raises(ConfigError, match=r"secret_key.*endpoint, region, profile") as caught:
        StorageSettings.from_mapping({"region": "eu-west-3", "secret_key": "hush-hush"})

    assert "hush-hush" not in str(caught.value)


def test_a_mapping_is_what_yaml_gives():
    found = StorageSettings.from_mapping({"region": "eu-west-3", "anonymous": True, "profile": None})

    assert found == StorageSettings(region="eu-west-3", anonymous=True)


@profile(deadline=None)
@given(settings)
def test_settings_travel_in_a_uri_unchanged(made):
    uri = with_settings("s3://bucket/runs", made)

    assert parse_uri(uri).said == made
    assert parse_uri(join_uri(uri, "my-run")).said == made
    assert parse_uri(join_uri(uri, "my-run")).prefix == "runs/my-run"
    assert with_settings(uri, made) == uri


@profile(deadline=None)
@given(settings, settings)
def test_an_argument_wins_over_the_query_field_by_field(upper, lower):
    merged = parse_uri(with_settings(with_settings("s3://bucket/runs", lower), upper)).said

    for name in FIELDS:
        mine, theirs = getattr(upper, name), getattr(lower, name)
        assert getattr(merged, name) in ((mine,) if mine is not None else (theirs, None))


def test_environment_is_lowest_and_holds_where_the_store_is_opened(monkeypatch):
    monkeypatch.setenv("RAYCHECK_STORAGE_REGION", "from-environment")
    monkeypatch.setenv("RAYCHECK_STORAGE_REQUESTER_PAYS", "true")
    monkeypatch.setenv("AWS_REGION", "from-aws")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")

    uri = with_settings("s3://bucket/run?region=from-query", StorageSettings(requester_pays=False))

    assert "environment" not in uri
    assert parse_uri(uri).settings == StorageSettings(
        region="from-query", requester_pays=False, endpoint="http://127.0.0.1:2"
    )
    assert parse_uri("s3://bucket/run").settings.region == "from-environment"


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_come_from_the_environment(monkeypatch, name):
    needs = {"kms_key_id": {"ENCRYPTION": "aws:kms"}, "external_id": {"ROLE_ARN": "arn:x"}}.get(name, {})
    values = {"role_arn": "arn:x", "endpoint": "http://h", "encryption": "AES256"}
    value = values.get(name, "true" if name in ("anonymous", "requester_pays", "path_style") else "x")
    for variable, text in ({name.upper(): value} | needs).items():
        monkeypatch.setenv(f"RAYCHECK_STORAGE_{variable}", text)

    assert getattr(parse_uri("s3://bucket/run").settings, name) in (value, True)


def test_amazons_variables_are_for_s3_only(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_REGION", "eu-west-3")

    assert parse_uri("gs://bucket/run").settings == StorageSettings()
    assert parse_uri("az://container/run?account_name=me").settings == StorageSettings()


def test_environment_of_other_stores_does_not_trouble_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYCHECK_STORAGE_ENCRYPTION", "AES256")

    open_store(f"{tmp_path}/run").put("a", b"1")

    assert (tmp_path / "run/a").exists()


@pytest.mark.parametrize(
    ("uri", "wrong"),
    [
        ("file:///runs", {"encryption": "AES256"}),
        ("/runs", {"region": "eu-west-3"}),
        ("memory://runs", {"anonymous": True}),
        ("gs://bucket", {"region": "eu-west-3"}),
        ("az://container?account_name=me", {"requester_pays": True}),
    ],
)
def test_a_setting_that_means_nothing_to_a_scheme_is_refused_by_both_names(uri, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        open_store(uri, StorageSettings(**wrong))

    assert f"{uri.partition('://')[0] if '://' in uri else 'file'}://" in str(caught.value)


def test_no_settings_leave_a_uri_alone():
    for uri in ("/runs", "file:///runs", "s3://b/p?region=x&scheme=http&endpoint_override=h", "gcs://b"):
        assert with_settings(uri, StorageSettings()) == uri


def test_both_ways_of_writing_an_azure_address_name_one_place(monkeypatch):
    written = "az://runs/a/b?account_name=me", "abfss://runs@me.dfs.core.windows.net/a/b"

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")

    assert is_same_place(*written)
    assert is_same_place(written[0], "az://runs/a/b")
    assert not is_same_place(written[0], "az://runs/a/b?account_name=you")


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("s3://bucket/runs/one/exports/final?region=eu-1", "exports/final"),
        ("s3://bucket/runs/one/a%20b/?region=eu-1", "a b"),
        ("s3://bucket/runs/one?region=eu-1", None),
        ("s3://bucket/runs/one-more?region=eu-1", None),
        ("s3://bucket/runs/one/exports?region=eu-2", None),
        ("s3://other/runs/one/exports?region=eu-1", None),
        ("gs://bucket/runs/one/exports", None),
    ],
)
def test_a_place_inside_another_is_one_only_if_it_is_reached_in_the_same_way(uri, path) -> None:
    assert path_below("s3://bucket/runs/one?region=eu-1", uri) == path


def test_a_bucket_itself_contains_places() -> None:
    assert path_below("s3://bucket", "s3://bucket/one") == "one"
    assert path_below("memory://all", "memory://all/one/two") == "one/two"


def test_an_azure_account_stays_when_settings_are_folded_in():
    uri = with_settings("az://runs/a?account_name=me", StorageSettings(anonymous=True))

    assert (parse_uri(uri).account, parse_uri(uri).said.anonymous) == ("me", True)


@pytest.mark.parametrize(
    "uri",
    [
        "az://runs/a",
        "abfss://runs/a",
        "abfss://runs:hush-hush@me.dfs.core.windows.net/a",
        "abfss://runs@me.dfs.core.windows.net:hush-hush@x/a",
        "abfss://runs@me.elsewhere.example/a",
        "gs://me@bucket/a",
    ],
)
def test_an_address_without_account_or_with_credentials_is_refused(monkeypatch, uri):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)

    with pytest.raises(ConfigError) as caught:
        open_store(uri)

    assert "hush-hush" not in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "https://acct.blob.core.windows.net/run?sv=2024&sig=hush-hush",
        "s3a://b/run?secret_key=hush-hush",
        "s3://b/run?secret_key=hush-hush",
        "s3://AKIA:hush-hush]x@bucket/run",
        "s3://[b?key=hush-hush",
        "s3://b/run?endpoint_override=h/?sig=hush-hush",
    ],
)
def test_no_error_about_a_uri_repeats_its_secrets(uri):
    for storage in (None, StorageSettings(region="eu-west-3")):
        with pytest.raises(ConfigError) as caught:
            open_store(uri, storage)

        assert "hush-hush" not in str(caught.value)


def test_settings_are_plain_values():
    made = StorageSettings(region="eu-west-3")

    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(StorageSettings(region="eu-west-3"))
    assert not [name for name in asdict(made) if "secret" in name or "token" in name or name == "key"]
