"""Does this store honour conditional writes? Asked once per coordinator, on a scratch object, before all else."""

from collections.abc import Callable
from uuid import uuid4

from raycheck.bucket import layout
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, ConflictError


def probe(store: Store) -> None:
    """Step 6: prove on a scratch object that conditional writes are conditional. It cannot prove atomicity.

    Raises ConfigError when a stale swap or a second create is accepted, or the right swap is refused.
    """
    key = layout.probe_key(uuid4().hex)
    try:
        store.put_if_absent(key, b"one")
        first = store.get(key)
        _must_refuse(store, lambda: store.put_if_absent(key, b"two"), "creates over an existing object")
        try:
            store.put_if_match(key, b"three", first.version)
        except ConflictError:
            raise ConfigError(
                f"{store.uri}: the store refuses the right If-Match; raycheck cannot commit here"
            ) from None
        _must_refuse(store, lambda: store.put_if_match(key, b"four", first.version), "swaps a stale version")
        if store.get(key).data != b"three":
            raise ConfigError(f"{store.uri}: the store refused a conditional write and applied it all the same")
    finally:
        store.delete(key)


def _must_refuse(store: Store, write: Callable[[], None], what: str) -> None:
    try:
        write()
    except ConflictError:
        return
    raise ConfigError(
        f"{store.uri}: the store {what} although told not to. Two drivers could overwrite each other here; "
        "use a store with conditional writes"
    )
