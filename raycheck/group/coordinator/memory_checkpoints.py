"""Lists the memory checkpoints of a run: which of them all ranks have sealed, and which nodes hold their shards.

Memory checkpoints are made between those in the bucket. The nodes' actors hold them (on_ray/nodes/memory_shards.py),
and `latest` never lists them. This list exists only in the coordinator's memory: a new driver does not know it, and
resumes from the bucket. A memory checkpoint is offered to a new group only while the newest checkpoint in the bucket is
the one that this coordinator knows. So a rewind of the run in the bucket takes effect.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import index_key, shard_key
from raycheck.bucket.reading import Documents
from raycheck.bucket.store import Store
from raycheck.errors import NotFoundError, RaycheckError, StoreError
from raycheck.group.coordinator.messages import HeldCheckpoint, HeldShard, Holder, MemoryOffer, Outcome
from raycheck.group.coordinator.node_agents import NodeAgents
from raycheck.group.coordinator.rendezvous import RendezvousTable
from raycheck.group.coordinator.run_log import RunLog
from raycheck.log import event, logger

ANSWER_S = 5.0
"""How long a claim waits for the nodes to report what they hold."""
LAST_COPIES_S = 10.0
"""How long a claim waits for copies of the shards that all ranks of the previous group have sealed."""
COPY_TIMEOUT_S = 120.0
"""How long a copy to another node may take to send. With the pauses in between, it takes twice that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """A memory checkpoint that can be restored. sizes: the bytes of each of its shards, by key."""

    entry: Entry
    documents: Documents
    sizes: Mapping[str, int]


class MemoryCheckpoints:
    """The newest memory checkpoint of one run, which is offered to the group that claims the run next.

    problem: why there is no memory checkpoint of the newest step at which one was wanted; "" if there is one.
    """

    def __init__(
        self, store: Store, agents: NodeAgents, run_log: RunLog, plans: PlanCache, table: RendezvousTable
    ) -> None:
        self._plans = plans
        self._table = table
        self._store = store
        self._cluster = agents.cluster
        self._agents = agents
        self._run_log = run_log
        self._newest: _Listed | None = None
        self._head: tuple[str, int] | None = None  # key and step of the bucket's newest checkpoint, as known here
        self._attempt = self._last_step = 0
        self._is_used = self._is_warned = False
        self.problem = ""
        self._problem_step: int | None = None  # None: it holds for all steps to come

    def overtaken(self, report: Report) -> Outcome | None:
        """Return the outcome of a reported memory checkpoint if a later one has begun since.

        Otherwise this one is the newest, and no missing rank will report an earlier one.
        """
        step = report.progress.step
        self._is_used = True
        if step < self._last_step and not self._table.find(report.group, "memory", step):
            if report.checkpoint == self._newest_key:  # this rank must not stage the next one over it
                return Outcome(kind="committed", key=report.checkpoint)
            return Outcome(kind="failed", key=report.checkpoint, message="a later memory checkpoint was begun")
        self._last_step = max(step, self._last_step)
        self._table.end_before(report.group, "memory", self._last_step)
        return None

    def committed(self, key: str, step: int) -> None:
        """Record that the bucket has a new checkpoint: shards of earlier steps are freed."""
        self.note_head(key, step)
        if self._newest is not None and self._newest.entry.step <= step:
            self._newest = None
        if self._problem_step is not None and self._problem_step <= step:
            self.problem = ""
        if self._is_used:
            self._agents.keep(self._newest_key, (self._attempt, step))

    def note_head(self, key: str, step: int) -> None:
        """Record which checkpoint is the newest in the bucket."""
        self._head = key, step

    def note_problem(self, why: str, *, step: int | None = None) -> None:
        """Record why there is no memory checkpoint. Warn about it only when the reason changes.

        step: the step that has none; None: neither this step nor any later one has one.
        """
        self._is_used = True
        self._problem_step = step
        if why != self.problem:
            self.problem = why
            logger.warning(event(f"no memory checkpoint: {why}", run=self._store.uri))

    def take_problem(self) -> str:
        """Return the problem once, for the record of the start that follows it."""
        found, self.problem = self.problem, ""
        return found

    def forget(self, why: str = "") -> None:
        """Free the listed checkpoint. why: the reason, if it should have been restored."""
        if why:
            self.note_problem(why)
        self._newest = None
        self._agents.keep(None, (self._attempt, -1))

    async def claimed(self, attempt: int, head: Entry | None) -> MemoryOffer | None:
        """Return the memory checkpoint that the new group can restore, or None. Drop what earlier groups had begun.

        attempt: the new group's. head: the checkpoint of the bucket that the claim names.
        """
        deciding = [save.answer(LAST_COPIES_S) for save in self._table.of_kind("memory") if save.is_deciding]
        await asyncio.gather(*deciding, return_exceptions=True)
        self._attempt, self._last_step = attempt, 0
        known, self._head = self._head, (head.key, head.step) if head is not None else None
        newest = self._newest
        if not self._is_used:
            return None
        if known != self._head or newest is None or (head is not None and head.step >= newest.entry.step):
            self.forget()
            return None
        self._agents.keep(newest.entry.key, (attempt, -1))
        try:
            return await self._offer(newest)
        except (RaycheckError, OSError) as error:
            self.forget(f"{newest.entry.key} is not restored from memory: {error}")
        return None

    @property
    def _newest_key(self) -> str | None:
        return self._newest.entry.key if self._newest is not None else None

    async def _offer(self, newest: _Listed) -> MemoryOffer:
        """Return the checkpoint that can be restored. Raises NotFoundError if the live nodes do not have all of it."""
        holders = await self._holders(newest)
        if lost := sorted(newest.sizes.keys() - holders.keys()):
            raise NotFoundError(f"no node that is alive has {', '.join(lost[:5])}")
        held = HeldCheckpoint(documents=newest.documents, holders=holders)
        contents = await asyncio.to_thread(self._cluster.share, lambda: held)
        logger.info(event(f"restoring {newest.entry.key} from the memory of the nodes instead", run=self._store.uri))
        return MemoryOffer(entry=newest.entry, contents=contents)

    async def conclude(self, reports: Sequence[Report]) -> Outcome:
        """List a memory checkpoint whose shards all ranks have sealed, once other nodes have copies of them.

        reports: those of all ranks, in order of rank.
        """
        name = reports[0].checkpoint
        try:
            made = await asyncio.to_thread(assemble, self._store, reports, self._plans)
        except RaycheckError as error:
            return Outcome(kind="failed", key=name, message=str(error))
        lost = await self._copy(name, reports)
        if reports[0].attempt < self._attempt:  # another group has claimed the run
            return Outcome(kind="superseded", key=name)
        if lost:  # the previous one has copies, in case this node is lost first
            text = f"node {lost[0]} lost its shards before another one had a copy"
            return Outcome(kind="failed", key=name, message=text)
        documents = Documents(manifest=made.manifest_bytes, index=made.documents[index_key(name)])
        is_listed = self._list(made.manifest, documents)
        return Outcome(kind="committed" if is_listed else "superseded", key=name, must_agree_again=made.has_copies)

    def _list(self, manifest: Manifest, documents: Documents) -> bool:
        """List a memory checkpoint, unless the bucket or the memory has one as new. Return whether it is listed."""
        entry = Entry(
            key=manifest.key,
            refs=manifest.refs,
            step=manifest.step,
            committed_at=self._run_log.now,
            size_bytes=manifest.size_bytes,
            metrics={},
            manifest_crc32=crc32(documents.manifest),
        )
        sizes = {
            shard_key(manifest.key, shard.component, shard.rank): shard.size_bytes
            for component in manifest.components
            if component.checkpoint == manifest.key
            for shard in component.shards
            if shard.size_bytes  # nobody reads of an empty one
        }
        is_older = self._head is not None and self._head[1] >= entry.step
        if is_older or (self._newest is not None and self._newest.entry.step >= entry.step):
            return False
        self._newest = _Listed(entry=entry, documents=documents, sizes=sizes)
        self.problem = ""
        self._run_log.in_memory(entry.step, sum(sizes.values()))
        self._agents.keep(entry.key, (manifest.attempt, manifest.step))
        return True

    async def _copy(self, name: str, reports: Sequence[Report]) -> list[str]:
        """Have each node copy its shards to another one. Without a copy, they survive the workers but not the node.

        Return the nodes that lost their shards before any other node had a copy.
        """
        by_node: dict[str, list[Report]] = {}
        for report in reports:
            by_node.setdefault(report.node, []).append(report)
        nodes = sorted(by_node)
        ring = Ring(nodes, await asyncio.to_thread(self._cluster.alive))
        copied = await asyncio.gather(*(self._copy_from(node, name, ring.neighbours(node)) for node in nodes))
        problems = {node: problem for node, problem in zip(nodes, copied, strict=True) if problem}
        lost = [node for node in problems if not await self._has_shards(node, name, by_node[node])]
        if problems and not lost and not self._is_warned:
            self._is_warned = True
            text = f"memory checkpoints survive the loss of workers, but not of a node: {min(problems.values())}"
            logger.warning(event(text, run=self._store.uri))
        return lost

    async def _has_shards(self, node: str, name: str, reports: Sequence[Report]) -> bool:
        """Return whether a node's actor holds what the ranks of the node have sealed. reports: theirs."""
        actor = self._agents.known(node)
        held = {} if actor is None else await self._held(actor)
        return all(
            shard_key(name, shard.component, shard.rank) in held
            for report in reports
            for shard in report.written
            if shard.size_bytes
        )

    async def _copy_from(self, node: str, name: str, others: Iterable[str]) -> str:
        """Return why no other node has a copy of this node's shards; "" when one has."""
        problem = "the group has only one node"
        source = self._agents.known(node)
        for other in others:
            target = self._agents.known(other)
            if source is None or target is None:
                problem = f"there is no actor on node {other if target is None else node}"
                continue
            try:
                answer_s = 2 * COPY_TIMEOUT_S + ANSWER_S
                problem = await self._cluster.ask(
                    source, "send_shards", name, target, COPY_TIMEOUT_S, timeout_s=answer_s
                )
            except StoreError as error:
                problem = f"{error} while node {node} copied to {other}"
            if not problem:
                break
        return problem

    async def _holders(self, listed: _Listed) -> dict[str, list[Holder]]:
        """Return the holders of each complete shard, by key."""
        alive = await asyncio.to_thread(self._cluster.alive)
        asked = {node: actor for node, actor in self._agents.all().items() if node in alive}
        answers = await asyncio.gather(*(self._held(actor) for actor in asked.values()))
        holders: dict[str, list[Holder]] = {}
        for (node, actor), held in zip(asked.items(), answers, strict=True):
            for key, shard in held.items():
                if listed.sizes.get(key) == shard.size_bytes:
                    holders.setdefault(key, []).append(Holder(node=node, actor=actor, place=shard.place))
        return holders

    async def _held(self, actor: Any) -> dict[str, HeldShard]:
        try:
            return dict(await self._cluster.ask(actor, "held_shards", timeout_s=ANSWER_S))
        except StoreError:
            return {}


class Ring:
    """The nodes of a group in a ring, and which of them may take the copies of each."""

    def __init__(self, nodes: Sequence[str], zones: Mapping[str, str]) -> None:
        """nodes: sorted. zones: the zones of the live nodes."""
        self._nodes, self._zones = nodes, zones
        self._places = {node: place for place, node in enumerate(nodes)}
        self._in_zone: dict[str, dict[str, int]] = {}  # the place of each live node among those of its zone
        for node in nodes:
            if node in zones:
                own = self._in_zone.setdefault(zones[node], {})
                own[node] = len(own)
        known = [node for node in nodes if zones.get(node)]
        self._apart = {zone: [node for node in known if zones[node] != zone] for zone in self._in_zone if zone}

    def neighbours(self, node: str) -> Iterator[str]:
        """Yield the other nodes that may take the copies of `node`, the best one first.

        Nodes of other zones come first, beginning with the one at this node's place in its own zone, so that they share
        the copies evenly. Then come those that follow in the ring of all nodes.
        """
        zone = self._zones.get(node, "")
        apart = self._apart.get(zone, ())
        for place in range(len(apart)):
            yield apart[(self._in_zone[zone][node] + place) % len(apart)]
        for place in range(1, len(self._nodes)):
            other = self._nodes[(self._places[node] + place) % len(self._nodes)]
            if other in self._zones and not (apart and self._zones[other] not in ("", zone)):
                yield other
