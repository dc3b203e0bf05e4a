"""Replicas that a mesh knows of are compared at every save, too: HSDP's, and DTensors that are whole on every rank."""

from typing import Any

import pytest
import torch

from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import SaveFailedError
from tests.support.frameworks.fsdp_training import Tensors
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import claimed, committed, restore_state
from tests.support.samples import drifted_shapes, parallel_shapes


def save(
    ranks: Ranks, store: Store, kind: str, *, keeps_drift: bool = False, **drift: Any
) -> tuple[Checkpoint, list[Tensors]]:
    """Returns each rank's own part of the model, too."""
    name = claimed(store, world_size=4, step=parallel_shapes.PROGRESS.step)
    answers = ranks.run(drifted_shapes.save_drifted, 4, kind, store.uri, name, drift)
    uploads = [upload for upload, _ in answers]
    checkpoint = committed(store, name, uploads, progress=parallel_shapes.PROGRESS, keeps_drift=keeps_drift)
    return checkpoint, [own for _, own in answers]


@pytest.mark.parametrize(
    ("kind", "drift", "said"),
    [
        ("hybrid", {"rank": 3, "parameter": "up.weight"}, r"tensor model\.up\.weight is not the same on ranks 1 and 3"),
        ("hybrid", {"rank": 0, "parameter": "up.weight"}, r"tensor model\.up\.weight is not the same on ranks 0 and 2"),
        (
            "hybrid",
            {"rank": 2, "parameter": "down.weight", "slot": "exp_avg"},
            r"tensor optimizer\.state\.down\.weight\.exp_avg is not the same on ranks 0 and 2",
        ),
        (
            "replicas x tensor parallel",
            {"rank": 3, "parameter": "up.weight"},
            r"tensor model\.up\.weight is not the same on ranks 1 and 3",
        ),
        ("replicated", {"rank": 2, "parameter": "weight"}, r"tensor model\.weight is not the same on ranks 0 and 2"),
        ("replicated", {"rank": 0, "parameter": "bias"}, r"tensor model\.bias is not the same on ranks 0, 1, 2 and 3"),
    ],
)
def test_a_replica_of_a_mesh_that_drifted_is_refused_by_name(
    files: Store, ranks: Ranks, kind: str, drift: dict[str, Any], said: str
):
    with pytest.raises(SaveFailedError, match=said):
        save(ranks, files, kind, **drift)


@pytest.mark.parametrize("kind", ["hybrid", "replicas x tensor parallel", "replicated", "pipeline", "fsdp"])
def test_replicas_that_are_equal_are_saved(files: Store, ranks: Ranks, kind: str):
    save(ranks, files, kind)


@pytest.mark.parametrize("rank", [1, 3])
def test_of_replicas_that_drifted_the_first_one_is_kept_whole(files: Store, ranks: Ranks, rank: int):
    checkpoint, own = save(ranks, files, "hybrid", keeps_drift=True, rank=rank, parameter="up.weight")

    plain = parallel_shapes.build("plain", 1, seed=3)
    restore_state(checkpoint, plain)
    first_replica = torch.cat([own[0]["up.weight"], own[1]["up.weight"]])
    assert torch.equal(plain["model"].up.weight, first_replica)
    assert checkpoint.read_manifest().drifted == ("tensor model.up.weight",)
