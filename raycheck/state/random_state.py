"""Saves and sets the random state of a rank: Python's, NumPy's, torch's on the CPU and on every accelerator device.

Every rank keeps its own. With another world size, a rank that existed takes its own state, and a new rank gets seeds
derived from rank 0's saved state and its own number, so that the same resize always gives the same run. An engine whose
ranks must have equal states in groups chooses these numbers (StateEntry.random_rank). With another
number of devices, the first ones are set, and always the one on which the rank trains. State that is not in a
checkpoint is left unchanged.
"""

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from raycheck.bucket.format.values import decode, encode
from raycheck.errors import CorruptError


class DriverRandomState:
    """An adapter with state_dict and load_state_dict for the random state of a driver, which is not a rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"rng": rng_values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        apply_rng([state["rng"]], 0)


def rng_values() -> Any:
    """Return this process's random state, as a lossless tree."""
    numpy = sys.modules.get("numpy")
    return encode(
        {
            "python": random.getstate(),
            "numpy": numpy.random.get_state() if numpy else None,
            "torch": bytes(torch.get_rng_state().numpy()),
            "accelerator": [bytes(state.cpu().numpy()) for state in _accelerator_states()],
            "current_device": torch.accelerator.current_device_index() if torch.accelerator.is_available() else None,
        },
        "rng",
    )


def apply_rng(rank_values: Sequence[Any], rank: int, apart: str = "") -> str:
    """Set this process's random state from the saved states of all ranks. Return what was done, for the restore
    report.

    rank: whose saved state to take. A number that no rank had gives a new state, which is equal for equal numbers.
    apart: a name that gives a new state in any case. Ranks that had equal states of torch's generators get equal ones,
    as a tensor-parallel group needs.
    """
    if not rank_values:
        raise CorruptError("the checkpoint has no random state")
    if rank >= len(rank_values) or apart:
        source = rank if rank < len(rank_values) else 0
        told = json.dumps(rank_values[source]).encode() + rank.to_bytes(8, "big") + apart.encode()
        _seed_all(_seed_of(told))
        if rank < len(rank_values):
            of_torch = decode(rank_values[rank], _no_tensor).get("torch", b"")
            torch.manual_seed(_seed_of(of_torch + apart.encode()))
        return f"derived from rank {source}'s saved state and {apart or 'the number'} {rank}"
    saved = decode(rank_values[rank], _no_tensor)
    if "python" in saved:
        random.setstate(saved["python"])
    if saved.get("numpy") is not None:
        import numpy as np

        np.random.set_state(saved["numpy"])  # noqa: NPY002  user code draws from the legacy global state
    if "torch" in saved:
        torch.set_rng_state(_state_tensor(saved["torch"]))
    on_devices, devices = saved.get("accelerator", []), len(_accelerator_states())
    for device, state in enumerate(on_devices[:devices]):
        torch.get_device_module().set_rng_state(_state_tensor(state), device)
    if devices and on_devices:
        # Ranks move between devices: the device it trains on now gets the state of the one it trained on before.
        torch.get_device_module().set_rng_state(_state_tensor(on_devices[saved["current_device"]]))
    done = "restored"
    if absent := [name for name in ("python", "numpy", "torch", "accelerator") if name not in saved]:
        done += f"; not in the checkpoint and left as it is: {', '.join(absent)}"
    if len(on_devices) != devices:
        done += f"; accelerator devices: {len(on_devices)} saved, {devices} here, the first ones set"
    return done


def _accelerator_states() -> list[torch.Tensor]:
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module()
    return [module.get_rng_state(device) for device in range(torch.accelerator.device_count())]


def _state_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _seed_of(told: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big") >> 1


def _seed_all(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _no_tensor(name: str) -> object:
    raise CorruptError(f"random state refers to a tensor {name!r}")
