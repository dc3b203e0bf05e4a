"""Tests a store on scratch objects before anything depends on it.

Each coordinator tests once that the store honors conditional writes. Each node tests that it has all permissions that a
run needs, and that it sees what the driver writes.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from uuid import uuid4

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import READS
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, ConflictError, DeniedError, NotFoundError, RaycheckError, StoreError

_CREATES_OVER = "creates over an existing object"


def probe(store: Store) -> None:
    """Test on a scratch object that conditional writes are conditional. Step 6. This cannot prove atomicity.

    Raises ConfigError when a stale swap or a second create is accepted, or a correct swap is refused.
    """
    key = object_keys.probe_key(uuid4().hex)
    try:
        store.put_if_absent(key, b"one")
        first = store.get(key)
        _must_refuse(store, lambda: store.put_if_absent(key, b"two"), _CREATES_OVER)
        try:
            store.put_if_match(key, b"three", first.version)
        except ConflictError:
            raise ConfigError(f"{store}: the store refuses a correct If-Match; raycheck cannot commit here") from None
        _must_refuse(store, lambda: store.put_if_match(key, b"four", first.version), "swaps a stale version")
        if all(store.get(key).data != b"three" for _ in range(READS)):  # a response may be corrupted on the way
            raise ConfigError(f"{store}: the store refused a conditional write but applied it anyway")
    finally:
        store.delete(key)


def _must_refuse(store: Store, write: Callable[[], object], what: str) -> None:
    try:
        write()
    except ConflictError:
        return
    raise ConfigError(
        f"{store}: the store {what} although told not to. Two drivers could overwrite each other here; "
        "use a store with conditional writes"
    )


def probe_node(store: Store, *, node: str) -> None:
    """Test on a scratch object that `node` may do everything that a run needs.

    Raises ConfigError, which names the node, the verb and the missing permission or the wrong setting, and StoreError
    when the network or the store failed.
    """
    key = object_keys.probe_key(uuid4().hex)
    rights = rights_on(store, key, node=node)
    try:
        rights["put"]()
        store.together(rights["get"], rights["conditional put"], rights["list"])
        rights["delete"]()
    except RaycheckError:
        with suppress(RaycheckError):  # the first error is more informative
            store.delete(key)
        raise


def check_same_place(store: Store, key: str, *, node: str) -> None:
    """Test that `node` sees the object `key`, which the driver has written. Raises ConfigError.

    If each node had its own folder at this path, it would keep its shards where no other node can read them.
    """
    try:
        store.head(key)
    except NotFoundError:
        raise ConfigError(
            f"node {node}: {store} is another place than the driver's: the object that the driver wrote is not there. "
            "Use a bucket, or a folder that all nodes share"
        ) from None


def rights_on(store: Store, key: str, *, node: str) -> dict[str, Callable[[], None]]:
    """Return a call for each thing that `node` must be allowed to do, by its verb. Each raises as `probe_node` does.

    key: of a scratch object, which the first call makes and the last one deletes.
    """

    def create_again() -> None:
        _must_refuse(store, lambda: store.put_if_absent(key, b"two"), _CREATES_OVER)

    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(key, b"probe"),
        "get": lambda: store.get(key),
        "conditional put": create_again,
        "list": lambda: store.list_names(object_keys.CHECKPOINTS_PREFIX),
        "delete": lambda: store.delete(key),
    }
    return {verb: partial(_on_node, store, node, verb, call) for verb, call in calls.items()}


def _on_node(store: Store, node: str, verb: str, call: Callable[[], object]) -> None:
    try:
        call()
    except StoreError as error:
        kind = ConfigError if isinstance(error, DeniedError) else StoreError
        raise kind(f"node {node}: {verb}: {error}") from error
    except RaycheckError as error:
        if verb == "put" and isinstance(error, NotFoundError):
            text = f"{store}: nothing can be created there: the address leads through a file, or into a system's folder"
            raise ConfigError(f"node {node}: {verb}: {text}; give another folder") from error
        # A missing permission can also look like this: an object that was just written is not found.
        raise ConfigError(f"node {node}: {verb}: {error}") from error
