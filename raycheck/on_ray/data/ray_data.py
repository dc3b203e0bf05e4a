"""Provides a rank's share of a Ray Data dataset, and resumes after a restart with the remaining rows.

Ray Data decides at run time which rank gets which row, and when, and this differs from run to run. So the position is
not a number: it is the set of rows that were consumed in this epoch, by the ids in one of their columns. Each rank
saves its own set. A restore merges them, and the rest of the epoch is a split of the dataset without these rows, for
the current number of ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ray

from raycheck.data.data_stream import SampleStream
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.on_ray.api.datasets import shard_of, shares_without
from raycheck.on_ray.api.train_context import broadcast, in_ray_train, rank_and_world_size
from raycheck.on_ray.data.row_set import Ids, RowSet, ids_of


class RayData(SampleStream):
    """A rank's share of a dataset, whose position is kept if it is in the Checkpointer's state. Use it instead of
    `ray.train.get_dataset_shard`.

    An interrupted epoch resumes with the rows that no rank has consumed, at any world size: each row occurs once per
    epoch. As always, Ray Data decides which rank gets a row, and in which order; a repeated run is not bit-identical.

    name: the dataset's name in the trainer. id: a column of whole numbers of at least 0 that is unique for each row and
    the same each time the dataset is read; it must be in every batch.

    After a restart in the middle of an epoch, Ray Data reads that epoch's rows again, and drops consumed rows before
    they reach a rank. A split gives all ranks the same number of rows: up to world size - 1 rows of an epoch are
    left out, as without raycheck. The state takes one bit per row, or 8 bytes if ids are far apart.

    Every rank creates one, as it would call get_dataset_shard. Raises ConfigError outside Ray Train, and for a dataset
    that is not split among the ranks.
    """

    merges_ranks = True

    def __init__(self, name: str = "train", *, id: str) -> None:  # noqa: A002  the usual word
        if not in_ray_train():
            raise ConfigError("RayData: only Ray Train's workers have a dataset that is split; call it in train_fn")
        self._name = name
        self._id = id
        self._rank, self._world_size = rank_and_world_size()
        self._shard = shard_of(name)
        self._rest: Any = None  # the share of the interrupted epoch after a restore
        self._epoch = 0
        self._epoch_step = 0
        # Rows of this epoch that this rank consumed; on rank 0 also those from before the restore.
        self._rows = RowSet()
        self._samples = 0  # consumed by all ranks when this rank's count started
        self._own_samples = 0
        self._delivered: list[Ids] = []
        self._turn = 0
        self._is_begun = False

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epoch_step(self) -> int:
        """Return the number of steps in this epoch."""
        return self._epoch_step

    @property
    def samples(self) -> int:
        """Return the number of rows consumed over all epochs, assuming as many on every rank as on this one."""
        return self._samples + self._own_samples * self._world_size

    @property
    def is_in_mid_epoch(self) -> bool:
        return self._epoch_step > 0

    def iter_batches(self, **options: Any) -> Iterator[Any]:
        """Yield this rank's batches of the rest of the epoch, as Ray Data's DataIterator.iter_batches does.

        options: Ray's own (batch_size, prefetch_batches, local_shuffle_buffer_size, ...). All ranks call it with the
        same options. Raises ConfigError for a batch without the id column, and if the epoch was started and not ended:
        after leaving the loop early, call end_epoch().
        """
        return self._batches(lambda shard: shard.iter_batches(**options))

    def iter_torch_batches(self, **options: Any) -> Iterator[Any]:
        """Yield batches of tensors, as Ray Data's DataIterator.iter_torch_batches does. See `iter_batches`."""
        return self._batches(lambda shard: shard.iter_torch_batches(**options))

    def _batches(self, iterate: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
        if self._is_begun:
            raise ConfigError(
                f"RayData({self._name!r}): epoch {self._epoch} was already started; call end_epoch() after each epoch"
            )
        self._is_begun = True
        shard = self._share()
        self._begin_batches()
        turn = self._turn
        for batch in iterate(shard):
            self._delivered.append(self._ids_in(batch))
            yield batch
            if turn != self._turn:
                raise ConfigError(
                    f"RayData({self._name!r}): this iterator was started before a restore or an end_epoch(); start "
                    "a new one"
                )

    def _share(self) -> Any:
        """Return the shard that this rank iterates for the rest of the epoch. After a restore in mid-epoch this is a
        barrier."""
        rest, self._rest = self._rest, None
        if rest is None:
            return self._shard
        shares: Any = None
        if self._rank == 0:
            try:
                shares = shares_without(self._name, _dropping(self._id, ray.put([rest.sorted_for_look_ups()])))
            except Exception as error:  # noqa: BLE001  the other ranks wait for an answer
                shares = error
        shares = broadcast(shares)
        if isinstance(shares, Exception):
            raise shares
        return shares[self._rank]

    def _ids_in(self, batch: Any) -> Ids:
        try:
            ids = ids_of(batch[self._id])
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"RayData({self._name!r}, id={self._id!r}): a batch has no such column. Add it to the rows, and "
                "have any collate_fn keep it under this name"
            ) from error
        if ids is None:
            raise ConfigError(
                f"RayData({self._name!r}, id={self._id!r}): the column must contain whole numbers of at least 0"
            )
        return ids

    def end_step(self) -> None:
        for ids in self._delivered:
            if (again := self._rows.repeated(ids)) is not None:
                raise ConfigError(
                    f"RayData({self._name!r}, id={self._id!r}): {again} came twice in epoch {self._epoch}. Rows that "
                    "share an id would be lost after a restart; give a column that is different in each row"
                )
            self._rows.add(ids)
            self._own_samples += ids.size
        self._delivered = []
        self._epoch_step += 1

    def end_epoch(self) -> None:
        self._epoch += 1
        self._epoch_step = 0
        self._rows, self._rest, self._delivered = RowSet(), None, []
        self._turn += 1
        self._is_begun = False

    def end_loaders(self) -> None:
        self._delivered = []
        self._turn += 1
        self._is_begun = False

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share of the position."""
        return {
            "dataset": self._name,
            "id": self._id,
            "epoch": self._epoch,
            "epoch_step": self._epoch_step,
            "samples": self._own_samples + (0 if self._rank else self._samples),
            "rows": self._rows.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position of a run of one rank."""
        self.load_rank_states([state])

    def check_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Raise StateMismatchError if the saved position is one in another dataset. Change nothing."""
        first = states[0]
        if {(state["epoch"], state["epoch_step"]) for state in states} != {(first["epoch"], first["epoch_step"])}:
            raise StateMismatchError("the ranks' positions are of different epochs or steps")
        for name, here in (("dataset", self._name), ("id", self._id)):
            if first[name] != here:
                raise StateMismatchError(f"{name}: saved {first[name]!r}, here {here!r}")

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Move to a saved position. states: what each rank that saved had consumed."""
        self.check_rank_states(states)
        self._epoch, self._epoch_step = int(states[0]["epoch"]), int(states[0]["epoch_step"])
        whole = RowSet.union(RowSet.of_state(state["rows"]) for state in states)
        self._samples, self._own_samples = sum(int(state["samples"]) for state in states), 0
        self._rows = RowSet() if self._rank else whole
        self._rest = whole if len(whole) else None
        self.end_loaders()


def _dropping(column: str, consumed: Any) -> Callable[[Any], Any]:
    """Return a function that removes consumed rows from a block, in a Ray Data task.

    column: the id column. consumed: a reference to a list that contains the set of consumed ids.
    """

    def keep(table: Any) -> Any:
        (rows,) = ray.get(consumed)
        ids = ids_of(table[column]) if column in table.column_names else None
        if ids is None:
            raise ConfigError(f"RayData: the dataset has no column {column!r} of whole numbers of at least 0")
        return table.filter(~rows.contains(ids))

    return keep
