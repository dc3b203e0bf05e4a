"""Translates botocore's errors into raycheck's. obstore_store.py translates those of obstore."""

from botocore.exceptions import (
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    LoginError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
    UnknownCredentialError,
)

from raycheck.bucket.store.address import shown_uri
from raycheck.bucket.store.remote_store import not_accepted, said
from raycheck.bucket.store.retry import OverloadedError
from raycheck.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    DeniedError,
    NotFoundError,
    RaycheckError,
    StoreError,
)
from raycheck.storage_settings import StorageSettings

_PERMISSIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListObjectsV2": "s3:ListBucket",
    "HeadBucket": "s3:ListBucket",
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
    "GetBucketLifecycleConfiguration": "s3:GetLifecycleConfiguration",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
    "DeleteObject": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}
_TOO_MANY = ("SlowDown", "RequestTimeout")
_MAY_PASS = (
    "BadDigest",
    "IncompleteBody",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
)
"""They mean that the bytes that arrived are not those that were sent."""
_WRONG_CLOCK = ("RequestTimeTooSkewed", "RequestExpired")
BAD_IDENTITY = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "InvalidClientTokenId")
_MISCONFIGURED = (
    ConfigNotFound,
    ConfigParseError,
    InvalidConfigError,
    LoginError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
    UnknownCredentialError,
)


def translate(uri: str, key: str, error: Exception, settings: StorageSettings) -> tuple[RaycheckError, bool]:
    """Return the typed error, and whether an unconditional request may be repeated after it."""
    if isinstance(error, ClientError):
        return _answered(uri, key, error, settings)
    if isinstance(error, NoCredentialsError):
        return ConfigError(
            f"{shown_uri(uri)}: no credentials found. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret, on every "
            "node; give the nodes an instance role; or StorageSettings(anonymous=True) for a public bucket"
        ), False
    if isinstance(error, _MISCONFIGURED):
        return ConfigError(f"{shown_uri(uri)}: the credentials cannot be used on this node: {error}"), False
    return StoreError(f"{shown_uri(uri)}: {key}: {type(error).__name__}: {error}"), True


def _answered(uri: str, key: str, error: ClientError, settings: StorageSettings) -> tuple[RaycheckError, bool]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    about = error.response.get("Error", {})
    code, message = about.get("Code") or "", about.get("Message")  # both keys may be there with the value None
    verb = error.operation_name
    if verb.startswith("AssumeRole") and status < 500:
        return ConfigError(f"{shown_uri(uri)}: the role {settings.role_arn or ''} could not be assumed: {error}"), False
    if code in _WRONG_CLOCK:
        return ConfigError(
            f"{shown_uri(uri)}: the store refuses requests with this time ({said(code, message)}); set this machine's "
            "clock, as by NTP"
        ), False
    if code == "NoSuchBucket":
        return ConfigError(f"{shown_uri(uri)}: there is no such bucket; create it or correct the name"), False
    if status == 404:
        return NotFoundError(f"{shown_uri(uri)}: no object {key}"), False
    if status in (409, 412):
        return ConflictError(f"{shown_uri(uri)}: {key}: refused by its condition ({said(code)})"), False
    if status == 416:
        return CorruptError(f"{shown_uri(uri)}: {key} is shorter than the requested range"), False
    if code in BAD_IDENTITY:
        return not_accepted(uri, code), False
    if status in (401, 403):
        because = said(code, message)  # AWS names the policy that forbids it
        return DeniedError(
            f"{shown_uri(uri)}: {key}: access denied ({verb}: {because}). {_needed(verb, settings)}"
        ), False
    text = f"{shown_uri(uri)}: {key}: the store answered {status} {said(code, message)}"
    if status in (429, 503) or code in _TOO_MANY:
        return OverloadedError(text), True
    return StoreError(text), status >= 500 or code in _MAY_PASS


def _needed(verb: str, settings: StorageSettings) -> str:
    """Return which permission to grant for the request that was refused."""
    permission = _PERMISSIONS.get(verb, "s3:PutObject")
    if settings.anonymous:
        return f"The bucket does not allow everyone to do this ({permission}); anonymous=True is set"
    text = f"Grant {permission}"
    if settings.encryption == "aws:kms":
        text += " and, on the key, kms:GenerateDataKey and kms:Decrypt"
    if permission == "s3:GetObject":
        text += "; S3 also says this for a missing object when s3:ListBucket is not granted"
    return text
