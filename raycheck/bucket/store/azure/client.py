"""adlfs as raycheck uses it: arguments from client_options.py, and a client that trusts the CA bundle.

`AzFiles` is the same for Ray, as s3_client.S3Files is s3fs: a file system that is nothing but a URI.
"""

from adlfs import AzureBlobFileSystem

from raycheck.bucket.store.address import parse_uri
from raycheck.bucket.store.client_options import adlfs_options, ca_file
from raycheck.bucket.store.jitter import draw_apart
from raycheck.storage_settings import StorageSettings


class AzClient(AzureBlobFileSystem):  # type: ignore[misc]  # adlfs is untyped
    """adlfs with its own chain of credentials."""

    cachable = False  # two stores are two clients

    def __init__(self, uri: str, account: str | None, settings: StorageSettings) -> None:
        for client in ("aiohttp", "azure"):
            draw_apart(client)
        self._ca = str(ca_file(settings)) if settings.ca_bundle and not settings.is_plain_http else None
        super().__init__(**adlfs_options(uri, settings, account))

    def do_connect(self) -> None:
        super().do_connect()
        if self._ca is not None:  # adlfs has no argument for it; the clients of all containers share this transport
            self.service_client._config.transport.connection_config.verify = self._ca  # noqa: SLF001


class AzFiles(AzClient):
    """az://container/prefix?account_name=me. Credentials are found in each process anew."""

    cachable = True

    def __init__(self, uri: str) -> None:
        at = parse_uri(uri)
        self.uri = uri
        super().__init__(uri, at.account, at.settings)
