"""R2 and R3: saving and loading against the raw client, on each state, by both engines and by the peers.

A save counts until its shard is durable: staging, checksums and upload; with the commit it stands in the details. A
load counts from the manifest on. Every load is compared with what was saved, beside the clock.
"""

from tests.bench.ceilings import Raw
from tests.bench.goals import Row, worst_row
from tests.bench.ours import Ours
from tests.bench.peers import STOCK, peers
from tests.bench.place import ENGINES, new_folder, open_with
from tests.bench.sampling import Samples, Spread, interleaved
from tests.bench.scale import Bench
from tests.bench.states import make_state

WITH_PEERS = "few large"
ROWS = {
    "R2": ("save", "fast"),
    "R2.fsspec": ("save", "fsspec"),
    "R3": ("load", "fast"),
    "R3.fsspec": ("load", "fsspec"),
}


def rows(bench: Bench) -> list[Row]:
    taken: dict[str, tuple[Samples, int]] = {}
    missing: dict[str, str] = {}
    for name in bench.scale.states:
        samples, size_bytes, why_not = _measured(bench, name)
        taken[name] = samples, size_bytes
        missing |= why_not
    return [_row(key, what, engine, taken, missing) for key, (what, engine) in ROWS.items()]


def _measured(bench: Bench, name: str) -> tuple[Samples, int, dict[str, str]]:
    state = make_state(name, bench.scale.state_bytes)
    settle = bench.server.settle
    sides = Raw(bench.uri, state.size_bytes).shapes(settle)
    for engine in ENGINES:
        ours = Ours(open_with(engine, new_folder(bench.uri)), state)
        sides[engine] = lambda ours=ours: ours.turn(settle)
    missing: dict[str, str] = {}
    if name == WITH_PEERS:
        others, missing = peers(bench.server.kind, bench.uri, state)
        for peer in others:
            sides[peer.name] = lambda peer=peer: peer.turn(settle)
    return interleaved(sides, bench.scale.rounds, warm_ups=bench.scale.warm_ups), state.size_bytes, missing


def _row(key: str, what: str, engine: str, taken: dict[str, tuple[Samples, int]], missing: dict[str, str]) -> Row:
    """Shares of the raw throughput: its time over ours."""
    shares, details = {}, {}
    for name, (samples, size_bytes) in taken.items():
        raw = samples.fastest([side for side in samples.sides if side.startswith("raw")], what)
        shares[name] = samples.ratio(raw, engine, what)
        raw_s = Spread.of(samples.of(raw, what)).median
        details[f"{name}, {raw}, MB/s"] = size_bytes / raw_s / 1e6
        if what == "save":
            details[f"{name}, with the commit"] = samples.ratio(raw, engine, "save", under_what="committed").median
    samples, _ = taken[WITH_PEERS]
    raw = samples.fastest([side for side in samples.sides if side.startswith("raw")], what)
    others = [side for side in samples.sides if not side.startswith("raw") and side not in ENGINES]
    by_peer = {side: samples.ratio(raw, side, what).median for side in others}
    note = "; ".join(f"{name} not measured: {why}" for name, why in missing.items())
    return worst_row(key, shares, today=by_peer.get(STOCK), peers=by_peer, details=details, note=note)
