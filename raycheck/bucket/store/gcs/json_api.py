"""Implements the JSON API of Google Cloud Storage: single requests, and the chunks of a resumable upload.

gcsfs finds the credentials and has the session. This file knows HTTP, but no keys and no retry policy: it raises
RefusedError for a response of 400 or more, and the store decides what that means.
"""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import MultiMapping

from raycheck.bucket.store.remote_store import optional_import
from raycheck.bucket.store.upload_parts import RequestBody
from raycheck.errors import ConfigError, StoreError
from raycheck.storage_settings import StorageSettings

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """One response of the API."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def crc32c(self) -> str | None:
        """Return the checksum of the whole object, in base64.

        Return None where the response does not state it, or states it for bytes other than those received. There is one
        such header for each kind of checksum.
        """
        if not isinstance(self.headers, MultiMapping) or "Content-Encoding" in self.headers:
            return None
        said = re.search(r"crc32c=([^, ]+)", ",".join(self.headers.getall("x-goog-hash", [])))
        return said[1] if said else None


class RefusedError(Exception):
    """GCS answered 400 or more.

    needs: the permission that the request requires. is_signed: the request had a token. Messages are for people:
    servers choose their own wording, and no decision depends on it.
    """

    def __init__(self, answer: ApiResponse, needs: str, *, is_signed: bool = False) -> None:
        self.status = answer.status
        self.needs = needs
        self.message, self.reasons = _explained(answer.data)
        # Google used to say 403 where it now says 429.
        self.is_rate_limit = self.status == 429 or (self.status == 403 and "ateLimitExceeded" in self.reasons)
        # Without a token the request names no identity: then 401 means that a permission is missing.
        self.is_bad_identity = self.status == 401 and (is_signed or "authError" in self.reasons)
        # True when the condition of the request was refused: a server may also answer 412 to a wrong checksum.
        self.is_by_condition = False
        super().__init__(f"{self.status} {self.message}")


class Api:
    """The API's requests. The first one connects, since finding credentials may involve the machine's metadata
    server."""

    def __init__(self, settings: StorageSettings) -> None:
        # gcsfs's default class asks for the bucket's type by gRPC, which an HTTP endpoint never answers.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        optional_import("gcsfs.core", extra="gs")
        self._settings = settings
        self._lock = threading.Lock()
        self._fs: Any = None

    async def ask(
        self,
        method: str,
        url: str,
        *,
        needs: str,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: RequestBody | None = None,
        accepts: tuple[int, ...] = (),
        check: Callable[[int], None] = lambda _: None,
    ) -> ApiResponse:
        """Send one request. Raises RefusedError for a status of 400 and above that is not in `accepts`.

        needs: the permission that the request requires, for the error. check: raises when the response has too many
        bytes.
        """
        # In threads: both may wait for a token, and would hold up all requests on the event loop.
        if self._fs is None:
            await asyncio.to_thread(self._connect)
        sent = await asyncio.to_thread(self._headers, headers, needs)
        sent["Content-Length"] = str(body.size_bytes if body else 0)
        session = await self._fs._set_session()  # noqa: SLF001
        async with session.request(
            method,
            url if "://" in url else self._fs._location + url,  # noqa: SLF001
            params={**(params or {}), **self._billed()},
            headers=sent,
            data=body,
            allow_redirects=False,  # 308 is an answer here
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        ) as response:
            answer = ApiResponse(response.status, response.headers, await _body(response, check))
        if answer.status >= 400 and answer.status not in accepts:
            raise RefusedError(answer, needs, is_signed="Authorization" in sent)
        return answer

    def _headers(self, more: Mapping[str, str] | None, needs: str) -> dict[str, str]:
        """Return the headers with a token, which is renewed when due."""
        from gcsfs.retry import HttpError

        try:
            return dict(self._fs._get_headers(more))  # noqa: SLF001  gcsfs has no public way
        except HttpError as error:
            refused = ApiResponse(int(error.code or 401), {}, str(error).encode())
            raise RefusedError(refused, needs, is_signed=True) from error

    def _connect(self) -> None:
        from raycheck.bucket.store.gcs.client import GsClient

        with self._lock:
            if self._fs is None:
                self._fs = GsClient(self._settings)

    def _billed(self) -> dict[str, str]:
        if not self._settings.requester_pays:
            return {}
        if not self._fs.project:
            raise ConfigError("requester_pays needs a project to bill: set GOOGLE_CLOUD_PROJECT")
        return {"userProject": self._fs.project}


class ResumableUpload:
    """An upload of an object in chunks. The object appears only when its last byte has arrived."""

    def __init__(self, url: str, size_bytes: int, needs: str) -> None:
        self.url = url
        self._size_bytes = size_bytes
        self._needs = needs
        self._kept = 0  # how many bytes GCS has, by its own statement
        self._is_sure = True  # the outcome of every request is known
        self._is_finished = False

    async def finish(self, start: int, part: memoryview, checksum: str, api: Api) -> None:
        """Send the last bytes, with the checksum of all bytes: GCS creates no object that does not match it."""
        await self.send(start, part, api, **{"x-goog-hash": checksum})
        if not self._is_finished:
            raise StoreError(f"the parts end at byte {start + len(part)} of {self._size_bytes}")

    async def send(self, start: int, part: memoryview, api: Api, **headers: str) -> None:
        """Send the bytes from `start` on. May be repeated: after a broken request it first asks how much GCS has."""
        stop = start + len(part)
        while self._kept < stop:
            if self._is_sure:
                self._is_sure = False
                span = f"bytes {self._kept}-{stop - 1}/{self._size_bytes}"
                with RequestBody(part[self._kept - start :]) as body:
                    answer = await self._put(api, span, headers, body)
            else:
                answer = await self._put(api, f"bytes */{self._size_bytes}", {}, None)
            kept = self._kept_after(answer)
            if not start <= kept <= stop:
                raise StoreError(f"GCS has {kept} bytes of an upload, not {start} to {stop}; start again")
            self._kept, self._is_sure = kept, True

    async def _put(self, api: Api, span: str, headers: Mapping[str, str], body: RequestBody | None) -> ApiResponse:
        answer = await api.ask(
            "PUT",
            self.url,
            needs=self._needs,
            headers={**headers, "Content-Range": span, "Content-Type": "application/octet-stream"},
            body=body,
            accepts=(400, 404, 410, 412),
        )
        if answer.status in (404, 410):
            raise StoreError("GCS forgot an upload in progress; start again")
        if answer.status in (400, 412):  # a wrong checksum: this upload is over, even if GCS says otherwise when asked
            raise StoreError(f"GCS refused an upload ({answer.status} {_explained(answer.data)[0]}); start again")
        return answer

    def _kept_after(self, answer: ApiResponse) -> int:
        if answer.status != 308:
            self._is_finished = True
            return self._size_bytes
        return int(answer.headers.get("Range", "bytes=0--1").partition("-")[2]) + 1


async def _body(response: aiohttp.ClientResponse, check: Callable[[int], None]) -> bytes:
    """Read a response's body, and call `check` with its size.

    It is read piece by piece where the response does not state its length, or states the length of compressed bytes,
    which aiohttp decompresses.
    """
    if response.status >= 400:
        return await response.read()
    if response.content_length is not None and "Content-Encoding" not in response.headers:
        check(response.content_length)
        return await response.read()
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        check(len(data))
    return bytes(data)


def _explained(data: bytes) -> tuple[str, str]:
    """Return message and reasons of an error's body: JSON, or plain text where the request was for bytes."""
    text = data.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        return str(error.get("message", "")), " ".join(str(item.get("reason")) for item in error.get("errors", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return text[:500], ""
