"""Credentials stay in the memory of the cluster's processes: those of the Ray tests are unique, so they can be found."""

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray._private import state, worker
from ray.experimental import internal_kv
from ray.train import TrainingFailedError

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.processes.ray_fixtures import SECRETS
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@pytest.fixture
def texts(job, s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd, monkeypatch) -> dict[str, bytes]:
    """Returns, by name, all that anybody can read of a run that commits, is denied its next save, and ends with that error."""
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # as where there is a dashboard
    caplog.set_level(logging.DEBUG, "raycheck")
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        proxy.rule("deny", "PUT", "step-000000008-.*__1_0.distcp", times=100)
        with pytest.raises(TrainingFailedError) as caught:
            raycheck.fit(job(storage, "run", epochs=2, settings={"max_failed_saves": 1}, max_failures=1))
        store = open_store(storage)
        found = {item.key: store.get(item.key).data for item in store.list_objects("")}
    found["storage"] = storage.partition("?")[0].encode()
    assert any(key.endswith("manifest.json") for key in found)
    assert "__1_0.distcp" in str(caught.value)
    out, err = capfd.readouterr()
    found["the error"] = "".join(traceback.format_exception(caught.value)).encode()
    found["the driver's output"] = (out + err + caplog.text).encode()
    return found | dict(of_ray())


def of_ray() -> Iterator[tuple[str, bytes]]:
    """Yields what Ray keeps of all jobs of this session: its logs, and what its dashboard shows of jobs, actors and runs."""
    logs = Path(worker._global_node.get_session_dir_path(), "logs")
    for path in logs.rglob("*"):
        if path.is_file():
            yield str(path.relative_to(logs)), path.read_bytes()
    yield "actors", repr(state.actors()).encode()
    yield "jobs", repr(state.jobs()).encode()
    for key in internal_kv._internal_kv_list(b""):
        yield f"kv {key!r}", internal_kv._internal_kv_get(key) or b""
    runs = ray.get_actor("train_v2_state_actor", namespace="_train_state_actor")
    yield "runs", repr(ray.get([runs.get_train_runs.remote(), runs.get_train_run_attempts.remote()])).encode()


def test_no_secret_is_in_a_log_an_error_an_object_or_on_rays_dashboard(texts: dict[str, bytes]) -> None:
    logs = [text for name, text in texts.items() if name.endswith((".out", ".err", ".log"))]
    assert any(texts["storage"] in text and b"committed step-" in text for text in logs), "it looks where logs are"
    assert b"step-000000008" in texts["runs"], "and where the dashboard's facts are"

    leaks = [name for name, text in texts.items() for secret in SECRETS if secret.encode() in text]

    assert leaks == []
