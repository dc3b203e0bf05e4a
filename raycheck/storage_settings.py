"""The settings for accessing a bucket: plain data, all of it checked at construction.

These settings travel in the run's URI (bucket/store/address.py). The environment does not: each process reads its own
when it opens a store. A URI contains no secret, so it may appear in a bucket, a log or a pointer.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from raycheck.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageSettings:
    """Settings for access to a bucket, never a secret: those come from the environment, a profile or a role.

    endpoint: the store's URL, for stores other than the cloud's own.
    region: the bucket's region.
    profile: a section of the AWS configuration files.
    role_arn: a role to assume with the credentials found, with external_id where the role requires one.
    anonymous: send no credentials.
    requester_pays: agree to pay for requests to someone else's bucket.
    encryption: "AES256" or "aws:kms"; with the latter, kms_key_id names a key other than the account's default.
    ca_bundle: a file of PEM certificates to trust; every node must have it.
    path_style: put the bucket into the path (True) or into the host name (False). By default it is the path where an
        endpoint is given, otherwise the host name.

    None means "not set": then the URI's query decides, then the environment (RAYCHECK_STORAGE_<FIELD>, AWS's own
    variables), then the client's default. Raises ConfigError when a value cannot work.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
    role_arn: str | None = None
    external_id: str | None = None
    anonymous: bool | None = None
    requester_pays: bool | None = None
    encryption: str | None = None
    kms_key_id: str | None = None
    ca_bundle: str | None = None
    path_style: bool | None = None

    def __post_init__(self) -> None:
        for name in _FIELDS:
            value, kind = getattr(self, name), bool if name in _FLAGS else str
            if value is not None and (not isinstance(value, kind) or value == ""):
                raise ConfigError(f"StorageSettings({name}): give {'True or False' if kind is bool else 'a text'}")
        if self.endpoint is not None:
            _check_endpoint(self.endpoint)
        if self.encryption not in (None, "AES256", "aws:kms"):
            raise ConfigError(f'StorageSettings(encryption={self.encryption!r}): give "AES256" or "aws:kms"')
        if self.kms_key_id is not None and self.encryption != "aws:kms":
            raise ConfigError('StorageSettings(kms_key_id): a key is only used with encryption="aws:kms"')
        if self.external_id is not None and self.role_arn is None:
            raise ConfigError("StorageSettings(external_id): it goes with a role_arn")
        if self.role_arn is not None and not self.role_arn.startswith("arn:"):
            raise ConfigError(f"StorageSettings(role_arn={self.role_arn!r}): a role begins with arn:")
        for name in _IDENTITY:
            if self.anonymous and getattr(self, name) is not None:
                raise ConfigError(f"StorageSettings(anonymous, {name}): anonymous requests have no identity")

    @property
    def is_plain_http(self) -> bool:
        """Return whether the endpoint is plain http://, so that no certificate is checked."""
        return self.endpoint is not None and self.endpoint.startswith("http://")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> "StorageSettings":
        """Make settings from a mapping, as in a YAML or JSON file. Raises ConfigError for an unknown name."""
        unknown = sorted(str(name) for name in set(mapping) - set(_FIELDS))
        if unknown:
            raise ConfigError(f"unknown storage setting {unknown[0]!r}; known: {', '.join(_FIELDS)}")
        return cls(**{name: _parsed(name, value) for name, value in mapping.items()})

    @classmethod
    def from_environment(cls, kind: str) -> "StorageSettings":
        """Return the settings from this process's environment that apply to this kind of store (s3, gs, az).

        AWS_PROFILE is left to the clients: access keys in the environment override it, but not a setting.
        """
        found = {name: value for name in meant_for(kind) if (value := os.environ.get(f"{_PREFIX}{name.upper()}"))}
        settings = cls.from_mapping(found)
        if kind != "s3":
            return settings
        amazon = {name: next(filter(None, map(os.environ.get, names)), None) for name, names in _AWS.items()}
        return settings.over(cls.from_mapping(amazon))

    def over(self, lower: "StorageSettings") -> "StorageSettings":
        """Return these settings, completed with those of `lower` that do not contradict them."""
        merged = {name: getattr(self, name) for name in _FIELDS}
        names = set(_FIELDS)
        if self.anonymous:
            names -= set(_IDENTITY)
        if any(getattr(self, name) is not None for name in _IDENTITY):
            names -= {"anonymous"}
        if self.role_arn is not None:
            names -= {"external_id"}
        if self.encryption is not None and self.encryption != lower.encryption:
            names -= {"kms_key_id"}
        for name in names:
            if merged[name] is None:
                merged[name] = getattr(lower, name)
        return StorageSettings(**merged)


_FIELDS = tuple(field.name for field in fields(StorageSettings))
_FLAGS = ("anonymous", "requester_pays", "path_style")
_IDENTITY = ("profile", "role_arn", "external_id")
_PREFIX = "RAYCHECK_STORAGE_"
_AWS = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "ca_bundle": ("AWS_CA_BUNDLE",),
}
_MEANT_FOR = {
    "s3": _FIELDS,
    "gs": ("endpoint", "anonymous", "requester_pays", "ca_bundle"),
    "az": ("endpoint", "anonymous", "ca_bundle"),
}


def meant_for(kind: str) -> tuple[str, ...]:
    """Return the names of the settings that mean something to this kind of store (s3, gs, az)."""
    return _MEANT_FOR.get(kind, ())


def _parsed(name: str, value: object) -> Any:
    """Return the value of a field. Files, queries and the environment write flags as text."""
    if name in _FLAGS and isinstance(value, str):
        words = {"true": True, "1": True, "false": False, "0": False}
        if value.lower() not in words:
            raise ConfigError(f"storage setting {name}={value!r}: give true or false")
        return words[value.lower()]
    return value


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if "@" in endpoint:
        raise ConfigError("StorageSettings(endpoint): it holds credentials; take them out")
    if not has_host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        bare = endpoint.partition("?")[0].partition("#")[0]  # the rest may be a signature
        raise ConfigError(f"StorageSettings(endpoint={bare!r}): give a URL such as http://127.0.0.1:9000")
