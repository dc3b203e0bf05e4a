"""The test server of the GCS API judged by a client that is not ours: gcsfs with its own verbs, and bare requests."""

import json
import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.servers.gcs_server import gcs_server

WAIT_S = 30.0


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with gcs_server() as found:
        yield found


@pytest.fixture
def fs(endpoint):
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    from gcsfs.core import GCSFileSystem

    return GCSFileSystem(token="anon", endpoint_url=endpoint, use_listings_cache=False, skip_instance_cache=True)


def ask(method: str, url: str, data: bytes | None = None, **headers: str) -> tuple[int, dict, bytes]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data=data, method=method, headers=headers), timeout=WAIT_S
        ) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_gcsfs_writes_reads_lists_and_removes(fs):
    small, large = b"\n--==0==\nsmall\r\n", random.Random(1).randbytes(12 * 1024 * 1024 + 3)

    fs.pipe_file("raycheck/one/small", small)
    fs.pipe_file("raycheck/one/large", large)

    assert fs.cat_file("raycheck/one/small") == small
    assert fs.cat_file("raycheck/one/large") == large
    assert fs.cat_file("raycheck/one/large", start=5_000_000, end=5_000_010) == large[5_000_000:5_000_010]
    assert sorted(fs.ls("raycheck/one", detail=False)) == ["raycheck/one/large", "raycheck/one/small"]
    assert fs.info("raycheck/one/large")["size"] == len(large)


@pytest.mark.parametrize("size", [10, 12 * 1024 * 1024])
def test_gcsfs_cannot_create_twice(fs, size):
    fs.pipe_file(f"raycheck/twice/{size}", bytes(size), mode="create")

    with pytest.raises(FileExistsError):
        fs.pipe_file(f"raycheck/twice/{size}", b"other" * size, mode="create")

    assert fs.cat_file(f"raycheck/twice/{size}") == bytes(size)


def test_a_media_answer_carries_generation_etag_checksum_and_date(endpoint):
    status, _, body = ask("POST", f"{endpoint}/upload/storage/v1/b/raycheck/o?uploadType=media&name=m%2F1", b"12345")
    resource = json.loads(body)

    _, headers, data = ask("GET", f"{endpoint}/storage/v1/b/raycheck/o/m%2F1?alt=media")

    assert (status, data) == (200, b"12345")
    assert headers["x-goog-generation"] == resource["generation"]
    assert headers["ETag"] == resource["etag"]
    assert resource["crc32c"] in headers["x-goog-hash"]
    assert "GMT" in headers["Date"]


def test_compose_joins_in_order_and_honours_its_condition(endpoint):
    for name in ("x", "y"):
        ask("POST", f"{endpoint}/upload/storage/v1/b/raycheck/o?uploadType=media&name=c%2F{name}", name.encode() * 3)
    order = json.dumps({"sourceObjects": [{"name": "c/y"}, {"name": "c/x"}]}).encode()
    url = f"{endpoint}/storage/v1/b/raycheck/o/c%2Fjoined/compose?ifGenerationMatch=0"

    first, second = ask("POST", url, order)[0], ask("POST", url, order)[0]

    assert (first, second) == (200, 412)
    assert ask("GET", f"{endpoint}/storage/v1/b/raycheck/o/c%2Fjoined?alt=media")[2] == b"yyyxxx"


def test_a_delete_honours_its_condition(endpoint):
    _, _, body = ask("POST", f"{endpoint}/upload/storage/v1/b/raycheck/o?uploadType=media&name=d", b"1")
    generation, url = json.loads(body)["generation"], f"{endpoint}/storage/v1/b/raycheck/o/d"

    assert ask("DELETE", f"{url}?ifGenerationMatch=1")[0] == 412
    assert ask("DELETE", f"{url}?ifGenerationMatch={generation}")[0] == 204
    assert ask("GET", url)[0] == 404


def test_pages_of_a_listing_with_a_delimiter_name_everything_once(endpoint):
    for i in range(5):
        for name in ("a", "b"):
            ask("POST", f"{endpoint}/upload/storage/v1/b/raycheck/o?uploadType=media&name=p%2F{i}%2F{name}", b"1")
    found, token = [], ""

    for _ in range(10):
        url = f"{endpoint}/storage/v1/b/raycheck/o?prefix=p/&delimiter=/&maxResults=2&pageToken={token}"
        page = json.loads(ask("GET", url)[2])
        found += page["prefixes"]
        token = page.get("nextPageToken")
        if not token:
            break

    assert found == [f"p/{i}/" for i in range(5)]
