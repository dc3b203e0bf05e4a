"""What the page's script adds to tables and charts: sorting, filtering, the crosshair, options without a reload, ages."""

import pytest
from playwright.sync_api import expect

from tests.page.browser.conftest import KEYS, REAL
from tests.support.servers.chromium import Watched

pytestmark = pytest.mark.slow


def test_a_table_sorts_by_a_column_and_filters_by_a_text(signed_in: Watched, address: str) -> None:
    page = signed_in.page
    page.goto(f"{address}run?name={REAL}")
    steps = page.locator("#checkpoints tbody th")
    expect(steps).to_have_text(["2", "1"])

    heading = page.get_by_role("columnheader", name="loss")
    heading.get_by_role("button").press("Enter")
    expect(steps).to_have_text(["1", "2"])
    expect(heading).to_have_attribute("aria-sort", "descending")
    heading.get_by_role("button").press("Enter")
    expect(steps).to_have_text(["2", "1"])

    page.locator("input[data-filter=checkpoints]").fill(KEYS[0])
    expect(page.locator("#checkpoints tbody tr:visible")).to_have_count(1)
    assert signed_in.serious() == []


def test_the_crosshair_shows_the_values_of_all_charts_at_one_step(signed_in: Watched, address: str) -> None:
    page = signed_in.page
    page.goto(f"{address}run?name={REAL}")
    figure = page.locator("figure", has=page.get_by_text("loss", exact=True))
    box = figure.locator("svg").bounding_box()
    assert box is not None
    figure.locator("svg").scroll_into_view_if_needed()
    figure.locator("svg").hover(position={"x": box["width"] - 12, "y": box["height"] / 2})

    expect(figure.locator(".values")).to_have_text("1 at step 2")
    expect(page.locator(".cross")).to_have_count(page.locator("figure").count())


def test_an_option_draws_again_in_place_and_is_in_the_address(signed_in: Watched, address: str) -> None:
    page = signed_in.page
    page.goto(f"{address}run?name={REAL}")
    page.evaluate("window.same = true")
    page.get_by_role("checkbox", name="Log scale").check()

    expect(page).to_have_url(f"{address}run?name={REAL}&log=1&smooth=0&only=")
    expect(page.get_by_role("checkbox", name="Log scale")).to_be_checked()
    assert page.evaluate("window.same")


def test_chosen_runs_are_compared(signed_in: Watched) -> None:
    page = signed_in.page
    page.get_by_role("checkbox", name=f"Choose {REAL}", exact=True).check()
    page.get_by_role("checkbox", name="Choose ann/finished", exact=True).check()
    page.get_by_role("button", name="Compare metrics of the chosen runs").click()

    expect(page.locator("h1")).to_have_text("Metrics of 2 runs")
    assert page.locator("figure").count() > 0
    assert signed_in.serious() == []
