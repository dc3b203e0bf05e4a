"""The Grafana dashboard shows all that raycheck exports, under the names that Ray gives it."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit
from uuid import uuid4

import pytest

from raycheck.bucket.store.address import join_uri
from raycheck.on_ray.reports.ray_metrics import COUNTERS, GAUGES
from raycheck.page.pages import PageScope
from raycheck.page.server import make_app
from tests.support.processes.interrupted_run import RUN
from tests.support.servers.http_fault_proxy import fault_proxy

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads((ROOT / "cluster/grafana/raycheck.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPORTED = {f"ray_{name}" for name in GAUGES} | {f"ray_{name}_total" for name in COUNTERS}
"""As Ray's agent writes them: all get its prefix, counters the suffix of Prometheus."""
OF_MEMORY = {name for name in EXPORTED if "memory" in name}
SAMPLE = re.compile(r'^(ray_raycheck_\w+)\{(?:.*,)?run="([^"]*)".*\} (\S+)$', re.MULTILINE)
BOUND_S = 150.0


def values_of(tree: Any, key: str) -> Iterator[Any]:
    """All that stand under `key`, wherever it is."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from values_of(value, key)
    if isinstance(tree, list):
        for value in tree:
            yield from values_of(value, key)


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"ray_raycheck_\w+", text))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_has_a_title_a_unit_and_a_query_of_metrics_that_are_exported(panel: dict[str, Any]) -> None:
    expressions = [target["expr"] for target in panel["targets"]]

    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert expressions
    for expression in expressions:
        assert metrics_in(expression)
        assert metrics_in(expression) <= EXPORTED
        assert '{run="$run"}' in expression


def test_every_metric_is_shown_and_no_other_is_named() -> None:
    assert metrics_in(json.dumps([panel["targets"] for panel in PANELS])) == EXPORTED
    assert metrics_in(json.dumps(BOARD)) == EXPORTED


def test_the_dashboard_can_be_imported_anywhere() -> None:
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    ids = list(values_of(BOARD["panels"], "id"))

    assert BOARD["id"] is None
    assert len(ids) == len(set(ids))
    assert all(used == datasource for used in values_of(BOARD, "datasource"))
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "run", "page"]
    assert BOARD["templating"]["list"][0]["query"] == "prometheus"


def test_the_dashboard_links_to_the_run_in_the_page() -> None:
    """The address has the run's whole URI, which the page looks up below its own prefix."""
    (link,) = BOARD["links"]
    names = {variable["name"]: variable for variable in BOARD["templating"]["list"]}

    assert names["page"]["type"] == "textbox"
    assert set(re.findall(r"\$\{(\w+)", link["url"])) == {"page", "run"}
    path = link["url"].replace("${page}", "").replace("${run:percentencode}", quote("s3://bucket/runs/a b", safe=""))
    scope = PageScope(prefix="s3://bucket/runs")
    assert scope.name_of(parse_qs(urlsplit(path).query)["run"][0]) == "a b"
    assert urlsplit(path).path in {
        str(resource.canonical) for resource in make_app(scope, token="", hosts=()).router.resources()
    }


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


@dataclass
class Exports:
    """What the nodes of a run's Ray have exported of it so far, the newest value of each metric."""

    process: "subprocess.Popen[bytes]"
    folder: Path
    run: str
    seen: dict[str, float] = field(default_factory=dict)

    def wait(self, are_there: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        deadline = time.monotonic() + BOUND_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the driver has ended:\n{self.log}"
            for node in self._nodes():
                with urllib.request.urlopen(f"http://{node}/metrics", timeout=30) as answer:
                    samples = SAMPLE.findall(answer.read().decode())
                self.seen |= {name: float(value) for name, run, value in samples if run == self.run}
            if are_there(self.seen):
                return self.seen
            time.sleep(0.5)
        raise TimeoutError(f"missing {sorted(EXPORTED - self.seen.keys())}, seen {self.seen}:\n{self.log}")

    @property
    def log(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")[-4000:]

    def _nodes(self) -> list[str]:
        path = self.folder / "nodes.json"
        nodes = json.loads(path.read_text()) if path.exists() else []
        assert not any(node.endswith(":-1") for node in nodes), "Ray exports nothing here: pip install 'ray[default]'"
        return nodes


@contextmanager
def hurt_run(storage: str, folder: Path, config: dict[str, Any]) -> Iterator[Exports]:
    """Afterwards it ends by itself, and well."""
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_metrics_report_interval_ms": "1000",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        sys.executable,
        "-m",
        "tests.support.processes.interrupted_run",
        str(folder),
        storage,
        json.dumps(config),
    ]
    with (
        (folder / "driver.log").open("wb") as log,
        subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log) as process,
    ):
        exports = Exports(process, folder, join_uri(storage, RUN).partition("?")[0])
        try:
            yield exports
            (folder / "over").touch()
            assert process.wait(BOUND_S) == 0, exports.log
        finally:
            process.kill()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_ray_exports_all_that_the_dashboard_shows(s3: str, tmp_path: Path) -> None:
    with fault_proxy(s3) as proxy:
        proxy.rule("deny", "PUT", "step-000000008-a2-.*distcp", times=100)  # fails the first save after the restart
        held = proxy.rule("hold", "PUT", "step-000000012-a2-.*distcp")  # makes those after it be left out
        with hurt_run(join_uri(proxy.uri, uuid4().hex), tmp_path, {"settings": {"when_busy": "skip"}}) as exports:
            exports.wait(lambda _: held.reached.is_set())
            exports.wait(lambda seen: "ray_raycheck_skipped_saves_total" in seen)
            held.release()
            seen = exports.wait(
                lambda seen: seen.keys() >= EXPORTED - OF_MEMORY and seen["ray_raycheck_last_committed_step"] >= 12
            ).copy()

    counted = {name.removeprefix("ray_raycheck_").removesuffix("_total"): value for name, value in seen.items()}
    assert counted["attempt"] == 2
    assert counted["restores"] == 1
    assert counted["failed_saves"] == 1
    assert counted["skipped_saves"] >= 1
    assert 1 <= counted["lost_steps"] <= 3, "killed after step 7, with step 4 committed"
    assert counted["commits"] >= 2
    assert counted["last_committed_step"] % 4 == 0
    assert 0 < counted["goodput"] <= 1
    assert 0 <= counted["last_commit_age_seconds"] < BOUND_S
    for name in ("blocked_seconds", "upload_seconds", "commit_seconds", "restore_seconds"):
        assert 0 < counted[name] < BOUND_S, name
    for name in ("saved_bytes", "restored_bytes", "upload_mb_per_second"):
        assert counted[name] > 0, name


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_ray_exports_from_where_a_restart_was_restored(s3: str, tmp_path: Path) -> None:
    settings = {"upload_by": "node", "memory_every_steps": 1}
    config = {"settings": settings, "every": 1000, "in_memory": 1}
    with hurt_run(join_uri(s3, uuid4().hex), tmp_path, config) as exports:
        seen = exports.wait(lambda seen: seen.keys() >= OF_MEMORY).copy()

    assert seen["ray_raycheck_restores_from_memory_total"] == seen["ray_raycheck_restores_total"] == 1
    assert seen["ray_raycheck_memory_checkpoints_total"] >= 1
    assert seen["ray_raycheck_last_memory_step"] >= 1
    assert seen["ray_raycheck_memory_bytes"] > 0
