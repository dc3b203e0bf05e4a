"""Defines the grammar of URIs: the scheme names the backend, the query contains its settings.

`s3://bucket/prefix?endpoint_override=127.0.0.1:9000&scheme=http`, `gs://bucket/prefix`,
`az://container/prefix?account_name=me` (also `abfss://container@me.dfs.core.windows.net/prefix`), `file:///folder`, a
plain absolute path, `memory://prefix`. The query uses pyarrow's names where pyarrow has them, since Ray reads these
URIs too. A URI never contains credentials; they come from the store client's own chain.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from raycheck.errors import ConfigError
from raycheck.storage_settings import StorageSettings, meant_for

SCHEMES = ("s3", "gs", "az", "abfss", "file", "memory")
_KINDS = ("s3", "gs", "az", "file", "memory")
_KIND_OF_SCHEME = {"gcs": "gs", "abfs": "az", "abfss": "az"}
_ABFSS = re.compile(r"([^@:/?]+)@([^@:/?.]+)\.dfs\.core\.windows\.net")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ACCOUNT = "account_name"
"""The part of an address that is in the query: az:// has no other place for the account."""
_PYARROW_NAMES = {"endpoint": "endpoint_override", "ca_bundle": "tls_ca_file_path"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The parts of a URI.

    kind: the store behind the scheme: s3, gs, az, file or memory. bucket: the bucket or container; the first segment of
    memory://; empty for a folder. account: Azure's storage account, otherwise empty. said: the settings in the URI
    itself; `settings` adds those of the environment, with lower priority.
    """

    kind: str
    bucket: str
    prefix: str
    account: str
    said: StorageSettings

    @property
    def settings(self) -> StorageSettings:
        """Return the settings that apply in this process."""
        return self.said.over(StorageSettings.from_environment(self.kind))


class UriFiles:
    """The base of raycheck's own file systems for Ray (S3Files, GsFiles, AzFiles): each consists only of its URI."""

    uri: str


def parse_uri(uri: str) -> Address:
    """Split a URI into its parts. Raises ConfigError that says what is wrong with it, and repeats no credentials."""
    if uri.startswith("/"):
        return Address(kind="file", bucket="", prefix=uri, account="", said=StorageSettings())
    if odd := _CONTROL.search(uri):  # urlsplit would omit them, and so name another place
        raise ConfigError(f"{shown_uri(uri)!r}: write the character {odd[0]!r} as %{ord(odd[0]):02X}")
    bare = uri.partition("?")[0]  # errors repeat only this: queries of other tools contain signatures and keys
    scheme, _, rest = bare.partition("://")
    scheme = scheme.lower()
    host, _, path = rest.partition("/")
    kind = kind_of(bare) if "://" in bare else ""
    abfss = _ABFSS.fullmatch(host) if scheme in ("abfs", "abfss") else None
    if ("@" in bare and (not abfss or "@" in path)) or (kind in ("s3", "gs", "az") and ":" in host):
        raise ConfigError("the URI contains credentials: remove them, and use the environment or a profile")
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"{bare}: {error}") from None
    if parts.fragment or uri.endswith("#"):
        raise ConfigError(f"{bare}: a # has no meaning here; write it as %23")
    if kind not in _KINDS:
        schemes = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(f"{bare}: give an address that begins with {schemes}, or an absolute path")
    try:
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(f"{bare}: the settings after ? must be name=value") from None
    account = query.pop(_ACCOUNT, "") if kind == "az" else ""
    said = settings_in_query(kind, query)
    # The names in a folder may be any bytes, which Python writes with surrogates.
    bucket = parts.netloc
    prefix = unquote(parts.path, errors="surrogateescape" if kind == "file" else "replace").strip("/")
    if "\0" in prefix:
        raise ConfigError(f"{bare}: a name cannot contain the character NUL")
    if kind in ("s3", "gs") and not bucket:
        raise ConfigError(f"{bare}: name the bucket, as in {kind}://bucket/runs/my-run")
    if kind == "az":
        bucket, account = _container(bare, scheme, bucket, account, abfss)
    if kind == "file":
        if bucket:
            raise ConfigError(f"{bare}: write file:///folder with three slashes; {bucket!r} would be a host")
        prefix = f"/{prefix}"
    return Address(kind=kind, bucket=bucket, prefix=prefix, account=account, said=said)


def kind_of(uri: str) -> str:
    """Return the kind of store behind a URI's scheme (s3, gs, az, file, memory), or the scheme itself if unknown."""
    scheme = uri.partition("://")[0].lower() if "://" in uri else "file"
    return _KIND_OF_SCHEME.get(scheme, scheme)


def join_uri(uri: str, name: str) -> str:
    """Return `uri` with one more path segment: the run's root, from Ray's storage path and run name.

    name: unquoted, like a folder's; characters with a meaning in a URI are quoted here. Raises ConfigError for a name
    with a segment "." or "..".
    """
    if {".", ".."} & set(name.split("/")):
        raise ConfigError(f"{name!r} is not a name for a run: it would be another folder")
    base, mark, query = ("", "", "") if uri.startswith("/") else uri.partition("?")
    if not base:  # a plain path, in which nothing is quoted
        return f"{uri.rstrip('/')}/{name}"
    return f"{base.rstrip('/')}/{_quoted(name)}{mark}{query}"


def folder_uri(uri: str, name: str) -> str:
    """Return the URI of the folder `name` in the place at `uri`. The name may contain any character but a slash."""
    base, mark, query = uri.partition("?")
    base = base.rstrip("/")
    root = f"{base}//" if base.endswith(":") else base
    return f"{root}/{quote(name, safe='', errors='surrogateescape')}{mark}{query}"


def path_uri(path: str) -> str:
    """Return the URI of an absolute path, in which only characters with a meaning in a URI are quoted."""
    return f"file://{_quoted(path)}"


def _quoted(path: str) -> str:
    """Return `path` with only those characters quoted that would mean something else in a URI."""
    return re.sub("[%?#@\\x00-\\x1f\\x7f]", lambda found: f"%{ord(found[0]):02X}", path)


def is_same_place(one: str, other: str) -> bool:
    """Return whether two URIs name one place in one bucket, regardless of their settings."""
    return place_of(one) == place_of(other)


def located(prefix: str, key: str) -> str:
    """Return the key in the bucket for `key`, which is relative to `prefix` and may begin with "../".

    Raises ConfigError when it is above the bucket.
    """
    while key.startswith("../"):
        if not prefix.strip("/"):
            raise ConfigError(f"{key!r} is above the bucket")
        above = prefix.rstrip("/").rpartition("/")[0]
        prefix, key = f"{above}/" if above or prefix.startswith("/") else "", key[3:]
    return prefix + key


def uri_beside(uri: str, way: str) -> str:
    """Return the URI of the place at the relative path `way` ("../other") from `uri`, with the settings of `uri`."""
    base, mark, query = uri.partition("?")
    start = base.index("://") + 3 if "://" in base else 0
    root = base[start:].rstrip("/") + "/"
    return base[:start] + located(root, quote(way)) + mark + query


def shown_uri(uri: str) -> str:
    """Return `uri` as messages show it: without its query, which may contain settings or another tool's signature.

    What a URI has before an "@" is also omitted, unless it is Azure's container. Never raises, whatever the text is. A
    path is returned unchanged. For an address that a program is to use, see `bare_uri`.
    """
    scheme, mark, rest = uri.partition("://")
    if not mark:
        return uri
    host, slash, path = rest.partition("?")[0].partition("/")
    is_container = _KIND_OF_SCHEME.get(scheme.lower()) == "az"
    return f"{scheme}://{host if is_container else host.rpartition('@')[2]}{slash}{path}"


def bare_uri(uri: str) -> str:
    """Return `uri` without the settings in its query, some of which are not for others to read.

    It is still an address: the account in az://container/path?account_name=me stays. A path is returned unchanged.
    """
    base = shown_uri(uri)
    is_azure = kind_of(base) == "az" and "@" not in base
    return f"{base}?{_ACCOUNT}={parse_uri(uri).account}" if is_azure else base


def overlap(one: str, other: str) -> bool:
    """Return whether two URIs name one place, or one is inside the other. Other endpoints are other places."""
    a, b = parse_uri(one), parse_uri(other)
    if (a.kind, a.account, a.bucket, a.settings.endpoint) != (b.kind, b.account, b.bucket, b.settings.endpoint):
        return False
    paths = [os.path.realpath(at.prefix) if at.kind == "file" else at.prefix for at in (a, b)]
    first, second = sorted(f"{path.strip('/')}/" for path in paths)
    return first == "/" or second.startswith(first)


def path_below(root: str, uri: str) -> str | None:
    """Return the path from `root` to a place in it that is reached by the same settings, such as "exports/final".

    Return None for any other place, and for `root` itself.
    """
    outer, inner = parse_uri(root), parse_uri(uri)
    if (outer.kind, outer.account, outer.bucket, outer.settings) != (
        inner.kind,
        inner.account,
        inner.bucket,
        inner.settings,
    ):
        return None
    start = f"{outer.prefix.rstrip('/')}/".lstrip("/")
    path = inner.prefix.lstrip("/")
    return path.removeprefix(start) or None if path.startswith(start) else None


def place_of(uri: str) -> tuple[str, str, str, str]:
    """Return what is equal for all URIs of one place in one bucket, regardless of their settings."""
    at = parse_uri(uri)
    return at.kind, at.account, at.bucket, at.prefix.rstrip("/")


def with_settings(uri: str, settings: StorageSettings) -> str:
    """Return `uri` with `settings` in its query, where they override existing ones. So they travel with the URI.

    Raises ConfigError for a setting that means nothing to the URI's scheme.
    """
    said = [field.name for field in fields(settings) if getattr(settings, field.name) is not None]
    if not said:
        return uri
    base, _, text = uri.partition("?")
    kind = kind_of(base)
    for name in said:
        if name not in meant_for(kind):
            raise ConfigError(f"StorageSettings({name}) means nothing to {kind}://")
    query = dict(parse_qsl(text, keep_blank_values=True))
    account = {_ACCOUNT: query.pop(_ACCOUNT)} if _ACCOUNT in query else {}
    pairs = _query_of(settings.over(settings_in_query(kind, query)))
    return f"{base}?{urlencode(account | pairs, safe=':/')}"


def settings_in_query(kind: str, query: Mapping[str, str]) -> StorageSettings:
    """Return the settings in a URI's query. Raises ConfigError for a name that this kind does not know."""
    known = _query_names(kind)
    unknown = sorted(set(query) - set(known))
    if unknown and not known:
        raise ConfigError(f"{kind}:// takes no settings in its query")
    if unknown:
        raise ConfigError(f"{kind}://: unknown setting {unknown[0]!r} in the query; known: {', '.join(known)}")
    found = {known[name]: value for name, value in query.items() if name != "scheme"}
    endpoint = found.get("endpoint")
    if endpoint and "://" not in endpoint:
        found["endpoint"] = f"{query.get('scheme', 'https')}://{endpoint}"
    return StorageSettings.from_mapping(found)


def _query_of(settings: StorageSettings) -> dict[str, str]:
    """Return the settings as the pairs of a URI's query."""
    pairs: dict[str, str] = {}
    for field in fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if name == "endpoint" and value is not None:
            scheme, _, host = value.rstrip("/").partition("://")
            pairs |= {"endpoint_override": host, "scheme": scheme}
        elif value is not None:
            pairs[_PYARROW_NAMES.get(name, name)] = str(value).lower() if isinstance(value, bool) else value
    return pairs


def _query_names(kind: str) -> dict[str, str]:
    """Return the field behind each name that a query may use; "scheme" is only a part of the endpoint."""
    names = {_PYARROW_NAMES.get(name, name): name for name in meant_for(kind)}
    return names | {"scheme": ""} if "endpoint" in meant_for(kind) else names


def _container(bare: str, scheme: str, bucket: str, account: str, abfss: re.Match[str] | None) -> tuple[str, str]:
    """Return container and account, from either way of writing them; the account may come from the environment."""
    if scheme != "az":
        if abfss is None:
            raise ConfigError(f"{bare}: write {scheme}://container@account.dfs.core.windows.net/runs/my-run")
        return abfss[1], abfss[2]
    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not bucket or not account:
        raise ConfigError(
            f"{bare}: name container and account, as in az://container/runs/my-run?{_ACCOUNT}=me "
            "(the account also from AZURE_STORAGE_ACCOUNT_NAME)"
        )
    return bucket, account
