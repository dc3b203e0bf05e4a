"""Directories that are published by themselves, and versions that are fetched by their number."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import raycheck
from raycheck.bucket.format.document import dump
from raycheck.bucket.reading import read_newest
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, ConflictError, FencedError
from raycheck.published import publish as publish_module
from raycheck.published.publish import publish
from raycheck.settings import Publish
from tests.published.weights import Trained, assert_equal, loaded


@pytest.fixture
def trained(uri: str, tmp_path: Path) -> Trained:
    made = Trained(open_store(uri), tmp_path / "cache")
    made.step()
    return made


class Adapter:
    """A directory as PEFT writes it, whose weights change a little with each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = {"lora_A.weight": torch.zeros(64, 64), "lora_B.weight": torch.zeros(64, 64)}
        path.mkdir()
        (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')

    def step(self) -> dict[str, torch.Tensor]:
        self.tensors["lora_A.weight"][0] += 1
        save_file(self.tensors, self.path / "adapter_model.safetensors")
        return {name: values.clone() for name, values in self.tensors.items()}


def test_a_directory_arrives_as_it_is_and_later_as_a_patch(trained: Trained, tmp_path: Path):
    adapter, run = Adapter(tmp_path / "adapter"), raycheck.open_run(trained.store.uri)
    with raycheck.follow(trained.store.uri, tmp_path / "local") as follower:
        for step in range(3):
            weights = adapter.step()
            done = run.publish_directory(adapter.path, step=step, cache=str(tmp_path / "cache"))
            version = follower.update()
            assert (version.step, version.checkpoint) == (step, None)
            assert done.version.is_whole == (step == 0)
            assert_equal(loaded(version.path), weights)
            assert (version.path / "adapter_config.json").read_bytes() == (
                adapter.path / "adapter_config.json"
            ).read_bytes()
    assert version.bytes_fetched < done.version.whole_bytes / 5


def test_readers_can_have_a_version_before_older_ones_are_deleted(trained: Trained, tmp_path: Path):
    adapter, run = Adapter(tmp_path / "adapter"), raycheck.open_run(trained.store.uri)
    seen = []

    def on_published(done: raycheck.values.Published) -> None:
        listed = [version.number for version in run.published().versions]
        directories = {key.key.split("/")[1] for key in trained.store.list_objects("published/")} - {"versions.json"}
        seen.append((done.version.number, listed, len(directories)))

    for step in range(3):
        adapter.step()
        run.publish_directory(
            adapter.path, step=step, keep_last=1, whole=True, cache=str(tmp_path / "c"), on_published=on_published
        )

    assert seen == [(1, [1], 1), (2, [2], 2), (3, [3], 2)]


def test_somebody_else_may_publish_in_between(trained: Trained, tmp_path: Path):
    """A publisher of directories does not read the list that it has written itself."""
    adapter, run = Adapter(tmp_path / "adapter"), raycheck.open_run(trained.store.uri)
    adapter.step()
    run.publish_directory(adapter.path, step=1, cache=str(tmp_path / "one"))
    known = dict(publish_module._WRITTEN)
    run.publish_directory(adapter.path, step=2, cache=str(tmp_path / "other"))  # as another process
    publish_module._WRITTEN.update(known)
    weights = adapter.step()

    done = run.publish_directory(adapter.path, step=3, cache=str(tmp_path / "one"))

    assert [(version.number, version.step) for version in run.published().versions] == [(1, 1), (2, 2), (3, 3)]
    with raycheck.follow(trained.store.uri, tmp_path / "local") as follower:
        assert follower.update().number == done.version.number
        assert_equal(loaded(follower.current.path), weights)


def test_a_run_that_was_begun_anew_at_the_same_place_begins_its_own_versions(trained: Trained, tmp_path: Path):
    adapter = Adapter(tmp_path / "adapter")
    adapter.step()
    run = raycheck.open_run(trained.store.uri)
    run.publish_directory(adapter.path, step=7, cache=str(tmp_path / "c"))
    trained.store.put("latest", dump(replace(read_newest(trained.store), run_id="another")))

    raycheck.open_run(trained.store.uri).publish_directory(adapter.path, step=1, cache=str(tmp_path / "c"))

    found = raycheck.open_run(trained.store.uri).published()
    assert [(version.number, version.step) for version in found.versions] == [(2, 1)]


def test_only_the_newest_attempt_publishes(trained: Trained, tmp_path: Path):
    adapter, run = Adapter(tmp_path / "adapter"), raycheck.open_run(trained.store.uri)
    adapter.step()
    run.publish_directory(adapter.path, step=1, attempt=run.attempt, cache=str(tmp_path / "c"))
    run.rewind(1)

    known = dict(publish_module._WRITTEN)
    for written in ({}, known):  # without and with the list that was written before
        publish_module._WRITTEN.update(written)
        with pytest.raises(FencedError, match=f"attempt {run.attempt} is over"):
            run.publish_directory(adapter.path, step=2, attempt=run.attempt, cache=str(tmp_path / "c"))
    assert len(run.published().versions) == 1


def test_a_late_task_does_not_bring_an_older_checkpoint_after_a_directory(trained: Trained, tmp_path: Path):
    adapter, run = Adapter(tmp_path / "adapter"), raycheck.open_run(trained.store.uri)
    adapter.step()
    early = trained.step()
    later = trained.step()
    options = Publish(cache=str(tmp_path / "c"))
    publish(later, options, by_training=True)
    run.publish_directory(adapter.path, step=later.entry.step, cache=str(tmp_path / "c"))

    for checkpoint in (early, later):
        with pytest.raises(ConflictError, match=f"a directory of step {later.entry.step} is published, which is newer"):
            publish(checkpoint, options, by_training=True)
    assert publish(trained.step(), options, by_training=True).version.number == 3
    assert publish(early, options).version.number == 4  # a person may: samplers go back


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: (path / "adapter_model.safetensors").unlink(), "0 files"),
        (lambda path: save_file({"x": torch.zeros(1)}, path / "b.safetensors"), "2 files"),
        (lambda path: (path / "more").mkdir(), "is not a file"),
        (lambda path: (path / "version.json").write_text("{}"), "version.json is not a file that can be published"),
    ],
    ids=["no weights", "two files", "a folder", "a name of raycheck's"],
)
def test_a_directory_that_cannot_be_published_is_refused(trained: Trained, tmp_path: Path, change, problem: str):
    adapter, run = Adapter(tmp_path / "adapter"), raycheck.open_run(trained.store.uri)
    adapter.step()
    change(adapter.path)

    with pytest.raises(ConfigError, match=re.escape(problem)):
        run.publish_directory(adapter.path, step=1, cache=str(tmp_path / "c"))

    assert run.published() is None


def test_a_version_is_fetched_by_its_number(trained: Trained, tmp_path: Path, capsys):
    uri, weights = trained.store.uri, {}
    for number in range(1, 5):
        trained.publish(whole_every=2, keep_last=10)
        weights[number] = trained.weights

    for number, expected in weights.items():
        with raycheck.follow(uri, tmp_path / f"local-{number}", version=number) as follower:
            found = list(follower)  # ends, since this version never changes
            assert [version.number for version in found] == [number]
            assert_equal(loaded(found[0].path), expected)
            assert follower.update() is None
    with (
        pytest.raises(ConfigError, match="has version 4, which is newer"),
        raycheck.follow(uri, tmp_path / "local-4", version=2) as follower,
    ):
        follower.update()
    directory = raycheck.open_run(uri).published().versions[2].directory
    with raycheck.follow(uri, version=directory) as follower:
        assert_equal(loaded(follower.update().path), weights[3])
    with raycheck.follow(uri, version=9) as follower, pytest.raises(ConfigError, match="no version 9; there are: 1, 2"):
        follower.update()
