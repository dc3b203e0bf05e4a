"""An archive of one checkpoint, whose frozen component has a name so long that its members need pax headers.

`python -m tests.golden.archive` writes it to `tests/golden/archive.tar`, with the code as it is. No test runs it.
"""

from pathlib import Path

import torch

import raycheck
from raycheck.bucket.store import open_store
from tests.support.processes.save_without_ray import save_state

FILE = Path(__file__).parent / "archive.tar"
ENTRY = "a_reference_policy_whose_name_is_as_long_as_names_are_where_they_say_all_of_it"
STEP = 7


def model(start: float) -> torch.nn.Module:
    """Make a model with a frozen body and a head that is trained, which count up from `start`."""
    whole = torch.nn.ModuleDict({"body": torch.nn.Linear(6, 5), "head": torch.nn.Linear(5, 2)})
    with torch.no_grad():
        for number, parameter in enumerate(whole.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number / 4 + start)
    whole["body"].requires_grad_(requires_grad=False)
    return whole


if __name__ == "__main__":
    store = open_store("memory://golden/run")
    save_state(store, {ENTRY: model(0.0)}, save_number=1, step=STEP, metrics={"loss": 0.5})
    FILE.unlink(missing_ok=True)
    raycheck.catalog.pack("memory://golden/run", str(FILE))
