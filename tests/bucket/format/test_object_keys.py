"""Tests a checkpoint's name and the keys made of it: hostile names never become keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.object_keys import CheckpointName
from tests.support.samples.hostile_documents import HOSTILE_NAMES, ONE, thorough

names = st.builds(
    CheckpointName,
    step=st.integers(0, 10**18 - 1),
    attempt=st.integers(0, 10**9 - 1),
    save=st.integers(0, 10**9 - 1),
)


@thorough
@given(names)
def test_a_checkpoints_name_reads_back(name):
    assert CheckpointName.parse(str(name)) == name


@thorough
@given(names, names)
def test_names_are_ordered_as_commits_are(one, other):
    assert (one < other) == ((one.attempt, one.save, one.step) < (other.attempt, other.save, other.step))


@thorough
@given(st.one_of(st.text(), st.builds("step-{}-a{}-s{}".format, *[st.text("0129\u0660\n", max_size=10)] * 3)))
def test_a_text_that_is_a_name_is_exactly_one_name(text):
    name = CheckpointName.parse(text)

    assert name is None or str(name) == text


@pytest.mark.parametrize("text", HOSTILE_NAMES)
def test_a_hostile_name_never_becomes_a_key(text):
    assert CheckpointName.parse(text) is None
    for key in (
        object_keys.checkpoint_prefix,
        object_keys.manifest_key,
        object_keys.index_key,
        object_keys.pointer_prefix,
    ):
        with pytest.raises(ValueError, match="name"):
            key(text)


@pytest.mark.parametrize("text", ["", ".", "..", "../x", "a/b", "/a", "-a", ".a", "a b", "a\n", "a\0", "é", "a" * 101])
def test_a_hostile_component_never_becomes_a_key(text):
    for key in (
        object_keys.component_prefix,
        object_keys.metadata_key,
        lambda name, part: object_keys.shard_key(name, part, 0),
    ):
        with pytest.raises(ValueError, match="component"):
            key(ONE, text)


def test_every_object_of_a_checkpoint_lies_under_its_own_name():
    for key in (object_keys.manifest_key(ONE), object_keys.index_key(ONE), object_keys.shard_key(ONE, "train", 3)):
        assert key.startswith(f"checkpoints/{ONE}/")
    assert object_keys.shard_key(ONE, "train", 3) == f"checkpoints/{ONE}/train/__3_0.distcp"
    assert object_keys.metadata_key(ONE, "train") == f"checkpoints/{ONE}/train/.metadata"
    assert object_keys.pointer_key(ONE) == f"ray/{ONE}/pointer.json"
