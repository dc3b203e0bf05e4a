"""Decides who may call: clients with the key that use an allowed host name and are not a web page of another site.

Every failure becomes JSON that the SDK shows. The SDK sends the key in a header, sends no Origin, and sends only JSON
and protobuf; a page of another site can do none of that without permission. So even a server without a key, on a
loopback address, does nothing for a page open in the user's browser.
"""

import hmac
import logging
import secrets
import sqlite3
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from raycheck.errors import ConfigError, NotFoundError, RaycheckError
from raycheck.http_callers import host_name, is_local, is_of_other_site
from raycheck.tinker.journal import ReplacedError
from raycheck.tinker.wire.fields import RefusedRequestError
from raycheck.tinker.wire.results import PROTOBUF

logger = logging.getLogger("raycheck.tinker")
OPEN_PATHS = frozenset({"/api/v1/healthz"})
DOWNLOADS = "/api/v1/downloads/"
"""URLs under this path are signed and need no key."""
MIN_KEY = 12
BODIES = frozenset({"application/json", PROTOBUF})
"""Allowed content types. A page of another site cannot send these without a CORS preflight, which is refused."""


def new_key() -> str:
    """Return a random key in the form that the SDK requires."""
    return f"tml-{secrets.token_urlsafe(24)}"


def check_bind(host: str, key: str | None) -> None:
    """Raise ConfigError for an address that others can reach without a key, and for a key that is too short.

    key: None if the server generates the key; "" for no key.
    """
    if not is_local(host) and key == "":
        raise ConfigError(f"host={host}: others can reach this address, so it needs a key; leave --no-key out")
    if key and (len(key) < MIN_KEY or not key.startswith("tml-")):
        raise ConfigError(
            f"the API key must begin with 'tml-', as the SDK requires, and have at least {MIN_KEY} characters"
        )


def problem(text: str, status: int) -> web.Response:
    """Return an error in the SDK's format. The body is never empty, because the SDK retries an empty 400."""
    return web.json_response({"detail": text or "the request was refused"}, status=status)


def refusal(request: web.Request, key: str, hosts: Collection[str]) -> web.Response | None:
    """Return the response to a refused request, or None if the request may be served."""
    if request.path in OPEN_PATHS:
        return None
    if (name := host_name(request)) not in hosts:
        return problem(f"this server is not known as {name[:200]!a}; allow that name with --allow-host", 403)
    if request.path.startswith(DOWNLOADS):
        return None
    shown = request.headers.get("x-api-key", "").encode("utf-8", "surrogateescape")
    if key and not hmac.compare_digest(shown, key.encode()):
        return problem(
            "the header x-api-key does not have this server's key: set TINKER_API_KEY to the key that the server "
            "printed",
            401,
        )
    if is_of_other_site(request):
        return problem("this request comes from a page of another site", 403)
    if request.can_read_body and request.content_type not in BODIES:
        return problem(f"Content-Type: use {' or '.join(sorted(BODIES))}", 415)
    return None


def guard(key: str, hosts: Collection[str]) -> Middleware:
    """Return the middleware that checks `refusal` first and turns every exception into a response.

    key: the key that clients must send; "" for none. hosts: the host names that clients may use.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (refused := refusal(request, key, hosts)) is not None:
            return refused
        try:
            return await handler(request)
        except RefusedRequestError as error:
            return problem(str(error), error.status)
        except web.HTTPException as error:
            return problem(f"{request.method} {request.path}: {_words(error)}", error.status)
        except ReplacedError as error:
            return problem(str(error), 503)
        except NotFoundError as error:
            return problem(str(error), 404)
        except ConfigError as error:
            return problem(str(error), 400)
        except RaycheckError as error:
            return problem(str(error), 503)  # the store's problem may pass: the SDK retries
        except (OSError, sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
            # A full disk, a broken connection, or a server that is shutting down and has closed its file: it may pass.
            logger.warning("%s %s: %s: %s", request.method, request.path, type(error).__name__, error)
            return problem(f"the server cannot do this at the moment: {error}", 503)
        except Exception as error:
            logger.exception("%s %s", request.method, request.path)
            # Not a 500, which the SDK would retry for five minutes with the same result.
            return problem(f"internal error, see the server's log: {type(error).__name__}: {error}", 400)

    return guarded


def _words(error: web.HTTPException) -> str:
    words = {
        404: "this server has no such route",
        405: "this server has no such route",
        413: "the body is larger than this server accepts",
    }
    return words.get(error.status, error.reason)
