"""Decides which names a server may be asked under, and whether another site's page is asking: for both servers.

A server on 127.0.0.1 is reached by every site that the user's browser has open: by DNS rebinding, under a name of that
site, and by requests across sites. So a request must name a host that is known, and must not come from another site.
"""

from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
ANY = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared, not bound


def is_local(host: str) -> bool:
    """Return whether an address to bind to is reached from this machine alone."""
    return host in LOCAL


def known_hosts(bound: str, allowed: Collection[str] = ()) -> frozenset[str]:
    """Return the names under which a server that is bound to `bound` may be asked. allowed: further ones."""
    return LOCAL | {host.lower() for host in (*allowed, bound) if host not in ANY}


def host_name(request: web.Request) -> str:
    """Return the name in the Host header, without its port."""
    try:
        return (urlsplit(f"//{request.headers.get('Host', '')}").hostname or "").lower()
    except ValueError:
        return ""


def is_own_origin(request: web.Request) -> bool:
    """Return whether the Origin header names this server, under the name that the request was sent to."""
    try:
        return urlsplit(request.headers.get("Origin", "")).netloc == request.headers.get("Host", "")
    except ValueError:
        return False


def is_of_other_site(request: web.Request) -> bool:
    """Return whether a browser says that a page of another site sends the request. Programs say nothing."""
    elsewhere = request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    return elsewhere or ("Origin" in request.headers and not is_own_origin(request))
