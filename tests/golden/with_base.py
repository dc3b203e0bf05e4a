"""Two runs of plain torch, of which the second refers to the frozen parameters of the first. Step 39.

`python -m tests.golden.with_base` writes them to `tests/golden/with_base`, with the code as it is. No test runs it.
"""

import shutil
from pathlib import Path

import torch

import raycheck
from raycheck.bucket.store import open_store
from tests.support.processes.coordinator_in_thread import group_of

FOLDER = Path(__file__).parent / "with_base"
STEPS = 2


def model(head: float, *, body: float | None = None) -> torch.nn.Module:
    """Make a model with a frozen body and a head that is trained."""
    whole = torch.nn.ModuleDict({"body": torch.nn.Linear(6, 5), "head": torch.nn.Linear(5, 2)})
    with torch.no_grad():
        for number, parameter in enumerate(whole["body"].parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number / 4)
            if body is not None:
                parameter.fill_(body)
        for parameter in whole["head"].parameters():
            parameter.fill_(head)
    whole["body"].requires_grad_(requires_grad=False)
    return whole


def train(uri: str, head: float, **settings: str) -> None:
    (group,) = group_of(uri, owner="golden")
    live = model(head)
    saves = raycheck.SaveSettings(every_steps=1, **settings)
    with raycheck.Checkpointer({"model": live}, saves, group=group) as ckpt:
        ckpt.restore()
        for _ in range(STEPS):
            with torch.no_grad():
                for parameter in live["head"].parameters():
                    parameter.add_(1)
            ckpt.end_step()
            ckpt.wait()


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    train("memory://golden/base", 10.0)
    train("memory://golden/run", 20.0, base="memory://golden/base")
    store = open_store("memory://golden")
    for item in store.list_objects(""):
        (FOLDER / item.key).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / item.key).write_bytes(store.get(item.key).data)
