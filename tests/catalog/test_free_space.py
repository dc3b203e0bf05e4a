"""raycheck clean: what it would free is what it frees, and nothing that anybody needs is dropped."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import dump
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.catalog import Cleaned, RunDeletion, clean
from raycheck.catalog.free_space import plan_clean
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.small_pages import small_pages
from tests.support.processes.command_line import raycheck as command
from tests.support.samples.sample_checkpoints import Driver, everything, write_checkpoint, write_export

ALL = 10**12


@pytest.fixture
def prefix() -> str:
    return f"memory://{uuid4().hex}/runs"


@pytest.fixture(autouse=True)
def nobody_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run that is not finished counts as silent, as if its driver had been killed long ago."""
    monkeypatch.setattr("raycheck.bucket.run_status.SILENT_S", -1.0)
    monkeypatch.setattr("raycheck.bucket.run_status.SILENT_GAPS", -1)


def started(prefix: str, name: str) -> Driver:
    driver = Driver(open_store(f"{prefix}/{name}"), owner=name)
    driver.claim(f"g-{name}")
    return driver


def trained(prefix: str, name: str, saves: int) -> Driver:
    driver = started(prefix, name)
    for save in range(1, saves + 1):
        driver.save(1, save, keep_last=None)
    return driver


def steps(driver: Driver) -> list[int]:
    body = assert_invariants(driver.store)
    assert body is not None
    return [entry.step for entry in body.live]


def bytes_below(prefix: str) -> int:
    return sum(item.size_bytes for item in open_store(prefix).list_objects("") if "/checkpoints/" in item.key)


def dropped(done: Cleaned) -> list[tuple[str, int]]:
    found = [
        (item, object_keys.CheckpointName.parse(item.name)) for item in done.freed if item.committed_at is not None
    ]
    return [(item.run, name.step) for item, name in found if name]


def most(prefix: str) -> int:
    """The most that can be freed, as the error says it."""
    with pytest.raises(ConfigError, match=r"cannot be freed, at most .* \((\d+) bytes\) can") as caught:
        clean(prefix, ALL, dry_run=True)
    return int(str(caught.value).partition("(")[2].partition(" bytes")[0])


# --- what goes ---


def test_the_oldest_checkpoints_of_all_runs_go_first_and_no_more_than_needed(prefix: str) -> None:
    one, two = started(prefix, "team/one"), started(prefix, "two")
    for driver, save in ((one, 1), (two, 1), (one, 2), (two, 2), (two, 3), (one, 3)):
        driver.save(1, save, keep_last=None)
    each = clean(prefix, 1, dry_run=True).freed_bytes
    before = bytes_below(prefix)

    done = clean(prefix, 2 * each + 1, grace_s=0)

    assert dropped(done) == [("team/one", 10), ("two", 10), ("team/one", 20)]
    assert done.freed_bytes == before - bytes_below(prefix)
    assert all(item.is_deleted for item in done.freed)
    assert (steps(one), steps(two)) == ([30], [20, 30])


def test_what_a_prune_and_a_sweep_would_delete_is_enough_where_it_is_enough(prefix: str) -> None:
    driver = started(prefix, "run")
    for save in (1, 2, 3):
        driver.save(1, save, keep_last=2)
    driver.store.put(object_keys.shard_key("step-000000090-a1-s9", "train", 0), b"torn" * 100)
    driver.claim("h")

    done = clean(prefix, 400, grace_s=0)

    assert [(item.name, item.committed_at) for item in done.freed] == [
        ("step-000000010-a1-s1", None),
        ("step-000000090-a1-s9", None),
    ]
    assert steps(driver) == [20, 30]
    assert len(list(driver.store.list_names("checkpoints/"))) == 2


def test_what_was_dropped_waits_for_readers_and_counts_when_the_command_is_repeated(prefix: str) -> None:
    driver = trained(prefix, "run", 4)
    each = clean(prefix, 1, dry_run=True).freed_bytes

    done = clean(prefix, each)
    again = clean(prefix, each, grace_s=0)

    assert [(item.is_deleted, item.wait_s) for item in done.freed] == [(False, 600.0)]
    assert dropped(again) == []
    assert again.freed_bytes == each
    assert steps(driver) == [20, 30, 40]
    assert len(list(driver.store.list_names("checkpoints/"))) == 3


# --- what is shared counts once ---


def test_a_directory_that_others_refer_to_goes_with_the_last_of_them_and_counts_once(prefix: str) -> None:
    driver = started(prefix, "run")
    frozen = driver.save(1, 1, keep_last=None)
    for save in (2, 3):
        driver.save(1, save, keep_last=None, base=frozen)
    driver.save(1, 4, keep_last=None)
    before = bytes_below(prefix)

    first = clean(prefix, 1, dry_run=True)
    done = clean(prefix, most(prefix), grace_s=0)

    assert dropped(first) == [("run", 20)], "to drop the first one would free nothing"
    assert dropped(done) == [("run", 20), ("run", 30), ("run", 10)]
    assert done.freed_bytes == before - bytes_below(prefix)
    assert steps(driver) == [40]


def test_what_the_head_refers_to_stays_and_so_does_the_checkpoint_that_has_it(prefix: str) -> None:
    driver = started(prefix, "run")
    frozen = driver.save(1, 1, keep_last=None)
    for save in (2, 3):
        driver.save(1, save, keep_last=None, base=frozen)

    done = clean(prefix, most(prefix), grace_s=0)

    assert dropped(done) == [("run", 20)]
    assert steps(driver) == [10, 30]


def test_a_directory_that_was_evicted_goes_with_the_last_checkpoint_that_used_it(prefix: str) -> None:
    driver = started(prefix, "run")
    frozen = driver.save(1, 1, keep_last=None)
    driver.save(1, 2, keep_last=None, base=frozen)
    driver.save(1, 3, keep_last=2)
    raycheck.open_run(driver.store.uri).prune(grace_s=0)  # its manifest goes, its frozen part stays
    before = bytes_below(prefix)

    done = clean(prefix, most(prefix), grace_s=0)

    assert [item.name for item in done.freed] == ["step-000000020-a1-s2", "step-000000010-a1-s1"]
    assert done.freed_bytes == before - bytes_below(prefix)
    assert steps(driver) == [30]


# --- what stays ---


def test_head_newest_best_pinned_named_and_restored_checkpoints_stay(prefix: str) -> None:
    driver = started(prefix, "run")
    for save in range(1, 10):
        driver.save(1, save, keep_last=None)
    run = raycheck.open_run(driver.store.uri)
    run.pin(20)
    run.name_checkpoint(40, "kept")
    run.rewind(60)
    assert steps(driver) == [10, 20, 30, 40, 50, 60, 70, 80, 90]

    clean(prefix, most(prefix), grace_s=0)

    assert steps(driver) == [20, 40, 60, 90]


def trained_by(prefix: str, setting: str) -> Driver:
    """A run of six checkpoints whose saves state a setting."""
    driver = started(prefix, "run")
    for save in range(1, 7):
        manifest = replace(write_checkpoint(driver.store, attempt=1, save=save), settings=(setting,))
        driver.store.put(object_keys.manifest_key(manifest.key), dump(manifest))
        driver.commit(manifest, keep_last=None)
    return driver


def test_the_best_by_the_runs_own_rule_stay_also_by_scores(prefix: str) -> None:
    driver = trained_by(prefix, "keep_best={'metric': 'mmlu', 'mode': 'max', 'count': 2}")
    run = raycheck.open_run(driver.store.uri)
    for step, score in ((10, 0.9), (20, 0.1), (30, 0.8), (40, 0.2)):
        run = run.score(step, {"mmlu": score})

    clean(prefix, most(prefix), grace_s=0)

    assert steps(driver) == [10, 30, 60]


def test_a_run_whose_rule_for_the_best_cannot_be_read_is_a_problem(prefix: str) -> None:
    trained_by(prefix, "keep_best=Best(1)")

    with pytest.raises(ConfigError, match=r"at most 0 B .* cannot be read: run$"):
        clean(prefix, 1)


def test_what_a_fork_uses_stays(prefix: str) -> None:
    driver = trained(prefix, "source", 4)
    raycheck.catalog.fork_run(driver.store.uri, f"{prefix}/fork", 20)

    done = clean(prefix, most(prefix), grace_s=0)

    assert dropped(done) == [("source", 10), ("source", 30)]
    assert steps(driver) == [20, 40]
    assert_invariants(open_store(f"{prefix}/fork"))


def test_a_run_that_is_being_trained_is_left_alone_and_said(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    driver, ended = trained(prefix, "live", 5), trained(prefix, "ended", 5)
    ended.finish("g-ended")

    done = clean(prefix, 1, grace_s=0)

    assert dropped(done) == [("ended", 10)]
    assert done.left_alone["live"].startswith("running")
    assert steps(driver) == [10, 20, 30, 40, 50]
    with pytest.raises(ConfigError, match=r"since they are being trained or cannot be read: live$"):
        clean(prefix, ALL)


def test_a_checkpoint_whose_export_is_not_complete_stays(prefix: str) -> None:
    driver = trained(prefix, "run", 4)
    keys = [entry.key for entry in driver.look().live]
    for key in keys[:2]:
        write_export(driver.store, object_keys.exports_prefix(key), key)
    driver.store.delete(object_keys.exports_prefix(keys[1]) + object_keys.EXPORT_ENDS[0])

    done = clean(prefix, most(prefix), grace_s=0)

    assert dropped(done) == [("run", 10), ("run", 30)]


def test_a_mirror_keeps_what_its_source_keeps(prefix: str) -> None:
    driver = trained(prefix, "source", 3)
    raycheck.catalog.copy_run(driver.store.uri, f"{prefix}/mirror")

    done = clean(prefix, most(prefix), grace_s=0)

    assert dropped(done) == [("source", 10), ("source", 20)]
    assert len(raycheck.open_run(f"{prefix}/mirror").checkpoints) == 3


def test_a_damaged_run_is_a_problem_and_the_others_are_cleaned(prefix: str) -> None:
    trained(prefix, "whole", 3)
    trained(prefix, "broken", 3).store.put("latest", b"{")

    done = clean(prefix, 1, grace_s=0)

    assert dropped(done) == [("whole", 10)]
    assert "raycheck repair" in done.problems["broken"]


# --- what changes meanwhile ---


def claims(driver: Driver) -> None:
    Driver(driver.store, owner="bob").claim("h")


def saves(driver: Driver) -> None:
    driver.save(1, 5, keep_last=None)


def pins(driver: Driver) -> None:
    raycheck.open_run(driver.store.uri).pin(10)


def forks(driver: Driver) -> None:
    raycheck.catalog.fork_run(driver.store.uri, f"{driver.store.uri}-fork", 10)


@pytest.mark.parametrize("change", [claims, saves, pins, forks])
def test_nothing_is_dropped_from_a_run_that_has_changed_since_the_plan(
    prefix: str, change: Callable[[Driver], None]
) -> None:
    driver, other = trained(prefix, "run", 4), trained(prefix, "unchanged", 4)
    plan = plan_clean(prefix, most(prefix), grace_s=0)
    change(driver)
    before = steps(driver)

    done = plan.carry_out()

    assert "nothing was dropped. Repeat the clean" in done.problems["run"]
    assert steps(driver) == before
    assert {item.run for item in done.freed} == {"unchanged"}
    assert steps(other) == [40]


def test_what_another_person_has_dropped_meanwhile_is_no_problem(prefix: str) -> None:
    driver = trained(prefix, "run", 4)
    plan = plan_clean(prefix, most(prefix), grace_s=0)
    raycheck.catalog.delete_checkpoint(driver.store.uri, 10)

    done = plan.carry_out()

    assert done.problems == {}
    assert steps(driver) == [40]


# --- everything at once ---


@pytest.mark.parametrize("seed", range(12))
def test_any_runs_lose_what_was_said_and_keep_what_is_protected(prefix: str, seed: int) -> None:
    chance = random.Random(seed)
    with small_pages():
        drivers = [any_run(prefix, f"run-{number}", chance) for number in range(3)]
        kept = {driver.store.uri: protected(driver.store) for driver in drivers}
        wanted = chance.randint(1, most(prefix))
        objects = [everything(driver.store) for driver in drivers]

        plan = clean(prefix, wanted, dry_run=True, grace_s=0)
        assert [everything(driver.store) for driver in drivers] == objects
        done = clean(prefix, wanted, grace_s=0)

    assert [replace(item, is_deleted=True) for item in plan.freed] == list(done.freed)
    gone = {
        (driver.store.uri, key): len(data)
        for driver, then in zip(drivers, objects, strict=True)
        for key, data in then.items()
        if key.startswith("checkpoints/") and key not in everything(driver.store)
    }
    named = {(item.uri, item.name) for item in done.freed}
    others = {(uri, key) for uri, key in gone if (uri, str(object_keys.checkpoint_of(key))) not in named}
    assert all(key.endswith("/manifest.json") for _, key in others), "of checkpoints that were evicted before"
    assert wanted <= done.freed_bytes == sum(gone.values()) - sum(gone[other] for other in others)
    assert {(item.uri, item.name) for item in done.freed}.isdisjoint(
        (uri, key) for uri, keys in kept.items() for key in keys
    )
    listed = [item for item in done.freed if item.committed_at is not None]
    if listed:
        assert done.freed_bytes - sum(item.size_bytes for item in last_drop(done.freed, listed[-1])) < wanted
    for driver in drivers:
        assert_invariants(driver.store)


def last_drop(freed: tuple[RunDeletion, ...], last: RunDeletion) -> tuple[RunDeletion, ...]:
    """The last checkpoint that was dropped, and what only that one used."""
    return freed[freed.index(last) :]


def any_run(prefix: str, name: str, chance: random.Random) -> Driver:
    driver = started(prefix, name)
    written = []
    for save in range(1, chance.randint(3, 14)):
        live = {entry.key for entry in driver.look().live}
        bases = [manifest for manifest in written if manifest.key in live]
        base = chance.choice(bases) if bases and chance.random() < 0.6 else None
        keep_last = chance.choice([None, None, 3])
        written.append(driver.save(1, save, keep_last=keep_last, base=base, world_size=chance.randint(1, 3)))
    run = raycheck.open_run(driver.store.uri)
    for checkpoint in run.checkpoints:
        if chance.random() < 0.15:
            run.pin(checkpoint.key)
        elif chance.random() < 0.15:
            run.name_checkpoint(checkpoint.key, f"n{checkpoint.step}")
    if chance.random() < 0.5:
        raycheck.catalog.fork_run(run.uri, f"{prefix}-forks/{name}", chance.choice(run.checkpoints).key)
    if chance.random() < 0.3:
        run.rewind(chance.choice(run.checkpoints).key)
    return driver


def protected(store: Store) -> set[str]:
    """What must stay, counted in another way than the code does."""
    body = read_latest(store)
    keys = {entry.key for entry in body.live if entry.pinned or entry.name}
    keys |= {body.live[-1].key, body.head, body.attempt.restore_key} - {None}
    keys |= {directory for hold in body.holds for directory in hold.directories}
    while more := {ref for entry in body.live if entry.key in keys for ref in entry.refs} - keys:
        keys |= more
    return keys


# --- the command ---


def test_the_command_shows_a_plan_and_does_it_only_with_yes(prefix: str) -> None:
    driver = trained(prefix, "run", 4)
    before = everything(driver.store)

    dry = command("clean", prefix, "--free", "2kB", "--dry-run")
    refused = command("clean", prefix, "--free", "2kB")

    assert dry.returncode == 0, dry.stderr
    assert "step-000000010-a1-s1" in dry.stdout
    assert "kB (2 listed checkpoints) in 1 run would be deleted" in dry.stdout
    assert "step-000000010-a1-s1" in refused.stdout
    assert refused.returncode == 2
    assert "give --yes" in refused.stderr
    assert everything(driver.store) == before

    done = command("clean", prefix, "--free", "2kB", "--yes", "--grace", "0", "--json")

    facts = json.loads(done.stdout)
    assert [item["name"] for item in facts["freed"]] == ["step-000000010-a1-s1", "step-000000020-a1-s2"]
    assert all(item["is_deleted"] for item in facts["freed"])
    assert steps(driver) == [30, 40]


def test_the_command_says_how_to_finish_what_waits_for_readers(prefix: str) -> None:
    driver = trained(prefix, "run", 4)
    each = clean(prefix, 1, dry_run=True).freed_bytes

    done = command("clean", prefix, "--free", "1", "--yes")

    assert f"or by this command with --free {each}" in done.stdout
    assert command("clean", prefix, "--free", str(each), "--yes", "--grace", "0").returncode == 0
    assert steps(driver) == [20, 30, 40]


def test_the_command_says_how_much_it_could_free_and_drops_nothing(prefix: str) -> None:
    driver = trained(prefix, "run", 4)
    can = most(prefix)

    done = command("clean", prefix, "--free", "50GB", "--yes")

    assert done.returncode == 2
    assert f"50.0 GB cannot be freed, at most {can / 1000:.1f} kB ({can} bytes) can" in done.stderr
    assert steps(driver) == [10, 20, 30, 40]


@pytest.mark.parametrize("amount", ["much", "0", "-1GB"])
def test_an_amount_that_is_none_is_refused_by_its_flag(prefix: str, amount: str) -> None:
    done = command("clean", prefix, f"--free={amount}")

    assert done.returncode == 2
    assert f"--free {amount}: give a size above 0" in done.stderr


def test_a_run_that_could_not_be_cleaned_is_told_and_exits_with_1(prefix: str) -> None:
    trained(prefix, "whole", 3)
    trained(prefix, "broken", 3).store.put("latest", b"{")

    done = command("clean", prefix, "--free", "1", "--dry-run")

    assert done.returncode == 1
    assert "broken: " in done.stdout
