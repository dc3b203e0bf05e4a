"""Passes on requests for a save from outside the training loop, and waits for that save.

A signal to the driver requests a save, and so does Ray Train's controller before it replaces a healthy group by a
larger or smaller one; it does not notify the group. The caller waits here, in the coordinator's event loop, until rank
0 has learned of the request through its heartbeat, all ranks have saved, and the save is committed. The wait is short,
because a waiting controller does not monitor the workers.
"""

import asyncio
from dataclasses import dataclass

PATIENCE_S = 30.0


@dataclass(eq=False, slots=True)
class _Request:
    """A request for a save. from_step: where rank 0 was when it learned of the request; None before."""

    is_committed: asyncio.Future[None]
    from_step: int | None = None


class RequestedSaves:
    """The requests for a save, kept until a save is committed that began after rank 0 had learned of them."""

    def __init__(self) -> None:
        self._requests: list[_Request] = []
        self._save_s = 0.0
        self._step_s = 0.0

    async def wait(self) -> bool:
        """Ask the live group for a save. Return whether it was committed in time."""
        request = _Request(asyncio.get_running_loop().create_future())
        self._requests.append(request)
        await asyncio.wait([request.is_committed], timeout=PATIENCE_S + 3 * (self._save_s + self._step_s))
        self._requests.remove(request)
        return request.is_committed.done()

    def note_step(self, step: int, *, begun: int, step_s: float) -> bool:
        """Record that rank 0 learns of all requests at `step`. Return whether it should save soon.

        begun: the step of the newest save that rank 0 has begun. step_s: seconds of its last step.
        """
        self._step_s = step_s
        for request in self._requests:
            request.from_step = step if request.from_step is None else request.from_step
        return any(request.from_step is not None and begun < request.from_step for request in self._requests)

    def committed(self, step: int, *, save_s: float) -> None:
        """End the requests that the committed save of `step` satisfies. save_s: how long that save took."""
        self._save_s = save_s
        for request in self._requests:
            if request.from_step is not None and step >= request.from_step and not request.is_committed.done():
                request.is_committed.set_result(None)
