"""Makes worlds with a run in them, from which tests begin."""

from functools import cache

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol import paging
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.store.interface import Upload
from tests.support.histories.invariants import assert_write
from tests.support.samples.sample_checkpoints import Driver, write_checkpoint
from tests.support.servers.fault_injection import Wire, World

A = "step-000000010-a1-s1"  # evicted; its `train` is held by B
B = "step-000000020-a1-s2"  # pinned
TORN, WHOLE = "step-000000030-a1-s3", "step-000000040-a1-s4"  # never committed, by an attempt that is over
E = "step-000000010-a2-s1"  # evicted
F = "step-000000020-a2-s2"  # head, of the attempt that is live
GRACE_S = 600.0


def new() -> World:
    world = World()
    world.checks.append(assert_write)
    return world


@cache
def _old(most_newest: int) -> World:
    del most_newest
    world = new()
    ann = Driver(world.open())
    ann.claim("g1")
    base = ann.save(1, 1)
    pin(ann.register, ann.save(1, 2, base=base).key)
    world.open().put(object_keys.shard_key(TORN, "train", 0), b"all that there is")
    write_checkpoint(world.open(), attempt=1, save=4)
    ann.claim("g2")
    ann.save(2, 1)
    ann.save(2, 2, keep_last=1)
    world.inner.uploads += [
        Upload(object_keys.shard_key(TORN, "train", 1), "1"),
        Upload(object_keys.shard_key(F, "x", 0), "2"),
    ]
    world.inner.at += GRACE_S + 60
    return world


def old() -> World:
    """Make a run of ann's in its second attempt, with every kind of leftover."""
    return _old(paging.MOST_NEWEST).copy()


def current(wire: Wire) -> Driver:
    """Make the coordinator of the live attempt of `old`, which has seen `latest`."""
    driver = Driver(wire)
    driver.look()
    return driver


def finished() -> World:
    """Make the run of `old` after its live attempt has come to the end of training."""
    world = old()
    current(world.open()).finish("g2")
    return world


def lost() -> World:
    """Make the run of `old` without its `latest`."""
    world = old()
    world.inner.delete(object_keys.LATEST_KEY)
    del world.objects[object_keys.LATEST_KEY]
    world.bodies.clear()
    return world


def rolled_back() -> World:
    """Make the run of `old` with the `latest` of its first attempt."""
    world = old()
    body = world.bodies[2]
    world.inner.put(object_keys.LATEST_KEY, body)
    world.objects[object_keys.LATEST_KEY] = body
    world.bodies.clear()
    return world


def damaged() -> World:
    """Make the run of `old` with a `latest` that is cut short."""
    world = old()
    body = world.bodies[-1][:99]
    world.inner.put(object_keys.LATEST_KEY, body)
    world.objects[object_keys.LATEST_KEY] = body
    world.bodies.clear()
    return world
