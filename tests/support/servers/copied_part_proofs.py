"""Answers of an S3 server to a copied part, with the proof that S3 sends and no S3 server that runs here.

A proxy adds to the real server's answer the checksum of what really lies in the range that the request names.
"""

import base64
import re
import zlib
from collections.abc import Callable
from urllib.parse import unquote

from raycheck.bucket.store import Store
from tests.support.servers.http_fault_proxy import Head


def prover(direct: Store, crc: Callable[[bytes], int] = zlib.crc32) -> Callable[[Head, bytes], bytes]:
    """Return an edit of answers for the proxy. direct: the store without the proxy. crc: makes the checksum."""

    def edit(request: Head, body: bytes) -> bytes:
        if "x-amz-copy-source" not in request.headers:
            return body
        key = unquote(request.headers["x-amz-copy-source"]).split("/", 2)[2]
        start, last = map(int, re.findall(r"\d+", request.headers["x-amz-copy-source-range"]))
        data = bytes(direct.get_range(key, start, last + 1))
        proof = base64.b64encode(crc(data).to_bytes(4, "big"))
        return body.replace(b"</CopyPartResult>", b"<ChecksumCRC32>" + proof + b"</ChecksumCRC32></CopyPartResult>")

    return edit
