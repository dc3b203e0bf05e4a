"""Where the sides write: folders of their own in the measured bucket, and clients of each kind for them."""

import os
from typing import Any
from uuid import uuid4

from raycheck.bucket.store import Store
from raycheck.bucket.store.address import Address, join_uri, parse_uri
from raycheck.bucket.store.client_options import obstore_options
from raycheck.bucket.store.s3.obstore_store import FastS3Store
from raycheck.bucket.store.s3.private_obstore import own_obstore
from raycheck.bucket.store.s3.s3fs_store import S3Store

ENGINES = {"fast": FastS3Store, "fsspec": S3Store}


def new_folder(uri: str) -> str:
    return join_uri(uri, uuid4().hex)


def open_with(engine: str, uri: str) -> Store:
    """The store at `uri` by the named engine, whatever else is installed."""
    at = parse_uri(uri)
    return ENGINES[engine](uri, bucket=at.bucket, prefix=at.prefix, settings=at.settings)


def raw_client(uri: str, *, of_raycheck: bool = False) -> Any:
    """obstore as fast as it goes: payloads neither signed nor checksummed.

    of_raycheck: made by raycheck's own copy of obstore, for the whole bucket, to be put into a FastS3Store.
    """
    from obstore.store import S3Store as Client

    at = parse_uri(uri)
    options = obstore_options(at.settings, at.bucket) | {"unsigned_payload": True}
    options.pop("checksum_algorithm", None)
    keys = {"access_key_id": _key(), "secret_access_key": _secret()}
    if of_raycheck:
        return own_obstore()._store.S3Store(at.bucket, **keys, **options)
    return Client(at.bucket, prefix=at.prefix, **keys, **options)


def s3fs_options(uri: str) -> dict[str, Any]:
    """For peers on s3fs: without hashes and checksums that plain http would get, as raycheck has it too."""
    at = parse_uri(uri)
    return {
        "key": _key(),
        "secret": _secret(),
        "endpoint_url": at.settings.endpoint,
        "client_kwargs": {"region_name": at.settings.region},
        "config_kwargs": {
            "s3": {"addressing_style": "path", "payload_signing_enabled": False},
            "max_pool_connections": 50,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        },
        "use_listings_cache": False,
    }


def tensorstore_options(uri: str, name: str) -> dict[str, Any]:
    """TensorStore's key-value store at a name below `uri`."""
    at = parse_uri(uri)
    return {
        "driver": "s3",
        "bucket": at.bucket,
        "path": f"{at.prefix}/{name}/",
        "endpoint": at.settings.endpoint,
        "aws_region": at.settings.region,
        "aws_credentials": {"type": "environment"},
    }


def plain_uri(uri: str) -> str:
    """Without the query, as other tools take it."""
    return uri.partition("?")[0]


def pyarrow_files(uri: str) -> tuple[Any, str]:
    """pyarrow's file system, as Ray makes it, and the path in it."""
    import pyarrow.fs

    at: Address = parse_uri(uri)
    scheme, _, host = str(at.settings.endpoint).partition("://")
    files = pyarrow.fs.S3FileSystem(
        access_key=_key(), secret_key=_secret(), endpoint_override=host, scheme=scheme, region=at.settings.region
    )
    return files, f"{at.bucket}/{at.prefix}"


def _key() -> str:
    return os.environ["AWS_ACCESS_KEY_ID"]


def _secret() -> str:
    return os.environ["AWS_SECRET_ACCESS_KEY"]
