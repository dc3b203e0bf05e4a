"""s3fs as raycheck uses it: credentials come from raycheck's own chain, arguments from client_options.py.

`S3Files` is the same for Ray: a file system that is nothing but a URI. Pickled it carries no more than that, equal URIs
are equal file systems, and each process that unpickles one reads its own environment.
"""

import asyncio
from typing import Any

import s3fs
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession

from raycheck.bucket.store.address import parse_uri
from raycheck.bucket.store.client_options import s3fs_options
from raycheck.bucket.store.jitter import draw_apart
from raycheck.bucket.store.s3.credentials import CredentialChain
from raycheck.storage_settings import StorageSettings


class S3Files(s3fs.S3FileSystem):  # type: ignore[misc]  # s3fs is untyped
    """What Ray writes its own files with where pyarrow's S3 cannot be told all settings."""

    def __init__(self, uri: str) -> None:
        at = parse_uri(uri)
        self.uri = uri
        super().__init__(
            **s3fs_options(at.settings, at.bucket), session=session(at.settings, CredentialChain(at.settings))
        )


def session(settings: StorageSettings, chain: CredentialChain) -> AioSession:
    """A session for s3fs. The profile still matters to it: regions and endpoints stand in profiles too."""
    draw_apart("aiohttp")
    made = _Session(profile=settings.profile)
    made.chain = chain
    return made


class _Session(AioSession):  # type: ignore[misc]  # aiobotocore is untyped
    chain: CredentialChain

    async def get_credentials(self) -> "_Credentials":
        return _Credentials(self.chain)


class _Credentials(AioCredentials):  # type: ignore[misc]  # aiobotocore is untyped
    """What aiobotocore's signer asks before each request. Holds none itself."""

    def __init__(self, chain: CredentialChain) -> None:
        super().__init__("", "", method="raycheck")
        self._chain = chain

    async def get_frozen_credentials(self) -> Any:
        if self._chain.needs_time():  # it would hold up every request of this process
            return await asyncio.to_thread(self._chain.frozen)
        return self._chain.frozen()
