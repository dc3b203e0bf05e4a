"""`gs://`: accesses Google Cloud Storage through gcsfs, which provides session, credentials and event loop.

Requests of the JSON API are made directly on its session (json_api.py). gcsfs itself turns a refused precondition into
FileExistsError and a refused permission into text, and repeats conditional writes six times. An object's version is its
generation. One request writes a small object (multipart: name, checksum and bytes together). A resumable upload writes
a large one: nothing is visible before its last chunk, which is withheld until the source of the parts has ended without
an error.

Responses are judged by status, reason and effect, never by their wording: Google's own test server uses other words.
Its JSON is made from protocol buffers, and so omits a zero, an empty text and an empty list.
"""

import base64
import json
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from raycheck.bucket.store.bucket_rules import BucketRules, Unread
from raycheck.bucket.store.gcs.bucket_rules import FIELDS, LOOK, rules_of
from raycheck.bucket.store.gcs.json_api import Api, ApiResponse, RefusedError, ResumableUpload
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    ChangedError,
    Got,
    Listed,
    Store,
    Written,
    check_conditional_size,
    check_whole,
)
from raycheck.bucket.store.moved_bytes import counted
from raycheck.bucket.store.part_sizes import PART_SIZES
from raycheck.bucket.store.remote_store import RemoteStore, bucket_time, not_accepted, optional_import, said
from raycheck.bucket.store.retry import OverloadedError, Repeat
from raycheck.bucket.store.upload_parts import PIECE_BYTES, RequestBody
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

GET = "storage.objects.get"
LIST = "storage.objects.list"
CREATE = "storage.objects.create (and storage.objects.delete where it replaces one)"
DELETE = "storage.objects.delete"
REWRITTEN_AT_ONCE = 1 << 30
"""How many bytes one request copies between places or classes of storage, so that it ends within its time-out."""


class GsStore(RemoteStore):
    """The objects in one bucket, below one prefix.

    Uses the settings endpoint, anonymous, requester_pays and ca_bundle.
    """

    def __init__(self, uri: str, *, bucket: str, prefix: str, settings: StorageSettings) -> None:
        super().__init__(uri, prefix=prefix)
        self._bucket = quote(bucket, safe="")
        self._endpoint = settings.endpoint
        self._api = Api(settings)
        self._settings = settings
        self._has_bucket = False  # until an answer proves it
        self._may_rewrite = True  # until an answer refuses it
        self._extend_crc: Callable[[int, bytes], int] = optional_import("google_crc32c", extra="gs").extend

    @property
    def bucket_id(self) -> Hashable:
        return "gs", self._endpoint, self._bucket

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        async def call(api: Api) -> Got:
            whole = partial(check_whole, self.uri, key, max_bytes=max_bytes)
            answer = await self._ask(api, "GET", key, params={"alt": "media"}, needs=GET, check=whole)
            if answer.crc32c not in (None, _encoded(self._crc(answer.data))):
                raise ChangedError
            date = answer.headers.get("Date")
            at = bucket_time(date)
            return Got(answer.data, answer.headers["x-goog-generation"], at)

        return self._run(key, call)

    async def _range(self, key: str, start: int, stop: int, client: Api) -> bytes:
        def check(size: int) -> None:
            if size > stop - start:
                raise CorruptError(f"{self}: {key}: {size} bytes came for a range of {stop - start}")

        headers = {"Range": f"bytes={start}-{stop - 1}"}
        answer = await self._ask(client, "GET", key, params={"alt": "media"}, headers=headers, needs=GET, check=check)
        return answer.data

    def head(self, key: str) -> int:
        async def call(api: Api) -> int:
            answer = await self._ask(api, "GET", key, params={"fields": "size"}, needs=GET)
            return int(answer.json().get("size", 0))

        return self._run(key, call)

    def states_checksum(self, key: str) -> bool:
        del key
        return True  # every write sends the CRC-32C of the whole object, and GCS refuses other bytes

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        start = len(self._full(prefix))
        for page in self._pages(prefix, fields="items(name,size),nextPageToken"):
            for item in page.get("items", []):
                if item["name"].endswith("/"):
                    continue  # an empty object that marks a "folder"; consoles make them
                yield Listed(prefix + item["name"][start:], int(item.get("size", 0)))

    def list_names(self, prefix: str) -> list[str]:
        return list(self.list_folders(prefix))

    def list_folders(self, prefix: str) -> Iterator[str]:
        start = len(self._full(prefix))
        for page in self._pages(prefix, delimiter="/", fields="prefixes,nextPageToken"):
            for name in page.get("prefixes", []):
                yield name[start:].rstrip("/")

    def put(self, key: str, data: Buffer) -> None:
        self._run(key, self._insert(key, data, {}))

    def part_bytes(self, size_bytes: int) -> int:
        return PART_SIZES["gs"].part_bytes_of(size_bytes)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        if size_bytes <= PART_SIZES["gs"].part_bytes:
            self.put(key, next(iter(parts), memoryview(b"")))
            return
        upload = self._run(key, partial(self._open_upload, key, size_bytes))
        flying: Future[None] | None = None
        try:
            held, start, crc = memoryview(b""), 0, 0
            for part in counted(parts):
                if flying is not None:
                    flying.result()
                if held:
                    flying = self._start(key, partial(upload.send, start, held))
                start, held, crc = start + len(held), part, self._crc(part, crc)
            if flying is not None:
                flying.result()
            # Only now: the source has ended without an error, and the last chunk creates the object.
            flying = self._start(key, partial(upload.finish, start, held, f"crc32c={_encoded(crc)}"))
            flying.result()
        except BaseException:
            if flying is not None:
                wait([flying])  # the buffer is in use until the request that reads it has ended
            self._abandon(key, upload)
            raise

    def put_copied(self, key: str, parts: Iterable[Buffer], size_bytes: int, *, source: Store, source_key: str) -> bool:
        # GCS states a CRC-32C, and manifests have a CRC-32. So the caller reads the source, and that very generation is
        # copied. A copy by name alone could be one of other bytes, whose checksum proves nothing.
        if not (isinstance(source, GsStore) and self._may_rewrite and source._settings == self._settings):  # noqa: SLF001
            return False
        try:
            about = source._about(source_key)  # noqa: SLF001
            if int(about.get("size", 0)) != size_bytes:
                return False
            crc = 0
            for part in parts:
                crc = self._crc(part, crc)
            wanted = {"size": str(size_bytes), "crc32c": _encoded(crc)}
            if about.get("crc32c") != wanted["crc32c"]:
                return False  # it has been rewritten since
        except (StoreError, NotFoundError):
            return False
        try:
            made = self._rewrite(key, source._object(source_key), about["generation"])  # noqa: SLF001
        except RaycheckError:  # no permission, or this server cannot do it: read no other object in vain
            self._may_rewrite = False
            return False
        return {name: made.get(name) for name in wanted} == wanted

    def _about(self, key: str) -> dict[str, Any]:
        async def call(api: Api) -> dict[str, Any]:
            answer = await self._ask(api, "GET", key, params={"fields": "size,crc32c,generation"}, needs=GET)
            return dict(answer.json())

        return self._run(key, call)

    def _rewrite(self, key: str, source: str, generation: str) -> dict[str, Any]:
        """Make GCS copy that generation of another object. Return what it states about the new one."""
        params = {"ifSourceGenerationMatch": generation, "maxBytesRewrittenPerCall": str(REWRITTEN_AT_ONCE)}
        url = f"{source}/rewriteTo{self._object(key).removeprefix('/storage/v1')}"
        body = {name: value for name, value in json.loads(self._described(key)).items() if name != "name"}

        async def call(api: Api) -> dict[str, Any]:
            headers = {"Content-Type": "application/json"}
            sent = RequestBody(json.dumps(body).encode())
            return dict((await api.ask("POST", url, params=params, headers=headers, body=sent, needs=CREATE)).json())

        while not (answer := self._run(key, call)).get("done"):  # GCS copies large objects in several steps
            params["rewriteToken"] = answer["rewriteToken"]
        return dict(answer["resource"])

    def unchecked_writes(self, key: str) -> tuple[str, ...]:
        sent, wrong = b"what was sent", self._crc(b"not what was sent")
        found = []
        if self._accepts(key, self._insert(key, sent, {}, crc=wrong)):
            found.append("objects")
        upload = self._run(key, partial(self._open_upload, key, len(sent)))
        if self._accepts(key, partial(upload.finish, 0, memoryview(sent), f"crc32c={_encoded(wrong)}")):
            found.append("parts")
        else:
            self._abandon(key, upload)
        return tuple(found)

    def _accepts(self, key: str, send: Callable[[Api], Awaitable[object]]) -> bool:
        """Return whether the store takes a body that does not have the checksum sent along."""

        async def call(api: Api) -> bool:
            try:
                await send(api)
            except RefusedError as error:
                if error.status not in (400, 412):
                    raise
                return False
            except StoreError:  # a resumable upload was refused
                return False
            return True

        return self._run(key, call, attempts=1)

    @property
    def endpoint(self) -> str:
        return f"{self._endpoint or 'Google Cloud Storage'}, by the JSON API"

    def bucket_rules(self, key: str) -> BucketRules:
        del key

        async def call(api: Api) -> Any:
            return (await api.ask("GET", f"/storage/v1/b/{self._bucket}", params={"fields": FIELDS}, needs=LOOK)).json()

        try:
            return rules_of(self._run("bucket's metadata", call))
        except StoreError as error:
            why = Unread(str(error))
            return BucketRules(region=why, versioning=why, lock=why, kept_days=why, lifecycle=why)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        check_conditional_size(key, data)
        return self._insert_if(key, data, "0")

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        check_conditional_size(key, data)
        return self._insert_if(key, data, version)

    def delete(self, key: str) -> None:
        async def call(api: Api) -> None:
            await self._ask(api, "DELETE", key, needs=DELETE)

        try:
            self._run(key, call)
        except NotFoundError:
            return

    def _insert_if(self, key: str, data: bytes, generation: str) -> Written:
        """Write over that generation only; "0" means that there must be no object."""
        insert = self._insert(key, data, {"ifGenerationMatch": generation})

        async def call(api: Api) -> Written:
            try:
                answer = await insert(api)
            except RefusedError as error:
                if error.status == 412:
                    is_same = "conditionNotMet" not in error.reasons and await self._generation(api, key) == generation
                    error.is_by_condition = not is_same
                raise
            return Written(str(answer.json()["generation"]), bucket_time(answer.headers.get("Date")))

        return self._run_conditional(key, call)

    async def _generation(self, api: Api, key: str) -> str:
        try:
            answer = await self._ask(api, "GET", key, params={"fields": "generation"}, needs=GET)
        except RefusedError as error:
            if error.status != 404:
                raise
            return "0"
        return str(answer.json().get("generation", "0"))

    async def _ask(self, api: Api, method: str, key: str, **more: Any) -> ApiResponse:
        """Send one request about one object.

        GCS answers 404 for a missing object and for a missing bucket. Until a response has shown that the bucket
        exists, a listing distinguishes the two: only a missing bucket makes it answer 404.
        """
        try:
            answer = await api.ask(method, self._object(key), **more)
        except RefusedError as error:
            if error.status == 404 and not self._has_bucket:
                params = {"maxResults": "1", "fields": "kind"}
                await api.ask("GET", f"/storage/v1/b/{self._bucket}/o", params=params, needs=LIST)
                self._has_bucket = True
            raise
        self._has_bucket = True
        return answer

    async def _client(self) -> Api:
        return self._api

    def _object(self, key: str) -> str:
        return f"/storage/v1/b/{self._bucket}/o/{quote(self._full(key), safe='')}"

    def _described(self, key: str, **more: str) -> bytes:
        # no-store: caches would otherwise serve a publicly readable object, even `latest`, for an hour.
        about = {"name": self._full(key), "contentType": "application/octet-stream", "cacheControl": "no-store"}
        return json.dumps(about | more).encode()

    def _insert(
        self, key: str, data: Buffer, condition: dict[str, str], crc: int | None = None
    ) -> Callable[[Api], Awaitable[ApiResponse]]:
        """Return one request that writes one object. GCS refuses it when the bytes do not match the checksum.

        crc: a checksum to send instead of that of `data`.
        """
        mark = uuid4().hex
        about = self._described(key, crc32c=_encoded(self._crc(data) if crc is None else crc))
        head = f"--{mark}\r\nContent-Type: application/json\r\n\r\n".encode() + about
        head += f"\r\n--{mark}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
        tail = f"\r\n--{mark}--\r\n".encode()
        params = {"uploadType": "multipart", "fields": "generation", **condition}
        headers = {"Content-Type": f"multipart/related; boundary={mark}"}

        async def call(api: Api) -> ApiResponse:
            url = f"/upload/storage/v1/b/{self._bucket}/o"
            with RequestBody(head, data, tail) as body:
                return await api.ask("POST", url, params=params, headers=headers, body=body, needs=CREATE)

        return call

    async def _open_upload(self, key: str, size_bytes: int, api: Api) -> ResumableUpload:
        answer = await api.ask(
            "POST",
            f"/upload/storage/v1/b/{self._bucket}/o",
            params={"uploadType": "resumable"},
            headers={"Content-Type": "application/json", "X-Upload-Content-Length": str(size_bytes)},
            body=RequestBody(self._described(key)),
            needs=CREATE,
        )
        return ResumableUpload(answer.headers["Location"], size_bytes, CREATE)

    def _abandon(self, key: str, upload: ResumableUpload) -> None:
        """End an upload. If this fails, GCS discards the upload after a week."""
        self._clean_up(key, lambda api: api.ask("DELETE", upload.url, needs=CREATE, accepts=(404, 410, 499)))

    def _pages(self, prefix: str, **more: str) -> Iterator[dict[str, Any]]:
        params = {"prefix": self._full(prefix), **more}

        async def call(api: Api) -> dict[str, Any]:
            answer = await api.ask("GET", f"/storage/v1/b/{self._bucket}/o", params=params, needs=LIST)
            return dict(answer.json())

        while True:
            page = self._run(prefix, call)
            yield page
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = page["nextPageToken"]

    def _crc(self, data: Buffer, crc: int = 0) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE_BYTES):
            crc = self._extend_crc(crc, bytes(view[at : at + PIECE_BYTES]))  # google_crc32c takes only bytes
        return crc

    def _translate(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        if not isinstance(error, RefusedError):
            return StoreError(f"{self}: {key}: {type(error).__name__}: {error}"), Repeat.UNCONDITIONAL
        text = f"{self}: {key}: the store answered {error.status} {said(error.message)}"
        if error.is_rate_limit:
            # One object accepts about one write a second, even `latest`. A rejected request was not applied, so a
            # conditional write may be repeated too. If it was applied after all, the repeated one is a conflict, and
            # the caller judges by the effect.
            return OverloadedError(text), Repeat.EVERYTHING
        if error.status == 404 and error.needs in (GET, DELETE):  # _ask has seen that the bucket exists
            return NotFoundError(f"{self}: no object {key}"), Repeat.NOTHING
        if error.status == 404:
            return ConfigError(f"{self}: there is no such bucket; create it or correct the name"), Repeat.NOTHING
        if error.is_by_condition:
            return ConflictError(f"{self}: {key}: refused by its condition"), Repeat.NOTHING
        if error.needs == CREATE and (error.status == 412 or (error.status == 400 and "invalid" in error.reasons)):
            # Its checksum was refused, or a condition other than ours: the bytes may be corrupted on the way. Nothing
            # was written, so a conditional write may be repeated too.
            return StoreError(f"{text}; the bytes that arrived may not be those that were sent"), Repeat.EVERYTHING
        if error.status == 416:
            return CorruptError(f"{self}: {key} is shorter than the requested range"), Repeat.NOTHING
        if error.is_bad_identity:
            return not_accepted(self.uri, said(error.message)), Repeat.EVERYTHING  # the next try may renew it
        if error.status in (401, 403):
            return DeniedError(
                f"{self}: {key}: access denied. The credentials need {error.needs} on the bucket; without "
                f"{LIST} GCS also says this for a missing object. GCS said: {said(error.message)}"
            ), Repeat.NOTHING
        if error.status in (408, 503):
            return OverloadedError(text), Repeat.UNCONDITIONAL
        return StoreError(text), Repeat.UNCONDITIONAL if error.status >= 500 else Repeat.NOTHING


def _encoded(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
