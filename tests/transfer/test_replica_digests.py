"""What the save digests on a device is not digested once more for the comparison with other ranks.

The tensors lie on the host here: only the place that SharedBox is told is a device.
"""

from dataclasses import replace

import pytest
import torch

from raycheck.bucket.assembly.replica_comparison import DIGEST_BYTES, Replica, digest_of
from raycheck.transfer.replica_digests import ReplicaDigests, SharedBox
from raycheck.transfer.stage.local_box import TRAIN, LocalBox, boxes_of
from raycheck.transfer.tensor_digest import digests


def box_on(device: str, name: str, component: str = "model.frozen") -> LocalBox:
    (box,) = boxes_of(name, (name,), torch.empty(3, device=device), may_spread=True, world_size=2)
    return replace(box, component=component)


def shared(box: LocalBox, *, is_written: bool = True, is_by_crc: bool = False) -> SharedBox:
    replica = Replica(key=box.name, label=box.name, cure="")
    return SharedBox.of(box, [replica], is_written=is_written, is_by_crc=is_by_crc)


@pytest.mark.parametrize(
    ("box", "how", "is_by_save"),
    [
        (box_on("meta", "w"), {}, True),
        (box_on("meta", "w"), {"is_written": False}, False),
        (box_on("meta", "w"), {"is_by_crc": True}, False),
        (box_on("meta", "w", TRAIN), {}, False),
        (box_on("cpu", "w"), {}, False),
    ],
)
def test_the_save_s_digest_counts_for_what_this_rank_writes_outside_train(
    box: LocalBox, how: dict[str, bool], is_by_save: bool
) -> None:
    assert (shared(box, **how).digested == "save") == is_by_save


def test_what_the_save_has_digested_is_taken_and_what_it_has_not_is_digested() -> None:
    boxes = [shared(box_on("meta", "known")), shared(box_on("meta", "not known"))]
    sources = [torch.ones(3), torch.arange(3)]
    replicas = ReplicaDigests(boxes, sources)

    replicas.release({"known@0": (7,)})
    replicas.wait()

    found = replicas.report([]).digests
    assert found[:DIGEST_BYTES] == digest_of((7,))
    assert found[DIGEST_BYTES:] == digest_of(digests(sources)[1])
