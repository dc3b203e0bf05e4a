"""The grammar of URIs: the scheme names the backend, the query gives its settings (pyarrow's names, as Ray takes them).

`s3://bucket/prefix?endpoint_override=127.0.0.1:9000&scheme=http`, `gs://bucket/prefix`,
`az://container/prefix?account_name=me` (also `abfss://container@me.dfs.core.windows.net/prefix`), `file:///folder`, a
plain absolute path, `memory://prefix`. Credentials never stand in a URI; they come from the store client's own chain.
"""

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from raycheck.errors import ConfigError
from raycheck.storage_settings import ADDRESS_NAMES, StorageSettings, kind_of

SCHEMES = ("s3", "gs", "az", "abfss", "file", "memory")
_KINDS = ("s3", "gs", "az", "file", "memory")
_ABFSS = re.compile(r"([^@:/?]+)@([^@:/?.]+)\.dfs\.core\.windows\.net")


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A URI taken apart. bucket: bucket or container, the first segment of memory://, empty for a folder.
    said: the settings in the URI itself; `settings` has the environment's below them."""

    kind: str
    bucket: str
    prefix: str
    account: str
    said: StorageSettings

    @property
    def settings(self) -> StorageSettings:
        """What holds in this process."""
        return self.said.over(StorageSettings.from_environment(self.kind))


def parse_uri(uri: str) -> Address:
    """Raises ConfigError that says what is wrong with the URI, and repeats no credentials."""
    if uri.startswith("/"):
        return Address(kind="file", bucket="", prefix=uri, account="", said=StorageSettings())
    bare = uri.partition("?")[0]  # errors repeat no more: queries of other tools hold signatures and keys
    scheme, _, rest = bare.partition("://")
    scheme = scheme.lower()
    host, _, path = rest.partition("/")
    kind = kind_of(bare) if "://" in bare else ""
    abfss = _ABFSS.fullmatch(host) if scheme in ("abfs", "abfss") else None
    if ("@" in bare and (not abfss or "@" in path)) or (kind in ("s3", "gs", "az") and ":" in host):
        raise ConfigError("the URI holds credentials: take them out, and use the environment or a profile")
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"{bare}: {error}") from None
    if parts.fragment or uri.endswith("#"):
        raise ConfigError(f"{bare}: a # has no meaning here; write it as %23")
    if kind not in _KINDS:
        raise ConfigError(f"{bare}: raycheck knows {', '.join(f'{name}://' for name in SCHEMES)} and absolute paths")
    try:
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(f"{bare}: the settings after ? must be name=value") from None
    account = query.pop("account_name", "") if kind == "az" else ""
    said = StorageSettings.from_query(kind, query)
    bucket, prefix = parts.netloc, unquote(parts.path).strip("/")
    if kind in ("s3", "gs") and not bucket:
        raise ConfigError(f"{bare}: name the bucket, as in {kind}://bucket/runs/my-run")
    if kind == "az":
        bucket, account = _container(bare, scheme, bucket, account, abfss)
    if kind == "file":
        if bucket:
            raise ConfigError(f"{bare}: write file:///folder with three slashes; {bucket!r} would be a host")
        prefix = f"/{prefix}"
    return Address(kind=kind, bucket=bucket, prefix=prefix, account=account, said=said)


def join_uri(uri: str, name: str) -> str:
    """`uri` with one more path segment, its query kept: the run's root from Ray's storage path and run name."""
    base, mark, query = uri.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def is_same_place(one: str, other: str) -> bool:
    """Whether two URIs name one place in one bucket, whatever their settings."""
    return _place(one) == _place(other)


def _place(uri: str) -> tuple[str, str, str, str]:
    at = parse_uri(uri)
    return at.kind, at.account, at.bucket, at.prefix.rstrip("/")


def _container(bare: str, scheme: str, bucket: str, account: str, abfss: re.Match[str] | None) -> tuple[str, str]:
    """Container and account, from either way of writing them, or the account from the environment."""
    if scheme != "az":
        if abfss is None:
            raise ConfigError(f"{bare}: write {scheme}://container@account.dfs.core.windows.net/runs/my-run")
        return abfss[1], abfss[2]
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not bucket or not account:
        raise ConfigError(
            f"{bare}: name container and account, as in az://container/runs/my-run?{ADDRESS_NAMES[0]}=me "
            "(the account also from AZURE_STORAGE_ACCOUNT_NAME)"
        )
    return bucket, account
