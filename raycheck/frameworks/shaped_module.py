"""Makes a module of tensors by name, to restore a model's entry into a dict where the live model cannot take it."""

from collections.abc import Mapping

import torch


class ShapedModule(torch.nn.Module):
    """Holds tensors under dotted names, as a model with parameters of these names would."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            inner: torch.nn.Module = self
            for step in path:
                if not hasattr(inner, step):
                    inner.add_module(step, torch.nn.Module())
                inner = inner.get_submodule(step)
            inner.register_buffer(last, tensor)
