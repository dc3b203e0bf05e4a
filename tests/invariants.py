"""What must hold in a bucket at any moment, as one function. Every test that touches a run ends with it."""

from raycheck.bucket import layout
from raycheck.bucket.catalog import Checkpoint, read_latest
from raycheck.bucket.latest import MAX_BYTES, Latest
from raycheck.bucket.layout import CheckpointName
from raycheck.bucket.store import Store
from raycheck.errors import NotFoundError


def assert_invariants(store: Store, before: Latest | None = None) -> Latest | None:
    """I1 to I6 on what lies in `store`; `before`, an earlier body of `latest`, checks that nothing went back."""
    try:
        body = read_latest(store)
    except NotFoundError:
        assert before is None, "latest disappeared"
        return None
    for checkpoint in (Checkpoint(store, entry) for entry in body.live):
        bad = [finding for finding in checkpoint.verify() if finding.problem]
        assert not bad, f"I1, I3: {bad}"
        manifest = checkpoint.manifest()
        assert set(manifest.refs) == set(checkpoint.entry.refs), "I3: references"
        assert set(manifest.refs) <= body.held(), "I3: a referenced directory is not held"
        name = CheckpointName.parse(checkpoint.entry.key)
        assert (name.step, name.attempt, name.save) == (manifest.step, manifest.attempt, manifest.save), "I2"
    numbers = [attempt.number for attempt in body.attempts]
    assert numbers == sorted(set(numbers)), "attempts are numbered upwards"
    assert all(CheckpointName.parse(entry.key).attempt <= body.attempt.number for entry in body.live), "I4"
    order = [CheckpointName.parse(entry.key) for entry in body.live]
    assert [(n.attempt, n.save) for n in order] == sorted((n.attempt, n.save) for n in order), "order of commit"
    assert not {entry.key for entry in body.live} & {item.key for item in body.evicted}, "I4: evicted and live"
    assert body.attempt.owner in body.owners
    if before is not None:
        assert body.counter >= before.counter, "the write counter only grows"
        assert body.attempt.number >= before.attempt.number, "I4: attempts only grow"
        assert set(before.owners) <= set(body.owners), "owners are never taken off"
        gone = {item.key for item in before.evicted}
        assert not gone & {entry.key for entry in body.live}, "I4: an evicted entry came back"
    assert len(store.get(layout.LATEST_KEY).data) <= MAX_BYTES
    return body
