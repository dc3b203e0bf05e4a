"""Sends one request to a cloud's metadata service: plain HTTP to a link-local address, with only the standard library.

It never uses a proxy, which the clouds forbid, and follows no redirect: a service that redirects is not a cloud's. An
answer with any status is an answer; only the connection can fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import URLError
from urllib.request import HTTPHandler, OpenerDirector, Request

from raycheck.errors import ConfigError

ENDPOINT = "http://169.254.169.254"
"""The address of the service in all three clouds: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html,
https://cloud.google.com/compute/docs/metadata/querying-metadata,
https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service"""
TIMEOUT_S = 5.0
MAX_BYTES = 1024 * 1024

_opener = OpenerDirector()
_opener.add_handler(HTTPHandler())


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataResponse:
    """An answer of the service.

    flavor: the header Metadata-Flavor, which only Google's server sends; otherwise empty.
    """

    url: str
    status: int
    text: str
    flavor: str

    def unexpected(self, hint: str = "") -> ConnectionError:
        """Return the error to raise for an answer that is not as documented."""
        return ConnectionError(f"{self.url}: HTTP {self.status}, {self.text[:200]!r}, is not as documented{hint}")


def checked(endpoint: str) -> str:
    """Return the endpoint without a trailing slash. Raises ConfigError if it is not an http:// URL."""
    if not endpoint.startswith("http://"):
        raise ConfigError(f"--endpoint {endpoint}: metadata services speak plain HTTP; give http://host[:port]")
    return endpoint.rstrip("/")


def ask(url: str, headers: Mapping[str, str], *, method: str = "GET", timeout_s: float = TIMEOUT_S) -> MetadataResponse:
    """Send a request and return the answer.

    Raises ConnectionError if nothing answers in time, or not in HTTP; the call may succeed later.
    """
    try:
        with _opener.open(Request(url, headers=dict(headers), method=method), timeout=timeout_s) as got:  # noqa: S310
            text = got.read(MAX_BYTES).decode(errors="replace").strip()
            return MetadataResponse(
                url=url, status=got.status, text=text, flavor=got.headers.get("Metadata-Flavor", "")
            )
    except (OSError, HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, URLError) else error
        raise ConnectionError(f"{method} {url}: {cause or type(error).__name__}") from None
