"""Tests the error of a node that lacks a permission, for each verb of the store."""

import re
from uuid import uuid4

import pytest

from raycheck import StorageSettings
from raycheck.bucket.protocol.preflight import probe, probe_node
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, DeniedError, StoreError
from tests.support.servers.http_fault_proxy import fault_proxy
from tests.support.servers.rclone_server import rclone_server


def test_a_node_with_all_rights_passes_and_leaves_nothing(store):
    probe_node(store, node="10.0.0.7")

    assert list(store.list_objects("")) == []


@pytest.mark.parametrize(
    ("method", "path", "times", "verb", "permission"),
    [
        ("PUT", "probes/", 2, "put", "s3:PutObject"),
        ("GET", "probes/", 2, "get", "s3:GetObject"),
        ("GET", "list-type", 1, "list", "s3:ListBucket"),
        ("DELETE", "probes/", 1, "delete", "s3:DeleteObject"),
    ],
)
def test_a_missing_right_is_a_configuration_error_that_names_node_verb_and_permission(
    s3, method, path, times, verb, permission
):
    with fault_proxy(s3) as proxy:
        rule = proxy.rule("deny", method, path, times=times)
        store = open_store(join_uri(proxy.uri, uuid4().hex))

        with pytest.raises(ConfigError, match=rf"node 10\.0\.0\.7: {verb}: .*{permission}"):
            probe_node(store, node="10.0.0.7")

    assert rule.seen


def test_a_server_that_ignores_preconditions_is_refused_before_anything_is_written(s3):
    with rclone_server() as rclone:
        store = open_store(join_uri(rclone, "run"))

        with pytest.raises(ConfigError, match="although told not to"):
            probe(store)
        with pytest.raises(ConfigError, match="although told not to"):
            probe_node(store, node="n")

        assert list(store.list_objects("")) == []


def test_a_conditional_put_that_is_denied_is_told_apart_from_the_plain_one(s3):
    with fault_proxy(s3) as proxy:
        proxy.rule("delay", "PUT", "probes/", times=1)
        proxy.rule("deny", "PUT", "probes/", times=1)

        with pytest.raises(ConfigError, match=r"conditional put: .*s3:PutObject"):
            probe_node(open_store(join_uri(proxy.uri, uuid4().hex)), node="n")


def test_the_keys_permissions_are_named_where_encryption_is_on(s3):
    with fault_proxy(s3) as proxy:
        proxy.rule("deny", "PUT", "probes/", times=2)
        store = open_store(join_uri(proxy.uri, uuid4().hex), StorageSettings(encryption="aws:kms"))

        with pytest.raises(ConfigError, match=re.escape("kms:GenerateDataKey")):
            probe_node(store, node="n")


def test_a_broken_network_is_an_error_of_the_store_that_names_the_node(s3, monkeypatch):
    monkeypatch.setattr("raycheck.bucket.store.retry.CHANCE.uniform", lambda *_: 0.0)
    with fault_proxy(s3) as proxy:
        proxy.rule("reset", "PUT", "probes/", times=100)

        with pytest.raises(StoreError, match="node n: put: ") as caught:
            probe_node(open_store(join_uri(proxy.uri, uuid4().hex)), node="n")

    assert not isinstance(caught.value, ConfigError)


def test_a_missing_bucket_is_a_configuration_error_that_names_the_node(s3):
    store = open_store(s3.replace("s3://raycheck", "s3://no-such-bucket/run"))

    with pytest.raises(ConfigError, match=r"node n: put: .*no-such-bucket"):
        probe_node(store, node="n")


def test_a_denial_is_told_from_other_failures_also_after_pickling(s3):
    import pickle

    with fault_proxy(s3) as proxy:
        proxy.rule("deny", "PUT", "a", times=2)
        with pytest.raises(StoreError) as caught:
            open_store(join_uri(proxy.uri, uuid4().hex)).put("a", b"1")

    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, DeniedError)
    assert str(again) == str(caught.value)


def test_a_read_that_is_denied_says_that_the_object_may_be_missing(s3):
    with fault_proxy(s3) as proxy:
        proxy.rule("deny", "GET", "a", times=2)

        with pytest.raises(StoreError, match=r"s3:GetObject.*missing object.*s3:ListBucket"):
            open_store(join_uri(proxy.uri, uuid4().hex)).get("a")
