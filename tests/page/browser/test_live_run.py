"""A run that goes on while its page is open: commits appear by themselves, and so does the loss of a worker."""

from uuid import uuid4

import pytest
from playwright.sync_api import Browser, expect

from raycheck.bucket.store.address import join_uri
from tests.page.browser.conftest import hurt_run, lose_a_worker
from tests.support.servers.chromium import watched_page
from tests.support.servers.http_fault_proxy import FaultProxy
from tests.support.servers.page_server import TOKEN, page_server

pytestmark = pytest.mark.slow
MOVES_MS = 20_000
"""The page asks every five seconds; the machine may be busy."""


def test_a_live_run_moves_by_itself_and_shows_that_it_lost_a_worker(browser: Browser, bucket: str) -> None:
    uri = join_uri(bucket, "live-one")
    driver = hurt_run(uri)
    with page_server(uri) as address, watched_page(browser) as watched:
        page = watched.page
        page.goto(f"{address}?token={TOKEN}")
        page.goto(f"{address}run?name=")
        commits, attempts = page.locator("circle.commit"), page.locator("rect.attempt")
        expect(commits).to_have_count(2)
        expect(attempts).to_have_count(2)
        page.evaluate("window.same = true")

        driver.save(2, 3)
        expect(commits).to_have_count(3, timeout=MOVES_MS)
        lose_a_worker(driver, group="g3", cause="rank 0: its node was taken away")
        expect(attempts).to_have_count(3, timeout=MOVES_MS)
        driver.save(3, 4)
        expect(commits).to_have_count(4, timeout=MOVES_MS)

        expect(page.get_by_role("cell", name="its node was taken away")).to_be_visible()
        assert page.evaluate("window.same"), "it was not loaded again"
        assert watched.serious() == []
        watched.assert_harmless()


def test_the_place_of_the_reader_stays_while_a_run_moves(browser: Browser, bucket: str) -> None:
    uri = join_uri(bucket, "live-two")
    driver = hurt_run(uri)
    with page_server(uri) as address, watched_page(browser, viewport={"width": 800, "height": 400}) as watched:
        page = watched.page
        page.goto(f"{address}?token={TOKEN}")
        page.goto(f"{address}run?name=")
        link = page.get_by_role("link", name="step-000000010-a1-s1").first
        link.focus()
        before = page.evaluate("window.scrollY")
        assert before > 0

        driver.save(2, 3)
        expect(page.locator("circle.commit")).to_have_count(3, timeout=MOVES_MS)

        assert page.evaluate("document.activeElement.textContent") == "step-000000010-a1-s1", "the focus is kept"
        assert abs(page.evaluate("window.scrollY") - before) < 120
        watched.assert_harmless()


def test_a_list_that_takes_long_is_first_shown_as_it_was_and_replaced_without_a_reload(
    browser: Browser, wire: FaultProxy
) -> None:
    prefix = join_uri(wire.uri, uuid4().hex)
    hurt_run(join_uri(prefix, "one"))
    wire.rule("delay", "GET", "latest", delay_s=1.2)
    with page_server(prefix) as address, watched_page(browser) as watched:
        page = watched.page
        page.goto(f"{address}?token={TOKEN}")
        older = page.get_by_text("The page is reading a newer one.")
        expect(older).to_have_count(0)
        hurt_run(join_uri(prefix, "two"))
        held = wire.rule("hold", "GET", "one/latest")

        page.goto(address)
        expect(older).to_be_visible()
        expect(page.get_by_role("link", name="two")).to_have_count(0)
        held.wait()
        held.release()

        expect(page.get_by_role("link", name="two")).to_be_visible(timeout=MOVES_MS)
        expect(older).to_have_count(0)
        watched.assert_harmless()
