"""Adapters out of the server: external weights by SDK 0.38 and its command line, archives as SDK 0.24.1 asks for them."""

import io
import os
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from safetensors.torch import load, load_file

import raycheck
from raycheck.bucket.store.address import join_uri
from raycheck.tinker.checkpoint_paths import folder_of
from raycheck.tinker.routes import downloads
from tests.support.frameworks.tinker_client import TIMEOUT_S, ask, new_model, train
from tests.support.servers.tinker_server import RunningServer, tinker_server
from tests.tinker.conftest import KEY


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> str:
    return f"file://{tmp_path_factory.mktemp('bucket')}"


@pytest.fixture(scope="module")
def server(base: str, bucket: str, tmp_path_factory) -> Iterator[RunningServer]:
    with tinker_server(base, bucket, tmp_path_factory.mktemp("state") / "server.sqlite") as running:
        yield running


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        data = answer.read()
        assert int(answer.headers["Content-Length"]) == len(data)
        return data


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Hands a redirect to the caller, as SDK 0.24.1 does."""

    def redirect_request(self, *arguments: object) -> None:
        del arguments


def address_of_archive(server: RunningServer, run: str, checkpoint: str) -> str:
    opener = urllib.request.build_opener(NoRedirect())
    with pytest.raises(urllib.error.HTTPError) as answer:
        opener.open(f"{server.url}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive", timeout=TIMEOUT_S)
    assert answer.value.code == 302
    assert answer.value.headers["Expires"].endswith("GMT")
    return str(answer.value.headers["Location"])


def test_external_weights_are_downloaded_by_the_sdks_command_line(server, connect, base, tmp_path: Path) -> None:
    model = new_model(connect(server), base)
    train(model, range(2))
    path = model.save_weights_external("final", ttl_seconds=7200).result(TIMEOUT_S).path

    done = subprocess.run(  # noqa: PLW1510  its return code is looked at below
        [sys.executable, "-m", "tinker.cli", "checkpoint", "download", path, "--output", str(tmp_path)],
        env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert path == f"tinker://{model.model_id}/external_weights/final"
    (config,) = tmp_path.rglob("adapter_config.json")
    adapter = load_file(config.with_name("adapter_model.safetensors"))
    assert any(tensor.abs().sum() for name, tensor in adapter.items() if "lora_B" in name), "it was trained"
    (listed,) = (
        tinker.RestClient(base_url=server.url, api_key=KEY).list_checkpoints(model.model_id).result().checkpoints
    )
    assert listed.checkpoint_type == "external"
    assert listed.expires_at is not None


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "bare name"])
def test_an_archive_holds_the_adapter(server, connect, base, kind: str) -> None:
    model = new_model(connect(server), base)
    train(model, range(1))
    save = model.save_state if kind == "weights" else model.save_weights_for_sampler
    save("one").result(TIMEOUT_S)

    data = fetched(address_of_archive(server, model.model_id, "one" if kind == "bare name" else f"{kind}/one"))

    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}  # type: ignore[union-attr]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= members.keys()
    tensors = load(members["adapter_model.safetensors"])
    assert any(tensor.abs().sum() for name, tensor in tensors.items() if "lora_B" in name)
    assert all("lora_A" in name or "lora_B" in name for name in tensors), "no state of the optimizer"


def test_a_packed_state_has_the_optimizer_too_and_goes_on_at_another_server(
    server, connect, base, bucket, tmp_path
) -> None:
    model = new_model(connect(server), base)
    train(model, range(2))
    path = model.save_state("two").result(TIMEOUT_S).path
    undisturbed = train(model, range(2, 4))
    folder, file = folder_of(model.model_id), str(tmp_path / "two.tar")

    raycheck.catalog.pack(join_uri(bucket, folder), file, at="weights.two")
    unpacked = f"file://{tmp_path}/bucket/{folder}"
    raycheck.catalog.unpack(file, unpacked)
    raycheck.open_run(unpacked).name_checkpoint(2, "weights.two")

    with tinker_server(base, f"file://{tmp_path}/bucket", tmp_path / "s.sqlite") as other:
        client = connect(other)
        resumed = client.create_training_client_from_state_with_optimizer(path).result(TIMEOUT_S)
        assert train(resumed, range(2, 4)) == undisturbed


def test_an_address_is_for_one_file_and_for_a_time(server, connect, base, monkeypatch) -> None:
    model = new_model(connect(server), base)
    model.save_weights_external("one").result(TIMEOUT_S)
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    path = f"tinker://{model.model_id}/external_weights/one"
    url = rest.get_external_weights_urls(path).result().urls["adapter_config.json"]

    assert fetched(url)
    for other in (url.replace("adapter_config.json", "archive.tar"), url.replace("/one/", "/two/")):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            fetched(other)
    monkeypatch.setattr(downloads, "VALID_S", -1)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        fetched(rest.get_external_weights_urls(path).result().urls["adapter_config.json"])


def test_direct_downloads_come_from_the_bucket(s3, connect, base, tmp_path) -> None:
    settings = {"direct_downloads": True}
    with tinker_server(base, join_uri(s3, "direct"), tmp_path / "server.sqlite", settings=settings) as server:
        model = new_model(connect(server), base)
        train(model, range(1))
        path = model.save_weights_external("one").result(TIMEOUT_S).path
        urls = tinker.RestClient(base_url=server.url, api_key=KEY).get_external_weights_urls(path).result().urls

    adapter = load(fetched(urls["adapter_model.safetensors"]))  # the server has ended

    assert any(tensor.abs().sum() for name, tensor in adapter.items() if "lora_B" in name)
    assert urls.keys() >= {"adapter_config.json", "adapter_model.safetensors"}


def test_what_is_not_there_and_encryption_are_refused(server, connect, base) -> None:
    model = new_model(connect(server), base)
    model.save_state("one").result(TIMEOUT_S)

    status, answer = ask(server.url, f"training_runs/{model.model_id}/checkpoints/sampler_weights/one/archive")
    assert (status, "no such checkpoint" in answer["detail"]) == (404, True)
    with pytest.raises(tinker.APIStatusError, match="does not encrypt"):
        model.save_weights_external("two", age_encryption_recipients=["age1abc"]).result(TIMEOUT_S)


def test_the_adapter_of_a_checkpoint_that_is_gone_goes_with_the_next_export(server, connect, base, bucket) -> None:
    model = new_model(connect(server), base)
    model.save_weights_external("first").result(TIMEOUT_S)
    model.save_weights_external("second").result(TIMEOUT_S)
    run = raycheck.open_run(f"{bucket}/{folder_of(model.model_id)}")
    key = next(item.key for item in run.checkpoints if item.name == "external_weights.first")
    raycheck.catalog.delete_checkpoint(
        f"{bucket}/{folder_of(model.model_id)}", key
    )  # which leaves the export, as an expiry does

    assert len(run.exports()) == 2
    model.save_weights_external("third").result(TIMEOUT_S)

    names = sorted(name.partition("-")[0] for name in run.exports())
    assert names == ["external_weights.second", "external_weights.third"]
