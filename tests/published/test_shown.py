"""Published versions on the command line and the page."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raycheck
from raycheck.bucket.store import open_store
from raycheck.cli import app
from raycheck.page.pages import PageScope, run_view
from raycheck.page.rendering import render
from tests.published.weights import Trained, assert_equal, loaded


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    made = Trained(open_store(f"file://{tmp_path}/run"), tmp_path / "cache")
    for _ in range(2):
        made.publish()
    return made


def said(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    return done.output


def test_show_lists_versions_and_readers(trained: Trained, tmp_path: Path):
    with raycheck.follow(trained.store.uri, tmp_path / "local") as follower:
        follower.update()
        text = said("show", trained.store.uri)
        first, second = json.loads(said("show", trained.store.uri, "--json"))["published"]

    assert [line.split()[:2] for line in text.partition("published\n")[2].splitlines()[1:]] == [["1", "1"], ["2", "2"]]
    assert (first["is_whole"], first["patch_bytes"], first["readers"]) == (True, None, [])
    assert not second["is_whole"]
    assert second["patch_bytes"] < second["whole_bytes"] / 2
    assert len(second["readers"]) == 1


def test_the_page_lists_versions(trained: Trained, tmp_path: Path):
    place = PageScope(prefix=trained.store.uri)
    text = render("run.html", place, **run_view(place, ""))

    table = text.partition('<table id="published">')[2].partition("</table>")[0]
    assert table.count("<tr>") == 3
    assert "step-000000002-a1-s2" in table


def test_publish_and_pull_by_command(trained: Trained, tmp_path: Path):
    trained.step()
    text = said("publish", trained.store.uri)
    assert "published step-000000003-a1-s3 as version 3, as a patch of version 2" in text
    assert "nothing to do" in said("publish", trained.store.uri)
    assert json.loads(said("publish", trained.store.uri, "--whole", "--json"))["whole"]

    local = str(tmp_path / "local")
    made = json.loads(said("pull", trained.store.uri, local, "--json", "--run", f'cp "$VERSION_DIR"/*.json {tmp_path}'))

    assert (made["version"], made["step"]) == (4, 3)
    assert_equal(loaded(Path(made["path"])), trained.weights)
    assert (tmp_path / "config.json").exists()
    done = CliRunner().invoke(app, ["pull", f"file://{tmp_path}/nothing", str(tmp_path / "other")])
    assert done.exit_code != 0
    assert "nothing is published there" in str(done.exception)


def test_a_version_is_pulled_by_its_number(trained: Trained, tmp_path: Path):
    text = said("pull", trained.store.uri, str(tmp_path / "first"), "--version", "1")

    assert text.startswith("version 1, step 1, ")
    with raycheck.follow(trained.store.uri, tmp_path / "other", version=1) as follower:
        assert_equal(loaded(tmp_path / "first" / "latest"), loaded(follower.update().path))
    both = CliRunner().invoke(app, ["pull", trained.store.uri, str(tmp_path / "x"), "--version", "1", "--follow"])
    assert "give only one" in str(both.exception)
