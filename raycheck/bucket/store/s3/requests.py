"""Makes single S3 requests through a botocore client: bodies, parts of an upload, pages of a listing."""

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raycheck.bucket.format.checksum import combined, crc32
from raycheck.bucket.store.interface import Buffer, Range
from raycheck.bucket.store.upload_parts import PIECE_BYTES, RequestBody
from raycheck.errors import StoreError


class SeekableBody(RequestBody):
    """A body with what botocore needs: a length, and a way back to its start when it follows a redirect."""

    def __len__(self) -> int:
        return self.size_bytes

    def seek(self, offset: int) -> None:
        assert offset == 0, "each iteration begins at the start"


async def read_body(answer: Mapping[str, Any], check: Callable[[int], None] = lambda _: None) -> bytes:
    """Read a response's body, and close it even when that fails, since its connection would otherwise stay open.

    check: raises for a size that is too large.
    """
    async with answer["Body"] as body:
        if "ContentLength" in answer:
            check(answer["ContentLength"])
            return bytes(await body.read())
        data = bytearray()
        async for piece in answer["Body"].iter_chunks(PIECE_BYTES):
            data += piece
            check(len(data))
        return bytes(data)


async def upload_part(where: Mapping[str, str], number: int, part: memoryview, client: Any) -> dict[str, Any]:
    """Send one part. Return what completing the upload needs to know about it."""
    crc = crc_header(part)
    with SeekableBody(part) as body:
        answer = await client.upload_part(**where, PartNumber=number, Body=body, ChecksumCRC32=crc)
    return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": crc}


async def copy_part(
    where: Mapping[str, str], number: int, part: Range, source: Mapping[str, str], client: Any
) -> dict[str, Any]:
    """Have the store copy one part from another object. Raises StoreError if its response has no checksum of it."""
    answer = await client.upload_part_copy(
        **where,
        PartNumber=number,
        CopySource={"Bucket": source["Bucket"], "Key": source["Key"]},
        CopySourceRange=f"bytes={part.start}-{part.stop - 1}",
    )
    result = answer["CopyPartResult"]
    crc = result.get("ChecksumCRC32")
    if crc is None:
        raise StoreError(f"{part.key}: the store does not prove what it has copied")
    return {"PartNumber": number, "ETag": result["ETag"], "ChecksumCRC32": crc}


def check_assembled(key: str, done: Iterable[Mapping[str, Any]], lengths: Iterable[int], crc: int) -> None:
    """Raise StoreError when the parts of an upload, in sequence, do not have this CRC-32.

    done: what upload_part and copy_part returned.
    """
    crcs = (int.from_bytes(base64.b64decode(part["ChecksumCRC32"]), "big") for part in done)
    if combined(zip(crcs, lengths, strict=True)) != crc:
        raise StoreError(f"{key}: its parts do not have the checksum of the whole")


async def list_uploads_page(where: Mapping[str, str], client: Any) -> Mapping[str, Any]:
    """Request one page of unfinished uploads."""
    page: Mapping[str, Any] = await client.list_multipart_uploads(**where)
    return page


async def list_parts_page(where: Mapping[str, Any], client: Any) -> Any:
    """Request one page of an unfinished upload's parts."""
    return await client.list_parts(**where)


def crc_header(data: Buffer) -> str:
    """Return the CRC-32 of `data` in the form of S3's headers."""
    return base64.b64encode(crc32(data).to_bytes(4, "big")).decode()
