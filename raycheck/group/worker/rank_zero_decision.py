"""Makes rank 0's decisions known to every rank, by a broadcast.

Step triggers are arithmetic and need no broadcast. Rank 0 decides everything else (time, tokens, preemption, the user's
own function, which commit to report) and sends it to all ranks in one small broadcast every k steps. k is chosen so
that this costs less than 1 % of the step time, and is 1 when there is a user's function to call.
"""

import time
from dataclasses import dataclass

from raycheck.errors import ConfigError
from raycheck.group.group import Group, same
from raycheck.group.worker.save_kind import SaveKind

COST_SHARE = 0.01
MAX_GAP = 1000
MAX_GAP_S = 5.0
"""The longest pause between two broadcasts, as far as steps allow: a preemption notice may leave only 30 s."""
PREEMPTED_GAP_S = 0.5
"""The longest pause once there is a preemption notice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankZeroDecision:
    """Rank 0's decision for all ranks: whether to save, which commit to report, and when it decides next.

    step: rank 0's step, None at the end of its loop. clock_s: how long it has trained in this attempt. save: the kind
    of save to begin now, None for none. tasks: what follows its commit because of the time. commit: name of the commit
    to report; only rank 0 has its metrics, since Ray's broadcast carries 1 kB. gap: steps until the next broadcast.
    is_preempted: a node of the group is about to be taken away. leave: end the attempt once the saves in progress are
    committed. problem: why the run ends here on all ranks, "" when it continues. is_by_notice: the save is made because
    a node is about to be taken away. to_memory: there should be a memory checkpoint before a node is taken away, even
    if a save to the bucket takes too long.
    """

    step: int | None
    clock_s: float = 0.0
    save: SaveKind | None = None
    tasks: tuple[str, ...] = ()
    commit: str | None = None
    gap: int = 1
    is_preempted: bool = False
    leave: bool = False
    problem: str = ""
    is_by_notice: bool = False
    to_memory: bool = False


class DecisionBroadcast:
    """The broadcast of rank 0's decisions to all ranks, and the choice after how many steps the next one follows.

    is_each_step: a decision is needed at every step. again_s: seconds until the next broadcast, as rank 0 expects them.
    """

    def __init__(self, group: Group, *, is_each_step: bool) -> None:
        self._group = group
        self._broadcast = same if group.broadcast is None and group.world_size == 1 else group.broadcast
        self._is_each_step = is_each_step
        self._next_step = 1
        self._last = (0, time.monotonic())
        self._broadcast_s = 1.0
        self.again_s = 0.0

    @property
    def is_possible(self) -> bool:
        """Return whether the ranks have a way to make the same decision on anything but steps."""
        return self._broadcast is not None

    def start_at(self, step: int) -> None:
        """Expect the first broadcast at the end of the step after this one."""
        self._next_step = step + 1
        self._last = (step, time.monotonic())

    def is_due(self, step: int) -> bool:
        return self._broadcast is not None and step >= self._next_step

    def share(self, decision: RankZeroDecision | None, *, step: int | None) -> RankZeroDecision:
        """Send rank 0's decision to every rank; each rank calls this. decision: None on the other ranks.

        Raises ConfigError when the ranks are not at the same step.
        """
        assert self._broadcast is not None, "the callers have checked"
        shared: RankZeroDecision = self._broadcast(decision)
        if shared.step != step:
            names = [f"step {at}" if at is not None else "the end of its loop" for at in (step, shared.step)]
            raise ConfigError(
                f"rank {self._group.rank} is at {names[0]} while rank 0 is at {names[1]}: "
                "every rank must take the same number of steps"
            )
        return shared

    def choose_gap(self, step: int, now: float, *, is_preempted: bool) -> int:
        """Return, on rank 0, the number of steps until its next decision. now: by time.monotonic."""
        steps, seconds = step - self._last[0], now - self._last[1]
        self._last = (step, now)
        if seconds <= 0 or steps <= 0:
            return 1
        if self._group.world_size == 1:
            self.again_s = seconds / steps
            return 1
        cheap = self._broadcast_s * steps / (COST_SHARE * seconds)
        gap_s = PREEMPTED_GAP_S if is_preempted else MAX_GAP_S
        gap = max(1, min(MAX_GAP, round(cheap), round(gap_s * steps / seconds)))
        if self._is_each_step:
            gap = 1
        self.again_s = gap * seconds / steps
        return gap

    def schedule(self, step: int, gap: int, *, took_s: float) -> None:
        """Expect the next broadcast `gap` steps after this one. took_s: how long this one took."""
        # Keep the minimum. Anything above it is waiting for slower ranks, which a larger gap would not shorten.
        self._broadcast_s = min(self._broadcast_s, took_s)
        self._next_step = step + gap
