"""Deletes: the only module that removes anything of a checkpoint.

A delete cannot be fenced, so only what is dead for ever is deleted (I6): entries that a swap moved to `evicted`,
after a grace for readers, and of them only objects that no live entry holds.
"""

from raycheck.bucket import layout
from raycheck.bucket.commit import Identity, check_current, forget_evicted
from raycheck.bucket.register import Register
from raycheck.bucket.store import Store

GRACE_S = 600.0
MAX_EVICTED = 200


def prune(
    register: Register, me: Identity, *, grace_s: float = GRACE_S, spare: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Steps 20 and 21, by the current coordinator: delete evicted checkpoints older than the grace by the bucket's
    clock, except those of `spare`, which it is still reading itself. Returns the names that are gone. A crash
    anywhere: the next coordinator repeats it.
    """
    found = register.read()
    if found is None:
        return ()
    body, got = found
    check_current(register, body, me)
    held = body.held()
    crowded = body.evicted[:-MAX_EVICTED]  # `latest` has a size bound: a reader's grace ends before a run does
    due = [item.key for item in body.evicted if got.at - item.at >= grace_s or item in crowded]
    ripe = [key for key in due if key not in spare]
    for name in ripe:
        _delete_checkpoint(register.store, name, is_held=name in held)
    gone = tuple(name for name in ripe if name not in held)
    if gone:
        # A directory that a live entry still refers to keeps its objects and stays in `evicted` until it is free.
        forget_evicted(register, me, frozenset(gone))
    return gone


def _delete_checkpoint(store: Store, name: str, *, is_held: bool) -> None:
    """Manifest first: from then on no reader takes the rest for a checkpoint."""
    store.delete(layout.manifest_key(name))
    if not is_held:
        for item in list(store.list_objects(layout.checkpoint_prefix(name))):
            store.delete(item.key)
