"""Sets up adlfs for raycheck: arguments come from client_options.py, and the client trusts the CA bundle.

`AzFiles` is for Ray: a file system that consists only of a URI, like S3Files in s3/client.py.
"""

from adlfs import AzureBlobFileSystem

from raycheck.bucket.store.address import UriFiles, parse_uri
from raycheck.bucket.store.client_options import adlfs_options, ca_file
from raycheck.bucket.store.jitter import draw_apart
from raycheck.storage_settings import StorageSettings


class AzClient(AzureBlobFileSystem):
    """The client of one account, with the credentials that adlfs finds."""

    cachable = False  # two stores are two clients

    def __init__(self, uri: str, account: str | None, settings: StorageSettings) -> None:
        for client in ("aiohttp", "azure"):
            draw_apart(client)
        self._ca = str(ca_file(settings)) if settings.ca_bundle and not settings.is_plain_http else None
        super().__init__(**adlfs_options(uri, settings, account))

    def do_connect(self) -> None:
        super().do_connect()
        if self._ca is not None:  # adlfs has no argument for it. All containers' clients share this transport.
            self.service_client._config.transport.connection_config.verify = self._ca  # noqa: SLF001


class AzFiles(UriFiles, AzClient):
    """The file system for Ray's own files, such as at az://container/prefix?account_name=me. Each process finds its own
    credentials."""

    cachable = True

    def __init__(self, uri: str) -> None:
        at = parse_uri(uri)
        self.uri = uri
        super().__init__(uri, at.account, at.settings)
