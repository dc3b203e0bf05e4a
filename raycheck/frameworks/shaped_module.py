"""A module made from named tensors, to restore a model's entry into a dict when the live model cannot receive it."""

from collections.abc import Mapping

import torch


class ShapedModule(torch.nn.Module):
    """A module with the given tensors under dotted names, like a model with parameters of these names."""

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
