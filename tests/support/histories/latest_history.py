"""Rebuilds the history of `latest` from its writers' logs, and asserts that it is linear.

It walks back from the body that is there now, from each body to the one that it replaced. The history is linear when
every body that a writer was told of, or a reader has seen, lies on that walk.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from raycheck.bucket.format.object_keys import CheckpointName


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """Describes one body of `latest` as it was sent. before: the digest of the body to replace, empty for the first."""

    writer: str
    before: str
    digest: str
    counter: int
    attempt: int
    owner: str
    coordinator: str
    head: str | None
    live: list[str]
    evicted: list[str]
    owners: list[str]

    def head_order(self) -> tuple[int, int]:
        name = CheckpointName.parse(self.head) if self.head else None
        return (name.attempt, name.save) if name else (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Logs:
    sent: dict[str, Body]
    lines: list[dict[str, Any]]

    def of(self, kind: str, fact: str) -> list[Any]:
        return [line[fact] for line in self.lines if line["kind"] == kind]


def read_logs(paths: Iterable[Path]) -> Logs:
    sent: dict[str, Body] = {}
    lines = []
    for path in paths:
        for text in path.read_text().split("\n")[:-1]:  # a line that a kill cut short was never sent
            line = json.loads(text)
            lines.append(line)
            if line["kind"] == "sent":
                body = Body(**{field.name: line[field.name] for field in fields(Body)})
                known = sent.setdefault(body.digest, body)
                # Two may forget the same evicted checkpoints at a time, and no body tells who did.
                same = replace(body, writer=known.writer) == known
                assert same, f"the same bytes for two places in the history: {known} and {body}"
    return Logs(sent=sent, lines=lines)


def walk(logs: Logs, last: str) -> list[Body]:
    """Return the bodies from the first one to that of digest `last`."""
    bodies = []
    at = last
    while at:
        assert at in logs.sent, f"a body that nobody has sent: {at}"
        bodies.append(logs.sent[at])
        at = logs.sent[at].before
    return bodies[::-1]


def assert_linear(logs: Logs, bodies: Sequence[Body], seen: Iterable[tuple[int, str]]) -> None:
    """Assert that the history is linear. bodies: the walk. seen: counter and digest of each body that a reader saw."""
    by_counter = {body.counter: body.digest for body in bodies}
    assert list(by_counter) == list(range(1, len(bodies) + 1)), "each write counts one"
    lost = set(logs.of("acknowledged", "digest")) - set(by_counter.values())
    assert not lost, f"acknowledged and not in the history: {[logs.sent[item] for item in lost]}"
    strange = {(counter, item) for counter, item in seen if by_counter.get(counter) != item}
    assert not strange, f"seen by a reader and not in the history: {strange}"
    commits = [body.head for before, body in pairwise(bodies) if body.head != before.head]
    assert len(commits) == len(set(commits)), "a checkpoint was committed twice"
    assert set(logs.of("committed", "key")) <= set(commits), "told of a commit that is not in the history"
    owners = [owner for owner, _ in groupby(body.owner for body in bodies)]
    assert len(owners) == len(set(owners)), "a fenced owner came back"
    dropped: set[str] = set()
    for before, body in pairwise(bodies):
        assert_follows(before, body)
        dropped |= set(before.live) - set(body.live)
        assert not dropped & set(body.live), f"I4: evicted entries came back: {body}"


def assert_follows(before: Body, body: Body) -> None:
    """Assert that one swap is a claim, a take-over, a commit or a prune, by a writer that has the right to it."""
    what = f"{before} -> {body}"
    assert body.owners[: len(before.owners)] == before.owners, f"owners are never taken off: {what}"
    assert set(before.live) - set(body.live) <= set(body.evicted), f"dropped and not evicted: {what}"
    if body.attempt != before.attempt:
        assert body.attempt == before.attempt + 1, f"I4: attempts only grow: {what}"
        assert (body.head, body.live) == (before.head, before.live), f"a claim commits nothing: {what}"
        assert body.coordinator == body.writer, f"somebody claimed for another: {what}"
        return
    assert body.owner == before.owner, f"an owner comes with an attempt: {what}"
    if body.coordinator != before.coordinator:
        assert (body.head, body.coordinator) == (before.head, body.writer), f"a take-over takes nothing else: {what}"
    if body.head != before.head:
        assert body.head_order() > before.head_order(), f"I4: head went back: {what}"
        assert body.head_order()[0] == body.attempt, f"I4: an older attempt committed: {what}"
        assert body.writer == body.coordinator == before.coordinator, f"who committed was not the coordinator: {what}"
