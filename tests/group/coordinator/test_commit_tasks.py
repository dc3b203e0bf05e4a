"""Tests tasks that follow commits by their own triggers while training continues: exports, and the user's functions."""

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import ray
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import raycheck
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError
from raycheck.group.coordinator.commit_tasks import CommitTasks, TaskRun
from raycheck.group.coordinator.export_task import ExportTask, Note
from raycheck.group.ports import PreemptionNotice
from raycheck.group.worker.save_triggers import SaveTriggers
from raycheck.on_ray.ray_tasks import _dealt, _spread
from raycheck.on_ray.version_copies import RayVersionCopies
from raycheck.settings import AfterCommit, HFExport, Retention, SaveSettings
from tests.group.worker import test_save_triggers
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.save_without_ray import save_state

TOKENS = torch.arange(8).reshape(1, 8)


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


class Tokenizer:
    """Writes two files, by which it is kept: one is empty, and one is larger than a part of an upload."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{" + " " * 6_000_000 + "}")
        Path(folder, "empty.txt").write_text("")


@ray.remote(num_cpus=0)
class Trainer:
    """One rank that trains a small language model, and records at each step how many exports are complete."""

    def __init__(self, uri: str, coordinator, settings: SaveSettings) -> None:
        self.model = small_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.store = open_store(uri)
        place = raycheck.adapters.RayGroup(
            id=uuid4().hex, uri=uri, rank=0, world_size=1, coordinator=coordinator, broadcast=lambda value: value
        )
        state = {"model": self.model, "optimizer": self.optimizer, "tokenizer": Tokenizer()}
        self.ckpt = raycheck.Checkpointer(state, settings, group=place)
        self.ckpt.restore()

    def train(self, steps: int, epoch_steps: int = 1000) -> list[int]:
        whole = []
        for step in range(1, steps + 1):
            self.optimizer.zero_grad()
            self.model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            self.optimizer.step()
            self.ckpt.end_step()
            if step % epoch_steps == 0:
                self.ckpt.end_epoch()
            whole.append(sum(item.key.endswith(".index.json") for item in self.store.list_objects("exports/")))
        self.ckpt.close()
        return whole

    def logits(self) -> torch.Tensor:
        return self.model(input_ids=TOKENS).logits.detach()


def trainer_of(uri: str, **exports):
    settings = SaveSettings(every_steps=4, keep_last=1, after_commit=AfterCommit.export(**exports))
    return Trainer.remote(uri, raycheck.adapters.start_coordinator(uri, owner=uuid4().hex), settings)


def loaded_logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(input_ids=TOKENS).logits.detach()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_exports_stand_in_the_bucket_when_training_is_over(cluster: None, tmp_path) -> None:
    uri = f"file://{tmp_path}/run"
    trainer = trainer_of(uri, every_steps=3, max_shard_bytes=4000, mode="sync")

    whole = ray.get(trainer.train.remote(7))

    exports = sorted((tmp_path / "run/exports").iterdir())
    assert [CheckpointName.parse(folder.name).step for folder in exports] == [3, 6, 7]
    assert whole == [0, 0, 1, 1, 1, 2, 2]  # the last one follows at the end
    assert torch.equal(loaded_logits(exports[2]), ray.get(trainer.logits.remote()))
    assert json.loads((exports[0] / "tokenizer.json").read_text()) == {}
    assert not (exports[0] / "empty.txt").read_bytes()
    assert len(list(exports[0].glob("*.safetensors"))) > 2
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [7]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_a_follower_has_what_training_published(cluster: None, tmp_path) -> None:
    uri = f"file://{tmp_path}/run"
    publish = AfterCommit.publish(every_steps=2, mode="sync", cache=str(tmp_path / "cache"))
    elsewhere, cache = f"file://{tmp_path}/elsewhere", str(tmp_path / "cache-elsewhere")
    also = AfterCommit.publish(every_steps=3, mode="sync", to=elsewhere, cache=cache)
    settings = SaveSettings(every_steps=4, keep_last=1, after_commit=[publish, also])
    trainer = Trainer.remote(uri, raycheck.adapters.start_coordinator(uri, owner=uuid4().hex), settings)

    ray.get(trainer.train.remote(7))

    versions = raycheck.open_run(uri).published().versions
    assert [version.step for version in versions] == [2, 4, 6, 7]
    assert [version.is_whole for version in versions] == [True, False, False, False]
    for place in (uri, elsewhere):
        with raycheck.follow(place) as follower:
            assert torch.equal(loaded_logits(follower.update().path), ray.get(trainer.logits.remote()))
    with raycheck.follow(elsewhere) as follower:
        assert follower.update().number == 3  # of steps 3, 6 and 7
    copies = RayVersionCopies(f"{uri}/published")  # of the coordinator: those of a task would have ended with it
    record = tmp_path / f"run/published/{versions[-1].directory}/version.json"
    assert copies.take(versions[-1].directory, "version.json") == record.read_bytes()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_older_exports_go_where_it_is_asked_for_and_one_by_hand_stays(cluster: None, tmp_path) -> None:
    uri = f"file://{tmp_path}/run"
    ray.get(trainer_of(uri, every_steps=1, at_end=False, mode="sync").train.remote(1))
    raycheck.export_hf(uri, f"{uri}/exports/by-hand")
    trainer = trainer_of(uri, every_steps=2, mode="sync", keep_last=2, name="step{step}")

    ray.get(trainer.train.remote(6))

    assert sorted(folder.name for folder in (tmp_path / "run/exports").iterdir()) == ["by-hand", "step6", "step7"]
    assert torch.equal(loaded_logits(tmp_path / "run/exports/step7"), ray.get(trainer.logits.remote()))
    assert_invariants(open_store(uri))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_names_by_epoch_in_another_bucket_and_no_second_export_of_what_is_there(cluster: None, s3, tmp_path) -> None:
    uri, to = f"file://{tmp_path}/run", s3.replace("?", f"/{uuid4().hex}?")
    told = {"every_epochs": 2, "name": "epoch{epoch}/step{step:04d}", "to": to, "dtype": "bfloat16"}

    ray.get(trainer_of(uri, **told).train.remote(12, epoch_steps=3))
    first = {item.key: item.size_bytes for item in open_store(to).list_objects("")}
    ray.get(trainer_of(uri, **told).train.remote(0))  # restored at its last step

    names = {key.rpartition("/")[0] for key in first}
    assert names == {"epoch2/step0006", "epoch4/step0012"}
    raycheck.export_hf(f"file://{tmp_path}/run", str(tmp_path / "hf"), dtype="bfloat16")
    weights = "model-00001-of-00001.safetensors"
    assert open_store(to).get(f"epoch4/step0012/{weights}").data == (tmp_path / "hf" / weights).read_bytes()
    assert {item.key: item.size_bytes for item in open_store(to).list_objects("")} == first


@ray.remote(num_cpus=0)
class Shard:
    """One rank's half of a model that two ranks hold together."""

    def __init__(self, uri: str, coordinator, rank: int, rendezvous: str) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
        self.model = small_model()
        fully_shard(self.model)
        place = raycheck.adapters.RayGroup(id="shards", uri=uri, rank=rank, world_size=2, coordinator=coordinator)
        export = AfterCommit.export(every_steps=2, at_end=False, max_shard_bytes=4000)
        self.ckpt = raycheck.Checkpointer({"model": self.model}, SaveSettings(after_commit=export), group=place)

    def train(self) -> torch.Tensor:
        self.ckpt.restore()
        for _ in range(2):
            self.ckpt.end_step()
        self.ckpt.close()
        return self.model(input_ids=TOKENS).logits.detach()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_as_many_tasks_as_ranks_write_the_shards_of_all(cluster: None, tmp_path) -> None:
    uri = f"file://{tmp_path}/run"
    coordinator = raycheck.adapters.start_coordinator(uri, owner="me")
    ranks = [Shard.remote(uri, coordinator, rank, f"{tmp_path}/rendezvous") for rank in range(2)]

    logits = ray.get([rank.train.remote() for rank in ranks])

    (folder,) = (tmp_path / "run/exports").iterdir()
    assert torch.equal(loaded_logits(folder), logits[0])
    deadline = time.monotonic() + 60
    while (tasks := Counter(event["name"] for event in ray.timeline()))["raycheck.on_ray.ray_tasks._write"] < 2:
        assert time.monotonic() < deadline, tasks
        time.sleep(0.5)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_an_export_whose_task_is_killed_is_done_again(cluster: None, wire, tmp_path) -> None:
    uri = join_uri(wire.uri, uuid4().hex)
    write = wire.rule("hold", "PUT", "/exports/.*safetensors$")
    training = trainer_of(uri, every_steps=3).train.remote(3)

    write.wait()
    titles = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    (task,) = [process for process, title in titles.items() if title.startswith(b"ray::_lead")]
    os.kill(task, signal.SIGKILL)
    write.release()

    ray.get(training, timeout=120)
    exported = [item.key for item in open_store(uri).list_objects("exports/")]
    assert [key for key in exported if key.endswith("index.json")]
    assert len(write.seen) == 1


@ray.remote(num_cpus=0)
class Policy:
    """Holds the model that a driver's ActorCheckpointer saves."""

    def __init__(self) -> None:
        self.model = small_model()

    def logits(self) -> torch.Tensor:
        return self.model(input_ids=TOKENS).logits.detach()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_a_driver_of_actors_exports_when_due_and_when_asked(cluster: None, tmp_path) -> None:
    actor = Policy.remote()
    export = AfterCommit.export(every_steps=2, at_end=False, name="step{step}")
    settings = SaveSettings(every_steps=None, after_commit=export)

    with raycheck.ActorCheckpointer([actor], lambda actor: {"model": actor.model}, f"{tmp_path}/run", settings) as ckpt:
        ckpt.restore()
        for _ in range(2):
            ckpt.end_step()
        ckpt.end_step()
        ckpt.save(after_commit="export")

    folders = sorted((tmp_path / "run/exports").iterdir())
    assert [folder.name for folder in folders] == ["step2", "step3"]
    assert torch.equal(loaded_logits(folders[1]), ray.get(actor.logits.remote()))


def test_an_export_is_due_by_its_own_triggers_and_saves() -> None:
    tasks = [AfterCommit.export(every_steps=6, every_epochs=2), AfterCommit(print, every_epochs=4)]
    triggers = SaveTriggers(SaveSettings(every_steps=4, after_commit=tasks), test_save_triggers.group(0, 1, None))

    due = [(triggers.decide_at_step(Progress(step=step)), triggers.tasks) for step in range(1, 13)]
    ends = [(triggers.decide_at_epoch_end(Progress(step=12, epoch=epoch)), triggers.tasks) for epoch in range(1, 5)]

    nothing, save, export = (None, ()), ("keep", ()), ("keep", ("export",))
    assert due == [*[nothing] * 3, save, nothing, export, nothing, save, *[nothing] * 3, export]
    assert ends == [nothing, export, nothing, ("keep", ("export", "print"))]


def test_an_export_by_time_is_rank_0_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    settings = SaveSettings(every_s=20.0, after_commit=AfterCommit.export(every_s=50.0))
    triggers = SaveTriggers(settings, test_save_triggers.group(0, 1, lambda value: value))
    saved = []

    for step in range(1, 13):
        clock[0] += 10.0
        progress = Progress(step=step)
        if due := triggers.decide_at_step(progress):
            saved.append((step, due, triggers.tasks))
            triggers.saved(0.0, progress, due, began=time.monotonic(), tasks=triggers.tasks)

    assert [(step, due) for step, due, _ in saved] == [(step, "keep") for step in (2, 4, 5, 7, 9, 10, 12)]
    assert [step for step, _, tasks in saved if tasks == ("export",)] == [5, 10]
    with pytest.raises(ConfigError, match=r"every_s.*needs Group"):
        SaveTriggers(SaveSettings(after_commit=AfterCommit.export(every_s=5.0)), test_save_triggers.group(0, 2, None))


def test_what_has_not_begun_when_it_is_due_again_is_given_up(tmp_path, caplog) -> None:
    store = open_store(f"file://{tmp_path}/run")
    keys = [
        save_state(store, {"model": torch.nn.Linear(1, 1)}, save_number=step, step=step).entry.key
        for step in (1, 2, 3, 4)
    ]
    has_begun, may_end = threading.Event(), threading.Event()

    def run(job: TaskRun) -> list[Note]:
        has_begun.set()
        may_end.wait()
        return job.run()

    tasks = CommitTasks(store, store.uri, run)
    for step, key in enumerate(keys, 1):
        tasks.start(key, Progress(step=step), {"export": HFExport()})
        tasks.start(key, Progress(step=step), {"export": HFExport()})
        assert has_begun.wait(60)

    assert tasks.keys == {keys[0], keys[3]}
    assert [key in caplog.text for key in keys] == [False, True, True, False]
    may_end.set()
    assert asyncio.run(tasks.wait(["export"], 60.0, but=keys[3])) == 0
    assert asyncio.run(tasks.wait(["export"], 60.0, but="")) == 0
    assert f"export of {keys[3]} failed: " in caplog.text
    assert "holds no model with a Hugging Face configuration" in caplog.text
    assert not tasks.keys


def test_who_leaves_a_node_is_told_not_to_wait_for_exports() -> None:
    triggers = SaveTriggers(
        SaveSettings(after_commit=AfterCommit.export(every_steps=1)),
        test_save_triggers.group(0, 1, lambda value: value),
    )

    triggers.decide_at_step(Progress(step=1))
    before = triggers.is_preempted
    triggers._preemption.take_notice(PreemptionNotice(at=time.time() + 60))
    triggers.decide_at_step(Progress(step=2))

    assert (before, triggers.is_preempted) == (False, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "model"}, "does not tell steps apart"),
        ({"name": "{step}/../x"}, "cannot be a directory"),
        ({"name": "{step}{stem}"}, "cannot be a directory"),
        ({"name": "{checkpoint}{step"}, "cannot be a directory"),
        ({"name": "{checkpoint[0]}"}, "does not tell steps apart"),
        ({"name": "{epoch}/{epoch_step}"}, "does not tell steps apart"),
        ({"name": "{step:x}"}, "does not tell steps apart"),
        ({"to": "models/hf"}, "absolute path"),
        ({"files": "tokenizer"}, "a list"),
        ({"name": "/{step}"}, "cannot be a directory"),
        ({"mode": "later"}, "'auto' or 'async' or 'sync'"),
        ({"dtype": "bf16"}, "'bfloat16'"),
        ({"every_steps": 0}, "at least 1"),
        ({"every_s": -1.0}, "above 0"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(wrong, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AfterCommit.export(**wrong)


def test_a_name_may_say_epoch_and_step() -> None:
    settings = HFExport(name="epoch{epoch}epochstep{epoch_step}globalstep{step}")

    assert settings.directory("c", step=300, epoch=2, epoch_step=100) == "epoch2epochstep100globalstep300"


@pytest.mark.parametrize(
    ("to", "opened"),
    [
        (None, "s3://runs/a?scheme=http&endpoint_override=127.0.0.1:1"),
        ("s3://models/x", "s3://models/x?endpoint_override=127.0.0.1:1&scheme=http"),
        (
            "s3://models/x?endpoint_override=127.0.0.1:2&region=eu-west-1",
            "s3://models/x?endpoint_override=127.0.0.1:2&scheme=https&region=eu-west-1",
        ),
        ("/models", "file:///models"),
    ],
)
def test_the_settings_of_the_run_s_store_hold_where_the_other_place_says_nothing(to: str | None, opened: str) -> None:
    entry = save_state(open_store(f"memory://{uuid4().hex}"), {"model": torch.nn.Linear(1, 1)}).entry
    uri = "s3://runs/a?scheme=http&endpoint_override=127.0.0.1:1"

    dest = ExportTask(uri=uri, entry=entry, progress=Progress(step=1), settings=HFExport(to=to)).dest

    assert sorted(dest.uri.replace("?", "&").split("&")) == sorted(opened.replace("?", "&").split("&"))
    assert to is not None or dest.uri == uri


def test_each_node_is_dealt_about_as_many_bytes() -> None:
    sizes = {"a": 5, "b": 4, "c": 3, "d": 3, "e": 1}

    assert _dealt(sizes, ["one", "two"]) == [("one", ["a", "d"]), ("two", ["b", "c", "e"])]
    assert _spread(["one", "one", "two", "one", "two"]) == ["one", "two", "one", "two", "one"]


@pytest.mark.parametrize(("entry", "which"), [(None, "one model"), ("critic", "'critic'")])
def test_exports_need_a_model_that_says_what_it_is(entry: str | None, which: str) -> None:
    place = raycheck.adapters.RayGroup(id="g", uri=f"memory://{uuid4().hex}", rank=0, world_size=1, coordinator=None)

    settings = SaveSettings(after_commit=AfterCommit.export(entry=entry))
    with pytest.raises(ConfigError, match=f"{which} with a Hugging Face configuration"):
        raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, settings, group=place).restore()


def began(uri: str, key: str) -> None:
    """Note in the run's folder that this ran, and keep a score."""
    run = raycheck.open_run(uri)
    Path(uri.removeprefix("file://"), f"ran-{run.at(key).step}").touch()
    run.score(key, {"step": run.at(key).step})


def breaks(uri: str, key: str) -> None:
    raise KeyError(key)


@pytest.mark.parametrize("mode", ["auto", "async", "sync"])
def test_without_ray_a_function_follows_commits_in_a_thread(mode, tmp_path, caplog) -> None:
    uri = f"file://{tmp_path}/run"
    tasks = [AfterCommit(began, every_steps=2, mode=mode), AfterCommit(breaks)]

    for steps in (3, 0):  # the second time it is restored at its last step
        (place,) = group_of(uri, owner=uuid4().hex)
        settings = SaveSettings(every_steps=1, after_commit=tasks)
        with raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, settings, group=place) as ckpt:
            at = ckpt.restore()
            for step in range(1, steps + 1):
                ckpt.end_step()
                if step == 1:
                    ckpt.save(after_commit="began")

    live = assert_invariants(open_store(uri)).live
    assert {step for step in (1, 2, 3) if (tmp_path / f"run/ran-{step}").exists()} >= (
        {1, 2, 3} if mode == "sync" else {3}
    )
    assert (at.step, live[-1].step, live[-1].scores) == (3, 3, {"step": 3.0})
    assert f"breaks of {live[-1].key} failed: KeyError" in caplog.text


def test_what_a_task_reads_is_not_deleted_before_it_has_ended(tmp_path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    keys = [save_state(store, {"model": torch.nn.Linear(1, 1)}, save_number=n, step=n).entry.key for n in (1, 2)]
    has_begun, may_end = threading.Event(), threading.Event()

    def run(job: TaskRun) -> list[Note]:
        has_begun.set()
        may_end.wait()
        return []

    tasks = CommitTasks(store, store.uri, run)
    tasks.start(keys[0], Progress(step=1), {"read": b""})
    assert has_begun.wait(60)
    register = Register(store)

    during = prune(register, Retention(keep_last=1), grace_s=0.0, spare=tasks.keys)
    may_end.set()
    assert asyncio.run(tasks.wait(["read"], 60.0, but="")) == 0
    after = prune(register, grace_s=0.0, spare=tasks.keys)

    assert (during, after) == ((), (keys[0],))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: AfterCommit(3), "give a function"),
        (lambda: SaveSettings(after_commit=[print]), "give AfterCommit"),
        (
            lambda: SaveSettings(after_commit=[AfterCommit(print), AfterCommit(print)]),
            "two tasks have the name 'print'",
        ),
        (lambda: begin_with(partial(print, threading.Lock())), "cannot run in another process: TypeError"),
        (lambda: begin_with(partial(print, bytes(2_000_000))), "may be 1048576"),
    ],
)
def test_a_task_that_cannot_run_is_refused_before_training(task, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task()


def begin_with(function) -> None:
    place = raycheck.adapters.RayGroup(id="g", uri=f"memory://{uuid4().hex}", rank=0, world_size=1, coordinator=None)
    settings = SaveSettings(after_commit=AfterCommit(function))
    raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, settings, group=place).restore()


def test_a_task_on_demand_must_be_in_the_settings() -> None:
    place = raycheck.adapters.RayGroup(id="g", uri=f"memory://{uuid4().hex}", rank=0, world_size=1, coordinator=None)

    with pytest.raises(ConfigError, match=r"save\(after_commit='export'\).*tasks \['print'\]"):
        raycheck.Checkpointer(
            {"model": torch.nn.Linear(2, 2)}, SaveSettings(after_commit=AfterCommit(print)), group=place
        ).save(after_commit="export")
