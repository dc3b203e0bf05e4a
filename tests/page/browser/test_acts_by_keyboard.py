"""A page with --edit in a browser: an act is asked for, done and told by keyboard alone, also below a path."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

import raycheck
from raycheck.bucket.store.address import join_uri
from tests.page.browser.conftest import KEYS, REAL
from tests.page.browser.test_by_keyboard import tab_to, walk
from tests.support.servers.chromium import Watched, watched_page
from tests.support.servers.page_server import TOKEN, below_a_path, page_server

pytestmark = pytest.mark.slow


@pytest.fixture(params=["at its own address", "below a path"])
def editing(request: pytest.FixtureRequest, browser: Browser, bucket: str) -> Iterator[tuple[Watched, str]]:
    with page_server(bucket, "--edit") as here, below_a_path(here, "/user/ann/proxy/") as there:
        address = here if request.param == "at its own address" else there
        with watched_page(browser) as watched:
            watched.page.goto(f"{address}?token={TOKEN}")
            yield watched, address


def test_a_checkpoint_is_pinned_unpinned_and_verified(editing: tuple[Watched, str], bucket: str) -> None:
    watched, address = editing
    page, run = watched.page, join_uri(bucket, REAL)

    for label, is_pinned in (("Pin", True), ("Unpin", False)):
        page.goto(f"{address}checkpoint?name={REAL}&at={KEYS[0]}")
        tab_to(page, label)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text(f"{label} {KEYS[0]}?")
        expect(page.locator("pre")).to_contain_text(f"raycheck {label.lower()} ")
        assert watched.serious() == []
        assert raycheck.open_run(run).at(KEYS[0]).is_pinned is not is_pinned, "nothing is done by the question"
        tab_to(page, label)
        page.keyboard.press("Enter")
        expect(page.get_by_role("status")).to_contain_text("is pinned" if is_pinned else "follows the retention rules")
        assert raycheck.open_run(run).at(KEYS[0]).is_pinned is is_pinned
        expect(page.get_by_role("link", name="Back to the run")).to_be_focused()
        expect(page.get_by_role("button")).to_have_count(0)

    page.goto(f"{address}act?name={REAL}&kind=verify&at={KEYS[0]}")
    assert walk(page) >= 4
    page.get_by_role("button", name="Verify").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("objects of", timeout=60_000)
    expect(page.get_by_role("status")).to_contain_text("are intact")
    watched.assert_harmless()


def test_a_refused_act_is_told_and_can_be_tried_again(editing: tuple[Watched, str]) -> None:
    watched, address = editing
    page = watched.page
    page.goto(f"{address}act?name={REAL}&kind=name&at={KEYS[0]}")
    page.get_by_role("textbox").fill("40")
    page.keyboard.press("Enter")

    expect(page.get_by_role("status")).to_contain_text("40")
    expect(page.get_by_role("button", name="Name")).to_be_enabled()
