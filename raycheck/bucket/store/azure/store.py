"""`az://` and `abfss://`: accesses Azure Blob Storage through adlfs, which provides credentials and the event loop.

Requests are made on adlfs's azure-storage-blob client. adlfs itself distinguishes a refused condition from other errors
only by the text, and repeats writes. An object's version is its ETag. A large object is staged block by block, several
at a time, and appears when its list of blocks is committed. Accounts with a hierarchical namespace keep folders as
objects marked by metadata; these are never shown as objects here.
"""

import hashlib
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any
from uuid import uuid4

from raycheck.bucket.store.bucket_rules import BucketRules, Unread
from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    ChangedError,
    Got,
    Listed,
    Written,
    check_conditional_size,
    check_whole,
)
from raycheck.bucket.store.part_sizes import PART_SIZES
from raycheck.bucket.store.remote_store import RemoteStore, bucket_time, not_accepted, optional_import, said
from raycheck.bucket.store.request_window import RequestWindow, window_of
from raycheck.bucket.store.retry import REQUEST_TIMEOUT_S, OverloadedError, Repeat
from raycheck.bucket.store.send_each import send_each
from raycheck.bucket.store.upload_parts import RequestBody, with_first_bytes
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

CONNECT_TIMEOUT_S = 10
ROLE = "Storage Blob Data Contributor"
_AS_IT_IS = {"decompress": False}
"""raycheck compresses no object, and a hostile one may decompress to any size."""
_BAD_IDENTITY = ("InvalidAuthenticationInfo", "AuthenticationFailed")


class AzStore(RemoteStore):
    """The objects in one container, below one prefix. Uses the settings endpoint, anonymous and ca_bundle."""

    def __init__(
        self, uri: str, *, container: str, account: str | None, prefix: str, settings: StorageSettings
    ) -> None:
        super().__init__(uri, prefix=prefix)
        optional_import("adlfs", extra="az")
        from raycheck.bucket.store.azure.client import AzClient

        self._fs: Any = AzClient(uri, account, settings)
        self._container = container
        self._place = "az", settings.endpoint, account, container
        self._azure = optional_import("azure.core", extra="az")
        self._options = {
            "retry_total": 0,  # repeated in retry.py, or not at all
            "connection_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": REQUEST_TIMEOUT_S,
        }

    @property
    def bucket_id(self) -> Hashable:
        return self._place

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        async def call(client: Any) -> Got:
            answers: list[Mapping[str, str]] = []

            def note(response: Any) -> None:
                if response.http_response.status_code < 400:
                    answers.append(response.http_response.headers)

            stream = await self._blob(client, key).download_blob(raw_response_hook=note, **_AS_IT_IS, **self._options)
            self._check_object(key, stream.properties)
            check_whole(self.uri, key, stream.size, max_bytes)
            data = await stream.readall()
            said = (
                stream.properties.content_settings.content_md5
            )  # Azure computes it itself for what one request has put
            if said and bytes(said) != hashlib.md5(data, usedforsecurity=False).digest():
                raise ChangedError
            # Above 32 MiB the rest comes in further responses, for which the client demands the ETag of the first one.
            date = answers[0].get("Date")
            at = bucket_time(date)
            return Got(data, answers[0]["ETag"], at)

        return self._run(key, call)

    async def _range(self, key: str, start: int, stop: int, client: Any) -> bytes:
        stream = await self._blob(client, key).download_blob(
            offset=start, length=stop - start, **_AS_IT_IS, **self._options
        )
        return bytes(await stream.readall())

    def head(self, key: str) -> int:
        async def call(client: Any) -> int:
            found = await self._blob(client, key).get_blob_properties(**self._options)
            self._check_object(key, found)
            return int(found.size)

        return self._run(key, call)

    def states_checksum(self, key: str) -> bool:
        async def call(client: Any) -> bool:
            found = await self._blob(client, key).get_blob_properties(**self._options)
            return bool(found.content_settings.content_md5)  # there for what one request has put, and compared then

        return self._run(key, call)

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        where = {"name_starts_with": self._full(prefix), "include": ["metadata"]}
        for item in self._listed(prefix, lambda client: client.list_blobs(**where, **self._options)):
            if not _is_folder(item):
                yield Listed(prefix + item.name[len(self._full(prefix)) :], item.size)

    def list_names(self, prefix: str) -> list[str]:
        # With a hierarchical namespace a folder outlives its last object.
        found = list(self.list_folders(prefix))
        return [name for name in found if next(self.list_objects(f"{prefix}{name}/"), None)]

    def list_folders(self, prefix: str) -> Iterator[str]:
        where = {"name_starts_with": self._full(prefix), "delimiter": "/"}
        start = len(self._full(prefix))
        for item in self._listed(prefix, lambda client: client.walk_blobs(**where, **self._options)):
            if item.name.endswith("/"):
                yield item.name[start:].rstrip("/")

    def put(self, key: str, data: Buffer) -> None:
        if len(data) > PART_SIZES["az"].part_bytes:
            view = memoryview(data).cast("B")
            part = self.part_bytes(len(view))
            self.put_parts(key, (view[at : at + part] for at in range(0, len(view), part)), len(view))
        else:
            self._run(key, self._upload(key, data, overwrite=True))

    def part_bytes(self, size_bytes: int) -> int:
        return PART_SIZES["az"].part_bytes_of(size_bytes, self._window().size)

    def _window(self) -> RequestWindow:
        return window_of(self.bucket_id, "uploads", least=PART_SIZES["az"].in_flight)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        first_bytes, parts = with_first_bytes(parts)
        if first_bytes == size_bytes <= PART_SIZES["az"].part_bytes:
            self.put(key, next(parts))
            return
        upload = uuid4().hex  # Azure keeps blocks of an earlier upload to this key for a week; ours need other names

        def start(number: int, part: memoryview) -> Future[str]:
            return self._start(key, partial(self._stage, key, f"{upload}-{number:05}", part))

        # If this raises, nothing was committed, so no object exists; Azure discards uncommitted blocks.
        staged = send_each(parts, start, window=self._window())

        async def commit(client: Any) -> None:
            # This may be repeated: if it was applied before, Azure finds the blocks among the committed ones.
            block = optional_import("azure.storage.blob", extra="az").BlobBlock
            await self._blob(client, key).commit_block_list([block(name) for name in staged], **self._options)

        self._run(key, commit)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        check_conditional_size(key, data)
        return _written(self._run_conditional(key, self._upload(key, data, overwrite=False)))

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        check_conditional_size(key, data)
        same = self._azure.MatchConditions.IfNotModified
        upload = self._upload(key, data, overwrite=True, etag=version, match_condition=same)
        return _written(self._run_conditional(key, upload))

    def unchecked_writes(self, key: str) -> tuple[str, ...]:
        wrong = hashlib.md5(b"not what was sent", usedforsecurity=False).digest()

        async def call(client: Any) -> bool:
            sent = {"transactional_content_md5": bytearray(wrong), "overwrite": True}
            try:
                await self._blob(client, key).upload_blob(b"what was sent", **sent, **self._options)
            except self._azure.exceptions.HttpResponseError as error:
                if error.status_code != 400:
                    raise
                return False
            return True

        objects = ("objects",) if self._run(key, call) else ()
        return (*objects, "parts")  # a block is staged without a checksum

    @property
    def endpoint(self) -> str:
        return f"{self._fs.service_client.url.partition('?')[0].rstrip('/')}, through adlfs"

    def bucket_rules(self, key: str) -> BucketRules:
        async def container(client: Any) -> Any:
            return await client.get_container_properties(**self._options)

        async def service(_: Any) -> Any:
            return await self._fs.service_client.get_service_properties(**self._options)

        async def put(client: Any) -> Any:
            return await self._blob(client, key).upload_blob(b"versioning", overwrite=True, **self._options)

        about = self._read("container's properties", container)
        account = self._read("account's properties", service)
        written = self._read(key, put)
        self.delete(key)
        is_immutable = not isinstance(about, Unread) and bool(about.has_immutability_policy or about.has_legal_hold)
        kept = account if isinstance(account, Unread) else account["delete_retention_policy"]
        return BucketRules(
            versioning=written if isinstance(written, Unread) else bool(written.get("version_id")),
            lock=about if isinstance(about, Unread) else "an immutability policy or a legal hold" * is_immutable,
            is_immutable=is_immutable,
            kept_days=kept if isinstance(kept, Unread) else float(kept.days or 0) * bool(kept.enabled),
            lifecycle=Unread("Azure shows them only to its management API (az storage account management-policy show)"),
        )

    def _read(self, what: str, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the response about one of the rules, or why it is not known. Sends one request."""
        try:
            return self._run(what, call, attempts=1)
        except StoreError as error:
            return Unread(str(error))

    def delete(self, key: str) -> None:
        async def call(client: Any) -> None:
            await self._blob(client, key).delete_blob(delete_snapshots="include", **self._options)

        try:
            self._run(key, call)
        except NotFoundError:
            return

    async def _client(self) -> Any:
        return self._fs.service_client.get_container_client(self._container)

    def _blob(self, client: Any, key: str) -> Any:
        return client.get_blob_client(self._full(key))

    def _upload(self, key: str, data: Buffer, **condition: Any) -> Callable[[Any], Awaitable[Any]]:
        """Return one Put Blob request: the client sends up to 64 MiB of bytes in a single request."""

        async def call(client: Any) -> Any:
            blob = self._blob(client, key)
            return await blob.upload_blob(bytes(data), validate_content=True, **condition, **self._options)

        return call

    async def _stage(self, key: str, name: str, part: memoryview, client: Any) -> str:
        with RequestBody(part) as body:
            await self._blob(client, key).stage_block(name, body, length=body.size_bytes, **self._options)
        return name

    def _listed(self, prefix: str, listing: Callable[[Any], Any]) -> Iterator[Any]:
        token: str | None = None

        async def call(client: Any) -> tuple[list[Any], str | None]:
            pages = listing(client).by_page(continuation_token=token)
            async for page in pages:
                return [item async for item in page], pages.continuation_token
            return [], None

        while True:
            items, token = self._run(prefix, call)
            yield from items
            if not token:
                return

    def _check_object(self, key: str, found: Any) -> None:
        if _is_folder(found):
            raise NotFoundError(f"{self}: no object {key}, only a folder of that name")

    def _translate(self, key: str, error: Exception) -> tuple[RaycheckError, Repeat]:
        kinds = self._azure.exceptions
        if not isinstance(error, kinds.HttpResponseError):
            return StoreError(f"{self}: {key}: {type(error).__name__}: {error}"), Repeat.UNCONDITIONAL
        if isinstance(error, kinds.ClientAuthenticationError) and error.response is None:
            reason = str(error).partition("\n")[0]
            return ConfigError(
                f"{self}: no Azure credentials found: set AZURE_STORAGE_CONNECTION_STRING or "
                f"AZURE_STORAGE_ACCOUNT_KEY, or run `az login` ({reason})"
            ), Repeat.NOTHING
        status = error.status_code or 0
        code = getattr(error, "error_code", None)
        name = said(getattr(code, "value", code))
        if name == "ContainerNotFound":
            return ConfigError(f"{self}: there is no such container; create it or correct the name"), Repeat.NOTHING
        if status == 404 or name == "DirectoryIsNotEmpty":  # the answer to deleting a folder
            return NotFoundError(f"{self}: no object {key}"), Repeat.NOTHING
        if status == 412 or name == "BlobAlreadyExists":
            return ConflictError(f"{self}: {key}: refused by its condition ({name})"), Repeat.NOTHING
        if status == 416:
            return CorruptError(f"{self}: {key} is shorter than the requested range"), Repeat.NOTHING
        if name in _BAD_IDENTITY:
            return not_accepted(self.uri, name), Repeat.NOTHING
        if status in (401, 403):
            return DeniedError(
                f"{self}: {key}: access denied ({name}). Check the credentials; an identity needs the role {ROLE} "
                "on the container"
            ), Repeat.NOTHING
        text = f"{self}: {key}: the store answered {status} {name}"
        if status == 429:
            return OverloadedError(text), Repeat.EVERYTHING
        if status in (408, 503):  # "the server is busy", above an account's or a blob's limits
            return OverloadedError(text), Repeat.UNCONDITIONAL
        return StoreError(text), Repeat.UNCONDITIONAL if status >= 500 else Repeat.NOTHING


def _written(answer: Mapping[str, Any]) -> Written:
    return Written(answer["etag"], answer["date"].timestamp())


def _is_folder(found: Any) -> bool:
    return bool((found.metadata or {}).get("hdi_isfolder") == "true")
