"""Sets up gcsfs for raycheck: arguments come from client_options.py, and the session trusts the CA bundle.

`GsFiles` is for Ray: a file system that consists only of a URI, like S3Files in s3/client.py.
"""

from typing import Any

import aiohttp
from gcsfs.core import GCSFileSystem  # gcsfs's default class first asks each bucket for its type, by gRPC
from google.auth.exceptions import DefaultCredentialsError

from raycheck.bucket.store.address import UriFiles, parse_uri
from raycheck.bucket.store.client_options import gcsfs_options, trusted
from raycheck.bucket.store.jitter import draw_apart
from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings


class GsClient(GCSFileSystem):
    """A gcsfs client that finds credentials at construction, possibly from the metadata server. Raises ConfigError
    without any."""

    cachable = False  # two stores are two clients

    def __init__(self, settings: StorageSettings) -> None:
        self._trusted = trusted(settings)
        for client in ("aiohttp", "gcsfs"):
            draw_apart(client)
        try:
            super().__init__(**gcsfs_options(settings))
        except DefaultCredentialsError as error:
            raise ConfigError(
                "no Google credentials found: set GOOGLE_APPLICATION_CREDENTIALS, or run "
                f"`gcloud auth application-default login` ({error})"
            ) from error

    async def _set_session(self) -> Any:
        if (
            self._session is None and self._trusted is not None
        ):  # made here, since a connector belongs to a running event loop
            self.session_kwargs["connector"] = aiohttp.TCPConnector(ssl=self._trusted)
        return await super()._set_session()


class GsFiles(UriFiles, GsClient):
    """The file system for Ray's own files, such as at gs://bucket/prefix?requester_pays=true. Each process finds its
    own credentials."""

    cachable = True

    def __init__(self, uri: str) -> None:
        self.uri = uri
        super().__init__(parse_uri(uri).settings)
