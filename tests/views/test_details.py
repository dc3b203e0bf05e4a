"""How many workers saved a checkpoint and how many can restore it, in words: from what it has, not from what one hopes."""

from uuid import uuid4

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.state.train_state import TrainState
from raycheck.views.details import CheckpointDetails, details_of
from tests.support.processes.save_without_ray import agreed, save

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def saved(*states: dict[str, object], values: bool = True) -> CheckpointDetails:
    """Save the state of each rank, and return the details of the checkpoint."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    ranks = [TrainState({"model": model, **own}, rank=rank, world_size=len(states)) for rank, own in enumerate(states)]
    checkpoint = save(open_store(f"memory://{uuid4().hex}"), [rank.stage(Progress(step=1)) for rank in agreed(ranks)])
    manifest = checkpoint.read_manifest()
    return details_of(manifest, checkpoint.read_index(manifest, values=values))


def test_what_all_workers_share_restores_on_any_number() -> None:
    assert saved({}, {}).workers == "saved by 2; restores on any number"


def test_what_each_worker_has_for_itself_is_named() -> None:
    loaders = [StatefulDataLoader(range(8), batch_size=2) for _ in range(2)]

    found = saved(*({"loader": loader, "own": raycheck.PerRank({"seen": 1})} for loader in loaders))

    assert found.per_rank == ("loader", "own")
    assert found.workers == (
        "saved by 2; restores on any number "
        "(loader, own: one for each worker; if that is a data loader, only 2 can restore it)"
    )


def test_without_the_values_it_is_not_known_and_not_said() -> None:
    found = saved({"own": raycheck.PerRank(1)}, {"own": raycheck.PerRank(2)}, values=False)

    assert found.per_rank is None
    assert found.workers == "saved by 2"
