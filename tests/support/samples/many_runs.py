"""Makes buckets with many small runs in them, in every state."""

import time
from collections.abc import Mapping

from raycheck.bucket.attempt_records import record_failure
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.store import Store
from tests.support.samples.sample_checkpoints import Driver, latest_tree, put_latest_tree
from tests.support.servers.memory_store import DictStore

DAY_S = 86400.0


def place(store: Store, folder: str, objects: Mapping[str, bytes]) -> None:
    """Put a run's objects into a folder of a bucket."""
    for key, data in objects.items():
        store.put(f"{folder}/{key}", data)


def a_run(*, steps: int = 2, ago_s: float = 0.0, state: str = "running") -> Mapping[str, bytes]:
    """Make the objects of a run whose last sign of life was `ago_s` seconds ago. state: what becomes of it afterwards."""
    store = DictStore(at=time.time() - ago_s)
    driver = Driver(store)
    driver.claim("g")
    tree = latest_tree(store)
    tree["attempts"][0]["claimed_at"] = store.at  # a first claim has no answer yet that tells the store's time
    put_latest_tree(store, tree)
    for number in range(1, steps + 1):
        driver.save(1, number)
    body = driver.look()
    if state == "finished":
        driver.finish("g")
    elif state in ("died", "hopeless"):
        record_failure(store, body.attempt, at=store.at, cause="rank 0: out of memory", is_final=state == "hopeless")
    elif state == "rewound":
        rewind(driver.register, body.live[0].key)
    elif state == "lost":
        store.delete(object_keys.LATEST_KEY)
    elif state == "torn":
        store.put(object_keys.LATEST_KEY, store.get(object_keys.LATEST_KEY).data[:-40])
    elif state == "newer":
        put_latest_tree(store, latest_tree(store) | {"format_version": 99})
    else:
        assert state == "running", state
    return dict(store.objects)


def mixed_runs() -> dict[str, tuple[str, Mapping[str, bytes]]]:
    """Return one run in each state, by its folder: the state that a listing of now gives it, and its objects."""
    return {
        "ann/running": ("running", a_run()),
        "ann/finished": ("finished", a_run(state="finished")),
        "bob/died": ("died", a_run(ago_s=DAY_S, state="died")),
        "bob/hopeless": ("died", a_run(ago_s=DAY_S, state="hopeless")),
        "bob/silent": ("silent", a_run(ago_s=DAY_S)),
        "bob/idle": ("idle", a_run(ago_s=DAY_S, state="rewound")),
        "young": ("uncommitted", a_run(steps=0, ago_s=DAY_S)),
        "starting": ("running", a_run(steps=0)),
        "lost": ("lost", a_run(state="lost")),
        "deep/er/torn": ("damaged", a_run(state="torn")),
        "newer": ("newer", a_run(state="newer")),
    }
