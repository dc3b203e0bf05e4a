"""Storage settings that are given to `fit` reach all that write: the workers, the coordinator, and Ray itself."""

from uuid import uuid4

import pytest
from pyarrow.fs import LocalFileSystem, S3FileSystem

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.bucket.protocol.test_iam_policy import refused
from tests.support.histories.invariants import assert_invariants
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def test_settings_given_to_fit_reach_workers_coordinator_and_ray(job, s3: str) -> None:
    settings = raycheck.StorageSettings(encryption="AES256", requester_pays=True)
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        trainer = job(storage, "run", epochs=1)

        result = raycheck.fit(trainer, storage=settings)

        assert (trainer.run_config.storage_path, trainer.run_config.storage_filesystem) == (storage, None)
        writes = [head for head in proxy.heads if head.method == "PUT"]
        assert any("/shard" in head.target or ".distcp" in head.target for head in writes), "by a worker"
        assert any(head.target.endswith("latest") for head in writes), "by the coordinator"
        assert any(".validate_storage_marker" in head.target for head in writes), "by Ray"
        assert refused("trainer", proxy.requests) == []
        for head in writes:
            if "partNumber=" not in head.target:  # the request that begins an upload says it for all of its parts
                assert head.headers.get("x-amz-server-side-encryption") == "AES256", head.target
            assert head.headers.get("x-amz-request-payer") == "requester", head.target
        checkpoint = raycheck.open_checkpoint(result.checkpoint)
        assert checkpoint.step == 12
        assert "encryption=AES256" in checkpoint.uri
        assert raycheck.open_run(join_uri(storage, "run"), settings).head._stored.entry == checkpoint._stored.entry
        assert_invariants(open_store(join_uri(storage, "run")))


@pytest.mark.slow
def test_a_file_system_that_can_be_read_is_as_good_as_its_uri_also_without_fit(job, s3: str) -> None:
    root = uuid4().hex
    with fault_proxy(s3) as proxy:
        endpoint = f"127.0.0.1:{proxy.port}"
        files = S3FileSystem(endpoint_override=endpoint, scheme="http", region="us-east-1")
        trainer = job(join_uri(proxy.uri, root), "run", epochs=1)
        trainer.run_config.storage_path = f"raycheck/{root}"
        trainer.run_config.storage_filesystem = files

        result = trainer.fit()

        assert raycheck.open_checkpoint(result.checkpoint).step == 12
        assert refused("trainer", proxy.requests) == []
    assert_invariants(open_store(join_uri(join_uri(s3, root), "run")))


@pytest.mark.slow
def test_a_local_file_system_is_read_too(job, tmp_path) -> None:
    trainer = job(f"{tmp_path}/my runs", "run", epochs=1)
    trainer.run_config.storage_filesystem = LocalFileSystem()

    result = raycheck.fit(trainer)

    assert raycheck.open_checkpoint(result.checkpoint).step == 12
    assert_invariants(open_store(f"{tmp_path}/my runs/run"))


def test_settings_that_mean_nothing_there_are_refused_before_anything_starts(job, tmp_path) -> None:
    trainer = job(f"file://{tmp_path}/runs", "run")

    with pytest.raises(raycheck.errors.ConfigError, match=r"encryption.*file"):
        raycheck.fit(trainer, storage=raycheck.StorageSettings(encryption="AES256"))

    assert not (tmp_path / "runs").exists()
