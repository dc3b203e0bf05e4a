"""The page as a browser asks for it: every view, hostile names, and what it refuses. One real server for all tests."""

import html
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from raycheck.bucket.format.object_keys import checkpoint_prefix, manifest_key
from raycheck.bucket.store import open_store
from raycheck.catalog import fork_run
from raycheck.errors import ConfigError
from raycheck.page.pages import PageScope, freed_view, run_view, runs_view
from raycheck.page.rendering import render
from raycheck.page.server import serve
from raycheck.run import open_run
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import save_state
from tests.support.samples.many_runs import mixed_runs, place
from tests.support.samples.sample_checkpoints import Driver, write_checkpoint
from tests.support.servers.page_server import TOKEN, page_server

GOLDEN = Path(__file__).parent.parent / "golden" / "v4"
HOSTILE = "<img src=x onerror=alert(1)>\u202e"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in every state, and one with real tensors."""
    here = tmp_path_factory.mktemp("page")
    for name, (_, objects) in mixed_runs().items():
        place(open_store(f"file://{here}"), name, objects)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {HOSTILE: torch.ones(2)}}
    store = open_store(f"file://{here}/real")
    save_state(store, state, save_number=1, step=1, metrics={"loss": 2.0, HOSTILE: 1.0})
    with torch.no_grad():
        model[0].weight += 1
    save_state(store, state, save_number=2, step=2, metrics={"loss": 1.0})
    return here


class Browser:
    """Asks the page as a browser would, with the token in its cookie."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.host = f"127.0.0.1:{port}"
        self.cookie = f"raycheck-token-{port}={TOKEN}"

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
        link = HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Host": self.host, "Cookie": self.cookie} | {key.replace("_", "-"): v for key, v in headers.items()}
        link.request(method, path, headers={key: value for key, value in given.items() if value})
        answer = link.getresponse()
        text = answer.read().decode()
        link.close()
        return answer, text

    def view(self, path: str) -> str:
        answer, text = self.ask(path)
        assert answer.status == 200, text
        return text


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    command = [sys.executable, "-m", "raycheck", "page", str(folder), "--port", "0", "--token", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=" + TOKEN, server.stdout.readline())
            assert found
            yield Browser(int(found[1]))
        finally:
            server.terminate()


class Links(HTMLParser):
    """Collects the addresses in a page, and its elements' names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def test_every_run_is_listed_with_its_state(browser: Browser) -> None:
    text = browser.view("/")

    for name, (state, _) in mixed_runs().items():
        assert name in text
        assert f"state-{state}" in text


def test_every_link_of_every_view_leads_to_a_view_and_is_relative(browser: Browser) -> None:
    seen, queue = set(), ["./"]
    while queue:
        path = queue.pop()
        if path in seen or path.startswith("#"):
            continue
        seen.add(path)
        assert not urlsplit(path).scheme
        assert not path.startswith("/"), "it would not work below a path"
        answer, text = browser.ask("/" + path.removeprefix("./"))
        is_made_up = "tensor?" in path and "name=real" not in path  # those of many_runs.py have no right checksums
        assert answer.status in (200, 404) or (is_made_up and "another checksum" in text), (path, text)
        if "text/html" in answer.headers["Content-Type"]:
            page = Links(text)
            queue += page.found
            assert page.handlers == [], "the content security policy allows none"
            assert "img" not in page.tags
    assert len([path for path in seen if path.startswith("tensor?")]) > 10
    assert any(path.startswith("checkpoint?") for path in seen)


def test_a_run_shows_its_attempts_metrics_and_why_each_checkpoint_is_kept(browser: Browser) -> None:
    text = browser.view("/run?name=real")

    assert "among the newest 10" in text or "head" in text
    assert text.count('class="commit') >= 2
    assert "<figcaption>loss</figcaption>" in text
    assert "raycheck download" in text


def test_a_checkpoint_shows_tensors_and_a_tensor_its_values(browser: Browser) -> None:
    key = "step-000000002-a1-s2"
    text = browser.view(f"/checkpoint?name=real&at={key}")
    assert "optimizer.state.0.weight.exp_avg" in text
    assert "tensor=model.1.weight" in text
    assert "tensor=model.1.weight" not in browser.view(f"/checkpoint?name=real&at={key}&search=0.weight")

    tensor = browser.view(f"/tensor?name=real&at={key}&tensor=model.0.weight")
    assert "32 of 32 values" in tensor
    assert tensor.count('class="bin"') == 40


def test_a_comparison_names_what_changed(browser: Browser) -> None:
    text = browser.view("/diff?name=real&before=1&after=2")

    assert re.findall(r'<th scope="row"><a href="tensor[^"]+">(.+?)</a></th>', text) == ["model.0.weight"]
    assert "Norm of the change" not in text
    (norms,) = re.findall(r'href="(diff[^"]+tensor=[^"]+)"', text)
    shown = browser.view("/" + html.unescape(norms))
    assert "Norm of the change" in shown
    assert "32 of 32 values" in shown


def test_a_comparison_goes_from_the_older_to_the_newer_in_whichever_order_it_is_asked(browser: Browser) -> None:
    for asked in ("before=2&after=1", "before=1&after=2"):
        text = re.sub(r"<[^>]+>|\s+", " ", browser.view(f"/diff?name=real&{asked}"))
        assert "From step 1 ( step-000000001-a1-s1 ) to step 2 ( step-000000002-a1-s2 )" in text


def test_a_checkpoint_shows_its_metrics_and_why_it_is_kept(browser: Browser) -> None:
    text = browser.view("/checkpoint?name=real&at=1")

    assert '<span class="metric">loss 2</span>' in text
    assert re.search(r"<dt>Kept because</dt><dd>among the newest 10", text), text
    assert "step-000000002-a1-s2, newer</option>" in text


def test_a_run_that_is_not_claimed_yet_says_so_and_asks_again(browser: Browser) -> None:
    answer, text = browser.ask("/run?name=not/yet")

    assert answer.status == 404
    assert "No run here yet" in text
    assert re.search(r'<p id="live" data-name="not/yet" data-version=""', text)


def test_tables_have_the_values_by_which_they_sort_and_the_names_of_their_columns(browser: Browser) -> None:
    text = browser.view("/run?name=real")

    assert re.findall(r'<td data-label="loss" class="number" data-value="([\d.]+)">', text) == ["1.0", "2.0"]
    for path in ("/", "/run?name=real", "/diff?name=real&before=1&after=2"):
        for table in re.findall(r"<table.*?</table>", browser.view(path), re.DOTALL):
            assert re.match(r'<table id="\w+">', table)
            assert "<td>" not in table, "every cell says what it is where a table has no room for columns"


def test_times_are_in_one_line_and_ages_are_marked_to_move(browser: Browser) -> None:
    text = browser.view("/run?name=bob/died")

    assert re.search(r'<td data-label="Began" class="when" data-value="[\d.]+"><time datetime="[^"]+Z">'
                     r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d</time>", text)  # fmt: skip
    assert re.search(r'died</span> <time datetime="[^"]+" title="[^"]+" data-age="8\d{4}">24 h</time> ago', text)


def test_runs_are_drawn_over_each_other_as_the_address_asks(browser: Browser) -> None:
    text = browser.view("/compare?run=real&run=ann/finished&log=1&smooth=0.5&only=loss")

    (drawing,) = re.findall(r"<figure data-chart=.*?</figure>", text, re.DOTALL)
    assert len(re.findall(r'<polyline class="branch branch-0"', drawing)) == 2, "smoothed, and faint behind it"
    assert len(re.findall(r'<polyline class="branch branch-1"', drawing)) == 2
    assert 'name="log" value="1" checked' in text
    assert browser.ask("/compare?" + "&".join(f"run={number}" for number in range(9)))[0].status == 400


def test_a_comparison_shows_the_runs_that_are_left_and_names_one_that_is_gone(browser: Browser) -> None:
    text = browser.view("/compare?run=real&run=gone&run=../out")

    assert "<h1>Metrics of 1 run</h1>" in text
    assert "<figcaption>loss</figcaption>" in text
    assert re.findall(r'<p class="error">(.+?) is left out: ', text) == ["gone", "../out"]


def test_a_page_of_one_run_shows_that_run_as_soon_as_it_is_claimed(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    with page_server(store.uri) as address:
        found = Browser(int(urlsplit(address).port or 0))
        assert "There are no runs here yet" in found.view("/")
        Driver(store).claim("g")
        answer, _ = found.ask("/?newest=1")
        assert (answer.status, answer.headers["Location"]) == (303, "run?name=")
        assert "Attempts over time" in found.view("/run?name=")


def test_a_commits_nan_is_shown_although_latest_has_none() -> None:
    scope = PageScope(prefix=f"file://{GOLDEN}")

    text = render("run.html", scope, **run_view(scope, "run"))

    cells = re.findall(r'<td data-label="lr" class="number"(?: data-value="([^"]*)")?>([^<]*)</td>', text)
    assert cells == [("0.5", "0.5"), ("0.125", "0.125"), ("", "nan")], "a NaN sorts as an empty cell, at the end"


def test_a_checkpoint_that_the_run_went_back_behind_is_marked_and_a_change_by_hand_has_no_workers(
    tmp_path: Path,
) -> None:
    scope = PageScope(prefix=f"file://{tmp_path}")
    driver = Driver(open_store(f"file://{tmp_path}/run"))
    driver.claim("g1")
    driver.save(1, 1)
    driver.save(1, 2)
    open_run(f"file://{tmp_path}/run").rewind(10)
    Driver(driver.store, owner="bob").claim("g2")

    text = render("run.html", scope, **run_view(scope, "run"))

    assert re.findall(r'<tr class="abandoned"><th [^>]*>(\d+)<', text) == ["20"]
    assert text.count("abandoned: the run went back behind it") == 1
    assert re.findall(r'data-label="Workers" class="number" data-value="\d+">(\w+)<', text) == ["1", "none", "1"]


def test_a_cell_with_many_metrics_is_one_block_on_a_narrow_screen(tmp_path: Path) -> None:
    scope = PageScope(prefix=f"file://{tmp_path}")
    metrics = {f"metric {number}": 1.0 for number in range(9)}
    save_state(open_store(f"file://{tmp_path}/run"), {"x": torch.ones(2)}, save_number=1, step=1, metrics=metrics)

    for view in (render("run.html", scope, **run_view(scope, "run")), render("runs.html", scope, **runs_view(scope))):
        (cell,) = re.findall(r'<td data-label="Other metrics" class="others">(.*?)</td>', view)
        assert re.fullmatch(r"<div>(<span [^>]*>metric \d 1</span> ){5}</div>", cell), cell
    assert "1 run, " in view


def test_hostile_names_are_shown_as_text(browser: Browser) -> None:
    key = "step-000000002-a1-s2"
    for path in ("/run?name=real", f"/checkpoint?name=real&at={key}"):
        text = browser.view(path)
        assert "<img" not in text
        assert "&lt;img src=x" in text
        assert "\u202e" not in text
    text = browser.ask("/run?name=%3Cscript%3Ealert(1)%3C/script%3E")[1]
    assert "<script>alert" not in text


@pytest.mark.parametrize("name", ["../page", "real/../../x", "real//x", "..", "real/checkpoints/./"])
def test_a_name_that_leads_out_is_no_run(browser: Browser, name: str) -> None:
    answer, text = browser.ask(f"/run?name={name}")

    assert answer.status == 404
    assert "This cannot be shown" in text


def test_only_who_has_the_token_sees_anything(browser: Browser) -> None:
    assert browser.ask("/", Cookie="")[0].status == 401
    assert browser.ask("/", Cookie=f"raycheck-token-{browser.port}=another")[0].status == 401
    assert browser.ask("/static/page.css", Cookie="")[0].status == 401

    answer, _ = browser.ask(f"/run?name=real&token={TOKEN}", Cookie="")

    assert (answer.status, answer.headers["Location"]) == (303, "run?name=real")
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith(f"raycheck-token-{browser.port}={TOKEN};"), "another page's on this host stays"
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie


def test_another_host_name_is_refused_and_so_is_what_another_site_sends(browser: Browser) -> None:
    assert browser.ask("/", Host="evil.example:8766")[0].status == 403
    for headers in ({}, {"Origin": "http://evil.example", "X_Raycheck_Act": "1"}, {"Origin": f"http://{browser.host}"}):
        assert browser.ask("/", method="POST", **headers)[0].status == 403
    assert browser.ask("/", method="POST", Origin=f"http://{browser.host}", X_Raycheck_Act="1")[0].status == 405


def test_every_answer_has_the_headers_that_keep_it_in(browser: Browser) -> None:
    for answer, _ in (
        browser.ask("/"),
        browser.ask("/nothing"),
        browser.ask("/", Cookie=""),
        browser.ask("/run?name=x"),
    ):
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_link_by_a_runs_uri_leads_to_its_view_when_it_is_below_the_prefix(browser: Browser, folder: Path) -> None:
    answer, _ = browser.ask(f"/of?run=file%3A%2F%2F{folder}%2Fann%2Frunning")
    assert (answer.status, answer.headers["Location"]) == (303, "run?name=ann/running")

    for other in (f"file://{folder}-beside/x", f"file://{folder.parent}", "https://evil.example/x", ""):
        assert browser.ask(f"/of?run={other}")[0].status == 404


def test_a_probe_needs_neither_token_nor_name(browser: Browser) -> None:
    answer, text = browser.ask("/health", Cookie="", Host="10.0.0.7:8766")

    assert (answer.status, text) == (200, "ok\n")
    assert "Set-Cookie" not in answer.headers
    assert browser.ask("/health", method="POST", Cookie="")[0].status == 401


def test_a_large_request_for_bytes_is_refused(browser: Browser) -> None:
    key = "step-000000002-a1-s2"
    answer, text = browser.ask(f"/tensor?name=real&at={key}&tensor=model.0.weight&max_bytes=99999999999")

    assert answer.status == 400
    assert "reads at most" in text


def test_a_live_run_says_how_often_it_was_written(browser: Browser) -> None:
    before = browser.view("/live?name=real")

    assert re.fullmatch(r'\{"version": \d+\}', before)
    assert browser.ask("/live?name=nothing")[0].status == 404


def test_an_address_that_others_reach_needs_a_token(folder: Path) -> None:
    with pytest.raises(ConfigError, match="token"):
        serve(PageScope(prefix=f"file://{folder}"), host="0.0.0.0", port=0, token="", on_start=print)


def test_a_taken_port_is_said_in_words(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = raycheck("page", str(folder), "--port", str(taken.getsockname()[1]))

    assert done.returncode == 2
    assert "--port" in done.stderr


def test_a_saved_run_is_one_file_that_asks_for_nothing(folder: Path, tmp_path: Path) -> None:
    done = raycheck("page", str(folder / "real"), "--save", str(tmp_path / "run.html"))

    assert done.returncode == 0, done.stderr
    text = (tmp_path / "run.html").read_text()
    page = Links(text)
    assert [address for address in page.found if not address.startswith("#")] == []
    assert "script" not in page.tags
    assert "<style>" in text
    assert "step-000000002-a1-s2" in text


def test_forks_are_told_both_ways_and_the_list_has_goodput(tmp_path: Path) -> None:
    source = Driver(open_store(f"file://{tmp_path}/runs/source"))
    source.claim("g")
    now = time.time()
    source.save(1, 1, began_at=now - 100.0, trained_s=60.0)
    fork_run(f"file://{tmp_path}/runs/source", f"file://{tmp_path}/runs/deep/fork")
    fork_run(f"file://{tmp_path}/runs/source", f"file://{tmp_path}/elsewhere", copy=True)
    place_of_all = PageScope(prefix=f"file://{tmp_path}/runs")

    rows = {row["run"].name: row for row in runs_view(place_of_all)["rows"]}
    parent, fork = run_view(place_of_all, "source"), run_view(place_of_all, "deep/fork")

    assert rows["source"]["forks"] == [("deep/fork", "deep/fork")]
    assert rows["deep/fork"]["parent"] == ("source", "source")
    assert rows["source"]["run"].goodput == pytest.approx(0.6, abs=0.02)
    assert rows["deep/fork"]["run"].goodput is None
    assert (parent["parent"], parent["users"]) == (None, [("deep/fork", "deep/fork")])
    assert (fork["parent"], fork["users"]) == (("source", "source"), [])
    outside = run_view(PageScope(prefix=f"file://{tmp_path}/elsewhere"), "")["parent"]
    assert outside == (f"file://{tmp_path}/runs/source", None), "what the page does not have is no link"
    html = render("run.html", place_of_all, **fork)
    assert "Forked from" in html
    assert 'href="run?name=source"' in html
    assert "60.0 %" in render("run.html", place_of_all, **parent) or "59." in render("run.html", place_of_all, **parent)


def test_a_save_by_notice_is_a_diamond_on_the_timeline(tmp_path: Path) -> None:
    driver = Driver(open_store(f"file://{tmp_path}/run"))
    driver.claim("g")
    driver.save(1, 1)
    driver.save(1, 2, by_notice=True)

    html = render(
        "run.html", PageScope(prefix=f"file://{tmp_path}"), **run_view(PageScope(prefix=f"file://{tmp_path}"), "run")
    )

    assert re.findall(r'<(circle|rect) class="commit([^"]*)"', html) == [("circle", ""), ("rect", " head notice")]
    assert html.count("saved because a node was about to go") == 1


def test_what_a_prune_and_a_sweep_would_free_is_told_in_bytes_and_nothing_is_deleted(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    driver = Driver(store)
    driver.claim("g1")
    driver.save(1, 1)
    driver.save(1, 2, keep_last=1)
    torn = write_checkpoint(store, attempt=1, save=3)
    store.delete(manifest_key(torn.key))
    driver.claim("g2")
    before = sorted(item.key for item in store.list_objects(""))
    scope = PageScope(prefix=f"file://{tmp_path}")

    view = freed_view(scope, "run")
    html = render("freed.html", scope, **view)

    left = sum(item.size_bytes for item in store.list_objects(checkpoint_prefix(torn.key)))
    assert [item.name for item in view["plans"]["sweep"]] == [torn.key]
    assert view["totals"]["sweep"] == left > 0
    assert [item.name for item in view["plans"]["prune"]] == ["step-000000010-a1-s1"]
    assert torn.key in html
    assert "raycheck sweep" in html
    assert sorted(item.key for item in store.list_objects("")) == before
