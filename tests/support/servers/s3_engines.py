"""Chooses the client that moves the bytes of an S3 store: a test can rule out obstore, or rule out s3fs."""

from typing import Any

import pytest
from aiobotocore.session import AioSession

from raycheck.bucket.store import Store
from raycheck.bucket.store.s3.s3fs_store import S3Store


def by_s3fs_alone(store: Store) -> S3Store:
    """Opens the place of `store` anew, without obstore even where that is installed."""
    assert isinstance(store, S3Store)
    prefix = store._prefix.removesuffix("/")
    return S3Store(store.uri, bucket=store._bucket, prefix=prefix, settings=store._settings)


def forbid_s3fs_bytes(patch: pytest.MonkeyPatch) -> None:
    """Makes every read of a range and every write through s3fs fail, also where obstore has failed before."""

    def refuse(*_: object) -> None:
        raise AssertionError("it did not go through obstore")

    for verb in ("get_range", "put", "_put_each"):
        patch.setattr(S3Store, verb, refuse)


def clients_made(patch: pytest.MonkeyPatch) -> list[AioSession]:
    """A list that grows with each client of an S3 store that is made from now on."""
    made: list[AioSession] = []
    begin = AioSession.__init__

    def noted(session: AioSession, *args: Any, **settings: Any) -> None:
        made.append(session)
        begin(session, *args, **settings)

    patch.setattr(AioSession, "__init__", noted)
    return made
