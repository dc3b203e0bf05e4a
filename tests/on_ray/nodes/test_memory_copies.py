"""What a node holds of memory checkpoints, and which node takes the copies. With Ray's actors: test_memory_checkpoints.py."""

import numpy as np
import pytest

import raycheck
from raycheck.group.coordinator.memory_checkpoints import Ring
from raycheck.on_ray.nodes.memory_shards import MemoryShards


def test_each_node_copies_to_the_next_one_and_to_another_zone_first() -> None:
    nodes = ["a", "b", "c", "d"]

    ring = Ring(nodes, dict.fromkeys(nodes, ""))

    assert [next(ring.neighbours(node)) for node in nodes] == ["b", "c", "d", "a"]
    assert [*Ring(nodes, {"a": "x", "b": "x", "c": "y", "d": "x"}).neighbours("a")] == ["c", "b", "d"]
    assert [*Ring(nodes, {"a": "", "c": ""}).neighbours("a")] == ["c"], "b and d are gone"
    assert [*Ring(["a"], {"a": ""}).neighbours("a")] == []


def test_no_node_takes_the_copies_of_many_others() -> None:
    nodes = [f"{zone}{number}" for zone in "ab" for number in range(8)]
    zones = {node: node[0] for node in nodes}

    ring = Ring(nodes, zones)
    first = [next(ring.neighbours(node)) for node in nodes]

    assert sorted(first) == nodes
    assert all(zones[node] != zones[other] for node, other in zip(nodes, first, strict=True))


def test_what_comes_late_is_not_held() -> None:
    shards = MemoryShards()
    names = ["step-000000004-a1-s0", "step-000000008-a1-s0", "step-000000002-a2-s0"]
    first, second, of_next_attempt = (f"checkpoints/{name}/train/__0_0.distcp" for name in names)
    shards.put(first, memoryview(b"abcd"))
    shards.put(second, memoryview(b"abcd"))

    shards.keep(names[0], (2, -1))
    shards.put(second, memoryview(b"late"))
    shards.receive(second, 4, 0, np.zeros(4, np.uint8))
    shards.put(of_next_attempt, memoryview(b"efgh"))

    assert shards.whole().keys() == {first, of_next_attempt}
    shards.keep(names[2], (2, 2))
    assert shards.whole().keys() == {of_next_attempt}


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(raycheck.errors.ConfigError, match='upload_by="node"'):
        raycheck.SaveSettings(memory_every_steps=5)
    with pytest.raises(raycheck.errors.ConfigError, match="memory_every_steps=0"):
        raycheck.SaveSettings(memory_every_steps=0, upload_by="node")
    settings = raycheck.SaveSettings(memory_every_steps=5, upload_by="node")
    with pytest.raises(raycheck.errors.ConfigError, match="memory_every_steps=5: ActorCheckpointer"):
        raycheck.ActorCheckpointer([object()], dict, "file:///nowhere", settings)
