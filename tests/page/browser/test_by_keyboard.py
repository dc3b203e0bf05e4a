"""The page without a mouse: everything can be reached by Tab, is seen when it is reached, and works by Enter."""

import pytest
from playwright.sync_api import Page, expect

from tests.page.browser.conftest import KEYS, REAL
from tests.support.servers.chromium import Watched

pytestmark = pytest.mark.slow
MAX_STOPS = 400
CONTROLS = "a[href], button, input:not([type=hidden]), select, summary, [tabindex='0']"
FOCUSED = "document.activeElement"
IS_MARKED = """() => { const style = getComputedStyle(document.activeElement);
  return (style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== 'none' }"""
SEEN = """selector => [...document.querySelectorAll(selector)]
  .filter(item => item.checkVisibility({visibilityProperty: true})).length"""


def walk(page: Page) -> int:
    """Press Tab through the whole page. Returns at how many controls of it the focus was; each was marked."""
    page.evaluate("window.reached = new Set()")
    for _ in range(MAX_STOPS):
        page.keyboard.press("Tab")
        if page.evaluate(f"{FOCUSED} === document.body || window.reached.has({FOCUSED})"):
            break
        page.evaluate(f"window.reached.add({FOCUSED})")
        assert page.evaluate(IS_MARKED), page.evaluate(f"{FOCUSED}.outerHTML")
    return int(page.evaluate("window.reached.size"))


@pytest.mark.parametrize(
    "path",
    [
        "",
        f"run?name={REAL}",
        f"checkpoint?name={REAL}&at={KEYS[1]}",
        f"tensor?name={REAL}&at={KEYS[1]}&tensor=model.0.weight",
        f"diff?name={REAL}&before=1&after=2",
    ],
    ids=["runs", "run", "checkpoint", "tensor", "diff"],
)
def test_tab_reaches_every_control(signed_in: Watched, address: str, path: str) -> None:
    signed_in.page.goto(address + path)

    assert walk(signed_in.page) >= signed_in.page.evaluate(SEEN, CONTROLS)


def test_the_first_stop_skips_to_the_content(signed_in: Watched) -> None:
    page = signed_in.page
    page.keyboard.press("Tab")
    assert page.evaluate(f"{FOCUSED}.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(f"{FOCUSED}.closest('main') !== null")


def tab_to(page: Page, text: str) -> None:
    for _ in range(MAX_STOPS):
        page.keyboard.press("Tab")
        if page.evaluate(f"{FOCUSED}.textContent.trim()").startswith(text):
            return
    raise AssertionError(f"Tab does not reach {text!r}")


def test_from_the_runs_to_a_tensor_and_a_comparison(signed_in: Watched) -> None:
    page = signed_in.page
    page.get_by_role("searchbox").focus()
    page.keyboard.type(REAL)
    expect(page.locator("#runs tbody tr:visible")).to_have_count(1)
    tab_to(page, REAL)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text(REAL)
    tab_to(page, KEYS[1])
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Step 2")
    tab_to(page, "Compare")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("What changed")
    page.go_back()
    tab_to(page, "model.0.weight")
    page.keyboard.press("Enter")
    tab_to(page, "model.0.weight")
    page.keyboard.press("Enter")
    expect(page.get_by_text("32 of 32 values")).to_be_visible()
