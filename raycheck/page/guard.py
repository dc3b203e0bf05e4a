"""Decides which requests the page answers: those with the token, to an allowed host name, from its own origin.

A page on 127.0.0.1 can be reached by every program on this machine and, by DNS rebinding, by every site open in the
user's browser. So a request needs a token, as in Jupyter: first in the URL, then in a cookie. Scripts cannot read the
cookie, and other sites do not send it except when the user follows a link, from Grafana for example. A request must
also name a known host, so a foreign name that resolves to 127.0.0.1 is refused. Requests that change a run must come
from the page itself.
"""

import hmac
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from raycheck.http_callers import host_name, is_own_origin

COOKIE = "raycheck-token"
"""The prefix of the cookie's name. Browsers do not distinguish ports, so the name ends with the server's port."""
HEALTH = "/health"
"""The path for probes, which use the pod's address and send no token."""
ACT_HEADER = "X-Raycheck-Act"
"""A header required with every POST. A form of another site cannot set headers."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """The access check of every request.

    token: the required token; empty for none. hosts: allowed host names and addresses, see `known_hosts`; ports are not
    compared.
    """

    def __init__(self, token: str, hosts: Collection[str]) -> None:
        self._token = token
        self._hosts = hosts

    def middleware(self) -> Middleware:
        """Return the middleware that checks `refusal`, moves the token from the URL to a cookie, and adds HEADERS."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            response: web.StreamResponse
            if (refusal := self.refusal(request)) is not None:
                response = refusal
            elif self._token and request.path != HEALTH and "token" in request.query:
                response = self._signed_in(request)
            else:
                try:
                    response = await handler(request)
                except web.HTTPException as error:
                    response = error
            response.headers.update(HEADERS)
            if isinstance(response, web.HTTPException):
                raise response
            return response

        return guard

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the response to a refused request, or None for an allowed one."""
        if request.path == HEALTH and request.method in ("GET", "HEAD"):
            return None
        name = host_name(request)
        if name not in self._hosts:
            text = f"This page is not served as {name!r}. Start it with --allow-host to allow that name.\n"
            return web.Response(status=403, text=text)
        if not self._has_token(request):
            text = "Open the address that 'raycheck page' printed: it contains the token.\n"
            return web.Response(status=401, text=text)
        is_own = ACT_HEADER in request.headers and is_own_origin(request)
        if request.method not in ("GET", "HEAD") and not is_own:
            return web.Response(status=403, text="This request does not come from the page.\n")
        return None

    def _has_token(self, request: web.Request) -> bool:
        shown = request.query.get("token") or request.cookies.get(cookie_name(request)) or ""
        return not self._token or hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), self._token.encode())

    def _signed_in(self, request: web.Request) -> web.Response:
        """Return a response that stores the token in a cookie and redirects to the same address without it."""
        rest = {name: value for name, value in request.query.items() if name != "token"}
        here = request.path.rpartition("/")[2] or "./"
        response = web.Response(status=303, headers={"Location": str(request.url.with_query(rest).relative())})
        response.headers["Location"] = here + (f"?{request.url.with_query(rest).query_string}" if rest else "")
        response.set_cookie(cookie_name(request), self._token, httponly=True, samesite="Lax", path="/")
        return response


def cookie_name(request: web.Request) -> str:
    """Return the name of this server's cookie, which no other page on this host uses."""
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return f"{COOKIE}-{address[1]}" if address else COOKIE
