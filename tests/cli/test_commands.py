"""The command line on a real run."""

import fcntl
import importlib.util
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from raycheck.bucket.attempt_records import ResumeRecord, record_failure, record_resume
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import NotFoundError
from raycheck.run import open_run
from raycheck.views.in_words import age
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import save_state
from tests.support.samples import hf_models
from tests.support.samples.sample_checkpoints import Driver, write_export


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, Store]:
    """A run with two committed checkpoints of a small model."""
    uri = f"file://{tmp_path}/runs/mine"
    store = open_store(uri)
    for number, step in enumerate((3, 6), 1):
        state = {"model": torch.nn.Linear(40, 30)}
        save_state(store, state, save_number=number, step=step, metrics={"loss": 1.0 / step})
    return uri, store


def test_ls_lists_committed_checkpoints(run) -> None:
    uri, store = run

    text, data = raycheck("ls", uri), raycheck("ls", uri, "--json")

    assert text.returncode == data.returncode == 0
    assert "loss 0.1667" in text.stdout
    assert [item["step"] for item in json.loads(data.stdout)] == [3, 6]
    assert [item["is_head"] for item in json.loads(data.stdout)] == [False, True]
    assert_invariants(store)


def test_show_tells_attempts_and_what_is_in_a_checkpoint(run) -> None:
    uri, _ = run

    text, data = raycheck("show", uri), raycheck("show", uri, "--at", "3", "--json")

    assert text.returncode == data.returncode == 0
    assert "fresh start" in text.stdout
    facts = json.loads(data.stdout)["checkpoint"]
    assert (facts["step"], facts["tensors"], facts["components"]) == (3, 2, {"train": facts["key"]})


def test_ls_and_show_say_how_the_run_stands(run) -> None:
    uri, store = run
    driver = Driver(store)
    driver.claim("g")

    running = [raycheck(command, uri).stdout for command in ("ls", "show")]
    driver.finish("g")
    finished = [raycheck(command, uri).stdout for command in ("ls", "show")]
    facts = json.loads(raycheck("show", uri, "--json").stdout)

    assert all("running, as far as the bucket shows: it was claimed" in text for text in running)
    assert all("\nfinished at step 6, " in text for text in finished)
    assert facts["state"] == "finished"
    assert facts["state_text"].startswith("finished at step 6")
    attempt = driver.claim("g2")[0]
    record_failure(store, attempt, at=attempt.claimed_at, cause="rank 0: \x1b[31mOops", is_final=False)
    died = raycheck("show", uri).stdout
    assert "its driver gave up: rank 0: " in died
    assert_invariants(store)


def test_verify_is_content_with_a_whole_run(run) -> None:
    uri, _ = run

    text, data = raycheck("verify", uri), raycheck("verify", uri, "--json")

    assert text.returncode == data.returncode == 0
    assert json.loads(data.stdout)["problems"] == []
    assert text.stdout.count("ok ") == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_the_guilty_object_and_exits_with_1(run, damage: str) -> None:
    uri, store = run
    key = object_keys.shard_key(read_latest(store).live[0].key, "train", 0)
    data = bytearray(store.get(key).data)
    data[len(data) // 2] ^= 1
    if damage == "remove":
        store.delete(key)
    else:
        store.put(key, data if damage == "flip" else data[:-9])

    text, data = raycheck("verify", uri), raycheck("verify", uri, "--json")

    assert text.returncode == data.returncode == 1
    assert "BAD" in text.stdout
    assert key in text.stdout
    (found,) = json.loads(data.stdout)["problems"]
    assert found["key"] == key
    assert "rank 0, component train: " in found["where"][0]
    assert found["where"][0] in " ".join(text.stdout.split())
    assert raycheck("verify", uri, "--at", "6").returncode == 0


@pytest.mark.slow
def test_ls_marks_what_a_restore_found_damaged(run) -> None:
    uri, store = run
    driver = Driver(store)
    _, entry = driver.claim("g")
    go_back(driver.register, driver.me, group="g", key=entry.key, problem="tensor model.w")

    text, data = raycheck("ls", uri), raycheck("ls", uri, "--json")

    assert "pinned DAMAGED" in text.stdout
    assert [item["damaged"] for item in json.loads(data.stdout)] == [None, "tensor model.w"]


def test_export_hf_writes_what_others_load(run, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/runs/models"
    models = {"policy": hf_models.llama(seed=1), "critic": hf_models.llama(seed=2)}
    save_state(open_store(uri), models)

    text = raycheck("export-hf", uri, f"{tmp_path}/policy", "--entry", "policy")
    data = raycheck("export-hf", uri, f"{tmp_path}/critic", "--entry", "critic", "--dtype", "bfloat16", "--json")

    assert text.returncode == data.returncode == 0, text.stderr + data.stderr
    assert "model-00001-of-00001.safetensors" in text.stdout
    facts = json.loads(data.stdout)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "critic").iterdir()}
    assert (facts["files"], facts["bytes"]) == (sizes, sum(sizes.values()))
    assert facts["seconds"] > 0
    assert torch.equal(
        hf_models.logits(hf_models.from_pretrained(tmp_path / "policy")), hf_models.logits(models["policy"])
    )
    assert hf_models.from_pretrained(tmp_path / "critic").dtype == torch.bfloat16
    assert_invariants(open_store(uri))


@pytest.mark.slow
def test_export_hf_says_what_to_do_instead(run, tmp_path: Path) -> None:
    uri, _ = run

    for args, text in (
        ((), "--config-from"),
        (("--merge-lora",), "--config-from"),
        (("--at", "4"), "there are: 3, 6"),
    ):
        answer = raycheck("export-hf", uri, f"{tmp_path}/hf", *args)

        assert answer.returncode == 2
        assert answer.stderr.startswith("raycheck: ")
        assert text in answer.stderr
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_done_is_one_line_and_exit_code_2(run, tmp_path: Path) -> None:
    uri, _ = run

    for args in (("ls", f"file://{tmp_path}/none"), ("show", uri, "--at", "5"), ("ls", "ftp://host/x")):
        answer = raycheck(*args)

        assert answer.returncode == 2
        assert answer.stderr.startswith("raycheck: ")
        assert "Traceback" not in answer.stderr


def test_help_loads_neither_torch_nor_ray() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "raycheck", "--help"]

    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert answer.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert "raycheck.cli" in imported
    assert not imported & {"torch", "ray", "transformers"}
    assert all(command in answer.stdout for command in ("ls", "show", "verify", "export-hf", "demo"))


def test_a_run_without_its_latest_is_said_to_be_lost_and_repair_is_named(run) -> None:
    uri, store = run
    store.delete(object_keys.LATEST_KEY)

    for args in (("ls", uri), ("show", uri), ("verify", uri), ("pin", uri, "3"), ("prune", uri), ("sweep", uri)):
        answer = raycheck(*args)

        assert answer.returncode == 2
        assert "latest is missing, though 2 checkpoints are here" in answer.stderr
        assert "raycheck repair" in answer.stderr
    with pytest.raises(NotFoundError, match="raycheck repair"):
        open_run(uri)


def test_rewind_makes_an_earlier_checkpoint_the_head(run) -> None:
    uri, store = run

    done = raycheck("rewind", uri, "3")
    again = raycheck("rewind", uri, "step-000000006-a1-s2")
    wrong = raycheck("rewind", uri, "5")

    assert (done.returncode, again.returncode, wrong.returncode) == (0, 0, 2)
    assert "head is step-000000003-a1-s1" in done.stdout
    assert "there are: 3, 6" in wrong.stderr
    assert read_latest(store).head == "step-000000006-a1-s2"
    assert read_latest(store).attempt.number == 3
    assert "by hand" in raycheck("show", uri).stdout
    assert_invariants(store)


def test_show_tells_why_an_attempt_began_and_what_the_end_of_the_one_before_cost(run) -> None:
    uri, store = run
    resume = ResumeRecord(
        attempt=1,
        after=0,
        cause="rank 2: its process died",
        restored="step-000000003-a1-s1",
        step=3,
        world_size_before=4,
        world_size=3,
        lost_steps=7,
        lost_s=12.5,
        since_commit_s=60.0,
        restore_s=2.0,
        restore_bytes=1000,
        what="restored: model",
    )
    assert record_resume(store, resume)

    text, data = raycheck("show", uri), raycheck("show", uri, "--json")

    assert "7 steps, 12.5 s" in text.stdout
    assert "rank 2: its process died" in text.stdout
    shown = json.loads(data.stdout)["attempts"][0]["resume"]
    assert (shown["lost_steps"], shown["world_size_before"], shown["world_size"]) == (7, 4, 3)
    assert re.search(r"^1 +1, 4 before ", text.stdout, re.MULTILINE), "how many workers there were before it"
    assert re.search(r"^  workers +saved by 1; restores on any number$", text.stdout, re.MULTILINE)
    assert json.loads(data.stdout)["checkpoint"]["world_size"] == 1


@pytest.mark.parametrize(("verb", "pinned"), [("pin", True), ("unpin", False)])
def test_a_pin_says_what_it_changes_as_json_and_before_it_does(run, verb: str, pinned: bool) -> None:
    uri, store = run
    if not pinned:
        assert raycheck("pin", uri, "3").returncode == 0
    before = store.get(object_keys.LATEST_KEY).data

    dry, dry_json = raycheck(verb, uri, "3", "--dry-run"), raycheck(verb, uri, "3", "--dry-run", "--json")
    assert store.get(object_keys.LATEST_KEY).data == before
    done = raycheck(verb, uri, "3", "--json")

    assert "would be" in dry.stdout
    for code, is_dry in ((dry_json, True), (done, False)):
        told = json.loads(code.stdout)
        assert (told["dry_run"], told["changed"][0]["pinned"]) == (is_dry, pinned)
        assert told["changed"][0]["key"] == "step-000000003-a1-s1"
    assert read_latest(store).live[0].pinned == pinned
    assert raycheck(verb, uri, "4", "--dry-run").returncode == 2


def test_pin_keeps_a_checkpoint_from_prune_and_ls_shows_it(run) -> None:
    uri, store = run
    pinned, wrong = raycheck("pin", uri, "3"), raycheck("pin", uri, "4")

    pruned = raycheck("prune", uri, "--keep-last", "1")
    listed = raycheck("ls", uri)
    unpinned = raycheck("unpin", uri, "step-000000003-a1-s1")

    assert (pinned.returncode, wrong.returncode, pruned.returncode, unpinned.returncode) == (0, 2, 0, 0)
    assert "there are: 3, 6" in wrong.stderr
    assert "pinned" in listed.stdout
    assert [entry.step for entry in read_latest(store).live] == [3, 6]
    assert not read_latest(store).live[0].pinned
    assert_invariants(store)


def test_a_name_and_scores_are_given_shown_and_taken_in_place_of_a_step(run) -> None:
    uri, store = run
    before = read_latest(store)

    tried = raycheck("name", uri, "3", "base", "--dry-run", "--json")
    assert (json.loads(tried.stdout)["changed"][0]["name"], read_latest(store)) == ("base", before)
    named = raycheck("name", uri, "3", "base", "--expire-after", "7200")
    refused = raycheck("name", uri, "6", "base")
    scored = raycheck("score", uri, "base", "mmlu=0.25", "a=b=1e3", "--json")
    odd = raycheck("score", uri, "base", "mmlu")

    assert [done.returncode for done in (tried, named, refused, scored, odd)] == [0, 0, 2, 0, 2]
    assert "has the name base" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert json.loads(scored.stdout)["changed"][0]["scores"] == {"mmlu": 0.25, "a=b": 1000.0}
    (row,) = (line for line in raycheck("ls", uri).stdout.splitlines() if "base (expires in" in line)
    assert "mmlu 0.25" in row
    facts = json.loads(raycheck("show", uri, "--at", "base", "--json").stdout)["checkpoint"]
    assert (facts["step"], facts["name"], facts["scores"]["mmlu"], facts["note"]) == (3, "base", 0.25, {})
    assert [raycheck(*words).returncode for words in (("rename", uri, "base", "b"), ("pin", uri, "b"))] == [0, 0]
    gone = raycheck("unname", uri, "b")
    assert "no name" in gone.stdout
    assert [entry.name for entry in assert_invariants(store).live] == [None, None]


def test_prune_has_a_rule_for_rolling_checkpoints(run) -> None:
    uri, store = run

    def rolled(body: Latest, now: float) -> Latest:
        del now
        return replace(body, newest=tuple(replace(entry, rolling=True) for entry in body.live))

    Register(store).edit(rolled, what="a test")
    save_state(store, {"model": torch.nn.Linear(40, 30)}, save_number=3, step=9)

    raycheck("prune", uri, "--keep-last", "1")
    without = [entry.step for entry in read_latest(store).live]
    raycheck("prune", uri, "--rolling-keep-last", "1")

    assert without == [3, 6, 9]
    assert [entry.step for entry in read_latest(store).live] == [6, 9]


def test_prune_shows_bytes_and_reasons_first_and_deletes_after_the_grace(run) -> None:
    uri, store = run
    before = sorted(item.key for item in store.list_objects(""))

    dry = raycheck("prune", uri, "--keep-last", "1", "--dry-run", "--json")
    table = raycheck("prune", uri, "--keep-best", "loss:min:1", "--dry-run")
    assert sorted(item.key for item in store.list_objects("")) == before
    first = raycheck("prune", uri, "--keep-last", "1")
    second = raycheck("prune", uri, "--grace", "0", "--json")

    (found,) = json.loads(dry.stdout)["found"]
    assert json.loads(dry.stdout)["kept"] == {"step-000000006-a1-s2": "head"}
    assert (found["name"], found["reason"], found["wait_s"]) == ("step-000000003-a1-s1", "no rule keeps it", 600)
    assert found["size_bytes"] > 4 * 40 * 30
    assert "no rule keeps it" in table.stdout
    assert "would be deleted" in table.stdout
    assert "0 B deleted" in first.stdout
    assert "after that time" in first.stdout
    assert json.loads(second.stdout)["deleted"] == ["step-000000003-a1-s1"]
    assert not list(store.list_objects("checkpoints/step-000000003-a1-s1/"))
    assert [entry.step for entry in assert_invariants(store).live] == [6]


def test_prune_keeps_one_per_span_of_seconds(run) -> None:
    uri, store = run
    first = read_latest(store).live[0]

    shown = raycheck("prune", uri, "--keep-every-s", "1e9", "--dry-run", "--json")
    wrong = raycheck("prune", uri, "--keep-every-s", "0")

    assert json.loads(shown.stdout)["kept"][first.key] == "one per 1e+09 s"
    assert wrong.returncode == 2
    assert "--keep-every-s 0.0: give a number" in wrong.stderr


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_prune_exports_says_first_what_goes_and_why_the_rest_stays(run, tmp_path, is_elsewhere: bool) -> None:
    uri, store = run
    to = ["--to", f"file://{tmp_path}/models"] if is_elsewhere else []
    place, prefix = (open_store(to[1]), "") if is_elsewhere else (store, "exports/")
    run_id = read_latest(store).run_id
    nothing = raycheck("prune-exports", uri, "--keep-last", "1", *to)
    for entry in read_latest(store).live:
        write_export(place, f"{prefix}{entry.key}/", entry.key, run_id=run_id)
    write_export(place, f"{prefix}mine/", read_latest(store).live[0].key, run_id=run_id, by_training=False)
    before = sorted(item.key for item in place.list_objects(""))

    dry = raycheck("prune-exports", uri, "--keep-last", "1", "--dry-run", *to)
    untouched = sorted(item.key for item in place.list_objects("")) == before
    done = raycheck("prune-exports", uri, "--keep-last", "1", "--json", *to)
    no_rule = raycheck("prune-exports", uri)

    gone = f"{prefix}step-000000003-a1-s1/"
    assert (nothing.returncode, nothing.stdout) == (0, f"{to[1] if to else f'{uri}/exports'}: no exports here\n")
    assert untouched
    assert "not among the newest 1" in dry.stdout
    assert "it was exported by hand" in dry.stdout
    assert json.loads(done.stdout)["deleted"] == [gone]
    assert sorted(item.key for item in place.list_objects("")) == [key for key in before if not key.startswith(gone)]
    assert no_rule.returncode == 2


def test_prune_without_a_rule_drops_nothing_and_a_wrong_one_is_named(run) -> None:
    uri, store = run

    done, wrong = raycheck("prune", uri), raycheck("prune", uri, "--keep-best", "loss")
    nowhere = raycheck("prune", uri, "--keep-best", "accuracy:max:1")

    assert (done.returncode, wrong.returncode, nowhere.returncode) == (0, 2, 2)
    assert "METRIC:min:COUNT" in wrong.stderr
    assert "no checkpoint has that metric; there are: loss" in nowhere.stderr
    assert len(assert_invariants(store).live) == 2


def test_sweep_deletes_what_a_dead_attempt_left(run) -> None:
    uri, store = run
    store.put("checkpoints/step-000000009-a1-s3/train/__0_0.distcp", b"x" * 1000)
    nothing = raycheck("sweep", uri, "--json")
    raycheck("rewind", uri, "6")

    dry = raycheck("sweep", uri, "--dry-run")
    done = raycheck("sweep", uri, "--json")

    assert json.loads(nothing.stdout) == {"found": [], "deleted": [], "kept": {}}
    assert "1.0 kB would be deleted" in dry.stdout
    assert "attempt 1 ended before it was whole" in dry.stdout
    assert json.loads(done.stdout)["deleted"] == ["step-000000009-a1-s3"]
    assert not list(store.list_objects("checkpoints/step-000000009-a1-s3/"))
    assert len(assert_invariants(store).live) == 2


def test_repair_rebuilds_a_lost_latest_and_only_that(run) -> None:
    uri, store = run
    sound = raycheck("repair", uri)
    store.delete(object_keys.LATEST_KEY)
    store.delete(object_keys.manifest_key("step-000000003-a1-s1"))

    done = raycheck("repair", uri)

    assert (sound.returncode, done.returncode) == (2, 0)
    assert "nothing to repair" in sound.stderr
    assert "listed    step-000000006-a1-s2" in done.stdout
    assert "left out  step-000000003-a1-s1: it has no manifest" in done.stdout
    assert "the next start is attempt 3" in done.stdout
    assert_invariants(store)


def test_ls_of_s3_loads_no_library_that_only_trainings_need(s3: str, tmp_path) -> None:
    uri = join_uri(s3, tmp_path.name)
    save_state(open_store(uri), {"model": torch.nn.Linear(4, 3)}, save_number=1, step=3)
    code = (
        "import sys; from raycheck.cli import app; app(['ls', sys.argv[1], '--json'], standalone_mode=False);"
        "print({'pyarrow', 'yaml', 'torch', 'ray', 'numpy'} & set(sys.modules))"
    )

    found = subprocess.run([sys.executable, "-c", code, uri], capture_output=True, text=True, check=True, timeout=60)

    listed, _, loaded = found.stdout.strip().rpartition("\n")
    assert [item["step"] for item in json.loads(listed)] == [3]
    assert loaded == "set()"


def test_settings_from_a_file_reach_the_store(s3: str, tmp_path) -> None:
    uri, query = join_uri(s3, tmp_path.name).split("?")
    save_state(open_store(f"{uri}?{query}"), {"model": torch.nn.Linear(4, 3)}, save_number=1, step=3)
    endpoint = query.partition("endpoint_override=")[2].partition("&")[0]
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(f"endpoint: http://{endpoint}\nregion: us-east-1\n")
    bad.write_text("secret_key: hush-hush\n")

    found, refused = (raycheck("ls", uri, "--json", "--storage", str(file)) for file in (good, bad))

    assert [item["step"] for item in json.loads(found.stdout)] == [3]
    assert refused.returncode == 2
    assert "secret_key" in refused.stderr
    assert "hush-hush" not in refused.stderr


LONG = "a-metric-whose-name-is-as-long-as-some-people-like-them-to-be-in-their-dashboards"


@pytest.fixture
def wide(tmp_path: Path) -> tuple[str, str]:
    """A run of long names, and the name of its checkpoint."""
    uri = f"file://{tmp_path}/runs/wide"
    metrics = {LONG: 1 / 3, f"{LONG}-2": 123456789.125, "val_loss_at": 2.0, "took_s": 7.0}
    saved = save_state(
        open_store(uri), {"model": torch.nn.Linear(400, 300)}, save_number=1, step=10**8, metrics=metrics
    )
    return uri, saved.entry.key


@pytest.mark.parametrize("columns", ["20", None])
def test_a_row_is_one_line_with_whole_names(wide, columns: str | None, monkeypatch) -> None:
    uri, key = wide
    if columns:
        monkeypatch.setenv("COLUMNS", columns)

    listed, shown = raycheck("ls", uri), raycheck("show", uri)
    pruned, pinned = raycheck("prune", uri, "--dry-run"), raycheck("pin", uri, key)

    header, row, *_ = listed.stdout.splitlines()
    assert header.split() == ["step", "checkpoint", "size", "committed", "age", "metrics"]
    assert key in row.split()
    assert f"{LONG} 0.3333" in row
    assert any(LONG in line and f"{LONG}-2" in line for line in shown.stdout.splitlines())
    assert any(line.split() == [key, "head", "stays"] for line in pruned.stdout.splitlines())
    assert pinned.stdout == f"{key} is pinned\n"


def test_a_row_is_one_line_in_a_terminal_too(wide) -> None:
    uri, key = wide
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))

    done = subprocess.run([sys.executable, "-m", "raycheck", "ls", uri], stdout=terminal, check=True, timeout=60)
    os.close(terminal)
    shown = os.read(master, 100_000).decode()
    os.close(master)

    assert done.returncode == 0
    assert any(key in line and f"{LONG}-2" in line for line in shown.splitlines())


def test_only_damage_exits_with_one(wide) -> None:
    uri, _ = wide
    breaking = "from raycheck import cli\ncli.browse.open_run = lambda *_: {}['bug']\ncli.main()"

    with Path("/dev/full").open("w") as full:
        unwritten = subprocess.run(
            [sys.executable, "-m", "raycheck", "verify", uri],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    broken = subprocess.run(
        [sys.executable, "-c", breaking, "verify", uri], capture_output=True, text=True, check=False, timeout=60
    )

    assert (unwritten.returncode, broken.returncode) == (2, 2)
    assert unwritten.stderr.startswith("raycheck: [Errno 28]")
    assert "KeyError" in broken.stderr


def test_show_speaks_to_people_and_json_is_exact(wide) -> None:
    uri, _ = wide

    shown, exact = raycheck("show", uri).stdout, json.loads(raycheck("show", uri, "--json").stdout)["checkpoint"]

    assert exact["metrics"][LONG] == 1 / 3
    assert exact["metrics"][f"{LONG}-2"] == 123456789.125
    when = datetime.fromtimestamp(exact["committed_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert re.search(rf"^  committed +{when}, \d+ (s|min) ago$", shown, re.MULTILINE)
    assert re.search(r"^  size +\d+\.\d [kM]B$", shown, re.MULTILINE)
    assert re.search(r"^  pinned +no$", shown, re.MULTILINE)
    assert re.search(r"^  restored from +-$", shown, re.MULTILINE)
    assert re.search(r"^  refs +-$", shown, re.MULTILINE)
    for text in (f"{LONG}: 0.333333", f"{LONG}-2: 1.23457e+08", "val_loss_at: 2", "took_s: 7"):
        assert re.search(rf"{re.escape(text)}(,|$)", shown, re.MULTILINE), "a user's name says no unit"
    assert not re.search(r"\d\.\d{7}", shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7200, "2 h ago"), (3e6, "35 d ago"), (-90, "in 90 s")],
)
def test_an_age_has_one_unit(seconds: float, text: str) -> None:
    assert age(1e9, 1e9 + seconds) == text


def test_the_version_is_said_and_the_public_names_are_listed() -> None:
    code = "import sys, raycheck; print(*dir(raycheck)); print(raycheck.__version__); print({'torch', 'ray'} & set(sys.modules))"

    asked, found = (
        raycheck("--version"),
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True),
    )

    names, version, loaded = found.stdout.splitlines()
    assert {"Checkpointer", "fit", "open_run", "__version__"} <= set(names.split())
    assert asked.stdout == f"raycheck {version}\n"
    assert re.fullmatch(r"\d+\.\d+.*", version)
    assert loaded == "set()"


def test_a_copy_that_was_not_installed_has_a_version_too(tmp_path: Path) -> None:
    package = Path(importlib.util.find_spec("raycheck").origin).parent
    (tmp_path / "raycheck").symlink_to(package)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import raycheck; print(raycheck.__version__)"

    found = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "0+unknown"
