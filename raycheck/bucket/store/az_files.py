"""adlfs for Ray, as s3_client.S3Files is s3fs: a file system that is nothing but a URI."""

from adlfs import AzureBlobFileSystem

from raycheck.bucket.store.engines import adlfs_options
from raycheck.bucket.store.uri import parse_uri


class AzFiles(AzureBlobFileSystem):  # type: ignore[misc]  # adlfs is untyped
    """az://container/prefix?account_name=me. Credentials come from adlfs's own chain, in each process anew."""

    def __init__(self, uri: str) -> None:
        at = parse_uri(uri)
        self.uri = uri
        super().__init__(**adlfs_options(at.settings, at.account))
