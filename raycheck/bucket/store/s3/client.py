"""Sets up s3fs for raycheck: credentials come from raycheck's own chain, arguments from client_options.py.

`S3Files` is for Ray. It consists only of a URI: pickled it carries nothing else, equal URIs are equal file systems, and
each process that unpickles one reads its own environment.
"""

import asyncio
from functools import cache
from typing import Any

import s3fs
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.loaders import create_loader

from raycheck.bucket.store.address import UriFiles, parse_uri
from raycheck.bucket.store.client_options import s3fs_options
from raycheck.bucket.store.jitter import draw_apart
from raycheck.bucket.store.s3.credentials import CredentialChain
from raycheck.storage_settings import StorageSettings


class ChainedFiles(s3fs.S3FileSystem):
    """An s3fs file system that keeps the session with which it was made.

    Before 2026.9 s3fs replaces that session, and raycheck's credentials with it, by its own whenever it finds no open
    connection.
    """

    _made_with: AioSession | None = None

    @property
    def session(self) -> AioSession | None:
        return self._made_with

    @session.setter
    def session(self, made: AioSession | None) -> None:
        self._made_with = self._made_with or made


class S3Files(UriFiles, ChainedFiles):
    """The file system for Ray's own files where pyarrow's S3 does not know all the settings."""

    def __init__(self, uri: str) -> None:
        at = parse_uri(uri)
        self.uri = uri
        super().__init__(
            **s3fs_options(at.settings, at.bucket), session=session(at.settings, CredentialChain(at.settings))
        )


def session(settings: StorageSettings, chain: CredentialChain) -> AioSession:
    """Make a session for s3fs. It also receives the profile, since profiles contain regions and endpoints, too."""
    draw_apart("aiohttp")
    made = _Session(profile=settings.profile)
    made.chain = chain
    return made


class _Session(AioSession):
    chain: CredentialChain

    def get_component(self, name: str) -> Any:
        return _loader(self.get_config_variable("data_path")) if name == "data_loader" else super().get_component(name)

    async def get_credentials(self) -> "_Credentials":
        return _Credentials(self.chain)


@cache
def _loader(search_path: str | None) -> Any:
    """Return the loader of botocore's descriptions of services, shared by all clients of this process.

    Reading them takes most of the time in which a client is made, and blocks the event loop of all others.
    """
    return create_loader(search_path)


class _Credentials(AioCredentials):
    """The chain's credentials for aiobotocore's signer, which asks before each request. Nothing is stored here."""

    def __init__(self, chain: CredentialChain) -> None:
        super().__init__("", "", method="raycheck")
        self._chain = chain

    async def get_frozen_credentials(self) -> Any:
        if self._chain.needs_time():  # on the event loop it would delay every request of this process
            return await asyncio.to_thread(self._chain.frozen)
        return self._chain.frozen()
