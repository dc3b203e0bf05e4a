"""Measures what a coordinator of thousands of ranks costs: CPU, memory, messages, and how long after the last rank.

`python -m tests.bench.many_ranks`. The ranks are simulated: each one's messages are made by raycheck's own classes and
pickled before the clock starts, the coordinator's methods are called with what is unpickled, and each answer is pickled
again. The store is in memory. Times are CPU seconds of all threads of the coordinator's process, since the machine may
be shared. "after the last" is the part from the arrival of the last rank's message until all ranks have their answers.
`--ray` has the ranks call a coordinator that is a Ray actor (many_ray_ranks.py).
`--before PATH` measures an older tree in the same run, case by case, each in a process of its own, up to --before-ranks.
"""

import argparse
import asyncio
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.replica_agreement import Agreement, HeldBox, Holdings, ValueChecksums
from raycheck.bucket.assembly.replica_comparison import RankDigests, Replica, digest_of, dump_names
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index import Chunk, Leaf, Tensor, index_of
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.format.progress import Progress
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.coordinator.cluster import Cluster
from raycheck.group.coordinator.messages import (
    Arrival,
    HeldShard,
    Pending,
    RankProof,
    RankRestore,
    RestoreDecision,
)

HEAD, FRAME = 704, 1184
RANKS_PER_NODE = 8
REPLICAS = 8
"""How many ranks hold each box under HSDP, and how many cut a tensor's other dimension in two dimensions."""
PATIENCE_S = 3600.0
IDLE_SHARE = 0.02
"""A coordinator that uses no larger share of the time has nothing left to do."""
Clock = Callable[[], float]
OWN_BYTES = 5000
"""The size of a rank's own values, such as its random state, which hardly compress."""
LAYOUTS = ("fsdp", "hsdp", "ddp", "two dimensions")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a world of ranks holds its tensors. cuts: in how many parts each of the first two dimensions is cut.

    is_held: other ranks hold a rank's boxes too.
    """

    cuts: tuple[int, int]
    is_held: bool

    @classmethod
    def of(cls, name: str, world_size: int) -> "Layout":
        return {
            "fsdp": cls(cuts=(world_size, 1), is_held=False),
            "hsdp": cls(cuts=(world_size // REPLICAS, 1), is_held=True),
            "ddp": cls(cuts=(1, 1), is_held=True),
            "two dimensions": cls(cuts=(world_size // REPLICAS, REPLICAS), is_held=False),
        }[name]

    def offsets(self, rank: int) -> tuple[int, int]:
        """Return which part of each dimension a rank holds."""
        number = rank % (self.cuts[0] * self.cuts[1])
        return number // self.cuts[1], number % self.cuts[1]


class SimulatedRank:
    """One rank: the messages that it sends."""

    def __init__(self, rank: int, world_size: int, tensors: Sequence[Tensor], layout: Layout) -> None:
        self.rank, self.world_size, self.layout = rank, world_size, layout
        self._tensors = tensors
        self._sizes = [(t.shape[0] // layout.cuts[0], t.shape[1] // layout.cuts[1]) for t in tensors]
        self._at = layout.offsets(rank)

    def _box(self, number: int) -> tuple[str, tuple[int, ...]]:
        offsets = tuple(at * size for at, size in zip(self._at, self._sizes[number], strict=True))
        return f"{self._tensors[number].name}@{offsets[0]},{offsets[1]}", offsets

    def holdings(self) -> Holdings:
        held = [
            HeldBox(
                box=self._box(number)[0],
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                sizes=self._sizes[number],
                size_bytes=2 << 20,
                may_spread=self.layout.cuts == (1, 1),
                crc32=number,
            )
            for number, tensor in enumerate(self._tensors if self.layout.is_held else ())
        ]
        values = {"progress": ValueChecksums(names_crc32=1, may_differ=False, crc32=1)}
        make: Callable[..., Holdings] = getattr(Holdings, "of", Holdings)
        return make(held=tuple(held), values=values)

    def section(self, agreement: Agreement) -> Section:
        numbers = [
            number
            for number in range(len(self._tensors))
            if agreement.writers.get(self._box(number)[0], self.rank) == self.rank
        ]
        chunks, at = [], 0
        generator = random.Random(self.rank)
        for place, number in enumerate(numbers):
            rows, columns = self._sizes[number]
            payload = 4 * rows * columns
            chunks.append(
                Chunk(
                    tensor=place,
                    component="train",
                    rank=self.rank,
                    offsets=self._box(number)[1],
                    sizes=self._sizes[number],
                    record_offset=at,
                    record_size=payload + FRAME,
                    payload_offset=at + HEAD,
                    payload_size=payload,
                    crcs=(generator.getrandbits(32),),
                )
            )
            at += -(-(payload + FRAME) // 64) * 64
        leaf = Leaf(
            name="progress.step",
            path=("progress", "step"),
            component="train",
            rank=0,
            record_offset=at,
            record_size=1021,
        )
        index = index_of(
            [self._tensors[number] for number in numbers],
            chunks,
            leaves=[leaf] if not self.rank else [],
            values={"progress": {"step": 1}} if not self.rank else {},
            rank_values=[{"rng": generator.randbytes(OWN_BYTES // 2).hex()}],
        )
        return Section.of(index, self._digests())

    def _digests(self) -> RankDigests:
        keys = [Replica(key="progress: 1", label="state['progress']", cure="")]
        if self.layout.is_held:
            keys += [
                Replica(key=f"crc {self._box(number)[0]}", label=f"tensor {tensor.name}", cure="")
                for number, tensor in enumerate(self._tensors)
            ]
        return RankDigests(names=dump_names(keys), digests=b"".join(digest_of((n,)) for n in range(len(keys))))

    def report(self, section: Section | None, save: int, *, is_in_memory: bool = False) -> Report:
        shard = ShardRecord(component="train", rank=self.rank, size_bytes=4, crc32=crc32(b"data"))
        return Report(
            group="group",
            rank=self.rank,
            world_size=self.world_size,
            attempt=1,
            save=save,
            progress=Progress(step=save),
            node=f"node-{self.rank // RANKS_PER_NODE}",
            shards=(shard,) if section is not None else (),
            section=section,
            is_in_memory=is_in_memory,
        )

    def restored(self, key: str, group: str) -> RankRestore:
        return RankRestore(group=group, rank=self.rank, world_size=self.world_size, key=key, arrival=Arrival(step=1))


def tensors_of(count: int, layout: Layout) -> list[Tensor]:
    names = [f"model.layers.{number // 10}.block.{number % 10}.weight" for number in range(count)]
    return [
        Tensor(
            name=name,
            dtype="float32",
            shape=(layout.cuts[0] * 8 * (1 + number % 10), layout.cuts[1] * 128),
            path=("model", name[6:]),
        )
        for number, name in enumerate(names)
    ]


class SimulatedNodes(Cluster):
    """Nodes whose actors hold what the newest memory checkpoint needs, and an object store that all ranks reach."""

    def __init__(self, nodes: int) -> None:
        self._nodes = [f"node-{number}" for number in range(nodes)]
        self.shared: list[object] = []
        self.held: dict[str, dict[str, HeldShard]] = {node: {} for node in self._nodes}

    def share(self, make: Callable[[], object]) -> list[Any]:
        self.shared.append(pickle.dumps(make(), protocol=5))
        return [f"reference {len(self.shared)}"]

    def start_agent(self, kind: type, node: str) -> Any:
        del kind
        return node

    def alive(self) -> dict[str, str]:
        return {node: f"zone-{number % 2}" for number, node in enumerate(self._nodes)}

    def tell(self, agent: Any, method: str, *args: object) -> None:
        del agent, method, args

    async def ask(self, agent: Any, method: str, *args: object, timeout_s: float) -> Any:
        del args, timeout_s
        return {"send_shards": "", "held_shards": self.held[agent], "is_saving": False}[method]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """CPU seconds, messages and their bytes of one exchange of all ranks with the coordinator."""

    cpu_s: float
    after_the_last_s: float
    messages: int
    sent_bytes: int
    answer_bytes: int


class Exchange:
    """The coordinator's side of calls that all ranks make: messages come as bytes, and answers leave as bytes."""

    def __init__(self, coordinator: Coordinator, clock: Clock, idle_after_s: float) -> None:
        self._coordinator, self._clock, self._idle_after_s = coordinator, clock, idle_after_s
        self._messages = self._sent = self._answered = 0

    async def all_call(self, method: str, calls: Sequence[tuple[object, ...]]) -> tuple[Cost, list[Any]]:
        """Have all ranks call a method, one after the other, and again for as long as they are told to."""
        messages = [pickle.dumps(call, protocol=5) for call in calls]
        self._messages = self._sent = self._answered = 0
        began = self._clock()
        tasks = []
        for message in messages[:-1]:
            tasks.append(asyncio.create_task(self._ask(method, message)))
            await asyncio.sleep(0)
        last = await self._idle()
        tasks.append(asyncio.create_task(self._ask(method, messages[-1])))
        answers = await asyncio.gather(*tasks)
        return self._cost(began, last), [pickle.loads(answer) for answer in answers]

    async def once(self, method: str, calls: Sequence[tuple[object, ...]]) -> tuple[Cost, list[Any]]:
        """Have some ranks call a method, and take whatever they are told."""
        messages = [pickle.dumps(call, protocol=5) for call in calls]
        self._messages = self._sent = self._answered = 0
        began = self._clock()
        answers = await asyncio.gather(*(self._call(method, message) for message in messages))
        return self._cost(began, self._clock()), [pickle.loads(answer) for _, answer in answers]

    async def _idle(self) -> float:
        """Wait until what has arrived is taken in. Return the clock's time then."""
        last = self._clock()
        while True:
            await asyncio.sleep(self._idle_after_s)
            before, last = last, self._clock()
            if last - before <= IDLE_SHARE * self._idle_after_s:
                return last

    def _cost(self, began: float, last: float) -> Cost:
        ended = self._clock()
        return Cost(
            cpu_s=ended - began,
            after_the_last_s=ended - last,
            messages=self._messages,
            sent_bytes=self._sent,
            answer_bytes=self._answered,
        )

    async def _ask(self, method: str, message: bytes) -> bytes:
        while True:
            is_pending, answer = await self._call(method, message)
            if not is_pending:
                return answer

    async def _call(self, method: str, message: bytes) -> tuple[bool, bytes]:
        self._messages += 2
        self._sent += len(message)
        told = await getattr(self._coordinator, method)(*pickle.loads(message))
        answer = pickle.dumps(told, protocol=5)
        self._answered += len(answer)
        return isinstance(told, Pending), answer


async def measured(
    name: str,
    world_size: int,
    num_tensors: int,
    *,
    clock: Clock = time.process_time,
    idle_after_s: float = 0.1,
    numbered: Callable[[int], int] = int,
) -> dict[str, Cost]:
    """Measure one world: two claims, the agreement, saves, a memory checkpoint, and the restore of it.

    clock: what costs are counted in. numbered: makes the number of a rank.
    """
    layout = Layout.of(name, world_size)
    tensors = tensors_of(num_tensors, layout)
    ranks = [SimulatedRank(numbered(rank), world_size, tensors, layout) for rank in range(world_size)]
    nodes = SimulatedNodes(-(-world_size // RANKS_PER_NODE))
    coordinator = Coordinator(f"memory://{uuid4().hex}", "driver", cluster=nodes)
    exchange, costs = Exchange(coordinator, clock, idle_after_s), {}
    for node in nodes.held:
        await coordinator.node_agent(object, node)
    costs["first claim"], _ = await exchange.all_call("claim", [("group", world_size, it.rank) for it in ranks])
    proofs = [RankProof(group="group", rank=it.rank, world_size=world_size, stream=None, proof=None) for it in ranks]
    costs["data"], _ = await exchange.all_call("compare_data", [(proof, PATIENCE_S) for proof in proofs])
    costs["agreement"], agreements = await exchange.all_call(
        "agree", [(it.report(None, 1), it.holdings(), PATIENCE_S) for it in ranks]
    )
    sections = [it.section(agreement) for it, agreement in zip(ranks, agreements, strict=True)]
    unchanged = [section.without_plan() for section in sections]

    async def save(number: int, sent: Sequence[Section], **options: bool) -> tuple[Cost, str]:
        calls = [(it.report(own, number, **options), PATIENCE_S) for it, own in zip(ranks, sent, strict=True)]
        cost, outcomes = await exchange.all_call("report", calls)
        assert {outcome.kind for outcome in outcomes} == {"committed"}, outcomes[0]
        return cost, outcomes[0].key

    costs["first save"], _ = await save(1, sections)
    await save(2, unchanged)
    costs["later save"], _ = await save(3, unchanged)
    waiting = [(it.report(own, 4), 0.0) for it, own in zip(ranks[:-1], unchanged, strict=False)]
    await exchange.once("report", waiting)
    costs["one rank is missing"], answers = await exchange.once("report", waiting)
    assert {type(answer) for answer in answers} == {Pending}
    await save(4, unchanged)
    costs["memory checkpoint"], key = await save(5, sections, is_in_memory=True)
    for it in ranks:
        for node in (it.rank // RANKS_PER_NODE, (it.rank // RANKS_PER_NODE + 1) % len(nodes.held)):
            nodes.held[f"node-{node}"][shard_key(key, "train", it.rank)] = HeldShard(size_bytes=4, place=None)
    costs["claim"], claims = await exchange.all_call("claim", [("next", world_size, it.rank) for it in ranks])
    assert claims[0].memory is not None, "the memory checkpoint is offered"
    costs["restore"], decisions = await exchange.all_call(
        "restored", [(it.restored(key, "next"), PATIENCE_S) for it in ranks]
    )
    assert {type(decision) for decision in decisions} == {RestoreDecision}
    return costs


def measure_here(name: str, world_size: int, num_tensors: int) -> dict[str, Any]:
    """Measure one world in this process, with its peak memory."""
    costs = asyncio.run(measured(name, world_size, num_tensors))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak_mib": peak, "costs": {phase: asdict(cost) for phase, cost in costs.items()}}


def measure_tree(tree: Path, name: str, world_size: int, num_tensors: int) -> dict[str, Any]:
    """Measure one world in a process of its own, with the raycheck of this tree."""
    command = [sys.executable, "-P", __file__, "--one", name, str(world_size), str(num_tensors)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(ran.stderr[-4000:])
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def lines(name: str, world_size: int, num_tensors: int, trees: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of a table for one world. trees: what was measured, by the tree's title."""
    peaks = ", ".join(f"{found['peak_mib']:.0f} MiB {title}" for title, found in trees.items())
    yield f"**{name}, {world_size} ranks, {world_size * num_tensors:,} (rank, tensor) pairs**; peak memory {peaks}"
    yield ""
    yield (
        "| | "
        + " | ".join(f"{what} {title}" for what in ("CPU, s", "after the last, s", "MB") for title in trees)
        + " |"
    )
    yield "|---" * (1 + 3 * len(trees)) + "|"
    for phase in next(iter(trees.values()))["costs"]:
        costs = [found["costs"][phase] for found in trees.values()]
        cells = [f"{cost['cpu_s']:.3f}" for cost in costs]
        cells += [f"{cost['after_the_last_s']:.3f}" for cost in costs]
        cells += [f"{(cost['sent_bytes'] + cost['answer_bytes']) / 1e6:.1f}" for cost in costs]
        yield f"| {phase} | " + " | ".join(cells) + " |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the root of an older checkout, measured too")
    parser.add_argument("--before-ranks", type=int, default=512, help="the largest world that it is measured with")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--tensors", type=int, default=244, help="1,000,000 pairs with 4,096 ranks")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, choices=LAYOUTS)
    parser.add_argument("--ray", action="store_true", help="through Ray: see many_ray_ranks.py")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        name, world_size, num_tensors = asked.one
        print(json.dumps(measure_here(name, int(world_size), int(num_tensors))))
        return
    if asked.ray:
        from tests.bench import many_ray_ranks

        many_ray_ranks.show(asked.layouts, asked.ranks, asked.tensors)
        return
    for name in asked.layouts:
        for world_size in asked.ranks:
            is_compared = asked.before and world_size <= asked.before_ranks
            trees = {"before": asked.before.resolve(), "now": ROOT} if is_compared else {"now": ROOT}
            found = {title: measure_tree(tree, name, world_size, asked.tensors) for title, tree in trees.items()}
            print("\n".join(lines(name, world_size, asked.tensors, found)), flush=True)


if __name__ == "__main__":
    main()
