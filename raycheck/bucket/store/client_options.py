"""Translates the settings into each client's arguments, by one table. Imports no client, and opens nothing.

| setting        | botocore (s3fs)                      | obstore                                | pyarrow's own URI  |
|----------------|--------------------------------------|----------------------------------------|--------------------|
| endpoint       | endpoint_url                         | endpoint, allow_http                   | - (see below)      |
| region         | region_name                          | region                                 | region             |
| profile        | the session's profile                | credential_provider                    | -                  |
| role_arn       | the session's credentials            | credential_provider                    | -                  |
| anonymous      | signature UNSIGNED                   | skip_signature                         | -                  |
| requester_pays | RequestPayer, on every request       | request_payer                          | -                  |
| encryption     | ServerSideEncryption, on every write | server_side_encryption                 | -                  |
| kms_key_id     | SSEKMSKeyId, on every write          | sse_kms_key_id                         | -                  |
| ca_bundle      | verify                               | root_certificate (its bytes)           | tls_ca_file_path   |
| path_style     | s3.addressing_style                  | virtual_hosted_style_request, and then | -                  |
|                |                                      | the bucket is part of the endpoint     |                    |

A dash means that pyarrow's URI cannot say it; Ray is given an fsspec file system instead (ray_filesystem.py). The same
holds for an S3 store that is not AWS's: a current pyarrow uploads with a checksum at the end and without the length,
which Ceph and others answer with 411 (unless AWS_REQUEST_CHECKSUM_CALCULATION is when_required in every process of
Ray's). tests/bucket/store/test_client_options.py compares every row with what arrives at a server. The other clouds
have four of the settings, and there one class serves the store and Ray's own file system:

| setting        | gcsfs (gcs.client.GsClient)  | adlfs (azure.client.AzClient)                |
|----------------|------------------------------|----------------------------------------------|
| endpoint       | endpoint_url                 | account_host, or in the connection_string    |
| anonymous      | token "anon"                 | a connection_string without a key            |
| requester_pays | requester_pays (userProject) | (none)                                       |
| ca_bundle      | the session's connector      | connection_verify of the service's transport |
"""

import os
import ssl
from pathlib import Path
from typing import Any

from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings

TIMEOUT_S = 60
"""How long one of obstore's requests may take, including its body."""
SAYABLE_TO_PYARROW: dict[str, set[str]] = {"s3": {"region", "ca_bundle"}, "gs": {"endpoint"}, "az": set()}


def uses_path_style(settings: StorageSettings, bucket: str) -> bool:
    """Return whether the bucket is named in the path: in a host name, a dot in the bucket's name would not match the
    store's wildcard certificate."""
    if settings.path_style is not None:
        return settings.path_style
    return settings.endpoint is not None or "." in bucket


def s3fs_options(settings: StorageSettings, bucket: str) -> dict[str, Any]:
    """Return the arguments of s3fs.S3FileSystem except session and credentials. Callers may add to `config_kwargs`."""
    client: dict[str, Any] = {}
    if settings.region:
        client["region_name"] = settings.region
    if settings.ca_bundle and not settings.is_plain_http:
        client["verify"] = str(ca_file(settings))
    style = "path" if uses_path_style(settings, bucket) else "virtual"
    return {
        "anon": bool(settings.anonymous),
        "endpoint_url": settings.endpoint,
        "requester_pays": bool(settings.requester_pays),
        # s3fs passes each call those that it knows. Before 2026.9 it omitted its own requester_pays from writes.
        "s3_additional_kwargs": on_write(settings) | on_every_request(settings),
        "client_kwargs": client,
        "config_kwargs": {"s3": {"addressing_style": style}},
        "use_listings_cache": False,
    }


def on_every_request(settings: StorageSettings) -> dict[str, str]:
    """Return the parameters of every botocore call on objects."""
    return {"RequestPayer": "requester"} if settings.requester_pays else {}


def on_write(settings: StorageSettings) -> dict[str, str]:
    """Return the parameters of a botocore call that creates an object: put_object, create_multipart_upload."""
    found = {"ServerSideEncryption": settings.encryption, "SSEKMSKeyId": settings.kms_key_id}
    return {name: value for name, value in found.items() if value is not None}


def obstore_options(settings: StorageSettings, bucket: str) -> dict[str, Any]:
    """Return the arguments of obstore.store.S3Store except credentials.

    Everything that obstore would otherwise take from the environment is passed, so that both clients reach the same
    store. The region must be known: obstore follows no redirect.
    """
    assert settings.region, "FastS3Store has asked botocore, or reads through s3fs"
    suffix = ".cn" if settings.region.startswith("cn-") else ""
    endpoint = settings.endpoint or f"https://s3.{settings.region}.amazonaws.com{suffix}"
    is_path_style = uses_path_style(settings, bucket)
    if not is_path_style:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{bucket}.{host}"
    client: dict[str, Any] = {
        "allow_http": settings.is_plain_http,
        "timeout": f"{TIMEOUT_S}s",
        "connect_timeout": "10s",
    }
    if settings.ca_bundle and not settings.is_plain_http:
        client["root_certificate"] = ca_file(settings).read_bytes()
    found = {
        # Each body carries a checksum that the store compares; a SHA-256 in the signature would take far more CPU.
        "unsigned_payload": True,
        "checksum_algorithm": "CRC64NVME",
        "endpoint": endpoint.rstrip("/"),
        "region": settings.region,
        "virtual_hosted_style_request": not is_path_style,
        "skip_signature": bool(settings.anonymous),
        "request_payer": bool(settings.requester_pays),
        "server_side_encryption": settings.encryption,
        "sse_kms_key_id": settings.kms_key_id,
        "client_options": client,
    }
    return {name: value for name, value in found.items() if value is not None}


def adlfs_options(uri: str, settings: StorageSettings, account: str | None) -> dict[str, Any]:
    """Return the arguments of adlfs.AzureBlobFileSystem.

    Credentials are left to its own chain, except with an endpoint or without credentials, which that chain cannot
    express. Raises ConfigError for requests that would go to another account, or unencrypted with a token.
    """
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    key = os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
    connection = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
    if not account and not connection:
        raise ConfigError(f"{shown_uri(uri)}: name the account: az://container/path?account_name=... or abfss://")
    named = dict(item.partition("=")[::2] for item in (connection or "").split(";")).get("AccountName", account)
    if account and named != account and not settings.anonymous:
        # adlfs would follow the variable and write to the other account.
        raise ConfigError(f"{shown_uri(uri)}: AZURE_STORAGE_CONNECTION_STRING is of another account, {named}; unset it")
    endpoint = settings.endpoint or f"https://{account}.blob.core.windows.net"
    found: dict[str, Any] = {"anon": bool(settings.anonymous), "use_listings_cache": False}
    if settings.anonymous:
        return found | {"connection_string": f"BlobEndpoint={endpoint}"}
    if settings.endpoint and key and not connection:
        return found | {"connection_string": f"BlobEndpoint={endpoint};AccountName={account};AccountKey={key}"}
    if settings.endpoint and not connection:
        if not endpoint.startswith("https://"):
            raise ConfigError(f"{shown_uri(uri)}: {endpoint}: Azure takes tokens over https:// only")
        found["account_host"] = endpoint.removeprefix("https://")
    return found | {"account_name": account}


def gcsfs_options(settings: StorageSettings) -> dict[str, Any]:
    """Return the arguments of gcsfs.GCSFileSystem. An emulator gets no credentials, as with Google's own clients."""
    is_anonymous = settings.anonymous or bool(os.environ.get("STORAGE_EMULATOR_HOST"))
    return {
        # Not None: that falls back to no credentials at all, and the error would be the bucket's 401.
        "token": "anon" if is_anonymous else "google_default",
        "access": "read_write",
        "endpoint_url": settings.endpoint,
        "requester_pays": bool(settings.requester_pays),
        "use_listings_cache": False,
        "session_kwargs": {"trust_env": True},  # proxies
    }


def trusted(settings: StorageSettings) -> ssl.SSLContext | None:
    """Return a TLS context with the CA bundle; None means the system's certificates. Raises ConfigError."""
    if not settings.ca_bundle or settings.is_plain_http:
        return None
    path = ca_file(settings)
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"StorageSettings(ca_bundle): {path}: {error}") from error


def ca_file(settings: StorageSettings) -> Path:
    """Return the path of the CA bundle. Raises ConfigError when it is not on this node."""
    path = Path(settings.ca_bundle or "")
    if not path.is_file():
        raise ConfigError(f"StorageSettings(ca_bundle): there is no file {path} on this node")
    return path
