"""What vLLM loads models from `s3://` with has every whole version, to the bit."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.published.weights import Trained
from tests.support.frameworks.model_streamer import digest_of, streamed
from tests.support.servers.ceph_server import ceph_server


@pytest.mark.slow
@pytest.mark.server
def test_it_loads_the_whole_versions_in_the_bucket(tmp_path: Path):
    with ceph_server("memstore") as cluster:
        trained = Trained(open_store(join_uri(cluster.uri, "run")), tmp_path / "cache")
        endpoint = f"http://{parse_qs(urlsplit(cluster.uri).query)['endpoint_override'][0]}"
        bucket = urlsplit(cluster.uri).netloc
        expected = {}
        for _ in range(3):
            done = trained.publish(whole_every=2)
            expected[done.version.directory] = done.version.is_whole, trained.weights
        run = raycheck.open_run(trained.store.uri)
        whole = [version for version in run.published().versions if version.is_whole]
        assert len(whole) == 2

        for version in whole:
            keys = [item.key for item in trained.store.list_objects(f"published/{version.directory}/")]
            uris = [f"s3://{bucket}/run/{key}" for key in keys if key.endswith(".safetensors")]
            is_whole, weights = expected[version.directory]

            assert is_whole
            assert streamed(uris, endpoint) == {name: digest_of(values) for name, values in weights.items()}
