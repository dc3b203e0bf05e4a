"""Opens the store behind a URI. The scheme selects the backend, which is imported only when it is needed, like its
client."""

import importlib.util

from raycheck.bucket.store.address import Address, kind_of, parse_uri, path_uri, with_settings
from raycheck.bucket.store.interface import Store
from raycheck.storage_settings import StorageSettings


def open_store(uri: str, storage: StorageSettings | None = None) -> Store:
    """Return the store rooted at `uri`, without connecting to it.

    storage: settings that override those in the URI. Raises ConfigError that says what is wrong with the URI.
    """
    if storage is not None:
        uri = with_settings(uri, storage)
    at = parse_uri(uri)
    if at.kind == "s3":
        return _open_s3(uri, at)
    if at.kind == "gs":
        from raycheck.bucket.store.gcs.store import GsStore

        gs: Store = GsStore(uri, bucket=at.bucket, prefix=at.prefix, settings=at.settings)
        return gs
    if at.kind == "az":
        from raycheck.bucket.store.azure.store import AzStore

        az: Store = AzStore(uri, container=at.bucket, account=at.account, prefix=at.prefix, settings=at.settings)
        return az
    if at.kind == "memory":
        from raycheck.bucket.store.memory import MemoryStore

        return MemoryStore(uri, "/".join(("", *filter(None, (at.bucket, at.prefix)), "")))
    from raycheck.bucket.store.local import LocalStore

    return LocalStore(uri if "://" in uri else path_uri(uri), at.prefix)


def open_near(to: str, uri: str) -> Store:
    """Return the store at `to`, for what a run at `uri` writes there.

    If both are of the same kind, the store gets the settings that `to` leaves out from `uri`.
    """
    if kind_of(to) != kind_of(uri):
        return open_store(to)
    return open_store(to, parse_uri(to).said.over(parse_uri(uri).said))


def _open_s3(uri: str, at: Address) -> Store:
    """Return the store that transfers bytes through obstore where that is installed (the extra `fast`).

    A prefix with empty segments is left to s3fs: obstore drops them, S3 does not.
    """
    settings = at.settings
    if importlib.util.find_spec("obstore") is not None and "//" not in at.prefix:
        from raycheck.bucket.store.s3.obstore_store import FastS3Store

        return FastS3Store(uri, bucket=at.bucket, prefix=at.prefix, settings=settings)
    from raycheck.bucket.store.s3.s3fs_store import S3Store

    return S3Store(uri, bucket=at.bucket, prefix=at.prefix, settings=settings)
