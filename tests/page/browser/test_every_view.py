"""Every view in Chromium: hostile names are text, nothing else is asked for, and axe-core finds nothing serious."""

from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.browser.conftest import HOSTILE, HOSTILE_RUN, HURT, KEYS, REAL, STORM, WIDE
from tests.support.processes.command_line import raycheck
from tests.support.servers.chromium import Watched, watched_page
from tests.support.servers.page_server import TOKEN, below_a_path, site_with

pytestmark = pytest.mark.slow
VIEWS = {
    "runs": "",
    "a run": f"run?name={REAL}",
    "a run that lost a worker": f"run?name={quote(HURT)}",
    "a storm of attempts": f"run?name={STORM}",
    "a run with wide metrics": f"run?name={WIDE}",
    "a comparison of runs": f"compare?run={REAL}&run={STORM}",
    "a run that is not claimed yet": "run?name=not/yet",
    "a hostile name": f"run?{urlencode({'name': HOSTILE_RUN})}",
    "a checkpoint": f"checkpoint?name={REAL}&at={KEYS[1]}",
    "a tensor": f"tensor?name={REAL}&at={KEYS[1]}&tensor=model.0.weight",
    "a hostile tensor": f"tensor?{urlencode({'name': REAL, 'at': KEYS[1], 'tensor': f'extra.{HOSTILE}'})}",
    "a comparison": f"diff?name={REAL}&before=1&after=2",
    "what would be freed": f"freed?name={quote(HURT)}",
    "an error": f"run?{urlencode({'name': HOSTILE})}",
}
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"color_scheme": "light", "viewport": {"width": 360, "height": 640}},
}


@pytest.mark.parametrize("look", LOOKS)
def test_axe_core_finds_nothing_serious_and_nothing_runs_over_the_edge(
    browser: Browser, address: str, look: str
) -> None:
    with watched_page(browser, **LOOKS[look]) as watched:
        watched.page.goto(f"{address}?token={TOKEN}")
        found = {}
        for name, path in VIEWS.items():
            watched.page.goto(address + path)
            expect(watched.page.locator("h1")).to_be_visible()
            open_all(watched.page)
            found[name] = watched.serious()
            wide = watched.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{name} scrolls sideways by {wide} pixels"
        assert found == {name: [] for name in VIEWS}
        watched.assert_harmless()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_storm_of_attempts_fits_on_the_screen(browser: Browser, address: str, width: int) -> None:
    with watched_page(browser, viewport={"width": width, "height": 800}) as watched:
        page = watched.page
        page.goto(f"{address}?token={TOKEN}")
        page.goto(f"{address}run?name={STORM}")
        drawing = page.get_by_role("img", name="Attempts over time").bounding_box()
        table = page.get_by_role("region", name="Attempts", exact=True).bounding_box()
        assert page.locator("rect.attempt").count() == 50
        assert drawing is not None
        assert table is not None
        assert drawing["height"] < 600
        assert table["height"] <= 0.85 * 800
        sizes = page.eval_on_selector_all(".timeline text", "items => items.map(item => item.getBoundingClientRect())")
        edges = page.locator(".timeline svg").bounding_box()
        assert edges is not None
        assert [box for box in sizes if box["width"] and box["left"] < edges["x"]] == [], "no label is clipped"
        assert [box for box in sizes if box["width"] and box["height"] < 9] == [], "each can be read"


def test_a_narrow_screen_shows_whole_labels_legible_metrics_and_the_newest_attempt(
    browser: Browser, address: str
) -> None:
    with watched_page(browser, viewport={"width": 400, "height": 800}) as watched:
        page = watched.page
        page.goto(f"{address}?token={TOKEN}")
        for path in ("", f"run?name={WIDE}"):
            page.goto(address + path)
            boxes = page.eval_on_selector_all(".metric", "items => items.map(item => item.getBoundingClientRect())")
            assert len(boxes) > 10
            assert [box for box in boxes if box["width"] < 60 or box["right"] > 400] == []
        cut = page.eval_on_selector_all(
            "#charts text",
            """items => items.filter(item => {
          const [own, all] = [item.getBoundingClientRect(), item.closest("svg").getBoundingClientRect()];
          return own.width && (own.left < all.left || own.top < all.top || own.right > all.right);
        }).map(item => item.textContent)""",
        )
        assert cut == []
        page.goto(f"{address}run?name={STORM}")
        (bar, edge) = page.evaluate("""() => [[...document.querySelectorAll("rect.attempt")].at(-1),
          document.querySelector(".timeline")].map(item => item.getBoundingClientRect())""")
        assert edge["left"] <= bar["left"] <= bar["right"] <= edge["right"] + 1


def open_all(page: Page) -> None:
    page.evaluate("for (const item of document.querySelectorAll('details')) item.open = true")


def test_dark_and_light_differ_and_both_can_be_read(browser: Browser, address: str) -> None:
    backs = {}
    for look in ("light", "dark"):
        with watched_page(browser, color_scheme=look) as watched:
            watched.page.goto(f"{address}?token={TOKEN}")
            backs[look] = watched.page.evaluate("getComputedStyle(document.body).backgroundColor")
    light, dark = (sum(map(int, text[4:-1].split(","))) for text in (backs["light"], backs["dark"]))
    assert light > 600
    assert dark < 200


def test_hostile_names_are_shown_as_text_in_every_view(signed_in: Watched, address: str) -> None:
    seen = ""
    for path in VIEWS.values():
        signed_in.page.goto(address + path)
        open_all(signed_in.page)
        seen += signed_in.page.locator("body").inner_text()
        assert signed_in.page.locator("img").count() == 0
        assert signed_in.page.evaluate("document.querySelectorAll('[onerror], [onload]').length") == 0
    assert seen.count("<img src=x onerror=window.hacked=1>") >= 8
    assert "{{7*7}}" in seen, "no template is made of a name"
    assert "\u202e" not in seen


def test_every_link_of_every_view_leads_somewhere(signed_in: Watched, address: str) -> None:
    page, links = signed_in.page, set()
    for path in VIEWS.values():
        page.goto(address + path)
        links |= set(page.eval_on_selector_all("a[href]", "items => items.map(item => item.href)"))
    links = {link.partition("#")[0] for link in links}
    assert all(link.startswith(address) for link in links), links
    assert len(links) > 20
    for link in sorted(links):
        answer = page.goto(link)
        assert answer is not None
        is_made_up = "tensor?" in link and f"name={REAL}" not in link  # those of many_runs.py have no right checksums
        assert answer.status in (200, 404) or is_made_up, link


def test_the_page_works_below_a_path(browser: Browser, address: str) -> None:
    with below_a_path(address, "/user/ann/proxy/8766/") as outside, watched_page(browser) as watched:
        page = watched.page
        page.goto(f"{outside}?token={TOKEN}")
        assert page.url == outside, "the token does not stay in the address"
        page.get_by_role("link", name=REAL, exact=True).click()
        page.get_by_role("link", name=KEYS[1]).first.click()
        expect(page.locator("h1")).to_have_text("Step 2")
        page.get_by_role("button", name="Compare").click()
        expect(page.locator("h1")).to_have_text("What changed")
        assert page.url.startswith(f"{outside}diff?")
        page.get_by_role("link", name=KEYS[0]).first.click()
        page.locator("summary").first.click()
        page.locator("details a").first.click()
        expect(page.locator("h1")).to_be_visible()
        assert page.url.startswith(f"{outside}tensor?")
        assert page.evaluate("[...document.styleSheets].every(sheet => sheet.cssRules.length > 10)")
        watched.assert_harmless()


def test_a_link_from_another_site_works_and_that_site_learns_nothing(
    browser: Browser, address: str, bucket: str
) -> None:
    target = f"{address}of?{urlencode({'run': bucket.partition('?')[0] + '/' + REAL})}"
    html = f"""<a href="{target}">the run</a><iframe src="{address}"></iframe>
    <script>fetch("{address}live?name={REAL}", {{credentials: "include"}})
    .then(answer => answer.text()).then(text => window.stolen = text, error => window.refused = true)</script>"""
    with watched_page(browser) as watched, site_with(html) as other:
        watched.page.goto(f"{address}?token={TOKEN}")
        watched.page.goto(other)
        watched.page.wait_for_function("window.refused")
        assert watched.page.evaluate("window.stolen") is None
        framed = watched.page.frame_locator("iframe").locator("h1", has_text="Runs")
        assert framed.count() == 0, "the page is in no frame of another site"
        watched.page.get_by_role("link", name="the run").click()
        expect(watched.page.locator("h1")).to_have_text(REAL)
        assert watched.elsewhere == []


def test_who_has_no_token_sees_nothing(browser: Browser, address: str) -> None:
    with watched_page(browser) as watched:
        for path in ("", *VIEWS.values()):
            answer = watched.page.goto(address + path)
            assert answer is not None
            assert answer.status == 401
        assert REAL not in watched.page.content()


def test_the_saved_run_is_read_without_a_server(browser: Browser, bucket: str, tmp_path: Path) -> None:
    scheme, mark, query = bucket.partition("?")
    done = raycheck("page", f"{scheme}/{REAL}{mark}{query}", "--save", str(tmp_path / "run.html"))
    assert done.returncode == 0, done.stderr
    with watched_page(browser) as watched:
        asked: list[str] = []
        watched.page.on("request", lambda request: asked.append(request.url))
        watched.page.goto(f"file://{tmp_path}/run.html")
        expect(watched.page.get_by_role("heading", name="Checkpoints")).to_be_visible()
        assert KEYS[1] in watched.page.locator("body").inner_text()
        assert watched.serious() == []
        assert asked == [f"file://{tmp_path}/run.html"]
        watched.assert_harmless()
