"""All measures in the order of their goals. One that fails becomes rows that say so, and the others go on."""

import traceback
from collections.abc import Callable, Collection, Sequence
from time import perf_counter

from tests.bench import blocking, checksums, memory, planning, throughput, traffic, training
from tests.bench.goals import GOALS, Row, not_measured
from tests.bench.scale import Bench

Measure = Callable[[Bench], Sequence[Row]]
MEASURES: dict[tuple[str, ...], Measure] = {
    ("R1", "R1.first"): blocking.rows,
    ("R2", "R2.fsspec", "R3", "R3.fsspec"): throughput.rows,
    ("R4", "R4.resharded", "R4.replicas", "R5", "R5.commit", "R5.load", "R13"): traffic.rows,
    ("R6", "R6.unchanged", "R7", "R7.parse"): planning.rows,
    ("R8",): memory.rows,
    ("R9", "R9.fsspec"): training.rows,
    ("R10",): checksums.rows,
}


def measure(bench: Bench, only: Collection[str], *, tell: Callable[[str], None]) -> list[Row]:
    """`only`: goals by their first word (R1, R2, ...); empty for all. Rows come in the order of the goals."""
    found: dict[str, Row] = {}
    for keys, rows in MEASURES.items():
        if only and not {key.partition(".")[0] for key in keys} & set(only):
            continue
        began = perf_counter()
        try:
            found |= {row.key: row for row in rows(bench)}
        except Exception as error:
            traceback.print_exc()
            found |= {key: not_measured(key, f"{type(error).__name__}: {error}") for key in keys}
        tell(f"{', '.join(keys)}: {perf_counter() - began:.0f} s")
    return [found[key] for key in GOALS if key in found]
