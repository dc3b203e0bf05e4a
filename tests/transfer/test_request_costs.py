"""The requests of a save as they arrive at an S3 server, against the steps of FORMAT.md (13, 16, 17 and 20)."""

from dataclasses import dataclass
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.removal import prune_and_sweep
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.catalog import SavePlan
from raycheck.catalog.doctor.plan import requests_of
from raycheck.settings import Retention
from raycheck.state.train_state import Progress, TrainState
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import ME, claimed, save_state, upload
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

WORLD_SIZE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """Numbers of requests. puts: all that are priced as a PUT, which POST and LIST are."""

    puts: int = 0
    gets: int = 0
    deletes: int = 0


def sent(proxy: FaultProxy) -> Requests:
    """Returns the requests that came since the last call."""
    verbs = ["PUT" if "list-type" in line else line.split(" ")[0] for line in proxy.requests]
    proxy.requests.clear()
    return Requests(
        puts=verbs.count("PUT") + verbs.count("POST"),
        gets=verbs.count("GET") + verbs.count("HEAD"),
        deletes=verbs.count("DELETE"),
    )


@pytest.mark.parametrize("elements", [1_000, 4_300_000])
def test_a_save_sends_the_requests_that_are_counted(s3, elements: int) -> None:
    with fault_proxy(s3) as proxy:
        store = open_store(join_uri(proxy.uri, uuid4().hex))
        older = save_state(store, {"own": {"a": torch.zeros(4)}})
        name = claimed(store, world_size=WORLD_SIZE, step=2)
        reports, puts = [], 0
        for rank in range(WORLD_SIZE):
            state = {"own": raycheck.PerRank({"part": torch.zeros(elements)})}
            staged = TrainState(state, rank=rank, world_size=WORLD_SIZE).stage(Progress(step=2))
            sent(proxy)

            uploaded = upload(store, staged, name=name)

            size = uploaded.records[0].size_bytes
            parts = -(-size // store.part_bytes(size))
            upload_requests = sent(proxy)
            assert upload_requests == Requests(puts=1 if parts == 1 else parts + 2)  # in parts: begun and ended
            puts += upload_requests.puts
            attempt = int(name.split("-a")[1].split("-")[0])
            reports.append(
                Report(
                    group="group",
                    rank=rank,
                    world_size=WORLD_SIZE,
                    attempt=attempt,
                    save=1,
                    progress=Progress(step=2),
                    shards=uploaded.records,
                    section=uploaded.section,
                )
            )
        register = Register(store)
        register.read()
        sent(proxy)

        made = assemble(store, reports)
        at = put_all_once(store, made.documents)
        protocol.commit(register, ME, made.manifest, made.manifest_bytes, Retention(keep_last=1), at=at)

        assert sent(proxy) == Requests(puts=4)  # .metadata, index and manifest; the swap of a `latest` that is known
        prune_and_sweep._delete_checkpoint(store, older.entry.key, is_held=False)
        assert sent(proxy) == Requests(puts=1, deletes=4)  # a listing; manifest, index, .metadata and the shard
        assert [entry.key for entry in assert_invariants(store).live] == [name]
        counted = requests_of(SavePlan(size_bytes=WORLD_SIZE * size, world_size=WORLD_SIZE), store.part_bytes(size))
        assert counted.puts == puts + 4 + 1, "what raycheck doctor says that a save costs"
