"""Refuses torchdata loaders that a restore would put at the wrong position.

A StatefulDataLoader saves what its sampler and its dataset can report, and replays the rest. Replaying gives the same
samples only if the order does not depend on random numbers that are not saved.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from raycheck.data.isolated_call import TrialError, isolated
from raycheck.data.sample_seeding import seed_worker
from raycheck.data.shared_streams import has_state, known_fault
from raycheck.errors import ConfigError
from raycheck.log import event, logger
from raycheck.state.entries.object_entry import has_state_dict

MAX_INDICES = 64
"""How many of a sampler's indices are compared."""
WITHIN_S = 10.0
_CURE = (
    "Give it sampler=torchdata.stateful_dataloader.sampler.RandomSampler(dataset, generator=...), and a "
    "different generator to the loader itself; raycheck.Batches needs neither"
)
_READS_AGAIN = "Use raycheck.Batches(dataset, global_batch=...), which reads up to the position again"


def check_loaders(objects: Mapping[str, object], *, rank: int) -> None:
    """Raise ConfigError, naming the entry, for a StatefulDataLoader whose order would not be restored."""
    for name, value in objects.items():
        if any(kind.__module__.startswith("torchdata.") for kind in type(value).__mro__):
            _check(f"state[{name!r}]", value, rank)


def _check(name: str, loader: Any, rank: int) -> None:
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        _check_iterable(name, loader, dataset, rank)
        return
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:  # "or" would call its __len__, which a sampler need not have
        sampler = getattr(loader, "sampler", None)
    sampler = getattr(sampler, "sampler", sampler)  # a batch sampler saves what its sampler can report
    if sampler is None:
        return
    generator = getattr(sampler, "generator", None)
    if generator is not None and generator is loader.generator and not loader.num_workers:
        raise ConfigError(
            f"{name}: the loader and its sampler draw from one generator, so a restart would change the order from "
            f"the next epoch on. {_CURE}"
        )
    if not has_state_dict(sampler) and not _has_state_while_iterated(sampler):
        try:
            one, two = isolated(lambda: _orders(sampler), within_s=WITHIN_S)
        except TrialError as error:
            logger.warning(event(f"{name}: its sampler's order could not be tested: {error}", rank=rank))
            return
        if one != two:
            raise ConfigError(
                f"{name}: its sampler ({type(sampler).__qualname__}) gives another order each time, and has no "
                f"state_dict: a restart would repeat some samples and leave out others. {_CURE}"
            )


def _check_iterable(name: str, loader: Any, dataset: Any, rank: int) -> None:
    if not has_state_dict(dataset) and not _has_state_while_iterated(dataset):
        raise ConfigError(
            f"{name}: {type(dataset).__qualname__} has no state_dict, and at the second restart torchdata loses track "
            f"of how much of it was read. {_READS_AGAIN}"
        )
    fault = known_fault(dataset)
    if has_state_dict(dataset) and not has_state(dataset):
        fault = "the state of Hugging Face's shuffle leaves out its buffer, so a restart would drop the samples in it"
    if fault:
        raise ConfigError(f"{name}: {fault}. {_READS_AGAIN}")
    if loader.num_workers:
        text = (
            f"{name}: a StatefulDataLoader with workers over an IterableDataset resumes wrongly from a checkpoint of "
            "an epoch's last batch; use num_workers=0, or raycheck.Batches(dataset, global_batch=...)"
        )
        logger.warning(event(text, rank=rank))


def _has_state_while_iterated(value: Iterable[Any]) -> bool:
    """Return whether an iterator over this has a state.

    The iterator is created in a child, since that may draw numbers.
    """
    try:
        return isolated(lambda: has_state_dict(iter(value)), within_s=WITHIN_S)
    except TrialError:
        return False


def _orders(sampler: Iterable[Any]) -> list[list[Any]]:
    """Act as the child: read a sampler twice, under different random numbers."""
    found = []
    for seed in (1, 2):
        seed_worker(seed)
        found.append([repr(index) for index in islice(sampler, MAX_INDICES)])
    return found
