"""A data source is proven before the first step: streams whose state misleads, data that ranks have split, data that were exchanged.

The judge is the order of the samples of runs with and without interruptions. The sources are read in other processes.
"""

import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import Dataset, IterableDataset, Sampler, Subset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import raycheck
from raycheck.data.batches import Batches
from raycheck.data.loader_checks import check_loaders
from raycheck.data.proof_agreement import SourceProof, agreed_proof
from raycheck.data.source_proof import MAX_SAMPLES
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.group.worker.training_progress import ProgressCounter
from raycheck.state.train_state import TrainState
from tests.support.processes.coordinator_in_thread import group_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture(autouse=True)
def _with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each proof come to its end, however busy the machine is."""
    for name in ("READ_FOR_S", "ROWS_FOR_S", "TRY_FOR_S", "CALL_WITHIN_S"):
        monkeypatch.setattr(f"raycheck.data.source_proof.{name}", 60.0)


class Numbers(Dataset[int]):
    """Gives first, first + 1, ..."""

    def __init__(self, length: int = 48, first: int = 0) -> None:
        self.length, self.first = length, first
        self.asked = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return self.first + index


class Counting(IterableDataset[int]):
    """Goes on after the sample at which its state was taken, if `forget` leaves the state right."""

    def __init__(self, forget: Callable[[int], int] = lambda at: at) -> None:
        self.forget, self.at = forget, 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.forget(state["at"])

    def __iter__(self) -> Iterator[int]:
        start, self.at = self.at, 0
        for number in range(start, 48):
            self.at = number + 1
            yield number
        self.at = 0


class ForgetsInItsThirdLife(Counting):
    """Counts from where it was put, so that its second state is wrong."""

    def __iter__(self) -> Iterator[int]:
        start, self.at = self.at, 0
        for number in range(start, 48):
            self.at = number + 1 if start == 0 else number + 1 - start
            yield number


class WithoutArguments(Counting):
    """Has a state_dict that asks for an argument, as that of MosaicML's StreamingDataset does."""

    def state_dict(self, samples: int) -> dict[str, int]:  # type: ignore[override]
        return {"at": samples}


def hugging_face(shards: int = 6) -> Any:
    return datasets.Dataset.from_dict({"n": list(range(48))}).to_iterable_dataset(num_shards=shards)


HUGGING_FACE: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda stream: stream,
    "map": lambda stream: stream.map(lambda row: {"n": row["n"]}),
    "map in batches": lambda stream: stream.map(lambda row: {"n": row["n"]}, batched=True, batch_size=7),
    "filter and map": lambda stream: stream.filter(lambda row: row["n"] % 3).map(lambda row: {"n": row["n"]}),
    "batch": lambda stream: stream.batch(3).map(lambda row: {"n": row["n"][0]}),
    "interleave": lambda stream: datasets.interleave_datasets([stream, stream.map(lambda row: {"n": row["n"] + 100})]),
    "rename": lambda stream: stream.rename_column("n", "m").rename_column("m", "n"),
    "shuffle": lambda stream: stream.shuffle(seed=1, buffer_size=5).map(lambda row: {"n": row["n"]}),
    "repeat": lambda stream: stream.repeat(2),
}
ALIKE = {"as it is", "map in batches", "filter and map", "rename"}
"""Kinds whose state is that of another one above, or is part of it."""


def proven(batches: Batches) -> Batches:
    proof = agreed_proof([batches.prove()])
    assert proof is not None
    batches.take_proof(proof)
    return batches


def samples_of(make: Callable[[], Any], lives: list[int], **options: Any) -> list[list[int]]:
    """The samples of each step of a run of so many lives, each with a source of its own. lives: their steps.

    A run without interruptions proves nothing; the others prove their source in the first life.
    """
    found: list[list[int]] = []
    state: dict[str, Any] | None = None
    proof = None
    for steps in lives:
        batches = Batches(make(), global_batch=4, rank=0, world_size=1, **options)
        if len(lives) > 1:
            proof = proof or agreed_proof([batches.prove()])
            assert proof is not None
            batches.take_proof(proof)
        if state is not None:
            batches.load_state_dict(state)
        loader, end = batches.loader(), len(found) + steps
        while len(found) < end:
            batch = next(loader, None)
            if batch is None:
                iter(loader)  # the next epoch
                continue
            found.append((batch["n"] if isinstance(batch, dict) else batch).tolist())
            batches.end_step()
        state = batches.state_dict()
    return found


# --- streams and their states ---


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(pytest.param(kind, {}, marks=[pytest.mark.slow] * (kind in ALIKE)) for kind in HUGGING_FACE),
        pytest.param("as it is", {"batches_per_epoch": 5}, marks=pytest.mark.slow),
        ("shuffle", {"batches_per_epoch": 5}),
    ],
)
def test_a_stream_of_hugging_face_goes_on_exactly_in_three_lives(kind: str, options: dict[str, Any]):
    make = HUGGING_FACE[kind]

    expected = samples_of(lambda: make(hugging_face()), [16], **options)

    assert samples_of(lambda: make(hugging_face()), [3, 4, 9], **options) == expected


def test_a_stream_whose_state_is_known_to_mislead_is_named_with_the_release_that_is_right(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets, "__version__", "4.7.0")
    proven(Batches(HUGGING_FACE["map"](hugging_face()), global_batch=4, rank=0, world_size=1))

    assert "datasets 4.7.0 does not restore a stream's state exactly after a map" in caplog.text
    assert "5.1 does. After a restart the samples before the position are read again" in caplog.text


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Counting(lambda at: at + 1), "taken after 1 samples and restored, does not lead to the next one"),
        (lambda: Counting(lambda at: at - at % 4), "taken after 1 samples"),
        (lambda: Counting(lambda at: at + (at > 3)), "taken after 5 samples"),
        (ForgetsInItsThirdLife, "taken after 2 samples"),
        (WithoutArguments, "state could not be tried: TypeError"),
    ],
)
def test_a_stream_that_fails_its_proof_is_named_and_read_again(
    make: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
):
    found = samples_of(make, [2, 3, 7])

    assert reason in caplog.text
    assert found == samples_of(Counting, [12])


def test_a_stream_that_passes_goes_straight_to_its_position(caplog: pytest.LogCaptureFixture):
    batches = proven(Batches(Counting(), global_batch=4, rank=0, world_size=1))
    next(batches.loader())
    batches.end_step()

    assert batches.state_dict()["sources"][0]["source"] == {"at": 4}
    assert not caplog.records


class Slow(Counting):
    """Waits for an event that never comes before its fourth sample."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            if number == 3:
                threading.Event().wait()
            yield number


def test_a_proof_that_is_cut_short_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raycheck.data.source_proof.TRY_FOR_S", 0.0)
    monkeypatch.setattr("raycheck.data.source_proof.READ_FOR_S", 0.0)
    stream, table = (Batches(one, global_batch=4, rank=0, world_size=1).prove() for one in (Counting(), Numbers()))

    assert stream is not None
    assert table is not None
    assert (stream.is_exact, stream.reason) == (None, "there was no time to try its state")
    assert table.said == ("the proof was cut short: 1 of 16 samples were read in 0 s",)


def test_a_source_that_hangs_is_given_up_and_said_to_be_unproven(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raycheck.data.source_proof.CALL_WITHIN_S", 0.5)
    proof = Batches(Slow(), global_batch=4, rank=0, world_size=1).prove()

    assert proof is not None
    assert (proof.is_exact, proof.samples) == (None, {})
    assert "it took longer than" in proof.reason


# --- the ranks' data ---


def together(sources: list[Any], **options: Any) -> SourceProof | None:
    return agreed_proof(
        [
            Batches(source, global_batch=4, rank=rank, world_size=len(sources), **options).prove()
            for rank, source in enumerate(sources)
        ]
    )


TABLE = datasets.Dataset.from_dict({"n": list(range(100))})
SPLIT = {
    "Subset": [Subset(range(100), range(rank, 100, 2)) for rank in range(2)],  # type: ignore[arg-type]
    "split_dataset_by_node": [split_dataset_by_node(TABLE, rank=rank, world_size=2) for rank in range(2)],
    "shard": [TABLE.shard(2, rank) for rank in range(2)],
    "a part of a tensor": [TensorDataset(torch.arange(100)[rank::2]) for rank in range(2)],
    "a stream split by node": [split_dataset_by_node(hugging_face(), rank=rank, world_size=2) for rank in range(2)],
    "unequal parts": [Subset(range(100), range(rank, 99, 2)) for rank in range(2)],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("sources", list(SPLIT.values()), ids=list(SPLIT))
def test_data_that_the_ranks_have_split_already_are_refused(sources: list[Any]):
    with pytest.raises(ConfigError, match=r"on rank.? 0 and .*give every rank the whole dataset"):
        together(sources)


@pytest.mark.parametrize(
    "make",
    [lambda: range(100), lambda: TABLE, pytest.param(hugging_face, marks=pytest.mark.slow), Counting, Numbers],
)
def test_the_same_data_on_all_ranks_are_agreed_on(make: Callable[[], Any]):
    proof = together([make(), make()])

    assert proof is not None
    assert len(proof.lasting) == MAX_SAMPLES


@pytest.mark.parametrize(
    ("name", "one", "two"), [("seed", 1, 2), ("shuffle", True, False), ("global_batch", 4, 8), ("prove", True, False)]
)
def test_ranks_that_order_their_data_in_different_ways_are_refused(name: str, one: object, two: object):
    proofs = [
        Batches(Numbers(), rank=rank, world_size=2, **{"global_batch": 4, name: value}).prove()  # type: ignore[arg-type]
        for rank, value in enumerate((one, two))
    ]

    with pytest.raises(ConfigError, match=rf"{name}.*[Uu]se the same value on all ranks"):
        agreed_proof(proofs)


def started(uri: str, sources: list[Any], steps: int, owner: str, **options: Any) -> list[list[int]]:
    """Trains on ranks in threads, each of which makes `steps` steps. Returns the samples of each step."""
    found: list[list[list[int]]] = [[] for _ in sources]
    skip = options.pop("skip", ())

    def train(place: Any) -> None:
        data = Batches(sources[place.rank], global_batch=4, rank=place.rank, world_size=place.world_size, **options)
        state = {"data": data, "weight": torch.ones(1)}
        with raycheck.Checkpointer(state, raycheck.SaveSettings(every_steps=1), group=place) as checkpointer:
            checkpointer.restore(skip=skip)
            loader = data.loader()
            for _ in range(steps):
                found[place.rank].append(next(loader).tolist())
                checkpointer.end_step()

    groups = group_of(uri, world_size=len(sources), owner=owner)
    with ThreadPoolExecutor(len(groups)) as pool:
        errors = [error for error in pool.map(lambda place: _error_of(train, place), groups) if error]
    if errors:
        raise errors[0]
    return [[number for share in shares for number in share] for shares in zip(*found, strict=True)]


def _error_of(call: Callable[[Any], None], place: Any) -> Exception | None:
    try:
        call(place)
    except Exception as error:
        return error
    return None


def test_split_data_end_the_run_before_its_first_step_on_all_ranks(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Batches of Subset: 1\d of 16 compared samples .* ranks 0 and 1"):
        started(f"file://{tmp_path}/run", SPLIT["Subset"], 1, "one")


def test_with_the_whole_dataset_on_each_rank_an_epoch_has_all_samples(tmp_path: Path):
    """The cure that the refusal of split data names."""
    found = started(f"file://{tmp_path}/run", [range(100), range(100)], 25, "one")

    assert sorted(number for step in found for number in step) == list(range(100))


# --- data that were exchanged between two starts ---

EXCHANGED = {
    "other content": (Numbers(48), Numbers(48, first=1000)),
    "another order": (Subset(range(48), range(48)), Subset(range(48), [*range(24, 48), *range(24)])),  # type: ignore[arg-type]
    "another stream": (hugging_face(), hugging_face().map(lambda row: {"n": row["n"] + 1})),
}


@pytest.mark.parametrize(("before", "after"), list(EXCHANGED.values()), ids=list(EXCHANGED))
def test_data_that_were_exchanged_since_the_save_are_refused(before: Any, after: Any):
    one, two = (proven(Batches(source, global_batch=4, rank=0, world_size=1)) for source in (before, after))

    with pytest.raises(StateMismatchError, match=r"1\d of 16 compared samples have other content.*skip"):
        two.load_state_dict(one.state_dict())


def test_the_folder_of_a_file_may_differ_from_start_to_start_and_its_name_may_not():
    first, moved, other = (
        proven(Batches([{"path": form.format(i)} for i in range(48)], global_batch=4, rank=0, world_size=1))  # type: ignore[arg-type]
        for form in ("/one/{}.wav", "/other/cache/{}.wav", "/one/{}.mp3")
    )

    moved.load_state_dict(first.state_dict())
    with pytest.raises(StateMismatchError, match=r"1\d of 16 compared samples .*such as the path of a cache"):
        other.load_state_dict(first.state_dict())


def test_a_slow_start_counts_what_it_has_read_and_keeps_what_the_checkpoint_knew(monkeypatch: pytest.MonkeyPatch):
    saved = proven(Batches(Numbers(), global_batch=4, rank=0, world_size=1)).state_dict()
    monkeypatch.setattr("raycheck.data.source_proof.READ_FOR_S", 0.0)  # one sample
    same, other = (
        proven(Batches(source, global_batch=4, rank=0, world_size=1)) for source in (Numbers(), Numbers(first=1000))
    )

    with pytest.raises(StateMismatchError, match=r" 1 of 1 compared samples"):
        other.load_state_dict(saved)
    same.load_state_dict(saved)
    assert len(saved["checksums"]) == MAX_SAMPLES
    assert same.state_dict()["checksums"] == saved["checksums"]


def test_both_cures_for_exchanged_data_work(tmp_path: Path):
    def run(name: str, source: Any, steps: int, owner: str, **options: Any) -> list[list[int]]:
        return started(f"file://{tmp_path}/{name}", [source], steps, owner, shuffle=False, **options)

    for name in ("begin", "go on"):
        run(name, Numbers(), 2, "one")
        with pytest.raises(StateMismatchError, match=r"data: .*restore\(skip=.*prove=False"):
            run(name, Numbers(first=1000), 1, "two")

    new = range(1000, 1048)
    assert run("begin", Numbers(first=1000), 2, "three", skip=["data"]) == [[*new[:4]], [*new[4:8]]]
    assert run("begin", Numbers(first=1000), 1, "four", skip=["data"]) == [[*new[8:12]]]
    assert run("go on", Numbers(first=1000), 1, "three", prove=False) == [[*new[8:12]]]
    assert run("go on", Numbers(first=1000), 1, "four") == [[*new[12:16]]]


def test_a_checkpoint_without_checksums_is_restored():
    one = Batches(Numbers(), global_batch=4, rank=0, world_size=1)
    two = proven(Batches(Numbers(first=5), global_batch=4, rank=0, world_size=1))
    assert "checksums" not in one.state_dict()

    two.load_state_dict(one.state_dict())

    assert two.state_dict()["checksums"]


# --- what a proof leaves alone ---


class Augmented(Numbers):
    """Adds random numbers of every kind to its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), random.random(), torch.rand(1), np.random.rand(), self.own.random()  # noqa: NPY002


class Unrepeatable(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, random.SystemRandom().random()


def random_states() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002


def test_random_augmentation_is_compared_among_ranks_and_not_with_a_checkpoint():
    proof = together([Augmented(), Augmented()])

    assert proof is not None
    assert (len(proof.samples), proof.lasting, proof.state()) == (MAX_SAMPLES, frozenset(), [])
    with pytest.raises(ConfigError, match="not the same on ranks 0 and 1"):
        together([Subset(Augmented(), range(rank, 48, 2)) for rank in range(2)])


def test_a_sample_that_differs_from_itself_is_not_compared_and_is_named():
    proof = together([Unrepeatable(), Unrepeatable()])

    assert proof is not None
    assert proof.samples == {}
    assert "differs from itself" in proof.said[0]


def once() -> Iterator[int]:
    yield from range(48)


class OneShot(IterableDataset[int]):
    """Reads a generator, which cannot be read twice."""

    def __init__(self) -> None:
        self.rows = once()

    def __iter__(self) -> Iterator[int]:
        return self.rows


class Lines(IterableDataset[int]):
    """Reads what was opened before, and writes down what it has read."""

    def __init__(self, rows: Any, log: Any = None) -> None:
        self.rows, self.log = rows, log

    def __iter__(self) -> Iterator[int]:
        for line in self.rows:
            if self.log is not None:
                self.log.write(line)
                self.log.flush()
            yield int(line)


NUMBERS = "".join(f"{number:99}\n" for number in range(400))
"""More than a file object reads ahead."""


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_proof_moves_no_file_that_a_stream_holds_open_and_writes_none(mode: str, tmp_path: Path):
    (tmp_path / "numbers").write_text(NUMBERS)
    with (tmp_path / "numbers").open(mode) as rows, (tmp_path / "log").open("w") as log:
        for _ in range(8):
            rows.readline()
        source = Lines(rows, log)
        batches = proven(Batches(source, global_batch=4, rank=0, world_size=1))

        assert (tmp_path / "log").read_text() == ""
        assert next(batches.loader()).tolist() == [8, 9, 10, 11]
        rest = [number for batch in batches.loader() for number in batch.tolist()]
        assert rest == list(range(12, 400))
        assert [int(line) for line in (tmp_path / "log").read_text().splitlines()] == list(range(8, 400))
    proof = batches.state_dict()["checksums"]
    assert len(proof) == MAX_SAMPLES


def test_a_proof_takes_nothing_out_of_a_pipe_that_a_stream_holds_open():
    receive, send = os.pipe()
    with os.fdopen(send, "w") as pipe:
        pipe.write(NUMBERS)
    with os.fdopen(receive) as rows:
        batches = Batches(Lines(rows), global_batch=4, rank=0, world_size=1)
        proof = batches.prove()

        assert proof is not None
        assert (proof.is_exact, proof.samples) == (None, {})
        assert next(batches.loader()).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [Numbers, Augmented, Unrepeatable, Counting, OneShot, hugging_face])
def test_a_proof_changes_neither_the_source_nor_the_random_state(make: Callable[[], Any]):
    source, before = make(), random_states()
    own = source.own.bit_generator.state if isinstance(source, Augmented) else None

    proven(Batches(source, global_batch=4, shuffle=False, rank=0, world_size=1))

    assert random_states() == before
    assert getattr(source, "asked", 0) == getattr(source, "at", 0) == 0
    assert own is None or source.own.bit_generator.state == own
    first = next(iter(source)) if isinstance(source, IterableDataset | datasets.IterableDataset) else source[0]
    assert first in (0, {"n": 0}) or first[0] == 0


def test_without_a_proof_nothing_is_read():
    batches = Batches(Numbers(), global_batch=4, rank=0, world_size=1, prove=False)

    assert batches.prove() is None
    assert "checksums" not in batches.state_dict()


def test_a_source_that_cannot_be_read_on_trial_is_left_to_the_training():
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise OSError("not here")

    proof = Batches(Broken(), global_batch=4, rank=0, world_size=1).prove()

    assert proof is not None
    assert proof.said == ("its samples could not be compared: OSError: not here",)


# --- wrappers that made a wrong run quiet ---


@pytest.mark.parametrize("wrap", [raycheck.PerRank, raycheck.RankZero])
def test_batches_in_a_wrapper_are_refused(wrap: Callable[[Any], Any]):
    batches = Batches(range(48), global_batch=4, rank=0, world_size=1)

    with pytest.raises(ConfigError, match=rf"{wrap.__name__}\(Batches\).*Give the Batches itself"):
        ProgressCounter([wrap(batches)])


def test_a_wrapper_around_a_loader_is_refused():
    loader = StatefulDataLoader(range(48), batch_size=4)  # type: ignore[arg-type]

    for wrapped in (raycheck.PerRank(loader), raycheck.RankZero(loader)):
        with pytest.raises(ConfigError, match=r"state\['data'\] is .* of a loader.*Use the loader itself"):
            TrainState({"data": wrapped}, rank=0, world_size=2)


# --- torchdata's loaders ---


class Rows(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(48))


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def torchdata_loader(kind: str) -> Any:
    one, numbers = seeded(), Numbers(20)
    options: dict[str, Any] = {
        "in order": {},
        "one generator": {"shuffle": True, "generator": one},
        "one generator, given twice": {"sampler": RandomSampler(numbers, generator=one), "generator": one},
        "torch's sampler": {"sampler": torch.utils.data.RandomSampler(numbers, generator=one)},
        "torch's sampler, global": {"sampler": torch.utils.data.RandomSampler(numbers)},
        "weights": {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 20, 20, generator=one)},
        "two generators": {"sampler": RandomSampler(numbers, generator=one), "generator": seeded(9)},
        "shares": {"sampler": torch.utils.data.DistributedSampler(numbers, num_replicas=2, rank=0), "generator": one},
    }[kind]
    return StatefulDataLoader(numbers, batch_size=2, **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one generator", "draw from one generator"),
        ("one generator, given twice", "draw from one generator"),
        ("torch's sampler", "RandomSampler.*gives another order each time"),
        ("torch's sampler, global", "RandomSampler.*gives another order each time"),
        ("weights", "WeightedRandomSampler.*gives another order each time"),
    ],
)
def test_a_loader_of_torchdata_whose_order_would_change_is_refused(kind: str, message: str):
    with pytest.raises(ConfigError, match=rf"state\['data'\].*{message}.*RandomSampler\(dataset, generator=...\)"):
        check_loaders({"data": torchdata_loader(kind)}, rank=0)


@pytest.mark.parametrize("kind", ["in order", "two generators", "shares"])
def test_a_loader_of_torchdata_that_passes_has_one_order_in_three_lives(kind: str):
    """The cure that a refusal names is among them."""

    def run(lives: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        state: dict[str, Any] | None = None
        for steps in lives:
            loader = torchdata_loader(kind)
            check_loaders({"data": loader}, rank=0)
            if state is not None:
                loader.load_state_dict(state)
            end = len(found) + steps
            while len(found) < end:
                for batch in loader:
                    found.append(batch.tolist())
                    if len(found) == end:
                        break
            state = pickle.loads(pickle.dumps(loader.state_dict()))
        return found

    expected = run([27])
    for lives in ([4, 23], [10, 17], [3, 9, 15]):
        assert run(lives) == expected


def test_a_stream_without_a_state_is_refused_in_a_loader_of_torchdata():
    with pytest.raises(ConfigError, match=r"Rows has no state_dict.*raycheck\.Batches\(dataset"):
        check_loaders({"data": StatefulDataLoader(Rows(), batch_size=4)}, rank=0)


def test_a_stream_of_hugging_face_whose_state_misleads_is_refused_in_a_loader_of_torchdata(
    monkeypatch: pytest.MonkeyPatch,
):
    mapped, shuffled = (
        StatefulDataLoader(HUGGING_FACE[kind](hugging_face()), batch_size=4) for kind in ("map", "shuffle")
    )
    monkeypatch.setattr(datasets, "__version__", "5.1.0")
    check_loaders({"data": mapped}, rank=0)
    with pytest.raises(ConfigError, match=r"leaves out its buffer.*raycheck\.Batches\(dataset"):
        check_loaders({"data": shuffled}, rank=0)

    monkeypatch.setattr(datasets, "__version__", "4.7.0")
    with pytest.raises(ConfigError, match=r"datasets 4\.7\.0 does not restore.* 5\.1 does.*raycheck\.Batches\(dataset"):
        check_loaders({"data": mapped}, rank=0)


class Endless(Sampler[int]):
    """Has no length, as an endless sampler has none."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(20))


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_sampler_without_a_length_is_checked_in_a_loader_of_torchdata(batch_size: int | None):
    check_loaders({"data": StatefulDataLoader(Numbers(20), batch_size=batch_size, sampler=Endless())}, rank=0)


def test_workers_over_a_stream_are_warned_of_in_a_loader_of_torchdata(caplog: pytest.LogCaptureFixture):
    check_loaders({"data": StatefulDataLoader(Counting(), batch_size=4)}, rank=0)
    assert not caplog.records

    check_loaders({"data": StatefulDataLoader(Counting(), batch_size=4, num_workers=1)}, rank=0)
    assert "an epoch's last batch; use num_workers=0" in caplog.text
