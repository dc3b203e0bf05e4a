"""Checks that the objects to which a commit refers are still in the bucket. Step 16.

A component that training does not change is uploaded once, so its objects are the oldest ones of a run. A lifecycle
rule by age, or a manual cleanup, deletes them first. Then every later save would be committed, and none could be
restored. While training runs, its ranks still have the bytes.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import READS
from raycheck.bucket.format.manifest import Component, Manifest
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store
from raycheck.errors import NotFoundError, RaycheckError, SaveFailedError, StoreError

LOOK_EVERY_S = 600.0
AT_ONCE = 32


class ReferenceLostError(SaveFailedError):
    """A save refers to an object that is missing. The next save uploads its component again."""


class ReferredObjects:
    """The time at which each component that commits refer to was last seen complete."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._seen_at: dict[tuple[str, str], float] = {}  # by name and directory

    def forget(self) -> None:
        """Make the next commit check all of them."""
        self._seen_at.clear()

    def refuse_lost(self, manifest: Manifest, *, every_s: float = LOOK_EVERY_S) -> None:
        """Check the size of each object of the components in other directories, each component once in `every_s`
        seconds.

        Raises ReferenceLostError, which names the objects that are missing or have another size. An unreachable store
        proves nothing: the next commit checks again.
        """
        now = self._clock()
        due = [part for part in manifest.components if part.checkpoint != manifest.key]
        due = [part for part in due if now - self._seen_at.get(_id(part), -every_s) >= every_s]
        lost: list[str] = []
        for part in due:
            with suppress(StoreError):
                if problems := lost_objects(self._store, [part]):
                    lost.append(self._describe(part, problems, now))
                else:
                    self._seen_at[_id(part)] = now
        if lost:
            raise ReferenceLostError(f"{manifest.key}: {'; '.join(lost)}")

    def _describe(self, part: Component, problems: list[str], now: float) -> str:
        seen_at = self._seen_at.pop(_id(part), None)
        since = "" if seen_at is None else f" {now - seen_at:.0f} s ago it was there."
        more = f" and {len(problems) - 1} more objects" if len(problems) > 1 else ""
        return (
            f"{part.name} is in {part.checkpoint}, and there {problems[0]}{more}.{since} {self._who_needs(part)}The "
            f"next save uploads {part.name} again"
        )

    def _who_needs(self, part: Component) -> str:
        """Return in words which checkpoints can no longer be restored."""
        with suppress(RaycheckError):
            body = read_latest(self._store)
            keys = [entry.key for entry in body.live if part.checkpoint in (entry.key, *entry.refs)]
            if keys:
                return (
                    f"{len(keys)} checkpoint(s) cannot be restored unless it is put back (bucket versioning): "
                    f"{', '.join(keys[:5])}{' and more' if len(keys) > 5 else ''}. "
                )
        return ""


def lost_objects(store: Store, components: Iterable[Component]) -> list[str]:
    """Return in words which objects of these components are missing or have the wrong size.

    A wrong response is checked again before it counts. Raises StoreError.
    """
    looks = [partial(_problem, store, key, size) for part in components for key, size in _objects(part)]
    groups = [looks[first : first + AT_ONCE] for first in range(0, len(looks), AT_ONCE)]
    return [problem for group in groups for problem in store.together(*group) if problem]


def _objects(part: Component) -> Iterator[tuple[str, int]]:
    yield object_keys.metadata_key(part.checkpoint, part.name), part.metadata.size_bytes
    for shard in part.shards:
        yield object_keys.shard_key(part.checkpoint, part.name, shard.rank), shard.size_bytes


def _problem(store: Store, key: str, size_bytes: int) -> str:
    problem = ""
    for _ in range(READS):
        try:
            found = store.head(key)
        except NotFoundError:
            problem = f"{key} is missing"
        else:
            if found == size_bytes:
                return ""
            problem = f"{key} has {found} bytes, and should have {size_bytes}"
    return problem


def _id(part: Component) -> tuple[str, str]:
    return part.name, part.checkpoint
