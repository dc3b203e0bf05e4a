"""`s3://` with the extra `fast`: obstore transfers the bytes of shards both ways, s3fs does everything else.

A request that obstore does not answer with bytes, or an upload that it does not start, is sent again through s3fs,
which follows redirects to a bucket's region and whose errors are translated in one place. So this class makes no
decisions.

The obstore used here is raycheck's private copy (private_obstore.py): the readers in forked loader workers may use the
script's. Parts are sent directly from the caller's buffer. obstore releases them in its own threads, even after an
error; the caller gets the buffer back once all parts are known to be free (buffer_loan.py).
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

from botocore.exceptions import BotoCoreError

from raycheck.bucket.store.client_options import obstore_options
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Buffer, check_length, check_process, check_whole
from raycheck.bucket.store.part_sizes import PART_SIZES
from raycheck.bucket.store.remote_store import not_accepted, until_deadline
from raycheck.bucket.store.request_window import FIRST, Share
from raycheck.bucket.store.retry import CLEAN_UP_S, OverloadedError, ends_by, note_refusal
from raycheck.bucket.store.s3.buffer_loan import LOOK_EVERY_S, BufferLoan
from raycheck.bucket.store.s3.errors import BAD_IDENTITY
from raycheck.bucket.store.s3.private_obstore import own_obstore
from raycheck.bucket.store.s3.s3fs_store import S3Store
from raycheck.bucket.store.upload_parts import with_first_bytes
from raycheck.errors import DeniedError, NotFoundError, RaycheckError, StoreError
from raycheck.storage_settings import StorageSettings

logger = logging.getLogger("raycheck")
MAX_RETRIES = 200
"""How often obstore retries a request of an upload in parts. Every other request is repeated through s3fs instead.

With thousands of ranks, S3 refuses some requests more than 50 times. The upload's deadline and _RETRIES_END end the
retries too.
"""
_RETRIES_END = timedelta(minutes=5)
"""How long after the first try the last one may begin: obstore signs a request only once."""
MAX_PAUSE = timedelta(seconds=2)
"""The longest pause before it does: it does not tell of refused requests, so other parts must not wait for one long."""
_BUSY = re.compile(r"\b(429|503)\b|timed out|timeout", re.IGNORECASE)
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.=-]*(/[A-Za-z0-9_-][A-Za-z0-9_.=-]*)*")
"""Other keys, such as those of a hostile run name, may be written differently by obstore than by S3."""
_PLAIN_REGION = "us-east-1"
"""Servers at a custom endpoint accept this region."""


class FastS3Store(S3Store):
    """An S3Store that transfers bytes through obstore, and does everything else through s3fs."""

    _first_in_flight = FIRST

    def __init__(self, uri: str, *, bucket: str, prefix: str, settings: StorageSettings) -> None:
        super().__init__(uri, bucket=bucket, prefix=prefix, settings=settings)
        self._of_bucket: dict[int, Any] = {}  # obstore's stores; those below and beside this one have them too

    def get_data(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        """Read as `get` does, at an eighth of its CPU time. obstore provides no time and no checksum of the store."""
        client = self._client_of(max_retries=0) if _PLAIN_KEY.fullmatch(self._full(key)) else None
        if client is None:
            return super().get_data(key, max_bytes)
        try:
            answer = own_obstore().get(client, self._full(key))
            check_whole(self.uri, key, answer.meta["size"], max_bytes)
            return bytes(answer.bytes())
        except _failures() as error:
            if isinstance(error, FileNotFoundError) and "<Code>NoSuchKey</Code>" in str(error):
                raise NotFoundError(f"{self}: no object {key}") from None
            return super().get_data(key, max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        client = self._client_of(max_retries=0)
        if client is None or start == stop:
            return super().get_range(key, start, stop)
        try:
            data = memoryview(own_obstore().get_range(client, self._full(key), start=start, end=stop))
        except _failures() as error:
            if _BUSY.search(str(error)):
                note_refusal(OverloadedError(str(error)))
            return super().get_range(key, start, stop)
        return check_length(self.uri, key, data, start, stop)

    def put(self, key: str, data: Buffer) -> None:
        client = self._client_of(max_retries=0)
        if client is None or len(data) > max(PART_SIZES["s3"].part_bytes, self.part_bytes(len(data))):
            super().put(key, data)
            return
        loan = BufferLoan()
        try:
            until_deadline(
                partial(own_obstore().put_async, client, self._full(key), loan.lend(data), use_multipart=False)
            )
        except _failures():
            self._take_back(key, loan)
            super().put(key, data)
        except BaseException:
            self._take_back(key, loan)
            raise

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        client = self._client_of(max_retries=MAX_RETRIES)
        first_bytes, parts = with_first_bytes(parts)
        if client is None or first_bytes == size_bytes:
            super().put_parts(key, parts, size_bytes)
            return
        window = self._window("uploads")
        share = Share(window)
        loan = BufferLoan(share)
        sizes = {"chunk_size": first_bytes, "max_concurrency": window.most}

        async def upload() -> None:
            looking = asyncio.ensure_future(_look_at(loan))
            try:
                pulled = _pulled(loan.lend_each(parts), share)
                await own_obstore().put_async(client, self._full(key), pulled, **sizes)
            finally:
                looking.cancel()

        try:
            with share:
                until_deadline(upload)
        except _failures() as error:
            self._take_back(key, loan)
            if isinstance(error, TimeoutError):
                self._abort_uploads(key)
            if loan.source_error is not None:
                raise loan.source_error from loan.source_error.__cause__
            if loan.lent_bytes == 0:  # the upload was not begun
                super().put_parts(key, parts, size_bytes)
            elif isinstance(error, TimeoutError):
                raise StoreError(f"{self}: {key}: no answer in time") from error
            elif not self._was_completed(key, loan, size_bytes, error):
                raise self._upload_error(key, error) from error
        except BaseException:
            self._take_back(key, loan)
            if loan.source_error is None:
                self._abort_uploads(key)
            raise
        else:
            self._take_back(key, loan)

    def _take_back(self, key: str, loan: BufferLoan) -> None:
        if not loan.take_back():
            raise StoreError(f"{self}: {key}: the client still reads the buffer, long after its requests have ended")

    def _abort_uploads(self, key: str) -> None:
        """Abort unfinished uploads of `key`, which has one writer.

        obstore aborts an upload that fails, but not one that was cancelled.
        """
        with suppress(RaycheckError), ends_by(time.monotonic() + CLEAN_UP_S):
            for upload in self.list_uploads(key):
                if upload.key == key:
                    self.abort_upload(upload)

    def _was_completed(self, key: str, loan: BufferLoan, size_bytes: int, error: Exception) -> bool:
        """Return whether the object exists, and only the response was lost: the repeated request finds no upload."""
        if not isinstance(error, FileNotFoundError) or loan.lent_bytes != size_bytes:
            return False
        try:
            return self.head(key) == size_bytes
        except NotFoundError:
            return False

    def _upload_error(self, key: str, error: Exception) -> RaycheckError:
        """Return the typed error for parts in flight. Bucket and permissions were checked before them."""
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{self}: no unfinished upload of {key}: it was aborted from elsewhere")
        code = re.search(r"<Code>(\w+)</Code>", str(error))
        if code and code[1] in BAD_IDENTITY:
            return not_accepted(self.uri, code[1])
        said = str(error).partition("\n")[0].partition("<")[0].rpartition(" - ")[2].strip(" :")
        kinds = own_obstore().exceptions
        text = f"{self}: {key}: upload of parts: {said}{f' ({code[1]})' if code else ''}"
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            return DeniedError(f"{text}. Grant s3:PutObject")
        return StoreError(text)

    def _client_of(self, *, max_retries: int) -> Any:
        """Return obstore's store of the bucket; None where s3fs has to transfer the bytes."""
        check_process(self.uri, self._process)
        return self._with_retries if max_retries else self._without_retries

    @cached_property
    def _without_retries(self) -> Any:
        return self._connected_once(max_retries=0)

    @cached_property
    def _with_retries(self) -> Any:
        return self._connected_once(max_retries=MAX_RETRIES)

    def _connected_once(self, *, max_retries: int) -> Any:
        if max_retries not in self._of_bucket:
            self._of_bucket[max_retries] = self._connected(max_retries=max_retries)
        return self._of_bucket[max_retries]

    def _connected(self, *, max_retries: int) -> Any:
        """Make obstore's store; None where s3fs has to find the region or the host, or to report what is wrong."""
        try:
            settings = self._chain.located()
        except BotoCoreError:
            return None
        if settings.endpoint is None and self._chain.has_variant_endpoint():
            return None
        if settings.region is None and settings.endpoint is not None:
            settings = settings.over(StorageSettings(region=_PLAIN_REGION))
        if settings.region is None:
            return None
        options = {} if settings.anonymous else {"credential_provider": self._chain.for_obstore}
        options |= obstore_options(settings, self._bucket) | {
            "retry_config": {
                "max_retries": max_retries,
                "retry_timeout": _RETRIES_END,
                "backoff": {"max_backoff": MAX_PAUSE},
            }
        }
        try:
            store_class = own_obstore()._store.S3Store  # noqa: SLF001  what obstore's own classes for Python derive from
        except (ImportError, OSError) as error:
            logger.info("%s: the bytes go through s3fs: raycheck's copy of obstore was not loaded: %s", self, error)
            return None
        try:
            return store_class(self._bucket, **options)
        except _failures():
            return None
        except ValueError:  # obstore cannot write this prefix, which may be a hostile run's name
            return None


def _failures() -> tuple[type[Exception], ...]:
    """Return the classes of errors that obstore raises."""
    return own_obstore().exceptions.BaseError, OSError


async def _pulled(parts: Iterator[memoryview], share: Share) -> AsyncIterator[memoryview]:
    """Yield the parts when they may be sent, each pulled in a thread: a source that waits must not delay others."""
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part
        while not share.may_begin():  # noqa: ASYNC110  nothing tells when obstore has released a part
            await asyncio.sleep(LOOK_EVERY_S)


async def _look_at(loan: BufferLoan) -> None:
    """Find out, again and again, which parts obstore has sent."""
    while True:
        loan.look()
        await asyncio.sleep(LOOK_EVERY_S)
