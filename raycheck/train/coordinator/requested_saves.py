"""A save that the live group is asked for from outside: by a signal to the driver, or before Ray Train replaces a
healthy group by a larger or smaller one, for which it asks nobody.

Who asks waits here, in the coordinator, until rank 0 has heard of it, all ranks have saved, and that is committed; not
for long, since meanwhile a controller looks after no workers.
"""

import asyncio
from dataclasses import dataclass

PATIENCE_S = 30.0


@dataclass(eq=False, slots=True)
class _Wish:
    """from_step: where the group was when it heard of it; None before."""

    end: asyncio.Future[None]
    from_step: int | None = None


class RequestedSaves:
    """In the coordinator's event loop."""

    def __init__(self) -> None:
        self._wishes: list[_Wish] = []
        self._save_s = 0.0
        self._step_s = 0.0

    async def wait(self) -> bool:
        """Have the live group save. Whether that was committed in time."""
        wish = _Wish(asyncio.get_running_loop().create_future())
        self._wishes.append(wish)
        await asyncio.wait([wish.end], timeout=PATIENCE_S + 3 * (self._save_s + self._step_s))
        self._wishes.remove(wish)
        return wish.end.done()

    def is_wanted_at(self, step: int, *, begun: int, step_s: float) -> bool:
        """Rank 0 has done `step` in step_s seconds, and begun its newest save after step `begun`. It asks."""
        self._step_s = step_s
        for wish in self._wishes:
            wish.from_step = step if wish.from_step is None else wish.from_step
        return any(wish.from_step is not None and begun < wish.from_step for wish in self._wishes)

    def committed(self, step: int, *, save_s: float) -> None:
        """save_s: how long that save took."""
        self._save_s = save_s
        for wish in self._wishes:
            if wish.from_step is not None and step >= wish.from_step and not wish.end.done():
                wish.end.set_result(None)
