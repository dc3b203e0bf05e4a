"""`s3://` with the extra `fast`: obstore carries the bytes of objects both ways, s3fs does all else as without it.

What obstore does not answer with an object, or does not begin to write, is asked again through s3fs: it follows
redirects to a bucket's region, and its errors are translated in one place. So this class decides nothing, and a process
that only moves bytes imports neither s3fs nor botocore while plain access keys, or none, are in use.

It is a copy of obstore of raycheck's own (private_obstore.py): readers in forked loader workers use the script's.

Parts go to the wire from the caller's buffer. obstore drops them in threads of its own, also after an error; the caller
gets the buffer back when all of them are seen to be free.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycheck.bucket.store.client_options import obstore_options
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    Got,
    Listed,
    Range,
    Store,
    Upload,
    check_length,
    check_process,
    check_whole,
)
from raycheck.bucket.store.part_sizes import PART_SIZES
from raycheck.bucket.store.retry import CLEAN_UP_S, ends_by
from raycheck.bucket.store.s3.buffer_loan import BufferLoan
from raycheck.bucket.store.s3.private_obstore import own_obstore
from raycheck.errors import DeniedError, NotFoundError, RaycheckError, StoreError
from raycheck.storage_settings import StorageSettings

if TYPE_CHECKING:
    from raycheck.bucket.store.s3.credentials import CredentialChain

logger = logging.getLogger("raycheck")
MAX_RETRIES = 4
"""Of an upload's requests. Any other one is repeated through s3fs, by the rules of retry.py."""
_PLAIN_REGION = "us-east-1"  # what S3 servers at an endpoint of their own are content with


class FastS3Store(Store):
    """An S3Store that moves bytes faster. `through_s3fs` is that store; it is made when it is first needed."""

    def __init__(self, uri: str, *, bucket: str, prefix: str, settings: StorageSettings) -> None:
        self.uri = uri
        self._process = os.getpid()
        self._bucket = bucket
        self._prefix = prefix
        self._settings = settings

    @cached_property
    def through_s3fs(self) -> Store:
        """Everything but the bytes of an object."""
        from raycheck.bucket.store.s3.s3fs_store import S3Store

        return S3Store(self.uri, bucket=self._bucket, prefix=self._prefix, settings=self._settings, chain=self._chain)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        if "through_s3fs" in self.__dict__ or self._client is None:
            # Who has written needs the store's clock, and obstore does not tell it.
            return self.through_s3fs.get(key, max_bytes)
        try:
            answer = own_obstore().get(self._client, key)
            check_whole(self.uri, key, answer.meta["size"], max_bytes)
            data, version = answer.bytes().to_bytes(), answer.meta["e_tag"] or ""
        except _failures():
            return self.through_s3fs.get(key, max_bytes)
        return _Browsed(data, version, lambda: self.through_s3fs.get(key, max_bytes).at)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        if self._client is None or start == stop:
            return self.through_s3fs.get_range(key, start, stop)
        try:
            data = memoryview(own_obstore().get_range(self._client, key, start=start, end=stop))
        except _failures():
            return self.through_s3fs.get_range(key, start, stop)
        return check_length(self.uri, key, data, start, stop)

    def head(self, key: str) -> int:
        if self._client is None:
            return self.through_s3fs.head(key)
        try:
            return int(own_obstore().head(self._client, key)["size"])
        except _failures():
            return self.through_s3fs.head(key)

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        return self.through_s3fs.list_objects(prefix)  # obstore shows a folder's marker as an object of its name

    def list_names(self, prefix: str) -> list[str]:
        return self.through_s3fs.list_names(prefix)

    def put(self, key: str, data: Buffer) -> None:
        if self._client is None or len(data) > PART_SIZES["s3"].part_bytes:
            self.through_s3fs.put(key, data)
            return
        loan = BufferLoan()
        try:
            _until_deadline(partial(own_obstore().put_async, self._client, key, loan.lend(data), use_multipart=False))
        except _failures():
            self._take_back(key, loan)
            self.through_s3fs.put(key, data)
        except BaseException:
            self._take_back(key, loan)
            raise

    def part_bytes(self, size_bytes: int) -> int:
        return PART_SIZES["s3"].part_bytes_of(size_bytes)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        if size_bytes <= self.part_bytes(size_bytes):
            self.put(key, next(iter(parts), memoryview(b"")))
            return
        client = self._uploads
        if client is None:
            self.through_s3fs.put_parts(key, parts, size_bytes)
            return
        loan = BufferLoan()
        cut: dict[str, Any] = {"chunk_size": self.part_bytes(size_bytes), "max_concurrency": PART_SIZES["s3"].in_flight}
        try:
            _until_deadline(lambda: own_obstore().put_async(client, key, _pulled(loan.lend_each(parts)), **cut))
        except _failures() as error:
            self._take_back(key, loan)
            if isinstance(error, TimeoutError):
                self._abandon(key)
            if loan.source_error is not None:
                raise loan.source_error from loan.source_error.__cause__
            if loan.lent_bytes == 0:  # the upload was not begun
                self.through_s3fs.put_parts(key, parts, size_bytes)
            elif isinstance(error, TimeoutError):
                raise StoreError(f"{self.uri}: {key}: no answer in time") from error
            elif not self._is_there(key, loan, size_bytes, error):
                raise self._typed(key, error) from error
        except BaseException:
            self._take_back(key, loan)
            if loan.source_error is None:
                self._abandon(key)
            raise

    def put_assembled(self, key: str, parts: Iterable[Range | memoryview], size_bytes: int) -> bool:
        return self.through_s3fs.put_assembled(key, parts, size_bytes)

    def _take_back(self, key: str, loan: BufferLoan) -> None:
        if not loan.is_back():
            raise StoreError(f"{self.uri}: {key}: the client still reads the buffer, long after its requests ended")

    def _abandon(self, key: str) -> None:
        """obstore aborts an upload that fails, and not one that was broken off. There is one writer of each key."""
        with suppress(RaycheckError), ends_by(time.monotonic() + CLEAN_UP_S):
            for upload in self.through_s3fs.list_uploads(key):
                if upload.key == key:
                    self.through_s3fs.abort_upload(upload)

    def _is_there(self, key: str, loan: BufferLoan, size_bytes: int, error: Exception) -> bool:
        """Whether the upload was completed already and only the answer was lost: the repetition finds no upload."""
        if not isinstance(error, FileNotFoundError) or loan.lent_bytes != size_bytes:
            return False
        try:
            return self.head(key) == size_bytes
        except NotFoundError:
            return False

    def _typed(self, key: str, error: Exception) -> RaycheckError:
        """What became of parts that were on their way; who may write here, and where, was settled before them."""
        from raycheck.bucket.store.remote_store import not_accepted
        from raycheck.bucket.store.s3.errors import BAD_IDENTITY

        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{self.uri}: no unfinished upload of {key}: it was aborted from elsewhere")
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        if code and code[1] in BAD_IDENTITY:
            return not_accepted(self.uri, code[1])
        said = str(error).partition("\n")[0].partition("<")[0].rpartition(" - ")[2].strip(" :")
        kinds = own_obstore().exceptions
        text = f"{self.uri}: {key}: upload of parts: {said}{f' ({code[1]})' if code else ''}"
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            return DeniedError(f"{text}. Grant s3:PutObject")
        return StoreError(text)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.through_s3fs.put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, version: str) -> None:
        self.through_s3fs.put_if_match(key, data, version)

    def delete(self, key: str) -> None:
        self.through_s3fs.delete(key)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return self.through_s3fs.list_uploads(prefix)

    def upload_bytes(self, upload: Upload) -> int:
        return self.through_s3fs.upload_bytes(upload)

    def abort_upload(self, upload: Upload) -> None:
        self.through_s3fs.abort_upload(upload)

    @cached_property
    def _chain(self) -> "CredentialChain":
        from raycheck.bucket.store.s3.credentials import CredentialChain

        return CredentialChain(self._settings)

    @property
    def _client(self) -> Any:
        check_process(self.uri, self._process)
        return self._for_reads

    @property
    def _uploads(self) -> Any:
        check_process(self.uri, self._process)
        return self._for_uploads

    @cached_property
    def _for_reads(self) -> Any:
        return self._connected(max_retries=0)

    @cached_property
    def _for_uploads(self) -> Any:
        return self._connected(max_retries=MAX_RETRIES)

    def _connected(self, *, max_retries: int) -> Any:
        """obstore's store of this prefix; None where s3fs has to find region or host, or to say what is wrong."""
        settings, options = self._settings, _plain_keys(self._settings)
        if options is None:
            from botocore.exceptions import BotoCoreError

            try:
                settings = self._chain.located()
            except BotoCoreError:
                return None
            if settings.endpoint is None and self._chain.has_variant_endpoint():
                return None
            options = {} if settings.anonymous else {"credential_provider": self._chain.for_obstore}
        if settings.region is None and settings.endpoint is not None:
            settings = settings.over(StorageSettings(region=_PLAIN_REGION))
        if settings.region is None:
            return None
        options |= obstore_options(settings, self._bucket) | {"retry_config": {"max_retries": max_retries}}
        try:
            client = own_obstore()._store.S3Store  # noqa: SLF001  what obstore's own classes for Python derive from
        except (ImportError, OSError) as error:
            logger.info("%s: the bytes go through s3fs: raycheck's copy of obstore was not loaded: %s", self.uri, error)
            return None
        try:
            return client(self._bucket, prefix=self._prefix or None, **options)
        except _failures():
            return None


def _failures() -> tuple[type[Exception], ...]:
    """What the client raises."""
    return own_obstore().exceptions.BaseError, OSError


def _until_deadline(start: Callable[[], Awaitable[object]]) -> None:
    from raycheck.bucket.store.remote_store import until_deadline  # with fsspec, which who only reads does without

    until_deadline(start)


async def _pulled(parts: Iterator[memoryview]) -> AsyncIterator[memoryview]:
    """In a thread: a source that waits must not hold up the parts that are on their way."""
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part


class _Browsed(Got):
    """An answer whose clock costs another request: obstore does not show the Date header. Who browses never asks."""

    def __init__(self, data: bytes, version: str, clock: Callable[[], float]) -> None:
        for name, value in (("data", data), ("version", version), ("_clock", clock)):
            object.__setattr__(self, name, value)

    @property
    def at(self) -> float:
        """A moment after the answer, by the store's clock."""
        clock: Callable[[], float] = self.__dict__["_clock"]
        return clock()


def _plain_keys(settings: StorageSettings) -> dict[str, Any] | None:
    """Credentials for obstore where botocore would look no further than the environment, be it for them, for the region
    or for the endpoint. None: ask botocore."""
    files = (
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    )
    if (
        settings.profile is not None
        or settings.role_arn is not None
        or os.environ.get("AWS_PROFILE")
        or os.environ.get("AWS_CREDENTIAL_EXPIRATION")
        or os.environ.get("AWS_USE_FIPS_ENDPOINT")
        or os.environ.get("AWS_USE_DUALSTACK_ENDPOINT")
        or any(Path(file).expanduser().exists() for file in files)
    ):
        return None
    if settings.anonymous:
        return {}
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key, secret, token = (os.environ.get(name) for name in names)
    if not key or not secret:
        return None
    return {"access_key_id": key, "secret_access_key": secret} | ({"session_token": token} if token else {})
