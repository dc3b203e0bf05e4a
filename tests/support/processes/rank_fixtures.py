"""Fixtures of tests with tensors: small stores, and four real ranks that save a training when a test wants it.

What loads torch is imported inside them, since pytest loads this file for every test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri

if TYPE_CHECKING:
    from tests.support.frameworks import fsdp_training
    from tests.support.processes.gloo_ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Holds an FSDP2 training's checkpoint in a folder ("file") and on S3 ("s3"), and the full tensors it must contain."""

    checkpoints: dict[str, Checkpoint]
    tensors: "fsdp_training.Tensors"


Trained = dict[int, Saved]
"""The checkpoints by the number of ranks that saved them."""


@pytest.fixture
def memory() -> Store:
    """Makes a store in memory, for tests that do not depend on the store."""
    return open_store(f"memory://{uuid4().hex}")


@pytest.fixture
def files(tmp_path) -> Store:
    """Makes a store that processes share."""
    return open_store(f"file://{tmp_path}/run")


@pytest.fixture
def group_of_one(tmp_path) -> Iterator[None]:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ranks(s3: str, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Ranks]":
    """Starts four processes. They inherit the S3 server's throw-away credentials, hence `s3`."""
    from tests.support.processes.gloo_ranks import Ranks

    ranks = Ranks(4, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def trained(ranks: "Ranks", s3: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Has two and four ranks train and save. Tests only read what they saved."""
    from tests.support.frameworks import fsdp_training
    from tests.support.processes.save_without_ray import claimed, committed

    found = {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp(f"saved-by-{world_size}")
        stores = {"file": open_store(f"file://{folder}"), "s3": open_store(join_uri(s3, folder.name))}
        names = {store.uri: claimed(store, world_size=world_size, step=3) for store in stores.values()}
        answers = ranks.run(fsdp_training.save_trained, world_size, names)
        checkpoints = {
            kind: committed(
                store, names[store.uri], [uploads[store.uri] for uploads, _ in answers], progress=fsdp_training.PROGRESS
            )
            for kind, store in stores.items()
        }
        found[world_size] = Saved(checkpoints=checkpoints, tensors=answers[0][1])
    return found
