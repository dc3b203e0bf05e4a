"""gcsfs for Ray, as s3_client.S3Files is s3fs: a file system that is nothing but a URI."""

from gcsfs.core import GCSFileSystem  # gcsfs's own default asks each bucket for its type by gRPC first

from raycheck.bucket.store.engines import gcsfs_options
from raycheck.bucket.store.uri import parse_uri


class GsFiles(GCSFileSystem):  # type: ignore[misc]  # gcsfs is untyped
    """gs://bucket/prefix?requester_pays=true. Credentials come from gcsfs's own chain, in each process anew."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        super().__init__(**gcsfs_options(parse_uri(uri).settings))
