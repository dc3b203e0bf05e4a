"""From a URI to a store: the scheme picks the backend, the query its settings (pyarrow's names, as Ray takes them).

`s3://bucket/prefix?endpoint_override=127.0.0.1:9000&scheme=http`, `file:///folder`, a plain absolute path,
`memory://prefix`. Credentials never stand in a URI; they come from the store client's own chain.
"""

from urllib.parse import parse_qsl, unquote, urlsplit

from raycheck.bucket.store.base import Store
from raycheck.errors import ConfigError

SCHEMES = ("s3", "file", "memory")


def open_store(uri: str) -> Store:
    """The store rooted at `uri`. Opens no connection. Raises ConfigError that says what is wrong with the URI."""
    if uri.startswith("/"):
        from raycheck.bucket.store.local import LocalStore

        return LocalStore(f"file://{uri}", uri)
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"{uri}: {error}") from None
    if parts.fragment or uri.endswith("#"):
        raise ConfigError(f"{uri.partition('?')[0]}: a # has no meaning here; write it as %23")
    if "@" in uri.partition("?")[0] or (parts.scheme == "s3" and ":" in parts.netloc):
        raise ConfigError("the URI holds credentials: take them out, and use the environment or a profile")
    bare = uri.partition("?")[0]
    try:
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(f"{bare}: the settings after ? must be name=value") from None
    path = unquote(parts.path).strip("/")
    if parts.scheme == "s3":
        from raycheck.bucket.store.s3 import S3Store

        if not parts.netloc:
            raise ConfigError(f"{uri}: name the bucket, as in s3://bucket/runs/my-run")
        return S3Store(uri, bucket=parts.netloc, prefix=path, query=query)
    if query:
        raise ConfigError(f"{bare}: {parts.scheme}:// takes no settings in its query")
    if parts.scheme == "file":
        from raycheck.bucket.store.local import LocalStore

        if parts.netloc:
            raise ConfigError(f"{uri}: write file:///folder with three slashes; {parts.netloc!r} would be a host")
        return LocalStore(uri, f"/{path}")
    if parts.scheme == "memory":
        from raycheck.bucket.store.memory import MemoryStore

        return MemoryStore(uri, f"/{parts.netloc}/{path}".rstrip("/"))
    raise ConfigError(f"{uri}: raycheck knows {', '.join(f'{name}://' for name in SCHEMES)} and absolute paths")


def join_uri(uri: str, name: str) -> str:
    """`uri` with one more path segment, its query kept: the run's root from Ray's storage path and run name."""
    base, mark, query = uri.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"
