"""`python -m tests.bench.frameworks.accelerate`: how long a save blocks a loop of Accelerate's, on one process.

The model has 25 million parameters (100 MB, 300 MB with AdamW's moments). Measured are raycheck's save_state, which
goes on behind the training, Accelerate's own save_state into a folder, and that with Ray's upload of the folder, as
`ray.train.report` does it in the training's thread: here a copy into another folder. Of five saves the median counts.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator

import raycheck
from tests.support.processes.coordinator_in_thread import group_of

SAVES = 5


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(2500, 2500) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        own = accelerator.save_state

        def uploaded(number: int) -> None:
            own(f"{folder}/stock-{number}")
            shutil.copytree(f"{folder}/stock-{number}", f"{folder}/uploaded-{number}")

        step(accelerator, model, optimizer)
        stock = measure(
            lambda number: own(f"{folder}/own-{number}"), lambda: step(accelerator, model, optimizer), folder
        )
        with_upload = measure(uploaded, lambda: step(accelerator, model, optimizer), folder)
        settings = raycheck.SaveSettings(every_steps=None, keep_last=2)
        attached = raycheck.accelerate.attach(accelerator, settings, group=group_of(f"file://{folder}/run")[0])
        accelerator.load_state()

        def train() -> None:
            step(accelerator, model, optimizer)
            attached.end_step()
            attached.checkpointer.wait()

        ours = measure(lambda _: accelerator.save_state(), train, folder)
        attached.close()
    print(f"blocked by a save: raycheck {ours:.3f} s, Accelerate's own / raycheck {stock / ours:.1f}, ", end="")
    print(f"with an upload as Ray's / raycheck {with_upload / ours:.1f}")


def measure(save: Callable[[int], None], train: Callable[[], None], folder: str) -> float:
    """Returns the median seconds of a save between steps. The first one, which claims memory, does not count."""
    seconds = []
    for number in range(SAVES + 1):
        train()
        began = time.monotonic()
        save(number)
        seconds.append(time.monotonic() - began)
        for old in Path(folder).glob(f"*-{number}"):
            shutil.rmtree(old)
    return median(seconds[1:])


def step(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    accelerator.backward(model(torch.randn(1, 2500)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
