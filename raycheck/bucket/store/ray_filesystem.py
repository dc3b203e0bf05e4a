"""Translates in both directions between a run's URI and the pyarrow file system with which Ray writes its own files.

Ray receives the URI itself wherever pyarrow understands all of it. Otherwise it receives an fsspec file system that
consists only of the URI: pickled it carries no secret, and equal URIs are equal file systems, which Ray compares.

`main` runs in a separate process and uses Ray's file system as Ray would. That process is ended if it hangs:
pyarrow waits in C++, with some of its clients for a quarter of an hour, and a Python thread cannot be told to stop.
"""

import os
import pickle
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote, urlencode

from raycheck.bucket.store.address import Address, UriFiles, parse_uri, with_settings
from raycheck.bucket.store.client_options import SAYABLE_TO_PYARROW
from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings

_SECRETS = ("access_key", "secret_key", "session_token", "access_token", "account_key", "client_secret", "sas_token")
_IDENTITIES = ("target_service_account", "client_id", "tenant_id")
_S3FS_SECRETS = ("key", "secret", "token", "username", "password", "session")
_S3FS_HARMLESS = (
    "default_block_size",
    "default_cache_type",
    "default_fill_cache",
    "listings_expiry_time",
    "max_concurrency",
    "skip_instance_cache",
    "use_listings_cache",
)


def ray_filesystem(uri: str) -> tuple[str, Any] | None:
    """Return path and file system for Ray to use instead of `uri`; None where pyarrow understands all of the URI."""
    at = parse_uri(uri)
    if not at.bucket or at.kind == "memory" or _is_sayable(uri, at):
        return None
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    if at.kind == "s3":
        from raycheck.bucket.store.s3.client import S3Files

        files: Any = S3Files(uri)
    elif at.kind == "gs":
        from raycheck.bucket.store.gcs.client import GsFiles

        files = GsFiles(uri)
    else:
        from raycheck.bucket.store.azure.client import AzFiles

        files = AzFiles(uri)
    return f"{at.bucket}/{at.prefix}".rstrip("/"), PyFileSystem(FSSpecHandler(files))


def uri_of(filesystem: Any, path: str) -> str:
    """Return the URI of `path` on a pyarrow file system.

    Raises ConfigError for a file system whose bucket cannot be determined, and for one that contains secrets, which
    must not get into a URI. GcsFileSystem and AzureFileSystem are what Ray makes of a plain gs:// or abfss:// URI.
    """
    from pyarrow import fs

    if isinstance(filesystem, fs.SubTreeFileSystem):
        return uri_of(filesystem.base_fs, f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}")
    if isinstance(filesystem, fs.LocalFileSystem):
        return _file_uri(path)
    if isinstance(filesystem, fs.PyFileSystem):
        return _of_fsspec(getattr(filesystem.handler, "fs", filesystem.handler), path)
    kind = type(filesystem).__name__
    if kind not in ("S3FileSystem", "GcsFileSystem", "AzureFileSystem"):  # a build of pyarrow may lack some of them
        raise _unreadable(kind)
    options = filesystem.__reduce__()[1][0]
    if any(options.get(name) for name in _SECRETS):
        raise _secret(kind)
    identity = next((name for name in _IDENTITIES if options.get(name)), None)
    if identity is not None:
        raise ConfigError(
            f"storage_filesystem: raycheck cannot use {identity} of {kind}. Give storage_path as a URI, and "
            "StorageSettings with credentials"
        )
    if kind == "AzureFileSystem":
        account = urlencode({"account_name": options["account_name"]})
        return with_settings(f"az://{_quoted(path)}?{account}", _of_azure(options))
    settings = _of_pyarrow(kind, options)
    return with_settings(f"{'s3' if kind == 'S3FileSystem' else 'gs'}://{_quoted(path)}", settings)


def main() -> None:
    """Read a file through Ray's file system and write another; report on stdout what starts, and what has failed.

    stdin contains, pickled, Ray's storage path and file system (None: the path's own), the two names, the bytes, and
    the seconds that reading and writing may take. After that time SIGALRM ends the process. Nothing else ends one that
    hangs in C++.
    """
    request = pickle.load(sys.stdin.buffer)  # noqa: S301  of its parent process
    storage_path, files, source, target, data, limit_s = request
    doing = "be made for it"
    try:
        from pyarrow.fs import FileSystem

        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may ignore it
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        files, path = FileSystem.from_uri(storage_path) if files is None else (files, storage_path)
        doing = _begin("read there what raycheck has written")
        with files.open_input_stream(f"{path.rstrip('/')}/{source}") as stream:
            if stream.read() != data:
                raise ValueError("these are other bytes")  # noqa: TRY301  the handler below says it
        doing = _begin("write there")
        with files.open_output_stream(f"{path.rstrip('/')}/{target}") as stream:
            stream.write(data)
        _begin("")
    except Exception as error:  # noqa: BLE001  whatever it is, the caller reports it
        _say("failed", f"{doing}: {type(error).__name__}: {error}")
    os._exit(0)  # pyarrow's threads may not end on their own


def _begin(doing: str) -> str:
    _say("begins", doing)
    return doing


def _say(*words: str) -> None:
    sys.stdout.write("\0".join(words) + "\1")
    sys.stdout.flush()


def _is_sayable(uri: str, at: Address) -> bool:
    """Return whether pyarrow would do everything that raycheck does.

    It reads AWS's region, endpoint and profile from the environment itself. For Azure it understands only abfss://.
    """
    said = {name for name, value in asdict(at.said).items() if value is not None}
    is_pyarrows_scheme = at.kind != "az" or (uri.startswith("abfs") and "?" not in uri)
    has_own_environment = any(name.startswith("RAYCHECK_STORAGE_") for name in os.environ)
    has_own_ca = at.kind == "s3" and not at.settings.is_plain_http and bool(os.environ.get("AWS_CA_BUNDLE"))
    has_own_endpoint = at.kind == "s3" and at.settings.endpoint is not None  # see client_options.py
    has_emulator = at.kind == "gs" and bool(os.environ.get("STORAGE_EMULATOR_HOST"))  # pyarrow ignores it
    has_own = has_own_environment or has_own_ca or has_own_endpoint or has_emulator
    return is_pyarrows_scheme and said <= SAYABLE_TO_PYARROW[at.kind] and not has_own


def _of_azure(options: Mapping[str, Any]) -> StorageSettings:
    authority = options["blob_storage_authority"]
    if authority == ".blob.core.windows.net":
        return StorageSettings()
    host = f"{options['account_name']}{authority}" if authority.startswith(".") else authority
    return StorageSettings(endpoint=f"{options['blob_storage_scheme']}://{host}")


def _of_pyarrow(kind: str, options: Mapping[str, Any]) -> StorageSettings:
    endpoint = options["endpoint_override"]
    if endpoint and "://" not in endpoint:
        endpoint = f"{options['scheme'] or 'https'}://{endpoint}"
    found = {"endpoint": endpoint or None, "anonymous": options["anonymous"] or None}
    if kind == "GcsFileSystem":
        return StorageSettings(**found)
    if options["proxy_options"]["host"]:
        raise ConfigError("storage_filesystem: raycheck's own requests would not go through its proxy; use HTTPS_PROXY")
    return StorageSettings(
        region=options["region"] or None,
        role_arn=options["role_arn"] or None,
        external_id=options["external_id"] or None,
        ca_bundle=options["tls_ca_file_path"] or None,
        path_style=False if options["force_virtual_addressing"] else None,
        **found,
    )


def _of_fsspec(files: Any, path: str) -> str:
    if isinstance(files, UriFiles):
        at = parse_uri(files.uri)
        account = f"?account_name={at.account}" if at.account else ""
        return with_settings(f"{at.kind}://{_quoted(path)}{account}", at.said)
    owner = f"{type(files).__module__}.{type(files).__name__}"  # a subclass may do what raycheck cannot do as well
    if owner == "fsspec.implementations.local.LocalFileSystem":
        return _file_uri(path)
    if owner != "s3fs.core.S3FileSystem":
        raise _unreadable(owner)
    if files.storage_args or any(files.storage_options.get(name) for name in _S3FS_SECRETS):
        raise _secret(owner)
    return with_settings(f"s3://{_quoted(path.removeprefix('s3://'))}", _of_s3fs(files.storage_options))


def _of_s3fs(options: Mapping[str, Any]) -> StorageSettings:
    left = {name: value for name, value in options.items() if name not in (*_S3FS_HARMLESS, *_S3FS_SECRETS)}
    client, writes = dict(left.pop("client_kwargs", None) or {}), dict(left.pop("s3_additional_kwargs", None) or {})
    config = dict(left.pop("config_kwargs", None) or {})
    style = str((config.pop("s3", None) or {}).get("addressing_style"))
    if any(name.startswith("aws_") for name in client):
        raise _secret("s3fs.S3FileSystem")
    verify = client.pop("verify", None)
    settings = StorageSettings(
        endpoint=left.pop("endpoint_url", None) or client.pop("endpoint_url", None),
        region=client.pop("region_name", None),
        profile=left.pop("profile", None),
        anonymous=left.pop("anon", None) or None,
        requester_pays=left.pop("requester_pays", None) or None,
        encryption=writes.pop("ServerSideEncryption", None),
        kms_key_id=writes.pop("SSEKMSKeyId", None),
        ca_bundle=verify if isinstance(verify, str) else None,
        path_style={"path": True, "virtual": False}.get(style),
    )
    unknown = sorted([*left, *client, *writes, *config, *(["verify"] if verify is False else [])])
    if unknown:
        raise ConfigError(f"storage_filesystem: raycheck cannot do the same with s3fs's option {unknown[0]!r}")
    return settings


def _file_uri(path: str) -> str:
    if not path.startswith("/"):
        raise ConfigError(f"storage_path {path!r}: give an absolute path, since workers run in other folders")
    return f"file://{_quoted(path)}"


def _quoted(path: str) -> str:
    return quote(path, safe="/")


def _unreadable(kind: str) -> ConfigError:
    return ConfigError(
        f"RunConfig(storage_filesystem=...): raycheck cannot see which bucket is behind a {kind}. Give storage_path as "
        "a URI, and settings by raycheck.fit(trainer, storage=raycheck.StorageSettings(...))"
    )


def _secret(kind: str) -> ConfigError:
    return ConfigError(
        f"RunConfig(storage_filesystem=...): the {kind} contains explicit keys, which would have to be part of the "
        "run's URI. Use a profile, a role or the environment instead"
    )
