"""An archive that an earlier version packed is still unpacked."""

import tarfile
from uuid import uuid4

import torch

import raycheck
from raycheck.bucket.store import open_store
from tests.golden.archive import ENTRY, FILE, STEP, model
from tests.support.histories.invariants import assert_invariants


def test_it_is_unpacked_to_the_state_that_was_packed() -> None:
    new = f"memory://{uuid4().hex}/new"

    done = raycheck.catalog.unpack(str(FILE), new)

    live = model(100.0)
    assert raycheck.open_run(new).restore(into={ENTRY: live}) == done.step == STEP
    wanted = model(0.0).state_dict()
    assert all(torch.equal(live.state_dict()[name], item) for name, item in wanted.items())
    body = assert_invariants(open_store(new))
    assert body is not None
    assert dict(body.live[0].metrics) == {"loss": 0.5}


def test_it_has_members_with_extended_headers_and_is_small() -> None:
    with tarfile.open(FILE) as archive:
        long = [item for item in archive if item.pax_headers]

    assert [item.name.rpartition("/")[2] for item in long] == [".metadata", "__0_0.distcp"]
    assert FILE.stat().st_size < 40_000
