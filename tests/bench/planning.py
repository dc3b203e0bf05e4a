"""R6 and R7: what a coordinator spends on planning, and how many bytes a plan takes, with ranks that are simulated."""

from tests.bench.coordinator import measure
from tests.bench.goals import Row
from tests.bench.scale import Bench


def rows(bench: Bench) -> list[Row]:
    ranks, tensors = bench.scale.ranks, bench.scale.tensors
    found = measure(sorted({max(1, ranks // 4), max(1, ranks // 2), ranks}), tensors=tensors)
    note = f"{ranks} simulated ranks x {tensors} tensors"
    growth = {"exponent of CPU over ranks": found["exponent"]}
    return [
        Row(key="R6", value=found["us_per_rank_tensor_new"], note=note, details=growth),
        Row(key="R6.unchanged", value=found["us_per_rank_unchanged"], note=note),
        Row(key="R7", value=found["bytes_per_rank_tensor"], note=note),
        Row(key="R7.parse", value=found["parse_s_per_million"], note=f"{note}, scaled up"),
    ]
