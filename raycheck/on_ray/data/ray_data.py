"""Gives out a rank's share of a dataset of Ray Data, and goes on after a restart with the rows that are left.

Which rank gets which row, and when, is decided by Ray Data as it goes, and differs from run to run. So the position is
not a number: it is the set of rows that were consumed in this epoch, by the ids in a column of theirs. Each rank saves
its own. A restore puts them together, and the rest of the epoch is a split of the dataset without these rows, for
however many ranks there are now.
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
    """Stands in the place of `ray.train.get_dataset_shard`, and keeps the position in the Checkpointer's state.

    An epoch that was cut off goes on with the rows that no rank has consumed, at any world size: each row comes once
    per epoch. Which rank gets a row, and in which order, is up to Ray Data, as always; a repeated run is not alike bit
    for bit.

    name: of the dataset, as the trainer was given it. id: a column of whole numbers of at least 0 that tells each row
    from all others and is the same each time the dataset is read; it must be in every batch.

    After a restart in the middle of an epoch, Ray Data reads that epoch's rows once more and drops those that were
    consumed, before they come to a rank. A split gives all ranks equally many rows: up to world size - 1 rows of an
    epoch are left out, as without raycheck. The state takes one bit per row, or 8 bytes where ids lie far apart.

    Every rank makes one, as it would call get_dataset_shard. Raises ConfigError outside of Ray Train, and for a dataset
    that is not split among the ranks.
    """

    merges_ranks = True

    def __init__(self, name: str = "train", *, id: str) -> None:  # noqa: A002  the word for it
        if not in_ray_train():
            raise ConfigError("RayData: only Ray Train's workers have a dataset that is split; call it in train_fn")
        self._name = name
        self._id = id
        self._rank, self._world_size = rank_and_world_size()
        self._shard = shard_of(name)
        self._rest: Any = None  # the share of the epoch that a restore has found cut off
        self._epoch = 0
        self._epoch_step = 0
        self._rows = RowSet()  # of this epoch, consumed by this rank, and on rank 0 also before the restore
        self._samples = 0  # consumed by all ranks when this rank's count began
        self._own_samples = 0
        self._delivered: list[Ids] = []
        self._turn = 0
        self._is_begun = False

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epoch_step(self) -> int:
        """Returns the number of steps of this epoch."""
        return self._epoch_step

    @property
    def samples(self) -> int:
        """Returns the number of rows consumed over all epochs, taking what this rank has consumed for each rank's."""
        return self._samples + self._own_samples * self._world_size

    @property
    def is_in_mid_epoch(self) -> bool:
        return self._epoch_step > 0

    def iter_batches(self, **options: Any) -> Iterator[Any]:
        """Yields this rank's batches of the rest of the epoch, as Ray Data's DataIterator.iter_batches does.

        options: Ray's own (batch_size, prefetch_batches, local_shuffle_buffer_size, ...). All ranks call it alike.
        Raises ConfigError for a batch without the column of ids, and when the epoch was begun and not ended: leave the
        loop early only to end_epoch().
        """
        return self._batches(lambda shard: shard.iter_batches(**options))

    def iter_torch_batches(self, **options: Any) -> Iterator[Any]:
        """Yields batches of tensors, as Ray Data's DataIterator.iter_torch_batches does. See `iter_batches`."""
        return self._batches(lambda shard: shard.iter_torch_batches(**options))

    def _batches(self, iterate: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
        if self._is_begun:
            raise ConfigError(
                f"RayData({self._name!r}): epoch {self._epoch} was begun before; call end_epoch() after each epoch"
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
                    f"RayData({self._name!r}): this iterator was begun before a restore or an end_epoch(); iterate anew"
                )

    def _share(self) -> Any:
        """Returns what this rank iterates for the rest of the epoch. It is a barrier after a restore in mid-epoch."""
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
                f"RayData({self._name!r}, id={self._id!r}): a batch has no such column. Give the rows one, and let a "
                "collate_fn keep it under this name"
            ) from error
        if ids is None:
            raise ConfigError(f"RayData({self._name!r}, id={self._id!r}): give a column of whole numbers of at least 0")
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
        """Returns this rank's share of the position."""
        return {
            "dataset": self._name,
            "id": self._id,
            "epoch": self._epoch,
            "epoch_step": self._epoch_step,
            "samples": self._own_samples + (0 if self._rank else self._samples),
            "rows": self._rows.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of a run of one rank."""
        self.load_rank_states([state])

    def check_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Raises StateMismatchError when the saved position is one in another dataset; changes nothing."""
        first = states[0]
        if {(state["epoch"], state["epoch_step"]) for state in states} != {(first["epoch"], first["epoch_step"])}:
            raise StateMismatchError("the ranks' positions are of different epochs or steps")
        for name, here in (("dataset", self._name), ("id", self._id)):
            if first[name] != here:
                raise StateMismatchError(f"{name}: saved {first[name]!r}, here {here!r}")

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Go to a saved position. states: what each rank that saved had consumed."""
        self.check_rank_states(states)
        self._epoch, self._epoch_step = int(states[0]["epoch"]), int(states[0]["epoch_step"])
        whole = RowSet.union(RowSet.of_state(state["rows"]) for state in states)
        self._samples, self._own_samples = sum(int(state["samples"]) for state in states), 0
        self._rows = RowSet() if self._rank else whole
        self._rest = whole if len(whole) else None
        self.end_loaders()


def _dropping(column: str, consumed: Any) -> Callable[[Any], Any]:
    """Returns what takes the rows that were consumed out of a block, in a task of Ray Data's.

    column: that of the ids. consumed: refers to a list with the set of them.
    """

    def keep(table: Any) -> Any:
        (rows,) = ray.get(consumed)
        ids = ids_of(table[column]) if column in table.column_names else None
        if ids is None:
            raise ConfigError(f"RayData: the dataset has no column {column!r} of whole numbers of at least 0")
        return table.filter(~rows.contains(ids))

    return keep
