"""Who may call: on this machine everybody, elsewhere who has the key. Every failure becomes JSON that the SDK shows."""

import hmac
import logging
import sqlite3

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from raycheck import ConfigError, NotFoundError, RaycheckError
from raycheck.tinker.journal import ReplacedError
from raycheck.tinker.wire.fields import RefusedRequestError

logger = logging.getLogger("raycheck.tinker")
LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATHS = frozenset({"/api/v1/healthz"})
DOWNLOADS = "/api/v1/downloads/"
"""Addresses below it are signed, and need no key."""
MIN_KEY = 12


def check_bind(host: str, key: str) -> None:
    """Raises ConfigError for an address that others can reach without a key, and for a key that is soon guessed."""
    if host not in LOCAL and not key:
        raise ConfigError(f"host={host}: others can reach this address, so it needs a key; give api_key_file=")
    if key and (len(key) < MIN_KEY or not key.startswith("tml-")):
        raise ConfigError(f"the API key has to begin with 'tml-', as the SDK demands, and have {MIN_KEY} characters")


def problem(text: str, status: int) -> web.Response:
    """Returns an error as the SDK reads it. Its body is never empty: the SDK repeats an empty 400."""
    return web.json_response({"detail": text or "the request was refused"}, status=status)


def guard(key: str) -> Middleware:
    """Returns the middleware that asks for the key, and turns every exception into an answer."""

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("x-api-key", "").encode("utf-8", "surrogateescape")
        is_open = request.path in OPEN_PATHS or request.path.startswith(DOWNLOADS)
        if key and not is_open and not hmac.compare_digest(shown, key.encode()):
            return problem("the header x-api-key has not this server's key (TINKER_API_KEY)", 401)
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
