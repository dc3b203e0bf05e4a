"""`s3://`: reaches S3 and compatible stores through s3fs, which supplies the session and the event loop.

Requests are made on its botocore client directly. s3fs itself drops If-Match once a body goes multipart, repeats
conditional writes, which then collide with themselves, and uploads parts one after another.
"""

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import s3fs
from botocore.exceptions import FlexibleChecksumError

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.store.client_options import on_every_request, on_write, s3fs_options
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    ChangedError,
    Got,
    Listed,
    Range,
    Upload,
    check_conditional_size,
    check_whole,
)
from raycheck.bucket.store.part_sizes import PART_SIZES
from raycheck.bucket.store.remote_store import RemoteStore, bucket_time
from raycheck.bucket.store.retry import Repeat
from raycheck.bucket.store.s3.client import session
from raycheck.bucket.store.s3.credentials import CredentialChain
from raycheck.bucket.store.s3.errors import translate
from raycheck.bucket.store.upload_parts import PIECE_BYTES, RequestBody, send_parts
from raycheck.errors import ConflictError, CorruptError, NotFoundError, RaycheckError, StoreError
from raycheck.storage_settings import StorageSettings


class S3Store(RemoteStore):
    """Keeps objects in one bucket, below one prefix."""

    def __init__(self, uri: str, *, bucket: str, prefix: str, settings: StorageSettings) -> None:
        super().__init__(uri)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._settings = settings
        self._wants_bare_etags = False
        self._proves_copies = True  # until a copy has failed
        self._on_every = on_every_request(settings)
        self._on_write = on_write(settings)
        options = s3fs_options(settings, bucket)
        options["config_kwargs"] |= {
            "max_pool_connections": 50,
            "connect_timeout": 10,
            "retries": {"total_max_attempts": 1},
            # Bodies are read from the staging buffer, and each part carries its CRC-32. botocore must neither validate
            # nor hash them: it can do both with bytes only.
            "parameter_validation": False,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        options["config_kwargs"]["s3"]["payload_signing_enabled"] = False
        self._chain = CredentialChain(settings)
        self._fs = s3fs.S3FileSystem(skip_instance_cache=True, session=session(settings, self._chain), **options)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        async def call(client: Any) -> Got:
            answer = await client.get_object(**self._at(key), ChecksumMode="ENABLED")
            data = await _body(answer, partial(check_whole, self.uri, key, max_bytes=max_bytes))
            said = answer.get("ChecksumCRC32", "-")
            if "-" not in said and said != _crc_header(data):  # with a "-" it is a checksum of the parts' checksums
                raise ChangedError
            return Got(data, answer["ETag"], bucket_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date")))

        return self._run(key, call)

    async def _range(self, key: str, start: int, stop: int, client: Any) -> bytes:
        def check(size: int) -> None:
            if size > stop - start:
                raise CorruptError(f"{self.uri}: {key}: {size} bytes came for a range of {stop - start}")

        return await _body(await client.get_object(**self._at(key), Range=f"bytes={start}-{stop - 1}"), check)

    def head(self, key: str) -> int:
        async def call(client: Any) -> int:
            return int((await client.head_object(**self._at(key)))["ContentLength"])

        try:
            return self._run(key, call)
        except NotFoundError:  # an answer to HEAD has no body that could say that the bucket is missing; a listing has
            with suppress(StoreError):
                next(self._pages(key, MaxKeys=1))
            raise

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        for page in self._pages(prefix):
            for item in page.get("Contents", []):
                if item["Key"].endswith("/"):
                    continue  # an empty object that marks a "folder"; pyarrow and consoles make them
                yield Listed(item["Key"][len(self._prefix) :], item["Size"])

    def list_names(self, prefix: str) -> list[str]:
        start = len(self._prefix) + len(prefix)
        return [
            item["Prefix"][start:].rstrip("/")
            for page in self._pages(prefix, Delimiter="/")
            for item in page.get("CommonPrefixes", [])
        ]

    def put(self, key: str, data: Buffer) -> None:
        self._run(key, lambda client: self._put_object(client, key, data))

    def part_bytes(self, size_bytes: int) -> int:
        return PART_SIZES["s3"].part_bytes_of(size_bytes)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        if size_bytes <= self.part_bytes(size_bytes):
            self.put(key, next(iter(parts), memoryview(b"")))
            return
        self._put_each(key, parts, size_bytes)

    def put_assembled(self, key: str, parts: Iterable[Range | memoryview], size_bytes: int) -> bool:
        if not self._proves_copies:
            return False
        try:
            self._put_each(key, parts, size_bytes)
        except RaycheckError:
            self._proves_copies = False  # give up server-side copies for good; the caller uploads the bytes instead
            return False
        return True

    def _put_each(self, key: str, parts: Iterable[Range | memoryview], size_bytes: int) -> None:
        where = self._at(key)
        begin = where | self._on_write | {"ChecksumAlgorithm": "CRC32"}
        created = self._run(key, lambda client: client.create_multipart_upload(**begin))
        where["UploadId"] = created["UploadId"]

        def start(number: int, part: Range | memoryview) -> Future[dict[str, Any]]:
            if isinstance(part, Range):
                return self._start(key, partial(_copy_part, where, number, part, self._at(part.key)))
            return self._start(key, partial(_upload_part, where, number, part))

        try:
            done = send_parts(parts, start, in_flight=PART_SIZES["s3"].in_flight)
            self._complete(key, where, done, size_bytes)
        except BaseException:
            self._abandon(key, where)
            raise

    def _complete(self, key: str, where: dict[str, str], done: list[dict[str, Any]], size_bytes: int) -> None:
        try:
            self._run(key, lambda client: client.complete_multipart_upload(**where, MultipartUpload={"Parts": done}))
        except NotFoundError:
            # It was completed before, and the answer was lost: the repeated request finds no such upload.
            if self.head(key) != size_bytes:
                raise

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_conditional_size(key, data)
        self._put_conditional(key, data, IfNoneMatch="*")

    def put_if_match(self, key: str, data: bytes, version: str) -> None:
        check_conditional_size(key, data)
        forms = [version, version.strip('"')]
        if self._wants_bare_etags:
            forms.reverse()
        try:
            self._put_conditional(key, data, IfMatch=forms[0])
        except ConflictError:
            # Ceph RGW compares If-Match with the ETag without its quotes. The second request is conditional too, so it
            # is safe. (To a swap that another one overtakes on its way Ceph answers 500. This stays a StoreError, since
            # it may mean other things.)
            self._put_conditional(key, data, IfMatch=forms[1])
            self._wants_bare_etags = not self._wants_bare_etags

    def delete(self, key: str) -> None:
        self._run(key, lambda client: client.delete_object(**self._at(key)))

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        where = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **self._on_every}
        after: dict[str, str] = {}
        while True:
            page = self._run(prefix, partial(_list_uploads, where | after))
            for item in page.get("Uploads", []):
                yield Upload(item["Key"][len(self._prefix) :], item["UploadId"])
            if not page.get("IsTruncated"):
                return
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def upload_bytes(self, upload: Upload) -> int:
        where = self._at(upload.key) | {"UploadId": upload.id}
        total, after = 0, 0
        with suppress(NotFoundError):
            while True:
                page = self._run(upload.key, partial(_list_parts, where | {"PartNumberMarker": after}))
                total += sum(int(part["Size"]) for part in page.get("Parts", []))
                if not page.get("IsTruncated"):
                    return total
                after = page["NextPartNumberMarker"]
        return 0

    def abort_upload(self, upload: Upload) -> None:
        where = self._at(upload.key) | {"UploadId": upload.id}
        with suppress(NotFoundError):
            self._run(upload.key, lambda client: client.abort_multipart_upload(**where))

    def _put_conditional(self, key: str, data: bytes, **condition: str) -> None:
        try:
            self._run_conditional(key, lambda client: self._put_object(client, key, data, **condition))
        except NotFoundError:  # S3 answers so to an If-Match on a missing key
            raise ConflictError(f"{self.uri}: {key}: refused by its condition: it is not there") from None

    async def _put_object(self, client: Any, key: str, data: Buffer, **condition: str) -> None:
        where = self._at(key) | self._on_write | condition | {"ChecksumCRC32": _crc_header(data)}
        if isinstance(data, bytes):
            await client.put_object(**where, Body=data)
            return
        with _SeekableBody(data) as body:
            await client.put_object(**where, Body=body)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key, **self._on_every}

    def _pages(self, prefix: str, **more: str | int) -> Iterator[dict[str, Any]]:
        where: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **self._on_every, **more}
        while True:
            page = self._run(prefix, lambda client: client.list_objects_v2(**where))
            yield page
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def _abandon(self, key: str, where: dict[str, str]) -> None:
        """Aborts an upload. The sweep, below `checkpoints/`, and lifecycle rules abort what is left."""
        self._clean_up(key, lambda client: client.abort_multipart_upload(**where))

    async def _client(self) -> Any:
        return await self._fs.set_session()

    def _translate(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        if isinstance(error, FlexibleChecksumError):  # newer versions of botocore compare it themselves
            return self._judge(key, ChangedError())
        translated, may_repeat = translate(self.uri, key, error, self._settings)
        return translated, Repeat.UNCONDITIONAL if may_repeat else Repeat.NOTHING


class _SeekableBody(RequestBody):
    """Adds what botocore asks of a body: a length, and a way back to its start when it follows a redirect."""

    def __len__(self) -> int:
        return self.size_bytes

    def seek(self, offset: int) -> None:
        assert offset == 0, "each iteration begins at the start"


async def _body(answer: Mapping[str, Any], check: Callable[[int], None] = lambda _: None) -> bytes:
    """Reads an answer's body, and closes it even when that fails, since its connection would stay open otherwise.
    check: raises for a size that is too large."""
    async with answer["Body"] as body:
        if "ContentLength" in answer:
            check(answer["ContentLength"])
            return bytes(await body.read())
        data = bytearray()
        async for piece in answer["Body"].iter_chunks(PIECE_BYTES):
            data += piece
            check(len(data))
        return bytes(data)


async def _upload_part(where: Mapping[str, str], number: int, part: memoryview, client: Any) -> dict[str, Any]:
    crc = _crc_header(part)
    with _SeekableBody(part) as body:
        answer = await client.upload_part(**where, PartNumber=number, Body=body, ChecksumCRC32=crc)
    return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": crc}


async def _copy_part(
    where: Mapping[str, str], number: int, part: Range, source: Mapping[str, str], client: Any
) -> dict[str, Any]:
    answer = await client.upload_part_copy(
        **where,
        PartNumber=number,
        CopySource={"Bucket": source["Bucket"], "Key": source["Key"]},
        CopySourceRange=f"bytes={part.start}-{part.stop - 1}",
    )
    result, crc = answer["CopyPartResult"], _in_header(part.crc)
    if result.get("ChecksumCRC32") != crc:
        raise StoreError(f"{part.key}: the store does not prove what it has copied")
    return {"PartNumber": number, "ETag": result["ETag"], "ChecksumCRC32": crc}


async def _list_uploads(where: Mapping[str, str], client: Any) -> Mapping[str, Any]:
    page: Mapping[str, Any] = await client.list_multipart_uploads(**where)
    return page


async def _list_parts(where: Mapping[str, Any], client: Any) -> Any:
    return await client.list_parts(**where)


def _crc_header(data: Buffer) -> str:
    return _in_header(crc32(data))


def _in_header(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
