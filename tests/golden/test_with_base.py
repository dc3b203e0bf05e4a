"""A run that refers to a base run, as it was written when that was new, and what older readers make of it. Step 39."""

import json
from pathlib import Path

import pytest
import torch

import raycheck
from raycheck.bucket.format import document
from raycheck.bucket.format.document import NewerFormatError
from raycheck.bucket.format.latest import dump_latest, load_latest
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from tests.golden.with_base import FOLDER, STEPS, model
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck as command
from tests.support.samples.sample_checkpoints import sealed

RUN, BASE = f"file://{FOLDER}/run", f"file://{FOLDER}/base"


def test_it_restores_what_was_saved_and_its_frozen_part_lies_in_the_base_alone() -> None:
    before = sorted(Path(FOLDER).rglob("*"))

    live = model(0.0, body=0.0)
    step = raycheck.open_run(RUN).restore(into={"model": live})

    assert step == STEPS
    wanted = model(20.0 + STEPS)
    assert all(torch.equal(live.state_dict()[name], item) for name, item in wanted.state_dict().items())
    body = assert_invariants(open_store(RUN))
    assert body is not None
    assert [loan.source for loan in body.loans] == ["../base"]
    assert all(len(entry.refs) == 1 for entry in body.live)
    assert not [item.key for item in open_store(RUN).list_objects("checkpoints/") if "frozen" in item.key]
    (hold,) = read_latest(open_store(BASE)).holds
    assert (hold.holder, hold.renewals) == ("../run", 1)
    assert [found.problem for found in raycheck.open_run(RUN).head.verify() if found.problem] == []
    assert sorted(Path(FOLDER).rglob("*")) == before, "readers write nothing"


@pytest.mark.parametrize("uri", [RUN, BASE])
def test_a_reader_of_an_older_format_refuses_it_by_number(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not know that what it takes for garbage is held for another run."""
    monkeypatch.setattr(document, "FORMAT_VERSION", 2)

    with pytest.raises(NewerFormatError, match="format version 3"):
        raycheck.open_run(uri)
    shown, listed = command("show", uri), command("runs", uri)

    assert shown.returncode == 2
    assert "format version 3" in shown.stderr
    assert "newer" in listed.stdout


def test_a_reader_of_this_format_that_does_not_know_bases_keeps_what_they_need() -> None:
    """What a base adds to a hold is `renewals`. To such a reader it is a field that it writes back as it is."""
    tree = json.loads((FOLDER / "base" / "latest").read_bytes())
    renewals = [hold.pop("renewals") for hold in tree["holds"]]
    assert renewals != [0]

    unaware = load_latest(sealed(tree | {"holds": [hold | {"of a later one": 1} for hold in tree["holds"]]}), what="it")

    assert unaware.holds[0].renewals == 0
    written = json.loads(dump_latest(unaware))
    assert written["holds"][0]["of a later one"] == 1
    assert written["holds"][0]["directories"] == tree["holds"][0]["directories"]
