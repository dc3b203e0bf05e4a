"""Decides which requests the page answers: those with the token, to a host name that was meant, from its own origin.

A page on 127.0.0.1 can be reached by every program of this machine and, by DNS rebinding, by every site that the user's
browser has open. So a request needs the token, as Jupyter's does: once in the URL, then in a cookie that scripts cannot
read and other sites do not send, but for a link that the user follows, from Grafana for example. And it must name a
host that is known, so that a name which somebody else has pointed to 127.0.0.1 is refused. What changes a run must come
from the page itself.
"""

import hmac
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from raycheck.http_callers import host_name, is_own_origin

COOKIE = "raycheck-token"
"""What the cookie's name begins with. Browsers do not tell ports apart, so the name ends with the server's."""
HEALTH = "/health"
"""What a probe asks for, by the pod's address and without a token."""
ACT_HEADER = "X-Raycheck-Act"
"""Has to come with every POST. A form of another site cannot send a header of its own."""
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
    """Lets requests pass.

    token: what has to be shown; an empty one needs none. hosts: names and addresses under which the page may be asked
    for, see `known_hosts`; ports are not compared.
    """

    def __init__(self, token: str, hosts: Collection[str]) -> None:
        self._token = token
        self._hosts = hosts

    def middleware(self) -> Middleware:
        """Return the middleware that asks `refusal` first, takes the token from the URL, and adds HEADERS."""

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
        """Return the answer to a request that must not be answered otherwise; None for one that may."""
        if request.path == HEALTH and request.method in ("GET", "HEAD"):
            return None
        name = host_name(request)
        if name not in self._hosts:
            text = f"This page is not served as {name!r}. Start it with --allow-host to allow that name.\n"
            return web.Response(status=403, text=text)
        if not self._has_token(request):
            text = "Open the address that 'raycheck page' printed: it has the token.\n"
            return web.Response(status=401, text=text)
        is_own = ACT_HEADER in request.headers and is_own_origin(request)
        if request.method not in ("GET", "HEAD") and not is_own:
            return web.Response(status=403, text="This request does not come from the page.\n")
        return None

    def _has_token(self, request: web.Request) -> bool:
        shown = request.query.get("token") or request.cookies.get(cookie_name(request)) or ""
        return not self._token or hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), self._token.encode())

    def _signed_in(self, request: web.Request) -> web.Response:
        """Return the answer that keeps the token in a cookie, and asks for the same address without it."""
        rest = {name: value for name, value in request.query.items() if name != "token"}
        here = request.path.rpartition("/")[2] or "./"
        response = web.Response(status=303, headers={"Location": str(request.url.with_query(rest).relative())})
        response.headers["Location"] = here + (f"?{request.url.with_query(rest).query_string}" if rest else "")
        response.set_cookie(cookie_name(request), self._token, httponly=True, samesite="Lax", path="/")
        return response


def cookie_name(request: web.Request) -> str:
    """Return the name of this server's cookie: two pages on one host must not overwrite each other's."""
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return f"{COOKIE}-{address[1]}" if address else COOKIE
