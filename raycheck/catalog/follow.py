"""Keeps a mirror up to date while its source is trained: the public `follow_run`.

It reads the source's `latest` every few seconds, and does a round of copier.py when it has changed. A failing store
does not stop it: the mirror shows a complete earlier state, and the round is repeated after a pause. It stops for
problems that need a person: a mirror that was claimed, a source that was lost or rolled back, refused credentials.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S
from raycheck.bucket.store import open_store
from raycheck.catalog.copier import MirrorCopier, SourceBody
from raycheck.errors import ConfigError, DamagedError, NotFoundError, StoppedError, StoreError
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings

MAX_PAUSE_S = 300.0
TIDY_EVERY_S = 60.0
"""How often to look for attempts' records, and to delete what the source has dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowNews:
    """News of a mirror.

    text: the message. step: the step of the mirror's head, None if it has not moved. lag_s: seconds from the head's
    commit in the source until it was here. is_trouble: a round has failed and will be repeated.
    """

    text: str
    step: int | None = None
    lag_s: float | None = None
    is_trouble: bool = False


def follow_run(
    source: str,
    to: str,
    *,
    every_s: float = 5.0,
    until_finished: bool = False,
    from_storage: StorageSettings | None = None,
    to_storage: StorageSettings | None = None,
    news: Callable[[FollowNews], None] = lambda _: None,
    progress: ShowProgress = show_nothing,
    stop: Event | None = None,
    grace_s: float = GRACE_S,
) -> None:
    """Copy a run to `to`. Then keep copying what is committed, and dropping what is dropped, until `stop` is set.

    every_s: seconds between two reads of the source's `latest`. until_finished: end when the source's training has
    finished and everything is copied. news: called with each event. progress: called with the bytes that are copied,
    and the total known so far. grace_s: seconds that readers of the mirror have between the drop of a checkpoint and
    its delete. The other arguments are those of copy_run.

    Raises StoppedError if it was stopped before the first checkpoint was complete, ConfigError if `to` can no longer
    hold the mirror, CorruptError when `latest` of either was lost or rolled back.
    """
    if every_s <= 0:
        raise ConfigError(f"every={every_s}: give a number of seconds above 0")
    one, other = open_store(source, from_storage), open_store(to, to_storage)
    stop = Event() if stop is None else stop
    copier = MirrorCopier(one, other, stop=stop, progress=progress)
    Follower(copier, every_s=every_s, until_finished=until_finished, news=news, stop=stop, grace_s=grace_s).run()


class Follower:
    """The loop that repeats rounds of a copier."""

    def __init__(
        self,
        copier: MirrorCopier,
        *,
        every_s: float,
        until_finished: bool,
        news: Callable[[FollowNews], None],
        stop: Event,
        grace_s: float = GRACE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copier, self._news, self._stop = copier, news, stop
        self._every_s, self._until_finished, self._grace_s = every_s, until_finished, grace_s
        self._monotonic = monotonic
        self._shown: Latest | None = None
        self._tidied_at = -TIDY_EVERY_S
        self._said: set[str] = set()

    def run(self) -> Latest:
        """Follow until stopped, or until the source's training has ended. Returns the mirror's body."""
        failures = 0
        while True:
            try:
                is_over = self.look()
                failures = 0
            except StoppedError:
                return self._last()
            except (StoreError, NotFoundError, DamagedError) as error:
                if isinstance(error, NotFoundError) and self._shown is not None:
                    raise  # the source existed before
                failures += 1
                is_over = False
                pause_s = self._pause_s(failures)
                self._news(FollowNews(text=f"{error}; trying again in {pause_s:.0f} s", is_trouble=True))
            if is_over or self._stop.wait(self._pause_s(failures)):
                return self._last()

    def look(self) -> bool:
        """Read the source once and bring the mirror up to date. Returns whether there is nothing left to wait for."""
        state = self._copier.read_source()
        if not self._is_shown(state.body):
            self._shown = self._copier.run()
            self._tell(state)
        if self._monotonic() >= self._tidied_at + TIDY_EVERY_S:
            self._copier.copy_records()
            self._copier.delete_dropped(grace_s=self._grace_s)
            self._tidied_at = self._monotonic()
        is_over = self._until_finished and state.body.is_finished and self._is_shown(state.body)
        if is_over:
            self._copier.copy_records()
        return is_over

    def _is_shown(self, body: Latest) -> bool:
        shown = self._shown
        return shown is not None and shown.mirror is not None and shown.mirror.counter >= body.counter

    def _tell(self, state: SourceBody) -> None:
        """Report the mirror's new state, and each damage in the source once."""
        report, shown = self._copier.report, self._shown
        entry = shown.entry(shown.head) if shown is not None and shown.head is not None else None
        for key in report.damaged.keys() - self._said:
            self._news(FollowNews(text=f"{report.damaged[key]}; it is left out", is_trouble=True))
        self._said |= report.damaged.keys()
        if shown is None or entry is None or entry.key in self._said:
            return
        self._said.add(entry.key)
        lag_s = max(0.0, state.at + self._monotonic() - state.read_at - entry.committed_at)
        text = f"step {entry.step} is here, {lag_s:.1f} s after its commit; {shown.num_live} checkpoints"
        self._news(FollowNews(text=text, step=entry.step, lag_s=lag_s))

    def _pause_s(self, failures: int) -> float:
        return float(min(self._every_s * 2 ** min(failures, 20), max(MAX_PAUSE_S, self._every_s)))

    def _last(self) -> Latest:
        if self._shown is None:
            raise StoppedError("the copy was stopped before it was complete; repeat it to continue")
        return self._shown
