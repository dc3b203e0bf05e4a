"""A save that the live group is asked for from outside: by a signal to the driver, or before Ray Train replaces a
healthy group by a larger or smaller one, for which it asks nobody.

Who asks waits here, in the coordinator, until rank 0 has heard of it, all ranks have saved, and that is committed; not
for long, since meanwhile a controller looks after no workers.
"""

import asyncio

PATIENCE_S = 30.0


class Farewell:
    """One wish at a time. In the coordinator's event loop."""

    def __init__(self) -> None:
        self._wish: asyncio.Future[None] | None = None
        self._from_step: int | None = None
        self._save_s = 0.0
        self._step_s = 0.0

    async def wait(self) -> bool:
        """Have the live group save. Whether that was committed in time."""
        if self._wish is None:
            self._wish, self._from_step = asyncio.get_running_loop().create_future(), None
        wish = self._wish
        await asyncio.wait([wish], timeout=PATIENCE_S + 3 * (self._save_s + self._step_s))
        if self._wish is wish:
            self._wish = None
        return wish.done()

    def is_wanted_at(self, step: int, *, step_s: float) -> bool:
        """Rank 0 has done `step` in step_s seconds, and asks."""
        self._step_s = step_s
        if self._wish is None or self._wish.done():
            return False
        self._from_step = step if self._from_step is None else self._from_step
        return True

    def committed(self, step: int, *, save_s: float) -> None:
        """save_s: how long that save took."""
        self._save_s = save_s
        if self._wish is not None and self._from_step is not None and step >= self._from_step and not self._wish.done():
            self._wish.set_result(None)
