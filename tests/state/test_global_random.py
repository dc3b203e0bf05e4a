"""A training that saves, sees requests fail, restores and exports draws the global random numbers of one that does not."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.huggingface.export import export_hf
from tests.support.processes.save_without_ray import restore_state, save_state
from tests.support.samples.hf_models import llama
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy
from tests.support.servers.s3_engines import by_s3fs_alone

ENGINES = ["memory", "file", "s3fs", "obstore", "gs"]


@pytest.fixture(params=ENGINES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, FaultProxy | None]]:
    """Returns a store of each engine; those behind a network are reached through a proxy that makes faults."""
    if request.param in ("memory", "file"):
        yield open_store(f"memory://{uuid4().hex}" if request.param == "memory" else f"{tmp_path}/run"), None
        return
    if request.param == "gs":
        endpoint = request.getfixturevalue("gcs").removeprefix("http://")
        with fault_proxy(f"gs://raycheck?endpoint_override={endpoint}") as proxy:
            query = f"endpoint_override=127.0.0.1:{proxy.port}&scheme=http&anonymous=true"
            yield open_store(f"gs://raycheck/{uuid4().hex}?{query}"), proxy
        return
    with fault_proxy(request.getfixturevalue("s3")) as proxy:
        store: Any = open_store(join_uri(proxy.uri, uuid4().hex))
        yield by_s3fs_alone(store) if request.param == "s3fs" else store, proxy


def global_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  the global generator is the one to leave alone
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


def test_saves_failing_requests_restores_and_exports_draw_no_global_random_number(
    place: tuple[Store, FaultProxy | None], tmp_path: Path
):
    store, wire = place
    model = llama()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    random.gauss(0, 1)
    before = global_states()

    rules = [wire.rule("busy", method, "", times=2) for method in ("PUT|POST", "GET")] if wire else []
    checkpoint = save_state(store, state)
    after_save = global_states()
    rules += [wire.rule("busy", "GET", "(/|%2F)index", times=2)] if wire else []
    restore_state(checkpoint, state)
    after_restore = global_states()
    export_hf(checkpoint, f"{tmp_path}/hf")

    assert [after_save, after_restore, global_states()] == [before] * 3
    assert not any(rule.times for rule in rules), "each fault has met a request"
