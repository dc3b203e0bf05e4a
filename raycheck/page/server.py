"""Handles the page's requests: one handler per view. A view's data is read in a thread, within a time limit."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from aiohttp import web

from raycheck.errors import ConfigError, NotFoundError, RaycheckError
from raycheck.http_callers import is_local, known_hosts
from raycheck.http_server import HttpLimits, bound, listen
from raycheck.page import acts, pages
from raycheck.page.background_acts import BackgroundActs
from raycheck.page.guard import HEALTH, Guard
from raycheck.page.pages import ChartOptions, PageScope
from raycheck.page.rendering import render, without_settings
from raycheck.page.view_threads import AT_ONCE, BusyError, LiveAnswers, ViewThreads

TIMEOUT_S = 60.0
"""How long one view may read from the bucket."""
QUICK_S = 1.0
"""A list of runs that takes longer to read is shown as it was last read, until it has been read again."""
LIMITS = HttpLimits()
STATIC = {"page.css": "text/css", "page.js": "text/javascript"}


def make_app(place: PageScope, *, token: str, hosts: Collection[str]) -> web.Application:
    """Return the application that serves the page. token, hosts: see Guard."""
    app = web.Application(middlewares=[Guard(token, hosts).middleware()])
    views = _Views(place)
    app.on_cleanup.append(views.close)
    app.router.add_get("/", views.runs)
    app.router.add_get("/run", views.run)
    app.router.add_get("/compare", views.compare)
    app.router.add_get("/freed", views.freed)
    app.router.add_get("/live", views.live)
    app.router.add_get("/of", views.of)
    app.router.add_get(HEALTH, _health)
    app.router.add_get("/checkpoint", views.checkpoint)
    app.router.add_get("/tensor", views.tensor)
    app.router.add_get("/diff", views.diff)
    app.router.add_get("/static/{file}", _static)
    if place.can_edit:
        app.router.add_get("/act", views.ask)
        app.router.add_post("/act", views.act)
        app.router.add_get("/progress", views.progress)
    return app


def serve(
    place: PageScope,
    *,
    host: str,
    port: int,
    token: str | None,
    allow_hosts: Collection[str] = (),
    limits: HttpLimits = LIMITS,
    on_start: Callable[[str], None],
) -> None:
    """Serve the page until the process is interrupted.

    host, port: where to bind; port 0 takes a free one. token: None generates a random one; "" disables it. on_start:
    called with the address to open. Raises ConfigError for a host other than this machine's without a token.
    """
    if not token and token is not None and not is_local(host):
        raise ConfigError(
            f"host={host}: others can reach this address, so it needs a token; leave token out to generate one"
        )
    chosen = secrets.token_urlsafe(24) if token is None else token
    app = make_app(place, token=chosen, hosts=known_hosts(host, allow_hosts))

    async def until_interrupted() -> None:
        async with listen(app, sockets, limits=limits) as address:
            on_start(f"{address}/" + (f"?token={chosen}" if chosen else ""))
            await asyncio.Event().wait()

    with bound(host, port) as sockets:
        asyncio.run(until_interrupted())


@dataclass(frozen=True, slots=True)
class _RunsRead:
    """The list of runs as it was last read. at: when reading it began, by time.monotonic. took_s: how long it took."""

    found: dict[str, Any]
    at: float
    took_s: float


class _Views:
    """The handlers, one per view."""

    def __init__(self, place: PageScope) -> None:
        self._place = place
        self._acts = BackgroundActs()
        self._threads = ViewThreads(timeout_s=TIMEOUT_S)
        self._live = LiveAnswers(lambda name: self._read(pages.live_version, name))
        self._runs: _RunsRead | None = None
        self._reading: asyncio.Future[tuple[int, Any]] | None = None

    async def close(self, app: web.Application) -> None:
        del app
        self._threads.close()

    async def runs(self, request: web.Request) -> web.Response:
        """Respond with the list of runs.

        One that takes long to read is shown as it was last, and read again meanwhile: static/page.js asks for that. If
        the prefix is a run, and no folder of others, the view of that run takes the place of the list.
        """
        known, reading = self._runs, self._reading
        if reading is None or reading.done():
            reading = self._reading = asyncio.ensure_future(self._read_runs())
        if known is None or known.took_s < QUICK_S or _asked(request, "newest"):
            status, found = await asyncio.shield(reading)  # another tab may be waiting for it too
        else:
            status, found = 200, known.found | {"old_s": time.monotonic() - known.at}
        if status == 200 and [row["link"] for row in found["rows"]] == [""]:
            raise web.HTTPSeeOther("run?name=")
        return self._response("runs.html", status, found)

    async def _read_runs(self) -> tuple[int, Any]:
        began = time.monotonic()
        status, found = await self._read(pages.runs_view)
        self._runs = _RunsRead(found, began, time.monotonic() - began) if status == 200 else None
        return status, found

    def _forget_runs(self) -> None:
        """Read the list of runs again at the next look, since an action has changed it."""
        self._runs = self._reading = None

    async def run(self, request: web.Request) -> web.Response:
        """Respond with the view of a run, or with one that waits for the run to start."""
        name = _asked(request, "name")
        status, found = await self._read(partial(pages.run_view, options=_options(request)), name)
        if status == 404 and self._place.may_have(name):
            html = render("no_run_yet.html", self._place, name=name, error=found)
            return web.Response(status=404, text=html, content_type="text/html")
        return self._response("run.html", status, found)

    async def compare(self, request: web.Request) -> web.Response:
        names = list(dict.fromkeys(request.query.getall("run", [])))
        return await self._shown("compare.html", partial(pages.compare_view, options=_options(request)), *names)

    async def freed(self, request: web.Request) -> web.Response:
        return await self._shown("freed.html", pages.freed_view, _asked(request, "name"))

    async def live(self, request: web.Request) -> web.Response:
        """Respond with the number of writes of `latest`, for a page that asks whether it is out of date."""
        status, found = await self._live.get(_asked(request, "name"))
        return web.json_response({"version": found} if status == 200 else {"error": found}, status=status)

    async def of(self, request: web.Request) -> web.Response:
        """Redirect to the view of the run with this URI, which must be under the prefix; for links from elsewhere."""
        name = self._place.name_of(_asked(request, "run"))
        if name is None:
            error = f"no run under {self._place.prefix.partition('?')[0]} has that URI"
            return web.Response(
                status=404, text=render("error.html", self._place, error=error, name=""), content_type="text/html"
            )
        raise web.HTTPSeeOther(f"run?{urlencode({'name': name})}")

    async def checkpoint(self, request: web.Request) -> web.Response:
        view = partial(pages.checkpoint_view, search=request.query.get("search", ""))
        return await self._shown("checkpoint.html", view, _asked(request, "name"), _asked(request, "at"))

    async def tensor(self, request: web.Request) -> web.Response:
        asked = request.query.get("max_bytes", "")
        view = partial(pages.tensor_view, max_bytes=int(asked) if asked.isdecimal() and len(asked) < 12 else None)
        names = [_asked(request, name) for name in ("name", "at", "tensor")]
        return await self._shown("tensor.html", view, *names)

    async def diff(self, request: web.Request) -> web.Response:
        names = [_asked(request, name) for name in ("name", "before", "after")]
        view = partial(pages.diff_view, tensor=request.query.get("tensor", ""))
        return await self._shown("diff.html", view, *names)

    async def ask(self, request: web.Request) -> web.Response:
        """Show what an action would do, and a button that performs it."""
        names = [_asked(request, name) for name in ("name", "kind", "at")]
        return await self._shown("act.html", acts.act_view, *names)

    async def act(self, request: web.Request) -> web.Response:
        """Perform an action. Respond with its result, or with its id if it runs in the background."""
        form = await request.post()
        name, kind, at, value = (str(form.get(field, "")) for field in ("name", "kind", "at", "value"))

        def do(place: PageScope) -> dict[str, str]:
            act, target = acts.act_of(kind), acts.Target(place=place, name=name, at=at, value=value)
            if act.is_long:
                target.run()  # refuses at once if there is no run
                return {"id": self._acts.start(partial(act.do, target))}
            return {"text": act.do(target, lambda _: None)}

        status, found = await self._answered(self._threads.do(partial(do, self._place)))
        self._forget_runs()
        if status == 504:
            found = f"{found}; the action may have succeeded anyway, so look at the run before you try again"
        return web.json_response(found if status == 200 else {"error": found}, status=status)

    async def progress(self, request: web.Request) -> web.Response:
        """Respond with the progress or the result of a background action."""
        act = self._acts.get(_asked(request, "id"))
        if act is None:
            return web.json_response({"error": "the page's server was restarted in the meantime"}, status=404)
        if act.is_done:
            self._forget_runs()
        text = without_settings(act.text)
        return web.json_response({"text": text, "is_done": act.is_done, "has_failed": act.has_failed})

    async def _shown(self, template: str, view: Callable[..., dict[str, Any]], *arguments: str) -> web.Response:
        """Return the HTML of a view, or of the error that occurred while reading it."""
        status, found = await self._read(view, *arguments)
        return self._response(template, status, found, name=next(iter(arguments), ""))

    def _response(self, template: str, status: int, found: Any, *, name: str = "") -> web.Response:
        if status == 200:
            html = render(template, self._place, **found)
        else:
            html = render("error.html", self._place, error=found, name=name if self._place.may_have(name) else "")
        return web.Response(status=status, text=html, content_type="text/html")

    async def _read(self, view: Callable[..., Any], *arguments: str) -> tuple[int, Any]:
        """Read from the bucket in a thread. Returns 200 and the result of `view`, or another status and an error."""
        return await self._answered(self._threads.read(partial(view, self._place, *arguments)))

    async def _answered(self, told: Awaitable[Any]) -> tuple[int, Any]:
        try:
            return 200, await told
        except NotFoundError as error:
            return 404, without_settings(str(error))
        except ConfigError as error:
            return 400, without_settings(str(error))
        except RaycheckError as error:
            return 502, without_settings(str(error))
        except TimeoutError:
            return 504, f"the bucket did not answer within {TIMEOUT_S:.0f} s"
        except BusyError:
            return 503, f"{AT_ONCE} views are already waiting for the bucket; try again later"


def _asked(request: web.Request, name: str) -> str:
    """Return an argument of the URL, or "" if it is missing."""
    return request.query.get(name, "")


def _options(request: web.Request) -> ChartOptions:
    """Return how to draw metrics, as the URL asks; what is not a number counts as no smoothing."""
    try:
        smooth = min(0.999, max(0.0, float(_asked(request, "smooth"))))
    except ValueError:
        smooth = 0.0
    is_log = _asked(request, "log") == "1"
    return ChartOptions(is_log=is_log, smooth=smooth, only=_asked(request, "only"))


async def _health(request: web.Request) -> web.Response:
    """Respond to a probe. The response reveals nothing else, so it needs no token."""
    del request
    return web.Response(text="ok\n")


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["file"]
    if name not in STATIC:
        raise web.HTTPNotFound
    return web.Response(text=static_text(name), content_type=STATIC[name])


def static_text(name: str) -> str:
    """Return the text of a file in static/."""
    return files("raycheck").joinpath("page", "static", name).read_text(encoding="utf-8")
