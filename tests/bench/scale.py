"""How much is measured: everything about a run of the benchmark that is not a goal."""

from dataclasses import dataclass
from pathlib import Path

from tests.bench.servers import Server
from tests.bench.states import STATES

MIB = 1024 * 1024
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Bytes of a state: `state_bytes` where time is measured, `upload_bytes` beside a training, `wire_bytes` where bytes
    and requests are counted, `memory_bytes` where memory is.

    ranks, tensors: of the simulated coordinator. steps_s: of a training without uploads. before_first_s: from when a
    TrainState is prepared to its first save. warm_ups: rounds that do not count. states: those that time is measured on.
    loaded_by: how many ranks load what four saved. has_processes: whether what needs fresh processes is measured too.
    """

    name: str
    state_bytes: int
    upload_bytes: int
    wire_bytes: int
    memory_bytes: int
    rounds: int
    ranks: int
    tensors: int
    steps_s: float
    before_first_s: float
    warm_ups: int = 1
    states: tuple[str, ...] = tuple(STATES)
    loaded_by: tuple[int, ...] = (2, 3, 8)
    has_processes: bool = True


FULL = Scale(
    name="full",
    state_bytes=512 * MIB,
    upload_bytes=256 * MIB,
    wire_bytes=256 * MIB,
    memory_bytes=512 * MIB,
    rounds=5,
    ranks=1024,
    tensors=1000,
    steps_s=0.5,
    before_first_s=1.0,
)
QUICK = Scale(
    name="quick",
    state_bytes=32 * MIB,
    upload_bytes=32 * MIB,
    wire_bytes=128 * MIB,
    memory_bytes=256 * MIB,
    rounds=2,
    ranks=256,
    tensors=1000,
    steps_s=0.2,
    before_first_s=0.5,
    loaded_by=(3,),
    states=("few large", "3,000 small"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What every measure is given."""

    server: Server
    scale: Scale

    @property
    def uri(self) -> str:
        return self.server.uri
