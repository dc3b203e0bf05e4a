"""Publishes a model's adapter to samplers, as it is after a step, without a commit.

A version is the adapter's directory in the run's `published/`. So samplers of this server read it by its name, and any
other sampler may follow it with `raycheck.follow`.
"""

import copy
import logging
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from raycheck import Run, open_run
from raycheck.tinker.engine.base_model import Adapter
from raycheck.tinker.engine.lora_model import LoraModel, peft_tensors
from raycheck.tinker.engine.ranks import Ranks

logger = logging.getLogger("raycheck.tinker")
KEEP_LAST = 4
"""How many of the newest versions stay in the bucket."""


class Publisher:
    """The publisher of one model. uri: of its run. attempt: that of this process' claim of the run.

    The first rank writes, in a thread, so that the next requests run meanwhile. Every rank makes the same calls.
    """

    def __init__(self, ranks: Ranks, uri: str, attempt: int) -> None:
        self._ranks, self._uri, self._attempt = ranks, uri, attempt
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-publisher")
        self._run: Run | None = None
        self._copy: Adapter | None = None
        self._directory: Future[str] | None = None

    def begin(self, model: LoraModel, step: int) -> None:
        """Copy the adapter, and begin to publish the copy. Ask `published` until it is there; begin no other before."""
        self._copy = model.lora.copied()
        if self._ranks.rank == 0:
            self._directory = Future()
            self._thread.submit(self._publish, self._directory, model, self._copy, step)

    def published(self) -> tuple[str, Adapter] | None:
        """Return the version's directory in the bucket and its adapter, once it is published. Call it on all ranks.

        Raises FencedError if another server has claimed the run, or the error of the store.
        """
        directory = self._ranks.from_first(self._directory_if_done)
        if directory is None or self._copy is None:
            return None
        adapter, self._copy = self._copy, None
        return directory, adapter

    def close(self) -> None:
        """End the thread, after what is under way."""
        self._thread.shutdown(wait=False)

    def _directory_if_done(self) -> str | None:
        return self._directory.result() if self._directory is not None and self._directory.done() else None

    def _publish(self, directory: Future[str], model: LoraModel, adapter: Adapter, step: int) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="raycheck-tinker-") as place:
                self._run = self._run or open_run(self._uri)
                self._run.publish_directory(
                    _written(Path(place) / "adapter", model, adapter),
                    step=step,
                    attempt=self._attempt,
                    keep_last=KEEP_LAST,
                    whole=True,
                    cache=f"{place}/cache",
                    on_published=lambda done: directory.set_result(done.version.directory),
                )
        except Exception as error:
            if directory.done():
                logger.exception("the adapter is published, but what follows failed: run=%s", self._uri)
            else:
                directory.set_exception(error)


def _written(folder: Path, model: LoraModel, adapter: Adapter) -> Path:
    """Write the adapter as a PEFT directory. Return its path."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = copy.copy(model.config)
    config.inference_mode = True  # as PEFT writes it
    config.save_pretrained(str(folder))
    tensors = {name: values.cpu() for name, values in peft_tensors(adapter).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
