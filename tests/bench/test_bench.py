"""The benchmark's machinery on a state of a few hundred kilobytes; its figures mean nothing here."""

import json
from dataclasses import replace

import pytest

from tests.bench import views
from tests.bench.catalog_verbs import VERBS, measured
from tests.bench.goals import GOALS
from tests.bench.measures import MEASURES
from tests.bench.peers import EXPECTED_WARNINGS
from tests.bench.report import BEGIN, END, document, print_table, write_json, write_readme
from tests.bench.sampling import interleaved
from tests.bench.scale import QUICK, Bench
from tests.bench.servers import Server
from tests.bench.states import STATES, make_state, size_of
from tests.support.servers.distant_bucket import distant_bucket

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in EXPECTED_WARNINGS]
TINY = replace(
    QUICK,
    name="tiny",
    state_bytes=1 << 20,
    upload_bytes=1 << 20,
    wire_bytes=1 << 20,
    rounds=1,
    ranks=2,
    tensors=20,
    steps_s=0.01,
    before_first_s=0.0,
    warm_ups=0,
    loaded_by=(2,),
    states=("few large",),
    has_processes=False,
)


@pytest.mark.slow
@pytest.mark.parametrize("keys", MEASURES, ids=lambda keys: keys[0])
def test_a_measure_gives_a_row_for_each_of_its_goals(keys: tuple[str, ...], s3: str, tmp_path, capsys) -> None:
    bench = Bench(server=Server(kind="moto", name="moto", uri=s3, pids=(), placement="anywhere"), scale=TINY)

    rows = MEASURES[keys](bench)
    write_json(document(rows, bench, command="python -m tests.bench", took_s=1.0), tmp_path / "figures.json")

    doc = json.loads((tmp_path / "figures.json").read_text())
    assert doc.keys() == {*keys, "about"}
    for key in keys:
        assert {"value", "goal", "today", "unit", "peers"} <= doc[key].keys()
        assert doc[key]["goal"] == GOALS[key].limit
        assert doc[key]["value"] is not None or doc[key]["note"].startswith("not measured: no processes"), key
    assert doc["about"]["placement"] == "anywhere"
    print_table(doc)
    assert "goals missed" in capsys.readouterr().out


def test_every_goal_is_measured() -> None:
    assert {key for keys in MEASURES for key in keys} == GOALS.keys()


def test_the_readme_gets_the_figures_and_keeps_its_text(tmp_path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    entry = {"what": "w", "value": 2.0, "goal": 1.0, "bound": "at most", "is_met": False, "today": None}
    entry |= {"unit": "ratio", "peers": {}, "spread": None, "details": {}, "note": ""}
    about = {"command": "c", "machine": "m", "server": "s", "placement": "p", "state_bytes": 1 << 20, "rounds": 3}

    write_readme({"R1": entry, "about": about}, readme)

    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| R1 | w | **2.00** (missed) |" in text
    assert "old" not in text


@pytest.mark.parametrize("name", STATES)
def test_states_have_about_the_asked_size(name: str) -> None:
    state = make_state(name, 8 << 20)

    assert 0.7 < state.size_bytes / (8 << 20) < 1.1
    if name == "LoRA":
        assert 0.03 < size_of(state.changing) / state.size_bytes < 0.08


def test_ratios_are_taken_within_rounds() -> None:
    drift = iter([1.0, 1.0, 10.0, 100.0])
    speed = {"now": 0.0}

    def slow():
        speed["now"] = next(drift)
        return {"s": 2 * speed["now"]}

    samples = interleaved({"slow": slow}, 3, warm_ups=1)

    assert samples.of("slow", "s") == [2.0, 20.0, 200.0]
    assert samples.ratio("slow", "slow", "s").median == 1.0


@pytest.mark.slow
@pytest.mark.server
def test_every_verb_is_counted(tmp_path) -> None:
    found, size_bytes = measured(tmp_path, checkpoints=6)

    rows = {row.label: row for row in found}
    assert [row.label for row in found] == [label for label, _ in VERBS]
    assert all(sum(row.requests.values()) > 0 for row in found)
    assert rows["ls"].sent_bytes == rows["verify, all 20"].sent_bytes == 0
    assert rows["verify, all 20"].answered_bytes > 6 * size_bytes
    assert rows["cp to another store, first"].sent_bytes > 6 * size_bytes > rows["fork"].sent_bytes
    assert rows["cp to another store, repeated"].sent_bytes == 0


def test_the_views_of_a_run_with_many_checkpoints_ask_what_those_of_a_small_one_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to the records of its attempts, of which there are ten at most."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    asked = {}
    for count in (20, 200):
        objects = views.a_run(count)
        keys = sorted(key.split("/")[1] for key in objects if key.endswith("/manifest.json"))
        with distant_bucket({f"run/{name}": data for name, data in objects.items()}, delay_s=0.0) as uri:
            found = views.views(keys[-1], keys[0])
            asked[count] = {name: views.measured(uri, view)[0] for name, view in found.items()}

    assert asked[20] == asked[200]
    assert asked[200] == {"a run": 26, "a checkpoint": 3, "what a live run's page asks": 1, "a comparison": 5}
