"""`s3://`: accesses S3 and compatible stores through s3fs, which provides the session and the event loop.

Requests are made directly on its botocore client. s3fs itself drops If-Match once a body goes multipart, repeats
conditional writes, which then conflict with themselves, and uploads parts one after another.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from botocore.exceptions import ClientError, FlexibleChecksumError
from botocore.handlers import set_operation_specific_signer

from raycheck.bucket.store.bucket_rules import BucketRules, Unread
from raycheck.bucket.store.client_options import on_every_request, on_write, s3fs_options
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    ChangedError,
    Got,
    Listed,
    Range,
    Store,
    Upload,
    Written,
    check_conditional_size,
    check_whole,
)
from raycheck.bucket.store.part_sizes import PART_SIZES
from raycheck.bucket.store.remote_store import RemoteStore, bucket_time
from raycheck.bucket.store.request_window import MOST, RequestWindow, window_of
from raycheck.bucket.store.retry import Repeat
from raycheck.bucket.store.s3.bucket_rules import lifecycle_rules, lock_in_words
from raycheck.bucket.store.s3.client import ChainedFiles, session
from raycheck.bucket.store.s3.credentials import CredentialChain
from raycheck.bucket.store.s3.errors import translate
from raycheck.bucket.store.s3.requests import (
    SeekableBody,
    check_assembled,
    copy_part,
    crc_header,
    list_parts_page,
    list_uploads_page,
    read_body,
    upload_part,
)
from raycheck.bucket.store.send_each import send_each
from raycheck.bucket.store.upload_parts import with_first_bytes
from raycheck.errors import (
    ConflictError,
    CorruptError,
    DeniedError,
    NotFoundError,
    RaycheckError,
    StoreError,
)
from raycheck.storage_settings import StorageSettings

OTHER_BYTES = b"not what was sent"


class S3Store(RemoteStore):
    """The objects in one bucket, below one prefix."""

    _first_in_flight = 0  # the least: each part takes 3 ms of CPU time, and more in flight means more of them

    def __init__(self, uri: str, *, bucket: str, prefix: str, settings: StorageSettings) -> None:
        super().__init__(uri, prefix=prefix)
        self._bucket = bucket
        self._settings = settings
        self._wants_bare_etags = False
        self._proves_copies = True  # until a copy has failed
        self._on_every = on_every_request(settings)
        self._on_write = on_write(settings)
        options = s3fs_options(settings, bucket)
        options["config_kwargs"] |= {
            "max_pool_connections": 3 * MOST,
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
        self._fs = ChainedFiles(skip_instance_cache=True, session=session(settings, self._chain), **options)

    @property
    def bucket_id(self) -> Hashable:
        return "s3", self._settings.endpoint, self._bucket

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        async def call(client: Any) -> Got:
            answer = await client.get_object(**self._at(key), ChecksumMode="ENABLED")
            data = await read_body(answer, partial(check_whole, self.uri, key, max_bytes=max_bytes))
            said = answer.get("ChecksumCRC32", "-")
            if "-" not in said and said != crc_header(data):  # with a "-" it is a checksum of the parts' checksums
                raise ChangedError
            return Got(data, answer["ETag"], bucket_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date")))

        return self._run(key, call)

    async def _range(self, key: str, start: int, stop: int, client: Any) -> bytes:
        def check(size: int) -> None:
            if size > stop - start:
                raise CorruptError(f"{self}: {key}: {size} bytes came for a range of {stop - start}")

        return await read_body(await client.get_object(**self._at(key), Range=f"bytes={start}-{stop - 1}"), check)

    def signed_address(self, key: str, valid_s: int) -> str:
        if self._settings.anonymous:
            return super().signed_address(key, valid_s)

        async def call(client: Any) -> str:
            client.meta.events.register_first("choose-signer.s3", _as_requests, unique_id="raycheck")
            return str(await client.generate_presigned_url("get_object", self._at(key), valid_s))

        return self._run(key, call)

    def head(self, key: str) -> int:
        async def call(client: Any) -> int:
            return int((await client.head_object(**self._at(key)))["ContentLength"])

        try:
            return self._run(key, call)
        except NotFoundError:  # a response to HEAD has no body to say that the bucket is missing; a listing has
            with suppress(StoreError):
                next(self._pages(key, MaxKeys=1))
            raise

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        start = len(self._full(prefix))
        for page in self._pages(prefix):
            for item in page.get("Contents", []):
                if item["Key"].endswith("/"):
                    continue  # an empty object that marks a "folder"; pyarrow and consoles make them
                yield Listed(prefix + item["Key"][start:], item["Size"])

    def list_names(self, prefix: str) -> list[str]:
        return list(self.list_folders(prefix))

    def list_folders(self, prefix: str) -> Iterator[str]:
        start = len(self._full(prefix))
        for page in self._pages(prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", []):
                yield item["Prefix"][start:].rstrip("/")

    def put(self, key: str, data: Buffer) -> None:
        self._run(key, lambda client: self._put_object(client, key, data))

    def part_bytes(self, size_bytes: int) -> int:
        return PART_SIZES["s3"].part_bytes_of(size_bytes, self._window("uploads").size)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        first_bytes, parts = with_first_bytes(parts)
        if first_bytes == size_bytes:
            self.put(key, next(parts))
            return
        self._put_each(key, parts, size_bytes)

    def _window(self, way: str) -> RequestWindow:
        return window_of(self.bucket_id, way, least=PART_SIZES["s3"].in_flight, first=self._first_in_flight)

    def put_assembled(
        self,
        key: str,
        parts: Iterable[Range],
        size_bytes: int,
        crc: int,
        *,
        source: Store | None = None,
    ) -> bool:
        if not self._proves_copies or not self._reaches(source):
            return False
        try:
            self._put_each(key, parts, size_bytes, crc, source=source)
        except RaycheckError:
            self._proves_copies = False  # give up server-side copies permanently; the caller uploads the bytes instead
            return False
        return True

    def _reaches(self, source: Store | None) -> bool:
        """Return whether this store's credentials and endpoint also work for `source`, as far as the settings show.

        Whether they have the permission to read there is known after the first copy.
        """
        return source is None or (isinstance(source, S3Store) and source._settings == self._settings)  # noqa: SLF001

    def states_checksum(self, key: str) -> bool:
        async def call(client: Any) -> bool:
            answer = await client.head_object(**self._at(key), ChecksumMode="ENABLED")
            return any(name.startswith("Checksum") and name != "ChecksumType" for name in answer)

        return self._run(key, call)

    def _put_each(
        self,
        key: str,
        parts: Iterable[Range | memoryview],
        size_bytes: int,
        crc: int | None = None,
        *,
        source: Store | None = None,
    ) -> None:
        where = self._at(key)
        origin = source if isinstance(source, S3Store) else self
        begin = where | self._on_write | {"ChecksumAlgorithm": "CRC32"}
        created = self._run(key, lambda client: client.create_multipart_upload(**begin))
        where["UploadId"] = created["UploadId"]

        lengths: list[int] = []

        def start(number: int, part: Range | memoryview) -> Future[dict[str, Any]]:
            lengths.append(len(part))
            if isinstance(part, Range):
                return self._start(key, partial(copy_part, where, number, part, origin._at(part.key)))  # noqa: SLF001
            return self._start(key, partial(upload_part, where, number, part))

        try:
            done = send_each(parts, start, window=self._window("uploads" if crc is None else "copies"))
            if crc is not None:
                check_assembled(key, done, lengths, crc)
            self._complete(key, where, done, size_bytes)
        except BaseException:
            self._abandon(key, where)
            raise

    def _complete(self, key: str, where: dict[str, str], done: list[dict[str, Any]], size_bytes: int) -> None:
        try:
            self._run(key, lambda client: client.complete_multipart_upload(**where, MultipartUpload={"Parts": done}))
        except NotFoundError:
            # It was completed before, and the response was lost: the repeated request finds no such upload.
            if self.head(key) != size_bytes:
                raise

    def put_if_absent(self, key: str, data: bytes) -> Written:
        check_conditional_size(key, data)
        return self._put_conditional(key, data, IfNoneMatch="*")

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        check_conditional_size(key, data)
        forms = [version, version.strip('"')]
        if self._wants_bare_etags:
            forms.reverse()
        try:
            return self._put_conditional(key, data, IfMatch=forms[0])
        except ConflictError:
            # Ceph RGW compares If-Match with the ETag without its quotes. The second request is conditional too, so it
            # is safe. (Ceph answers 500 to a swap that is overtaken by another one. This stays a StoreError, since it
            # may mean other things.)
            written = self._put_conditional(key, data, IfMatch=forms[1])
            self._wants_bare_etags = not self._wants_bare_etags
            return written

    def delete(self, key: str) -> None:
        self._run(key, lambda client: client.delete_object(**self._at(key)))

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        where = {"Bucket": self._bucket, "Prefix": self._full(prefix), **self._on_every}
        after: dict[str, str] = {}
        while True:
            page = self._run(prefix, partial(list_uploads_page, where | after))
            for item in page.get("Uploads", []):
                yield Upload(prefix + item["Key"][len(where["Prefix"]) :], item["UploadId"])
            if not page.get("IsTruncated"):
                return
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def upload_bytes(self, upload: Upload) -> int:
        where = self._at(upload.key) | {"UploadId": upload.id}
        total, after = 0, 0
        with suppress(NotFoundError):
            while True:
                page = self._run(upload.key, partial(list_parts_page, where | {"PartNumberMarker": after}))
                total += sum(int(part["Size"]) for part in page.get("Parts", []))
                if not page.get("IsTruncated"):
                    return total
                after = page["NextPartNumberMarker"]
        return 0

    def abort_upload(self, upload: Upload) -> None:
        where = self._at(upload.key) | {"UploadId": upload.id}
        with suppress(NotFoundError):
            self._run(upload.key, lambda client: client.abort_multipart_upload(**where))

    def begin_upload(self, key: str) -> Upload:
        begin = self._at(key) | self._on_write | {"ChecksumAlgorithm": "CRC32"}
        return Upload(key, self._run(key, lambda client: client.create_multipart_upload(**begin))["UploadId"])

    def unchecked_writes(self, key: str) -> tuple[str, ...]:
        sent = {"Body": b"what was sent", "ChecksumCRC32": crc_header(OTHER_BYTES)}
        found = []
        if self._accepts(key, lambda client: client.put_object(**self._at(key), **self._on_write, **sent)):
            found.append("objects")
        upload = self.begin_upload(key)
        where = self._at(key) | {"UploadId": upload.id}
        try:
            if self._accepts(key, lambda client: client.upload_part(**where, **sent, PartNumber=1)):
                found.append("parts")
        finally:
            self._abandon(key, where)
        return tuple(found)

    def _accepts(self, key: str, send: Callable[[Any], Awaitable[object]]) -> bool:
        """Return whether the store takes a body that does not have the checksum sent along."""

        async def call(client: Any) -> bool:
            try:
                await send(client)
            except ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 400:
                    return False
                raise
            return True

        return self._run(key, call)

    @property
    def endpoint(self) -> str:
        client = "obstore and s3fs" if type(self) is not S3Store else "s3fs"
        return f"{self._settings.endpoint or 'AWS'}, through {client}"

    def bucket_rules(self, key: str) -> BucketRules:
        where = {"Bucket": self._bucket}
        versions = self._read("versioning", lambda client: client.get_bucket_versioning(**where))
        if isinstance(versions, Unread):
            versioning: bool | Unread = self._writes_versions(key)
        else:
            versioning = versions.get("Status") == "Enabled"
        lock = self._read("object lock", lambda client: client.get_object_lock_configuration(**where))
        life = self._read("lifecycle rules", lambda client: client.get_bucket_lifecycle_configuration(**where))
        head = self._read("region", lambda client: client.head_bucket(**where))
        return BucketRules(
            region=head if isinstance(head, Unread) else _region(head),
            asked_region=self._settings.region or "" if self._settings.endpoint is None else "",
            versioning=versioning,
            lock=lock if isinstance(lock, Unread) else lock_in_words(lock),
            lifecycle=life if isinstance(life, Unread) else lifecycle_rules(life),
            keeps_uploads=True,
        )

    def _writes_versions(self, key: str) -> bool | Unread:
        """Return whether a new object gets a version, which needs no permission to read the bucket's settings."""
        try:
            answer = self._run(key, lambda client: self._put_object(client, key, b"versioning"))
            self.delete(key)
        except StoreError as error:
            return Unread(str(error))
        return answer.get("VersionId") not in (None, "null")

    def _read(self, what: str, call: Callable[[Any], Awaitable[dict[str, Any]]]) -> dict[str, Any] | Unread:
        """Return the response about one of the bucket's rules, empty if there is none. Sends one request."""
        try:
            return self._run(what, call, attempts=1)
        except NotFoundError:
            return {}
        except DeniedError as error:
            return Unread(str(error))
        except StoreError as error:  # many stores do not implement all of these
            return Unread(f"this store does not say ({error})")

    def _put_conditional(self, key: str, data: bytes, **condition: str) -> Written:
        try:
            answer = self._run_conditional(key, lambda client: self._put_object(client, key, data, **condition))
        except NotFoundError:  # S3's answer to an If-Match on a missing key
            raise ConflictError(f"{self}: {key}: refused by its condition: it does not exist") from None
        return Written(answer["ETag"], bucket_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date")))

    async def _put_object(self, client: Any, key: str, data: Buffer, **condition: str) -> Any:
        where = self._at(key) | self._on_write | condition | {"ChecksumCRC32": crc_header(data)}
        if isinstance(data, bytes):
            return await client.put_object(**where, Body=data)
        with SeekableBody(data) as body:
            return await client.put_object(**where, Body=body)

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._full(key), **self._on_every}

    def _pages(self, prefix: str, **more: str | int) -> Iterator[dict[str, Any]]:
        where: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._full(prefix), **self._on_every, **more}
        while True:
            page = self._run(prefix, lambda client: client.list_objects_v2(**where))
            yield page
            if not page.get("IsTruncated"):
                return
            where["ContinuationToken"] = page["NextContinuationToken"]

    def _abandon(self, key: str, where: dict[str, str]) -> None:
        """Abort an upload. The sweep, below `checkpoints/`, and lifecycle rules abort what is left."""
        self._clean_up(key, lambda client: client.abort_multipart_upload(**where))

    async def _client(self) -> Any:
        return await self._fs.set_session()

    def _translate(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        if isinstance(error, FlexibleChecksumError):  # newer versions of botocore compare it themselves
            return self._judge(key, ChangedError())
        translated, may_repeat = translate(self.uri, key, error, self._settings)
        return translated, Repeat.UNCONDITIONAL if may_repeat else Repeat.NOTHING


def _region(answer: Any) -> str:
    """Return the bucket's region in the response to head_bucket; "" where the store has none."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or "")


def _as_requests(signature_version: str, context: dict[str, Any], signing_name: str, **_: object) -> str:
    """Have botocore sign addresses as it signs requests. By default it uses version 2, which many stores refuse."""
    return set_operation_specific_signer(context, signing_name) or signature_version
