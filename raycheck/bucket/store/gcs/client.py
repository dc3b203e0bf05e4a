"""gcsfs as raycheck uses it: arguments from client_options.py, and a session that trusts the CA bundle.

`GsFiles` is the same for Ray, as s3_client.S3Files is s3fs: a file system that is nothing but a URI.
"""

from typing import Any

import aiohttp
from gcsfs.core import GCSFileSystem  # gcsfs's own default asks each bucket for its type by gRPC first
from google.auth.exceptions import DefaultCredentialsError

from raycheck.bucket.store.address import parse_uri
from raycheck.bucket.store.client_options import gcsfs_options, trusted
from raycheck.bucket.store.jitter import draw_apart
from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings


class GsClient(GCSFileSystem):  # type: ignore[misc]  # gcsfs is untyped
    """Finds the credentials at once, which may ask the machine's metadata server. Raises ConfigError without any."""

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
        if self._session is None and self._trusted is not None:  # here, since a connector belongs to a running loop
            self.session_kwargs["connector"] = aiohttp.TCPConnector(ssl=self._trusted)
        return await super()._set_session()


class GsFiles(GsClient):
    """gs://bucket/prefix?requester_pays=true. Credentials are found in each process anew."""

    cachable = True

    def __init__(self, uri: str) -> None:
        self.uri = uri
        super().__init__(parse_uri(uri).settings)
