"""Publishes a model's adapter to samplers, as it is after a step, without a commit.

A version is an adapter's directory in the run's `published/`, the same that `run.publish` makes of a checkpoint. So
samplers of this server read it by its number, and any other sampler may follow it with `raycheck.follow`.
"""

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from raycheck import Run, open_run
from raycheck.tinker.engine.base_model import Adapter
from raycheck.tinker.engine.lora_model import LoraModel, peft_tensors
from raycheck.tinker.engine.ranks import Ranks

KEEP_LAST = 4
"""How many of the newest versions stay in the bucket."""


class Publisher:
    """The publisher of one model. uri: of its run. attempt: that of this process' claim of the run.

    The first rank writes, in a thread, so that the next requests run meanwhile. Every rank makes the same calls.
    """

    def __init__(self, ranks: Ranks, uri: str, attempt: int) -> None:
        self._ranks, self._uri, self._attempt = ranks, uri, attempt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-publisher")
        self._place = tempfile.TemporaryDirectory(prefix="raycheck-tinker-", ignore_cleanup_errors=True)
        self._run: Run | None = None
        self._copy: Adapter | None = None
        self._number: Future[int] | None = None

    def begin(self, model: LoraModel, step: int) -> None:
        """Copy the adapter, and begin to publish the copy. Ask `published` until it is there; begin no other before."""
        self._copy = model.lora.copied()
        if self._ranks.rank == 0:
            self._number = Future()
            self._thread.submit(self._publish, self._number, model, self._copy, step)

    def published(self) -> tuple[int, Adapter] | None:
        """Return the number of the version, once it is published, and its adapter. Call it on all ranks.

        Raises FencedError if another server has claimed the run, or the error of the store.
        """
        number = self._ranks.from_first(self._number_if_done)
        return None if number is None or self._copy is None else (number, self._copy)

    def close(self) -> None:
        """End the thread, after what is under way."""
        self._thread.submit(self._place.cleanup)
        self._thread.shutdown(wait=False)

    def _number_if_done(self) -> int | None:
        return self._number.result() if self._number is not None and self._number.done() else None

    def _publish(self, number: Future[int], model: LoraModel, adapter: Adapter, step: int) -> None:
        try:
            self._run = self._run or open_run(self._uri)
            self._run.publish_directory(
                self._write(model, adapter),
                step=step,
                attempt=self._attempt,
                keep_last=KEEP_LAST,
                whole=True,
                cache=f"{self._place.name}/cache",
                on_published=lambda done: number.set_result(done.version.number),
            )
        except BaseException as error:
            if number.done():
                raise
            number.set_exception(error)

    def _write(self, model: LoraModel, adapter: Adapter) -> Path:
        """Write the adapter as a PEFT directory. Return its path."""
        from safetensors.torch import save_file

        folder = Path(self._place.name) / "adapter"
        folder.mkdir(exist_ok=True)
        model.config.save_pretrained(str(folder))
        tensors = {name: values.cpu() for name, values in peft_tensors(adapter).items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        return folder
