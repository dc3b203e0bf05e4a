"""A restore reports as restored only what was written, even if an object takes the tensors and does not keep them."""

from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.transfer.read.restore_proof import WrittenBytes, written_bytes
from raycheck.transfer.stage.local_box import boxes_of
from tests.support.processes.save_without_ray import restore_state, save_state


class Halved(nn.Linear):
    """Makes tensors anew in state_dict(), so that what was read must come back through load_state_dict()."""

    kind: type = torch.Tensor

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(3, 3)
        self.register_state_dict_post_hook(_halve)
        self.register_load_state_dict_pre_hook(_double)


def _halve(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[f"{prefix}weight"] = module.kind(state[f"{prefix}weight"] / 2)


def _double(_module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2


class HalvedParameter(Halved):
    kind = nn.Parameter


class Forgetful(Halved):
    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        return None


@pytest.mark.parametrize("kind", [Halved, HalvedParameter])
def test_tensors_that_a_hook_makes_go_back_through_load_state_dict(memory: Store, kind: type):
    one, two = kind(1), kind(2)

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert torch.equal(two.weight, one.weight)


def test_a_module_that_keeps_nothing_of_what_it_is_given_is_named(memory: Store):
    checkpoint = save_state(memory, {"model": Halved(1)})

    with pytest.raises(ConfigError, match=r"model\.weight was not restored: it was read, but the live object holds"):
        restore_state(checkpoint, {"model": Forgetful(2)})


def test_an_optimizer_that_keeps_something_else_is_named(memory: Store):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint = save_state(memory, {"model": model, "optimizer": optimizer})
    other = torch.optim.SGD(model.parameters(), momentum=0.9)

    def forget(_optimizer: Any) -> None:
        for slots in other.state.values():
            slots["momentum_buffer"] = torch.zeros_like(slots["momentum_buffer"])

    other.register_load_state_dict_post_hook(forget)

    with pytest.raises(ConfigError, match=r"optimizer\.state\.weight\.momentum_buffer was not restored"):
        restore_state(checkpoint, {"model": model, "optimizer": other})


class Drops(torch.optim.Adam):
    """Leaves out a slot in load_state_dict()."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kept = {key: {**slots} for key, slots in state_dict["state"].items()}
        for slots in kept.values():
            del slots["exp_avg"]
        super().load_state_dict({**state_dict, "state": kept})


class Anew(torch.optim.SGD):
    """Keeps tensors in lists, gives them in new ones, and loads them as torch does: cast to the parameter's type."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = [torch.full((2,), 1.0001)]

    def state_dict(self) -> dict[str, Any]:
        packed = super().state_dict()
        return {**packed, "state": {k: {s: [*v] for s, v in slots.items()} for k, slots in packed["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize(("kind", "slot"), [(Drops, "exp_avg"), (Anew, "factors.0")])
def test_an_optimizer_that_keeps_no_slot_or_none_exactly_is_named(memory: Store, kind: type, slot: str):
    model = nn.Linear(3, 3).to(torch.bfloat16)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    checkpoint = save_state(memory, {"model": model, "optimizer": optimizer})

    with pytest.raises(ConfigError, match=rf"optimizer\.state\.(weight|bias)\.{slot} was not restored"):
        restore_state(checkpoint, {"model": model, "optimizer": kind(model.parameters(), lr=0.1)})


@pytest.mark.parametrize("counts", [[], [35], [36, 1], [36, 36]])
def test_every_byte_of_a_box_must_be_written_once(counts: list[int]):
    (box,) = boxes_of("model.weight", ("model", "weight"), torch.ones(3, 3), may_spread=False)
    written = WrittenBytes()
    written.add_all((box, count) for count in counts)

    with pytest.raises(ConfigError, match=rf"model\.weight was not restored: {sum(counts)} of its 36 bytes"):
        written.check([box])

    whole = WrittenBytes()
    whole.add_all([(box, 12), (box, 24)])
    whole.check([box])


def test_nothing_is_written_where_there_is_no_memory():
    assert written_bytes(torch.ones(3)) == 12
    assert written_bytes(torch.ones(3, device="meta")) == 0
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    assert written_bytes(freed) == 0


def test_a_tensor_whose_memory_was_freed_is_neither_saved_nor_restored(memory: Store):
    model = nn.Linear(3, 3)
    checkpoint = save_state(memory, {"model": model})
    model.weight.untyped_storage().resize_(0)

    with pytest.raises(ConfigError, match=r"state at model\.weight has no memory on cpu: its storage was freed"):
        save_state(memory, {"model": model}, save_number=2, step=2)
    with pytest.raises(ConfigError, match=r"model\.weight has no memory on cpu"):
        restore_state(checkpoint, {"model": model})
