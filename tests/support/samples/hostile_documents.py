"""Draws hostile names, trees and bytes, for tests that parse them."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

thorough = settings(
    max_examples=settings().max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

ONE, TWO = "step-000000010-a1-s1", "step-000000020-a1-s2"

HOSTILE_NAMES = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "step-1-a1-s1",
    "step-00000001-a1-s1",
    "step-0000000001-a1-s1",
    "step-000000001-a01-s1",
    "step-000000001-a1-s01",
    "step-000000001-a1",
    "step--00000001-a1-s1",
    "step-000000001-a1-s-1",
    "step-000000001-a1-s1/",
    "step-000000001-a1-s1/../../x",
    "../step-000000001-a1-s1",
    " step-000000001-a1-s1",
    "step-000000001-a1-s1\n",
    "STEP-000000001-a1-s1",
    "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661-a1-s1",
]

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.just(2**64),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([ONE, TWO, *HOSTILE_NAMES]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=8,
)


def mutated_tree(data: st.DataObject, tree: Any) -> Any:
    """Return `tree` with one place in it removed, replaced or repeated."""
    if isinstance(tree, dict | list) and tree and data.draw(st.integers(0, 5)):
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = data.draw(st.sampled_from(keys))
        what = data.draw(st.sampled_from(["go", "go", "go", "remove", "repeat"]))
        copy = tree.copy()
        if what == "remove":
            del copy[key]
        elif what == "repeat" and isinstance(copy, list):
            copy.append(copy[key])
        else:
            copy[key] = mutated_tree(data, copy[key])
        return copy
    return data.draw(json_values)


def mutated_bytes(data: st.DataObject, body: bytes) -> bytes:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(at, min(len(body), at + 8)))
        body = body[:at] + data.draw(st.binary(max_size=4)) + body[stop:]
    return body
