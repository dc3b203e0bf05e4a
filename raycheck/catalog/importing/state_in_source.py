"""The common result of reading any kind of source: a nested state and facts about its training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raycheck.catalog.importing.source_tensors import SourceTensors


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceState:
    """The contents of a source.

    kind: the source's, as named by --as. tree: the state by the source's names; its tensors are on the meta device and
    registered in `tensors`. files: tokenizer files, as tensors of bytes, by name. texts: configuration files of the
    model, by name. is_whole: everything is imported, not only the weights. step, epoch: None if the source does not
    contain them. left_out: what is not imported, for people. notes: what was chosen, for people.
    """

    kind: str
    tree: Mapping[str, Any]
    tensors: SourceTensors
    files: Mapping[str, torch.Tensor] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = False
    step: int | None = None
    epoch: int | None = None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """Settings for reading a source. verify: compare all bytes with the source's checksums, which reads them once more.
    skip_values: leave out values that cannot be imported, with a note."""

    verify: bool = True
    skip_values: bool = False


def count_in(tree: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these values that is a plausible count of steps or epochs, or None."""
    found = (tree.get(name) for name in names)
    return next((value for value in found if type(value) is int and 0 <= value < 10**9), None)
