"""Checks, for both servers, the host name of a request, and whether a page of another site sent it.

Every site open in the user's browser can reach a server on 127.0.0.1, by DNS rebinding under a name of that site, and
by cross-site requests. So a request must name a known host and must not come from another site.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
ANY = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared, not bound


def is_local(host: str) -> bool:
    """Return whether an address to bind to can be reached only from this machine."""
    return host in LOCAL


def known_hosts(bound: str, allowed: Collection[str] = ()) -> frozenset[str]:
    """Return the host names that requests to a server bound to `bound` may use. allowed: further names."""
    return LOCAL | {host.lower() for host in (*allowed, bound) if host not in ANY}


def host_name(request: web.Request) -> str:
    """Return the name in the Host header, without its port."""
    try:
        return (urlsplit(f"//{request.headers.get('Host', '')}").hostname or "").lower()
    except ValueError:
        return ""


def is_own_origin(request: web.Request) -> bool:
    """Return whether the Origin header names this server by the host name of the request."""
    try:
        return urlsplit(request.headers.get("Origin", "")).netloc == request.headers.get("Host", "")
    except ValueError:
        return False


def is_of_other_site(request: web.Request) -> bool:
    """Return whether a browser reports that a page of another site sent the request. Programs report nothing."""
    elsewhere = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    return elsewhere or ("Origin" in request.headers and not is_own_origin(request))
