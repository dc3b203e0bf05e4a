"""Ray's own file system is tried before workers start: it must reach the place that raycheck's store reaches.

Real file systems before real servers; no Ray is started, for the check comes before that.
"""

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from pyarrow import fs
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import raycheck
from raycheck.bucket.diagnosis.checks import check_rules
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri, parse_uri, shown_uri
from raycheck.errors import ConfigError, StoreError
from raycheck.on_ray.api import run_location as ray_storage_module
from raycheck.on_ray.api.run_location import check_ray_storage, ray_storage, storage_uri
from tests.support.servers.http_fault_proxy import FaultProxy, of_s3
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket

HANGS_S = 3.0


def config(storage_path: str, **more: object) -> RunConfig:
    return RunConfig(name="my-run", storage_path=storage_path, **more)


def check(where: str) -> None:
    check_ray_storage(config(where), where, open_store(join_uri(where, "my-run")))


def check_by_pyarrow(where: str) -> None:
    """Checks the same place where the user has given Ray a file system of pyarrow's."""
    own = fs.S3FileSystem(endpoint_override=parse_uri(where).settings.endpoint, region="us-east-1")
    mine = config(where.removeprefix("s3://").partition("?")[0], storage_filesystem=own)
    check_ray_storage(mine, storage_uri(mine), open_store(join_uri(storage_uri(mine), "my-run")))


both_ways = pytest.mark.parametrize("check_it", [check_by_pyarrow, check], ids=["pyarrow", "fsspec"])


def left_in(where: str) -> list[str]:
    return [item.key for item in open_store(where).list_objects("")]


@pytest.mark.parametrize("form", ["{0}/runs", "file://{0}/runs", "file://{0}/my%20runs"])
def test_a_folder_is_reached_and_nothing_is_left_there(tmp_path: Path, form: str):
    where = form.format(tmp_path)

    check(where)

    assert left_in(where) == []


@both_ways
def test_a_bucket_is_reached_and_nothing_is_left_there(s3: str, check_it: Callable[[str], None]):
    where = join_uri(s3, uuid4().hex)

    check_it(where)

    assert left_in(where) == []


def test_a_google_emulator_is_reached_and_nothing_is_left_there(gcs: str):
    where = f"gs://raycheck/{uuid4().hex}"

    check(where)

    assert left_in(where) == []


@pytest.mark.slow
def test_azure_is_reached_and_nothing_is_left_there(azure: str):
    where = f"az://raycheck/{uuid4().hex}?account_name=devstoreaccount1"

    check(where)

    assert left_in(where) == []


@both_ways
def test_a_file_system_that_hangs_is_given_up_and_named(
    wire: FaultProxy, check_it: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_storage_module, "PROBE_S", HANGS_S)
    where = join_uri(wire.uri, uuid4().hex)
    wire.rule("hold", "GET|HEAD", "probes", times=99)

    with pytest.raises(ConfigError, match=r"Ray's own file system .* cannot read there .*: no answer in 3 s") as caught:
        check_it(where)

    assert str(caught.value).startswith(shown_uri(join_uri(where, "my-run")))
    assert "StorageSettings" in str(caught.value)


@both_ways
def test_a_file_system_that_may_not_read_is_named_with_its_reason(wire: FaultProxy, check_it: Callable[[str], None]):
    wire.rule("deny", "GET|HEAD", "probes", times=99)

    with pytest.raises(ConfigError, match="cannot read there what raycheck has written: "):
        check_it(join_uri(wire.uri, uuid4().hex))


@both_ways
def test_a_file_system_that_may_not_write_is_named_with_its_reason(wire: FaultProxy, check_it: Callable[[str], None]):
    wire.rule("deny", "PUT|POST", "probes/.*-ray", times=99)

    with pytest.raises(ConfigError, match="cannot write there: "):
        check_it(join_uri(wire.uri, uuid4().hex))


def test_another_place_is_told_from_this_one(tmp_path: Path):
    """Two places may have one name: a folder on two machines, or a bucket behind two endpoints."""
    here, there = f"file://{tmp_path}/here", f"file://{tmp_path}/there"

    with pytest.raises(ConfigError, match="cannot read there what raycheck has written: FileNotFoundError"):
        check_ray_storage(config(there), there, open_store(join_uri(here, "my-run")))

    assert left_in(here) == []


def test_a_failure_of_raychecks_own_side_is_its_own_error(wire: FaultProxy):
    wire.rule("deny", "PUT", "probes", times=99)

    with pytest.raises(StoreError, match="s3:PutObject"):
        check(join_uri(wire.uri, uuid4().hex))


def test_the_config_is_as_before_after_the_check(s3: str):
    where = join_uri(s3, uuid4().hex)
    mine = config(where)

    check_ray_storage(mine, where, open_store(join_uri(where, "my-run")))

    assert (mine.storage_path, mine.storage_filesystem) == (where, None)
    with ray_storage(mine, where):
        assert mine.storage_filesystem is not None


def test_fit_refuses_before_it_starts_a_ray(gcs: str, monkeypatch: pytest.MonkeyPatch):
    """Google's client in pyarrow looks for credentials, of which there are none here, for longer than anybody waits."""
    monkeypatch.setattr(ray_storage_module, "PROBE_S", HANGS_S)
    where = f"raycheck/{uuid4().hex}"
    trainer = TorchTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=config(where, storage_filesystem=fs.GcsFileSystem()),
    )

    with pytest.raises(ConfigError, match=r"gs://raycheck/.*GcsFileSystem.*cannot"):
        raycheck.fit(trainer)

    assert not ray.is_initialized()


def test_fit_refuses_what_the_doctor_calls_wrong_in_its_words_and_before_it_starts_a_ray(s3: str) -> None:
    uri = planted_bucket(s3, rules=[FROZEN_RULE])
    trainer = TorchTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=config(uri.replace("/my-run?", "?")),
    )

    (wrong,) = (finding for finding in check_rules(open_store(uri)) if finding.state == "wrong")
    with pytest.raises(ConfigError) as caught:
        raycheck.fit(trainer)

    assert wrong.sentence in str(caught.value)
    assert not ray.is_initialized()
    assert left_in(uri) == []


def test_a_store_that_takes_no_upload_without_its_length_is_written_by_ray_too(wire: FaultProxy) -> None:
    """Ceph answers 411 to what a current pyarrow sends: an upload in chunks, whose checksum comes last."""
    check(join_uri(wire.uri, uuid4().hex))

    sent = [head for head in wire.heads if head.method == "PUT"]
    assert any("-ray" in head.target for head in sent)
    for head in sent:
        assert "content-length" in head.headers
        assert "aws-chunked" not in head.headers.get("content-encoding", "")


def test_where_the_users_own_file_system_is_answered_411_the_error_names_the_cure(wire: FaultProxy) -> None:
    wire.rule("answer", "PUT|POST", "-ray", times=99, answer=of_s3("411 Length Required", "MissingContentLength"))

    with pytest.raises(ConfigError, match="set AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment"):
        check_by_pyarrow(join_uri(wire.uri, uuid4().hex))


def test_a_name_with_which_rays_controller_would_fail_is_refused_before_anything_starts(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        print,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="größe", storage_path=str(tmp_path / "runs")),
    )

    with pytest.raises(ConfigError, match=r"name=.größe.*names of ASCII alone.*may be in storage_path"):
        raycheck.fit(trainer)

    assert not ray.is_initialized()
    assert not (tmp_path / "runs").exists()
