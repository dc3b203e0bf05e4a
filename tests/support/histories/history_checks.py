"""Checks a history: every body of `latest`, every delete, and every answer that a process got.

The ledger sees each write at the moment it is applied, and judges it by the one before (tests/support/histories/invariants.py).
"""

import functools
from dataclasses import replace

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Attempt, Entry, Latest
from raycheck.bucket.format.manifest import Manifest, load_manifest
from raycheck.bucket.format.object_keys import is_segment_key
from raycheck.bucket.history.facts import Facts, facts_in, load_segment
from tests.support.histories.history_actors import Driver, Group, Save
from tests.support.histories.invariants import (
    assert_follows,
    assert_invariants,
    assert_never_named_again,
    assert_repaired,
    assert_same_bytes,
    load,
    whole,
)
from tests.support.servers.fault_injection import World, Write


class Ledger:
    """Keeps the true past of a run.

    is_lost: `latest` was deleted or rolled back, and nobody has repaired it yet. body: the newest body of `latest`,
    while it is lost the last one before that.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.body: Latest | None = None
        self.past: list[bytes] = []
        self.is_lost = False
        self.writer = ""  # the process that is at the store, unless it is a late write of one
        self.attempts: dict[int, Attempt] = {}
        self._restores: dict[int, set[str | None]] = {}  # what each attempt was to restore, before and after going back
        self.manifests: dict[str, Manifest] = {}
        self.committed: set[str] = set()
        self._checked: tuple[int, Latest | None] = (0, None)
        self._num_writes = 0
        self._deleted: dict[str, set[str]] = {}
        self._superseded: set[str] = set()
        self._fenced: set[str] = set()
        world.checks.append(self._wrote)

    def check(self) -> None:
        """Assert, after a rule, all invariants on the objects in the bucket."""
        if self._num_writes == self._checked[0] or self.is_lost:
            return
        found = assert_invariants(self.world.inner, self._checked[1])
        assert found is not None
        found = replace(found, past_pages=())
        assert found == self.body, "latest was changed by other means than a write"
        assert_same_bytes(self.world.inner, self.world.wrote)
        self._checked = (self._num_writes, found)

    def lose(self, body: bytes | None) -> None:
        """Delete `latest`, or put an older body back."""
        self.is_lost = True
        if body is None:
            self.world.inner.delete(object_keys.LATEST_KEY)
            self.world.objects.pop(object_keys.LATEST_KEY, None)
        else:
            self.world.inner.put(object_keys.LATEST_KEY, body)
            self.world.objects[object_keys.LATEST_KEY] = body

    # --- the answers that processes get ---

    def answered_claim(self, group: Group, attempt: Attempt, entry: Entry | None) -> None:
        known = self.attempts[attempt.number]
        assert known.group == group.name, "an attempt was answered to a group that does not hold it"
        assert (entry.key if entry else None) in self._restores[attempt.number], "I7: not what latest says is restored"
        assert group.attempt is None or group.attempt.number == attempt.number, "one group got two attempts"
        assert not self.is_lost or entry or group.attempt, "I7: a fresh start although latest was lost"

    def answered_going_back(self, group: Group, entry: Entry) -> None:
        assert group.attempt is not None
        assert entry.key in self._restores[group.attempt.number], "I7: not what latest says is restored"

    def answered_save(self, save: Save, outcome: str) -> None:
        assert self.body is not None
        if outcome == "committed":
            assert save.key in self.committed, f"{save.key} was answered committed and never was"
        if outcome == "superseded":
            assert self.is_lost or self.body.entry(save.key) is None, f"{save.key} was answered superseded and is live"
            self._superseded.add(save.key)

    def answered_fenced(self, driver: Driver) -> None:
        assert self.body is not None
        assert driver.owner in self.body.owners, "fenced before its first claim"
        assert driver.owner != self.body.attempt.owner, "the live owner was told that it is fenced"
        self._fenced.add(driver.owner)

    # --- the writes ---

    def _wrote(self, _: World, write: Write) -> None:
        self._num_writes += 1
        if write.key == object_keys.LATEST_KEY:
            self._replaced(whole(self.world, write.data), write.data)
        elif write.verb == "delete":
            self._delete(write.key)
        elif write.key.endswith("/manifest.json") and write.key not in self.manifests:
            manifest = load_manifest(write.data, what=write.key)
            self.manifests[manifest.key] = manifest

    def _replaced(self, new: Latest, data: bytes) -> None:
        if new.attempt.owner.startswith("repair-") and self.body and new.attempt.owner not in self.body.owners:
            assert self.is_lost, "a sound latest was repaired"
            assert_repaired(self.world.inner, self.body, new)
            self.is_lost = False
            for name in new.held():  # what was deleted in part may be whole again: its last late writes landed
                self._deleted.pop(name, None)
            self._superseded.clear()  # a whole checkpoint that was never committed is listed by a repair
            self._fenced.clear()
            self.past.clear()  # what an older body evicted may be listed again; that body itself never is
            self._checked = (0, None)
        else:
            assert not self.is_lost, "latest was written although it was lost"
            assert_follows(self.body, new)
            is_commit = self.body is not None and len({entry.key for entry in new.live} - self.committed)
            assert not is_commit or self.writer in ("", new.attempt.coordinator), f"a commit by {self.writer}"
        for name in new.held():
            assert_never_named_again(self._deleted.get(name, ()), new)
        live = {entry.key for entry in new.live}
        assert not live & self._superseded, "a save that was answered superseded is live"
        assert new.attempt.owner not in self._fenced, "an owner that was told it is fenced is back"
        self.committed |= live
        self.attempts[new.attempt.number] = new.attempt
        self._restores.setdefault(new.attempt.number, set()).add(new.attempt.restore_key)
        self.body = new
        self.past.append(data)

    def _delete(self, key: str) -> None:
        if is_segment_key(key):
            there = (data for other, data in self.world.objects.items() if is_segment_key(other))
            known = functools.reduce(Facts.joined, map(_facts, there), Facts())
            assert known.covers(_facts(self.world.wrote[key])), (
                f"{key} was deleted, and facts that no other segment has"
            )
            return
        name = object_keys.checkpoint_of(key)
        if (counter := object_keys.counter_of_page(key)) is not None:
            newest = load(self.past[-1])
            assert counter <= newest.counter, f"{key} was deleted, and may still be named"
            assert key not in {page.key for page in newest.all_pages}, f"{key} is named"
            return
        if name is None:
            assert key.startswith("probes/"), f"{key} was deleted, which nobody may"
            return
        assert self.body is not None
        assert_never_named_again([key], self.body)
        is_evicted = str(name) in {item.key for item in self.body.evicted} | self.committed
        assert name.attempt < self.body.attempt.number or is_evicted, f"{key} of the live attempt was deleted"
        self._deleted.setdefault(str(name), set()).add(key)


def list_directories(world: World) -> set[str]:
    """List the checkpoints' directories that have objects, committed or not."""
    return {str(name) for item in world.inner.list_objects("") if (name := object_keys.checkpoint_of(item.key))}


def _facts(segment: bytes) -> Facts:
    return facts_in(load_segment(segment, what="a segment"), what="a segment")
