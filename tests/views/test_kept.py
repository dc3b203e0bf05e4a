"""Which checkpoints of a run stay, by the rules that its newest manifest repeats."""

import pytest

from raycheck.bucket.format.latest import Attempt, Latest
from raycheck.settings import SaveSettings
from raycheck.views.kept import why_kept

CLAIM = Attempt(
    number=1, owner="ann", coordinator="c", group="g", world_size=1, restore_key=None, last_save=0, claimed_at=0.0
)
EMPTY = Latest(run_id="r", counter=1, newest_owners=("ann",), attempts=(CLAIM,), head=None)
CHOSEN = SaveSettings(keep_best={"metric": "loss", "mode": "min", "count": 2}, keep_every_s=60.0).chosen


@pytest.mark.parametrize("texts", [CHOSEN, ("keep_best=('loss', 'min', 2)", "keep_every_seconds=60.0")])
def test_the_rules_are_read_as_this_version_and_as_earlier_ones_wrote_them(texts: tuple[str, ...]) -> None:
    assert set(why_kept(EMPTY, texts, now=0.0).rules) == set(texts)


@pytest.mark.parametrize("text", ["keep_best=('loss', 'min')", "keep_best=loss", "keep_every_s=-1"])
def test_a_rule_that_cannot_be_read_is_named(text: str) -> None:
    found = why_kept(EMPTY, (text,), now=0.0)

    assert (found.rules, found.unread) == ((), (text,))
