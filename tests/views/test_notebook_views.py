"""What a notebook shows of a run, its history, a checkpoint, a comparison and a tensor: tables, and the page's pictures."""

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

import raycheck
from raycheck.bucket.attempt_records import ResumeRecord, record_end, record_resume
from raycheck.bucket.history.facts import Facts
from raycheck.bucket.history.metric_rows import MetricRows
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.protocol.name_and_score import score
from raycheck.bucket.store import open_store
from raycheck.views.charts import LEFT, RIGHT, WIDTH, steps_of
from raycheck.views.history import read_history
from tests.support.processes.save_without_ray import save_state
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.memory_store import DictStore

HOSTILE = '<img src=x onerror=alert(1)>"&\u202e'
TIME = re.compile(r"\d{4}-\d\d-\d\d|\d\d:\d\d|\d ?(s|ms|min|h|d)\b| ago\b")


class Tags(HTMLParser):
    """The tags of some HTML, its attributes, and its text. Fails on a tag that is closed in the wrong place."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def run(tmp_path: Path) -> raycheck.Run:
    store = open_store(f"file://{tmp_path}/run")
    model = torch.nn.Linear(8, 4)
    state = {"model": model, "extra": {HOSTILE: torch.ones(2)}}
    save_state(store, state, save_number=1, step=1, metrics={"loss": 2.0, HOSTILE: 1.0})
    with torch.no_grad():
        model.weight += 1
    save_state(store, state, save_number=2, step=2, metrics={"loss": 1.0})
    return raycheck.open_run(f"file://{tmp_path}/run").pin(1)


def interrupted() -> DictStore:
    """A run that committed steps 10 and 20, lost 3 steps, and went on from 20 to 30."""
    store = DictStore(at=time.time() - 60)
    driver = Driver(store)
    first, _ = driver.claim("g1", world_size=2)
    driver.save(1, 1, world_size=2)
    driver.save(1, 2, world_size=2)
    store.at += 20
    second, entry = driver.claim("g2", world_size=2)
    assert entry is not None
    assert record_end(store, first, by=second, cause=f"rank 1: its process died {HOSTILE}")
    resume = ResumeRecord(
        attempt=2, after=1, cause="", restored=entry.key, step=20, world_size_before=2, world_size=2, lost_steps=3,
        lost_s=1.5, since_commit_s=2.0, restore_s=0.25, restore_bytes=1, what="all",
    )  # fmt: skip
    assert record_resume(store, resume)
    driver.save(2, 1, world_size=2, step=30)
    return store


def test_a_run_and_a_checkpoint_are_tables_without_any_time(run: raycheck.Run) -> None:
    for html in (run._repr_html_(), run.at(1)._repr_html_()):
        shown = Tags(html)
        assert shown.tags.count("table") == 1
        assert "step-000000001-a1-s1" in shown.texts
        assert not TIME.search(html.replace(run.uri, "")), html
    rows = re.findall(r"<tr>(.*?)</tr>", run._repr_html_())[1:]
    assert [row.split("</td>")[0] for row in rows] == ["<td>2", "<td>1"], "the newest first"
    assert "head" in rows[0]
    assert "pinned" in rows[1]


def test_hostile_names_are_text_in_every_picture(run: raycheck.Run) -> None:
    history = run.history()
    shown = [run, run.at(1), history, history.over_steps, read_history(interrupted()),
             run.at(1).diff(run.at(2)), run.at(1).sample(f"extra.{HOSTILE}")]  # fmt: skip
    seen = ""
    for item in shown:
        tags = Tags(item._repr_html_())
        assert not {"img", "script", "style"} & set(tags.tags)
        assert not {name for name in tags.attributes if name.startswith("on") or name in ("style", "href", "src")}
        assert "\u202e" not in item._repr_html_()
        seen += " ".join(tags.texts)
    assert seen.count("<img src=x onerror=alert(1)>") >= 4


def test_a_history_shows_its_attempts_over_time_and_over_steps() -> None:
    history = read_history(interrupted())

    over_time, over_steps = history._repr_html_(), history.over_steps._repr_html_()

    assert "Attempts over time" in over_time
    assert "3 steps, 1.5 s" in over_time
    assert "Attempts over steps" in over_steps
    assert "3 steps" in over_steps
    assert not TIME.search(over_steps)
    for html in (over_time, over_steps):
        drawing = ET.fromstring(re.findall(r"<svg.*?</svg>", html, re.DOTALL)[0])
        kinds = [item.get("class", "").split()[:1] for item in drawing.iter()]
        assert kinds.count(["attempt"]) == 2
        assert kinds.count(["commit"]) == 3
        assert len([item for item in drawing.iter() if item.get("fill") == "url(#lost)"]) == 1


def test_a_history_shows_the_metrics_of_every_step_and_the_scores_of_checkpoints() -> None:
    store = interrupted()
    driver = Driver(store)
    body = driver.look()
    rows = MetricRows(series={(1, "train"): dict.fromkeys(range(1, 21), 2.0), (2, "train"): {25: 1.0, 30: 0.5}})
    record_facts(store, Facts(rows=rows), run_id=body.run_id, counter=body.counter)
    score(driver.register, "step-000000010-a1-s1", {"judge": 0.75})

    history = read_history(store)

    for html in (history._repr_html_(), history.over_steps._repr_html_()):
        drawings = [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
        charts = {item.get("aria-label"): item for item in drawings[1:]}
        assert list(charts) == ["judge over steps", "loss over steps", "train over steps"]
        points = [item for item in charts["train over steps"].iter() if item.get("class", "").startswith("point ")]
        assert len(points) == 22
        assert "step 10: 0.75" in "".join(charts["judge over steps"].itertext())


def test_over_steps_a_bar_goes_on_where_its_attempt_did_and_ends_with_what_was_lost() -> None:
    first, second = steps_of(read_history(interrupted()).attempts).bars
    scale = (WIDTH - LEFT - RIGHT) / 30

    assert (first.x, first.width) == pytest.approx((LEFT, 23 * scale))
    assert first.lost_width == pytest.approx(3 * scale)
    assert (second.x, second.width, second.lost_width) == pytest.approx((LEFT + 20 * scale, 10 * scale, 0.0))
    assert [dot.x for dot in second.dots] == [pytest.approx(LEFT + 30 * scale)]


def test_a_comparison_names_what_changed_and_a_tensor_has_its_histogram(run: raycheck.Run) -> None:
    assert Tags(run.at(1).diff(run.at(2))._repr_html_()).texts.count("model.weight") == 1

    drawings = re.findall(r"<svg.*?</svg>", run.at(2).sample("model.weight")._repr_html_(), re.DOTALL)

    bins, heat = (ET.fromstring(text) for text in drawings)
    assert len([item for item in bins.iter() if item.get("class") == "bin"]) == 40
    assert len([item for item in heat.iter() if item.get("class") == "heat"]) == 4 * 8


def test_a_long_table_says_how_much_is_left_out() -> None:
    from raycheck.views.notebook import MAX_ROWS, table

    html = table(("n",), [(number,) for number in range(MAX_ROWS + 7)])

    assert html.count("<tr>") == MAX_ROWS + 1
    assert "7 more are not shown" in html
