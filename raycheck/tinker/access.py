"""Decides who may call: who has the key, under a host name that was meant, and from no page of another site.

Every failure becomes JSON that the SDK shows. The SDK sends the key in a header, which no page of another site can do,
and neither an Origin nor anything but JSON and protobuf; so even a server without a key, on this machine's own address,
does nothing for a page that the user's browser has open.
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
"""Addresses below it are signed, and need no key."""
MIN_KEY = 12
BODIES = frozenset({"application/json", PROTOBUF})
"""What a body may be. A page of another site can send none of these without asking, and is refused when it asks."""


def new_key() -> str:
    """Return a key that nobody guesses, in the form that the SDK demands."""
    return f"tml-{secrets.token_urlsafe(24)}"


def check_bind(host: str, key: str | None) -> None:
    """Raise ConfigError for an address that others can reach without a key, and for a key that is soon guessed.

    key: None for one that the server makes; "" for none.
    """
    if not is_local(host) and key == "":
        raise ConfigError(f"host={host}: others can reach this address, so it needs a key; leave --no-key out")
    if key and (len(key) < MIN_KEY or not key.startswith("tml-")):
        raise ConfigError(f"the API key has to begin with 'tml-', as the SDK demands, and have {MIN_KEY} characters")


def problem(text: str, status: int) -> web.Response:
    """Returns an error as the SDK reads it. Its body is never empty: the SDK repeats an empty 400."""
    return web.json_response({"detail": text or "the request was refused"}, status=status)


def refusal(request: web.Request, key: str, hosts: Collection[str]) -> web.Response | None:
    """Return the answer to a request that nothing is done for; None for one that may be answered."""
    if request.path in OPEN_PATHS:
        return None
    if (name := host_name(request)) not in hosts:
        return problem(f"this server does not answer as {name[:200]!a}; allow that name by --allow-host", 403)
    if request.path.startswith(DOWNLOADS):
        return None
    shown = request.headers.get("x-api-key", "").encode("utf-8", "surrogateescape")
    if key and not hmac.compare_digest(shown, key.encode()):
        return problem("the header x-api-key has not this server's key: set TINKER_API_KEY as it printed it", 401)
    if is_of_other_site(request):
        return problem("this request comes from a page of another site", 403)
    if request.can_read_body and request.content_type not in BODIES:
        return problem(f"Content-Type: give {' or '.join(sorted(BODIES))}", 415)
    return None


def guard(key: str, hosts: Collection[str]) -> Middleware:
    """Return the middleware that asks `refusal` first, and turns every exception into an answer.

    key: what clients must show; "" for none. hosts: the names under which the server may be asked.
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
            return problem(str(error), 503)  # the store's trouble may pass: the SDK asks again
        except (OSError, sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
            # A full disk, a connection, or a server that is just ending and has closed its file: it may pass.
            logger.warning("%s %s: %s: %s", request.method, request.path, type(error).__name__, error)
            return problem(f"the server could not do it now: {error}", 503)
        except Exception as error:
            logger.exception("%s %s", request.method, request.path)
            # Not a 500, which the SDK would repeat for five minutes, with the same end.
            return problem(f"a fault of the server, whose log says more: {type(error).__name__}: {error}", 400)

    return guarded


def _words(error: web.HTTPException) -> str:
    words = {
        404: "this server has no such route",
        405: "this server has no such route",
        413: "the body is larger than this server takes",
    }
    return words.get(error.status, error.reason)
