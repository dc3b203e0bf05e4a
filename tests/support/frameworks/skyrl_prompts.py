"""The data of the SkyRL trainings, in a module of its own: processes that read the data import it, and not SkyRL."""

from typing import Any

import torch


class Prompts(list[Any]):
    """A data set in the form that SkyRL's trainer takes."""

    def collate_fn(self, items: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"prompt": item, "env_class": None, "env_extras": {}, "uid": ""} for item in items]
