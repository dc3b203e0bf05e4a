"""A run with a frozen part, so that its second checkpoint refers to the first one, and the archive of that."""

import io
from dataclasses import dataclass
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from tests.support.processes.save_without_ray import save_state


def a_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 8))
    model[0].requires_grad_(False)
    return model


@dataclass(frozen=True)
class Sample:
    """A run whose head is of step 9 and takes `model.frozen` from step 4."""

    uri: str
    store: Store
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def pack(self, **options) -> bytes:
        sink = io.BytesIO()
        raycheck.catalog.pack(self.uri, sink, **options)
        return sink.getvalue()


def make_sample(uri: str) -> Sample:
    store, model = open_store(uri), a_model()
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    for number, step in enumerate((4, 9), 1):
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "note": {"words": ["a", "b"], "pair": (1, 2)}}
        save_state(store, state, save_number=number, step=step, metrics={"loss": 1.0 / step})
    return Sample(uri, store, model, optimizer)


@pytest.fixture
def sample() -> Sample:
    return make_sample(f"memory://{uuid4().hex}/run")


@pytest.fixture(params=["memory", "file", "s3", "gs", pytest.param("az", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path) -> str:
    """A free prefix in each kind of store."""
    from tests.conftest import new_root

    base = new_root(request, tmp_path)
    return join_uri(base, "catalog")
