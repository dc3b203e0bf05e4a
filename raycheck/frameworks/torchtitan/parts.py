"""Presents the parts of a pipeline as one model, and torchtitan's optimizers and counters as entries of a state.

Names are those of the whole model. So a pipeline's checkpoint can be restored into another pipeline, or into a model
without one.
"""

from typing import Any

from torch import nn

from raycheck.errors import ConfigError, StateMismatchError


def whole(parts: list[nn.Module]) -> nn.Module:
    """Return one module with the contents of all parts, under their names in the whole model.

    It shares the parts' modules and parameters. Raises ConfigError when two parts hold the same name.
    """
    if len(parts) == 1:
        return parts[0]
    model = nn.Module()
    for part in parts:
        _add(part, model, "")
    return model


def _add(source: nn.Module, target: nn.Module, path: str) -> None:
    for name, parameter in source.named_parameters(recurse=False):
        if name in target._parameters:
            raise ConfigError(f"raycheck.torchtitan: two parts of the pipeline hold {path}{name}")
        target.register_parameter(name, parameter)
    for name, buffer in source.named_buffers(recurse=False):
        if name not in source._non_persistent_buffers_set:
            target.register_buffer(name, buffer)
    for name, child in source.named_children():
        if not isinstance(child, nn.ModuleDict | nn.ModuleList):
            if name in dict(target.named_children()):
                raise ConfigError(f"raycheck.torchtitan: two parts of the pipeline hold {path}{name}")
            target.add_module(name, child)
            continue
        if name not in dict(target.named_children()):
            target.add_module(name, nn.Module())
        _add(child, target.get_submodule(name), f"{path}{name}.")


class Counters:
    """The trainer's step and token counts, as an entry that refuses a change in the tokens per step.

    The trainer counts its own rank's tokens. They are saved as the sum over all ranks, which does not depend on the
    number of ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one optimizer step, over all ranks."""
        return self.samples_per_step * int(self._trainer.config.training.seq_len)

    @property
    def samples_per_step(self) -> int:
        """Return the sequences of one optimizer step, over all ranks."""
        batch = self._trainer.config.training.local_batch_size
        return int(batch * self._trainer.gradient_accumulation_steps * self._ranks("batch"))

    def state_dict(self) -> dict[str, Any]:
        saved = self._trainer.state_dict()
        tokens = int(saved["ntokens_seen"]) * self._ranks("loss")
        return {**saved, "ntokens_seen": tokens, "tokens_per_step": self.tokens_per_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rest = {name: value for name, value in state.items() if name != "tokens_per_step"}
        self._trainer.load_state_dict({**rest, "ntokens_seen": int(state["ntokens_seen"]) // self._ranks("loss")})

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError when a step would take a different number of tokens than before."""
        if state["tokens_per_step"] != self.tokens_per_step:
            raise StateMismatchError(
                f"an optimizer step took {state['tokens_per_step']} tokens over all ranks, and would take "
                f"{self.tokens_per_step} here, which would change the meaning of steps and schedules; set "
                "training.global_batch_size, which torchtitan keeps at any number of ranks"
            )

    def _ranks(self, mesh: str) -> int:
        found = self._trainer.parallel_dims.get_optional_mesh(mesh)
        return 1 if found is None else int(found.size())


def is_trainer(value: object) -> bool:
    """Return whether an entry of the states is torchtitan's trainer, whose tokens are counted per rank."""
    return all(hasattr(value, name) for name in ("config", "parallel_dims", "gradient_accumulation_steps"))
