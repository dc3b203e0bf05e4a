"""Debian's Chromium without a window, driven by playwright. It reaches 127.0.0.1 alone, and what it asks for is recorded.

The package is installed on first use, if by root. playwright's own browsers are not needed.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, sync_playwright

from tests.support.servers.debian_packages import prepare_programs

INSTALL = "apt-get install -y --no-install-recommends chromium"
TIMEOUT_MS = 90_000
LOCAL = {"127.0.0.1", "localhost"}
SERIOUS = {"serious", "critical"}
ARGUMENTS = (
    "--no-sandbox",  # it does not start as root with one; it sees nothing but our own pages
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)
AXE = Axe()


@dataclass
class Watched:
    """Holds a page of the browser, and what it did that a page of ours must not do.

    elsewhere: addresses outside of this machine that it asked for; none was let through. complaints: errors of scripts,
    refusals by the content security policy, and dialogs.
    """

    page: Page
    elsewhere: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def serious(self) -> list[str]:
        """What axe-core finds on the page that is serious or critical: the rule, and the elements."""
        return [found for found in self.findings() if found.split(":")[0] in SERIOUS]

    def findings(self) -> list[str]:
        """All that axe-core finds, by its own rules of every kind."""
        violations: list[dict[str, Any]] = AXE.run(self.page).response["violations"]
        return [
            f"{item['impact']}: {item['id']}: {', '.join(str(node['target']) for node in item['nodes'][:5])}"
            for item in violations
        ]

    def assert_harmless(self) -> None:
        assert self.elsewhere == []
        assert self.complaints == []
        assert self.page.evaluate("window.hacked") is None


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser."""
    prepare()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched_page(browser: Browser, **options: Any) -> Iterator[Watched]:
    """A page in a context of its own, without cookies. options: of playwright's new_context, such as color_scheme."""
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    watched = Watched(page)

    def decide(route: Route) -> None:
        if urlsplit(route.request.url).hostname in LOCAL or route.request.url.startswith("file://"):
            route.continue_()
        else:
            watched.elsewhere.append(route.request.url)
            route.abort()

    context.route("**/*", decide)
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (watched.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "console",
        lambda message: watched.complaints.append(message.text) if "Content Security Policy" in message.text else None,
    )
    try:
        yield watched
    finally:
        context.close()


def prepare() -> None:
    """The browser, installed where that is possible. Raises RuntimeError that says what to install."""
    prepare_programs(["chromium"], INSTALL, who="the tests of the page in a browser need Chromium")


if __name__ == "__main__":
    prepare()
