"""Tracks the exact position of training in the loaders that Accelerate prepared, and resumes there after a restart.

Accelerate fetches one batch ahead of the training loop, to know which one is the last. So the batches fetched are not
the batches trained on. A loader asks for its next batch when the training loop has finished with the last one. At that
point a step ends, including its schedulers and weight averages, and may be saved.
"""

from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches

from raycheck.adapters import DataStream
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.frameworks.accelerate.order import FetchRandom, LoaderOrder

CURE = (
    "Take the batches from raycheck.Batches(dataset, global_batch=..., seed=...) instead, do not prepare its loader, "
    "give it to accelerator.register_for_checkpointing, and call end_step() of what attach returned after each step"
)


class PreparedLoader:
    """The position in one loader that Accelerate prepared.

    epoch: number of completed passes. consumed: batches of this pass whose steps have ended. samples: total over all
    passes and all processes.
    """

    def __init__(self, loader: Any, body_ended: Callable[["PreparedLoader"], None]) -> None:
        self.loader = loader
        self.order = LoaderOrder(loader)
        self.fetch_random = FetchRandom()
        self.epoch = 0
        self.consumed = 0
        self.put_random_back: Callable[[], object] | None = None
        self._samples_before = 0
        self._body_ended = body_ended
        self._passes = 0
        self._is_in_pass = False
        self._is_left = False  # the loop ended before the loader was exhausted
        self._is_exhausted = False  # the last batch was fetched
        self._fetched = 0
        self._at_begin: dict[str, Any] = {}
        self._resume: dict[str, Any] | None = None
        if self.order.refusal is None:
            self._end = loader.end
            loader.base_dataloader.__iter__ = self._begin  # DataLoaderShard calls it by this name
            loader.end = self._pass_ended

    @property
    def is_in_pass(self) -> bool:
        """Return whether a loop is iterating over this loader."""
        return self._is_in_pass and not self._is_left

    @property
    def to_skip(self) -> int:
        """Return how many batches the next pass skips because they were trained on before a restart."""
        return self._resume["consumed"] // self.order.global_batch if self._resume else 0

    @property
    def samples(self) -> int:
        return self._samples_before + self.consumed * self.order.global_batch

    def end_step(self) -> None:
        """Count the batches given to the loop as consumed. Accelerate has fetched one more, except at the end."""
        if self._is_left:
            self.leave_pass()
        elif self._is_in_pass:
            self.consumed = self._fetched if self._is_exhausted else self._fetched - 1

    def leave_pass(self) -> None:
        """End the current pass, if there is one, so that the next iteration starts at the first batch."""
        if self._is_in_pass:
            self._samples_before, self.consumed = self.samples, 0
            self._is_in_pass = self._is_left = False
            self.epoch += 1
            self.fetch_random.value = None
            self.order.end_pass()

    def begin_anew(self) -> None:
        """Make every iterator created before this call raise ConfigError."""
        self._passes += 1
        self._is_in_pass = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position: after the newest step of the current pass, or at the start of the next pass."""
        if self.is_in_pass:
            place = {**self._at_begin, "consumed": self.consumed * self.order.global_batch}
        elif self._resume is not None:
            place = self._resume
        else:
            place = {**self._now(), "consumed": 0}
        return {**place, "epoch": self.epoch + (self._is_in_pass and self._is_left), "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass resume at a saved position."""
        self.loader.iteration = int(state["iteration"])
        self.order.load_state_dict(state["order"])
        self._resume = dict(state) if state["consumed"] else None
        self._is_in_pass = False
        self.epoch, self.consumed = int(state["epoch"]), self.to_skip
        self._samples_before = int(state["samples"]) - self.consumed * self.order.global_batch

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError when a saved position would mean different samples here."""
        self.order.check_state_dict(state["order"])
        is_over = state["consumed"] >= state["order"]["length"]
        if state["consumed"] % self.order.global_batch and not is_over:
            raise StateMismatchError(
                f"{state['consumed']} samples of the epoch were trained on, which is not a whole number of batches of "
                f"{self.order.global_batch} samples; keep batch_size x processes the same, or use a divisor of it"
            )

    def _now(self) -> dict[str, Any]:
        return {"iteration": self.loader.iteration, "order": self.order.state_dict()}

    def _begin(self) -> Iterator[Any]:
        """Yield this process's batches of one pass. DataLoaderShard calls this instead of torch's DataLoader."""
        self._body_ended(self)
        self.leave_pass()
        resume, self._resume = self._resume, None
        skipped = resume["consumed"] // self.order.global_batch if resume else 0
        self.order.begin_pass(resume["order"] if resume else None)
        self._at_begin = self._now()
        self._passes += 1
        self._is_in_pass, self._is_exhausted, self._fetched = True, False, skipped
        return self._batches(self._passes, skipped)

    def _batches(self, number: int, skipped: int) -> Iterator[Any]:
        base = self.loader.base_dataloader
        batches = type(base).__iter__(skip_first_batches(base, skipped) if skipped else base)
        while True:
            self._body_ended(self)
            if number != self._passes:
                raise ConfigError(
                    "this iterator was created before load_state(), or before another iterator of the same loader; "
                    "iterate the loader again"
                )
            is_first = self._fetched == skipped
            if skipped and is_first:
                self.fetch_random.put_back()
            before = None if base.num_workers else self.fetch_random.take()
            batch = next(batches, self)  # self is the sentinel: never a user's batch
            self._is_exhausted = batch is self
            self.fetch_random.value = None if self._is_exhausted else before
            if self.put_random_back is not None:
                call, self.put_random_back = self.put_random_back, None
                call()
            if self._is_exhausted:
                break
            self._fetched += 1
            try:
                yield batch
            except GeneratorExit:
                self._is_left = number == self._passes
                raise
        if skipped and is_first:  # nothing of this epoch was left, so the loader itself counts no pass
            self.loader.iteration += 1

    def _pass_ended(self) -> None:
        """End the pass: the loader is exhausted and the loop has finished with its last batch."""
        if self._is_exhausted:
            self._body_ended(self)
            self.leave_pass()
        self._end()


class Loaders(DataStream):
    """The position in all loaders that Accelerate prepared; epochs and samples are those of the training loader.

    body_ended: called when the training loop has finished with a batch.
    """

    def __init__(self, accelerator: Accelerator, body_ended: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._when_body_ended = body_ended
        self._trained: int | None = None
        self._epochs = 0  # used while the batches come from elsewhere
        self._steps = 0
        self.loaders = [PreparedLoader(loader, self._body_ended) for loader in accelerator._dataloaders]

    @property
    def _train_loader(self) -> PreparedLoader | None:
        """Return the loader that training iterates, or None while it is not known."""
        return None if self._trained is None else self.loaders[self._trained]

    @property
    def is_in_pass(self) -> bool:
        """Return whether the training loop is iterating over its loader."""
        return self._train_loader is not None and self._train_loader.is_in_pass

    @property
    def epoch(self) -> int:
        return self._train_loader.epoch if self._train_loader else self._epochs

    @property
    def epoch_step(self) -> int:
        return self._train_loader.consumed if self._train_loader else self._steps

    @property
    def samples(self) -> int:
        return self._train_loader.samples if self._train_loader else 0

    def train_on(self, loader: object) -> bool:
        """Record which loader this step's batch came from. Returns False for a loader that Accelerate did not prepare.

        Raises ConfigError, before the step, for a loader whose position cannot be determined.
        """
        for number, prepared in enumerate(self.loaders):
            if prepared.loader is loader:
                if prepared.order.refusal is not None:
                    raise ConfigError(
                        f"raycheck cannot resume in the middle of a prepared loader: {prepared.order.refusal}. {CURE}"
                    )
                if not prepared.is_in_pass:
                    raise ConfigError("this loop started before load_state(); iterate the loader after it")
                self._trained = number
                return True
        return False

    def find(self, loader: object) -> PreparedLoader | None:
        """Return the position of this loader, or None if Accelerate did not prepare it or it cannot be tracked."""
        return next((own for own in self.loaders if own.loader is loader and own.order.refusal is None), None)

    def end_step(self) -> None:
        self._steps += 1
        for loader in self.loaders:
            loader.end_step()

    def end_epoch(self) -> None:
        self._epochs, self._steps = self._epochs + 1, 0
        if self._train_loader:
            self._train_loader.leave_pass()

    def end_loaders(self) -> None:
        for loader in self.loaders:
            loader.begin_anew()

    def before_first_batch(self, call: Callable[[], object]) -> None:
        for loader in self.loaders:
            loader.put_random_back = call if loader.to_skip else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "trained": self._trained,
            "epochs": self._epochs,
            "steps": self._steps,
            "samples_per_step": self._samples_per_step(self._trained),
            "loaders": [None if own.order.refusal else own.state_dict() for own in self.loaders],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trained, self._epochs, self._steps = state["trained"], int(state["epochs"]), int(state["steps"])
        for own, position in zip(self.loaders, state["loaders"], strict=True):
            if position is not None:
                own.load_state_dict(position)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError when the saved position would mean other samples here; changes nothing."""
        if [position is None for position in state["loaders"]] != [bool(own.order.refusal) for own in self.loaders]:
            raise StateMismatchError(
                f"{len(state['loaders'])} loaders were prepared when this was saved, and {len(self.loaders)} here, or "
                "they are of other kinds; prepare the same loaders in the same order before load_state"
            )
        for own, position in zip(self.loaders, state["loaders"], strict=True):
            if position is not None:
                own.check_state_dict(position)
        here = self._samples_per_step(state["trained"])
        if here != state["samples_per_step"]:
            raise StateMismatchError(
                f"an optimizer step took {state['samples_per_step']} samples over all processes, and would take {here} "
                "here, which would change the meaning of steps and schedules; choose the loader's batch_size and "
                "gradient_accumulation_steps so that batch_size x processes x accumulation stays the same"
            )

    def _samples_per_step(self, trained: int | None) -> int | None:
        """Return one optimizer step's samples over all processes, or None while the training loader is unknown."""
        if trained is None:
            return None
        return self.loaders[trained].order.global_batch * int(self._accelerator.gradient_accumulation_steps)

    def _body_ended(self, loader: PreparedLoader) -> None:
        if loader is self._train_loader:
            self._when_body_ended()


class FetchedAhead:
    """The per-rank part of the position: the random state from before the batch that was fetched ahead."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders

    def state_dict(self) -> dict[str, Any]:
        return {"before": [own.fetch_random.value if own.is_in_pass else None for own in self._loaders.loaders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own, value in zip(self._loaders.loaders, state["before"], strict=True):
            own.fetch_random.value = value
