"""Inside torchtitan: its own trainer goes on where it was killed, and its data is shared among other numbers of ranks."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, StateMismatchError
from tests.support.frameworks.torchtitan_on_cpu import make_assets
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.samples.documents import PACKAGE, blocks

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan and torch warn

SCRIPT = Path(__file__).parents[1] / "support/frameworks/torchtitan_on_cpu.py"
SEQUENCE = 16


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_assets(tmp_path_factory.mktemp("assets"))


# --- the trainer itself, started by torchrun ---


def run(assets: tuple[Path, Path], uri: str, losses: Path, *more: str, ranks: int, kill: int = -1) -> int:
    """Run torchtitan's train entry under torchrun. Returns its exit status."""
    tokens, texts = assets
    environment = {
        **os.environ,
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(losses.parent / "datasets"),
        "OMP_NUM_THREADS": "1",
        "RAYCHECK_TEST_LOSSES": str(losses),
        "RAYCHECK_TEST_KILL": str(kill),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {
        "--hf_assets_path": tokens,
        "--dataloader.dataset_path": texts,
        "--dump_folder": losses.parent / "outputs",
        "--training.seq_len": 32,
        "--training.local_batch_size": 2,
        "--training.global_batch_size": 4,
        "--training.steps": 8,
        "--debug.seed": 1,
        "--checkpoint.folder": uri,
    }
    options = [str(word) for pair in given.items() for word in pair]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}"]
    command = [*launch, str(SCRIPT), "--module", "llama3", "--config", "debug_raycheck", *options, *more]
    done = subprocess.run(
        command, check=False, env=environment, cwd=losses.parent, timeout=200, capture_output=True, text=True
    )
    if kill < 0:
        assert not done.returncode, done.stderr[-4000:]
    return done.returncode


def read(losses: Path) -> list[list[Any]]:
    return [json.loads(line) for line in losses.read_text().splitlines()]


def weights(uri: str, step: int, folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint's model, as stock torch reads them. folder: a new one, for files."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    raycheck.catalog.download(uri, folder, at=step)
    dcp_to_torch_save(folder / "train", folder / "all.pt")
    return dict(torch.load(folder / "all.pt", weights_only=False)["model"])


@pytest.mark.slow
def test_a_killed_trainer_goes_on_to_the_last_bit_and_at_half_the_ranks(
    assets: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, hurt, fewer = (f"file://{tmp_path}/{name}" for name in ("whole", "hurt", "fewer"))
    losses = tmp_path / "whole.json"
    run(assets, whole, losses, ranks=2)
    first = tmp_path / "hurt.json"
    assert run(assets, hurt, first, ranks=2, kill=5)
    subprocess.run(["cp", "-r", str(tmp_path / "hurt"), str(tmp_path / "fewer")], check=True)
    again, other = tmp_path / "again.json", tmp_path / "other.json"
    run(assets, hurt, again, ranks=2)
    run(assets, fewer, other, ranks=1)

    assert len(read(losses)) == 8
    assert [step for step, _ in read(first)] == [1, 2, 3, 4, 5]
    restored = 8 - len(read(again))
    assert 2 <= restored <= 4
    assert read(first) == read(losses)[:5]
    assert read(again) == read(losses)[restored:]
    kept, expected = weights(hurt, 8, tmp_path / "x"), weights(whole, 8, tmp_path / "y")
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert [step for step, _ in read(other)] == list(range(restored + 1, 9))
    back = tmp_path / "back.json"
    run(assets, fewer, back, "--checkpoint.load_step", str(restored), ranks=1)
    assert read(back) == read(other)
    assert assert_invariants(open_store(fewer)).entry(assert_invariants(open_store(fewer)).head).step == 8


@pytest.mark.slow
def test_a_pipeline_of_several_parts_on_a_rank_goes_on_and_its_model_goes_into_one_without(
    assets: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYCHECK_TEST_LAYERS", "6")
    pipeline = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_layers_per_stage", "2"]
    uri = f"file://{tmp_path}/run"
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    whole = tmp_path / "whole.json"
    run(assets, f"file://{tmp_path}/whole", whole, *pipeline, ranks=2)
    assert run(assets, uri, first, *pipeline, ranks=2, kill=5)
    run(assets, uri, again, *pipeline, ranks=2)
    alone = tmp_path / "alone.json"
    run(assets, f"file://{tmp_path}/alone", alone, "--checkpoint.initial_load_path", uri, ranks=1)

    kept, expected = weights(uri, 8, tmp_path / "x"), weights(f"file://{tmp_path}/whole", 8, tmp_path / "y")
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert len(read(alone)) == 8


# --- its data, without the trainer ---


class Letters:
    """Is a tokenizer with one token per word."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str, *, add_bos: bool, add_eos: bool) -> list[int]:
        number = int(text.split(maxsplit=1)[0]) * 1000
        return [number + place for place in range(len(text.split()) + add_bos + add_eos)]


def loader_of(assets: tuple[Path, Path], rank: int, size: int, **options: Any) -> Any:
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    config = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(assets[1]), **options)
    loader = config.build(dp_world_size=size, dp_rank=rank, tokenizer=Letters(), seq_len=SEQUENCE, local_batch_size=1)
    return loader, config


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """What torchtitan lacks on this machine is given to it for this module."""
    from tests.support.frameworks.torchtitan_on_cpu import make_run_on_cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        make_run_on_cpu()
        yield


def positions_of(assets: tuple[Path, Path], saved: list[Any], size: int) -> list[tuple[Any, Any]]:
    """Returns each rank's loader and its position, gone on from what was saved."""
    from raycheck.frameworks.torchtitan.position import LoaderPosition
    from raycheck.frameworks.torchtitan.resplit import Resplit

    found = []
    for rank in range(size):
        loader, config = loader_of(assets, rank, size)
        position = LoaderPosition(loader, Resplit(loader, config))
        position.state_dict()  # as a check of the state before a restore does
        if saved:
            position.check(saved)
            position.go()
        found.append((loader, position))
    return found


def take(ranks: list[tuple[Any, Any]], steps: int) -> tuple[list[int], list[Any]]:
    """Returns the input tokens of so many steps of all ranks, and their positions then."""
    tokens: list[int] = []
    for loader, _ in ranks:
        batches = iter(loader)
        for _ in range(steps):
            inputs, _labels = next(batches)
            assert inputs["positions"].min() >= 0
            assert inputs["positions"].max() < SEQUENCE * 4
            tokens += inputs["input"].flatten().tolist()
    return tokens, [json.loads(json.dumps(position.state_dict(), default=str)) for _, position in ranks]


def epoch_of(assets: tuple[Path, Path]) -> Counter[int]:
    """Returns the input tokens of all documents."""
    lines = (assets[1] / "data.json").read_text().splitlines()
    encode = Letters().encode
    return Counter(
        token for line in lines for token in encode(json.loads(line)["text"], add_bos=True, add_eos=True)[:-1]
    )


def test_what_is_left_of_an_epoch_is_shared_among_other_numbers_of_ranks(assets: tuple[Path, Path]) -> None:
    """3 ranks, then 2, then 4, then 4 again after a restart, then 1 to the end: no token twice, none left out."""
    seen: Counter[int] = Counter()
    saved: list[Any] = []
    for size, steps in ((3, 5), (2, 4), (4, 3), (4, 2)):
        tokens, saved = take(positions_of(assets, saved, size), steps)
        seen.update(tokens)
    ((loader, position),) = positions_of(assets, saved, 1)
    batches = iter(loader)
    while loader.dataset._epoch == 0:
        inputs, _ = next(batches)
        seen.update(inputs["input"].flatten().tolist())

    every = epoch_of(assets)
    again = {token: count for token, count in seen.items() if count > every[token]}
    assert set(every) == set(seen)
    assert sum(again.values()) - len(again) <= SEQUENCE  # the sequence that reaches into the next epoch
    assert position.state_dict()["base"] is None


def test_the_same_number_of_ranks_goes_on_with_the_next_token(assets: tuple[Path, Path]) -> None:
    straight, _ = take(positions_of(assets, [], 2)[:1], 9)

    first, saved = take(positions_of(assets, [], 2), 4)
    again, _ = take(positions_of(assets, saved, 2)[:1], 5)

    assert first[: 4 * SEQUENCE] + again == straight


def test_data_that_cannot_be_shared_is_refused_at_another_size(assets: tuple[Path, Path]) -> None:
    _, saved = take(positions_of(assets, [], 2), 2)
    saved[0]["state"]["fetcher_state"]["dataset_iter_state"] = None
    saved[0]["state"]["dataset_state"] = {**saved[1]["state"]["dataset_state"], "epoch": 7}

    with pytest.raises(StateMismatchError, match=r"in epochs \[0, 7\] of their parts"):
        positions_of(assets, saved, 1)
    with pytest.raises(StateMismatchError, match=r"positions of data-parallel ranks \[0\]"):
        positions_of(assets, saved[:1], 2)


# --- settings, and parts of a pipeline ---


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"load_only": True}, "load_only=True.*open_run"),
        ({"last_save_in_hf": True}, "last_save_in_hf=True.*complete"),
        ({"initial_load_path": "/x", "initial_load_model_only": False}, "initial_load_model_only=False.*resume"),
        ({"settings": raycheck.SaveSettings(every_steps=3)}, "every_steps=3: set `interval` instead"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(options: dict[str, Any], cure: str) -> None:
    config = raycheck.torchtitan.CheckpointManager.Config

    with pytest.raises(ConfigError, match=cure):
        config(enable=True, **options)
    config(**options)  # not enabled: nothing is asked of it


def test_settings_are_mapped() -> None:
    from raycheck.frameworks.torchtitan.manager import _settings_of

    config = raycheck.torchtitan.CheckpointManager.Config(
        enable=True,
        interval=7,
        keep_latest_k=1,
        enable_first_step_checkpoint=True,
        settings=raycheck.SaveSettings(every_s=60, at_steps=[5]),
    )

    settings = _settings_of(config)
    assert (settings.every_steps, settings.keep_last, settings.at_steps) == (7, 1, (1, 5))
    assert settings.every_s == 60
    assert _settings_of(type(config)(keep_latest_k=0)).keep_last is None


def test_a_disabled_manager_does_nothing() -> None:
    config = raycheck.torchtitan.CheckpointManager.Config(enable=False)
    manager = config.build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )

    assert not manager.load()
    assert not manager.save(1)
    manager.maybe_wait_for_staging()
    manager.close()


def test_parts_of_a_pipeline_are_one_model_with_its_own_names() -> None:
    from raycheck.frameworks.torchtitan.parts import whole

    def part(*layers: int, **more: nn.Module) -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleDict({str(layer): nn.Linear(2, 2) for layer in layers})
        for name, module in more.items():
            model.add_module(name, module)
        return model

    first, last = part(0, 1, embeddings=nn.Embedding(3, 2)), part(4, 5, head=nn.Linear(2, 3))
    model = whole([first, last])

    names = {name for part in (first, last) for name, _ in part.named_parameters()}
    assert set(model.state_dict()) == names
    assert dict(model.named_parameters())["layers.4.weight"] is last.layers["4"].weight
    assert whole([first]) is first
    with pytest.raises(ConfigError, match=r"two parts of the pipeline hold layers\.1"):
        whole([first, part(1)])


def test_a_step_of_another_number_of_tokens_is_refused_and_tokens_are_counted_over_all_ranks() -> None:
    from raycheck.frameworks.torchtitan.parts import Counters

    def trainer(ranks: int, accumulate: int) -> Any:
        mesh = SimpleNamespace(size=lambda: ranks)
        counted = {"step": 4, "ntokens_seen": 1000}
        return SimpleNamespace(
            config=SimpleNamespace(training=SimpleNamespace(local_batch_size=2, seq_len=8)),
            gradient_accumulation_steps=accumulate,
            parallel_dims=SimpleNamespace(get_optional_mesh=lambda name: mesh),
            state_dict=lambda: dict(counted),
            load_state_dict=counted.update,
            counted=counted,
        )

    saved = Counters(trainer(4, 1)).state_dict()
    alone = trainer(1, 4)
    Counters(alone).check_state_dict(saved)
    Counters(alone).load_state_dict(saved)

    assert saved["ntokens_seen"] == 4000
    assert alone.counted == {"step": 4, "ntokens_seen": 4000}
    with pytest.raises(StateMismatchError, match=r"took 64 tokens.*would take 32.*global_batch_size"):
        Counters(trainer(2, 1)).check_state_dict(saved)


# --- Hugging Face's format ---


def debug_model(assets: Path | None = None, *, seed: int = 0) -> tuple[nn.Module, Any]:
    """Returns torchtitan's debug model with random weights, and its adapter to Hugging Face's names."""
    from tests.support.frameworks.torchtitan_on_cpu import debug_model as debug_config

    job = debug_config()
    job.training.seq_len = 32
    spec = job.model_spec
    spec.model.update_from_config(config=job)
    with torch.device("meta"):
        model = spec.model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model, spec.state_dict_adapter(spec.model, None if assets is None else str(assets))


def hugging_face_folder(folder: Path, model: nn.Module, adapter: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    found = adapter.to_hf({name: value.detach() for name, value in model.state_dict().items()})
    save_file(
        {name: value.to(torch.bfloat16).contiguous() for name, value in found.items()}, folder / "model.safetensors"
    )
    return folder


def save_model(uri: str, model: nn.Module) -> None:
    with raycheck.Checkpointer({"model": model}, group=group_of(uri)[0]) as ckpt:
        ckpt.restore()
        ckpt.end_step()


def load_hugging_face(path: str, model: nn.Module, adapter: Any, **options: Any) -> None:
    from raycheck.frameworks.torchtitan.first_weights import load_first_weights

    config = raycheck.torchtitan.CheckpointManager.Config(
        enable=True, initial_load_in_hf=True, initial_load_path=path, **options
    )
    assert load_first_weights(config, model, [model], adapter)


@pytest.mark.parametrize("place", ["folder", "run", "bucket"])
def test_first_weights_come_from_hugging_face_files_in_a_folder_or_imported_into_a_run(
    place: str, tmp_path: Path, s3: str
) -> None:
    source, adapter = debug_model()
    folder = hugging_face_folder(tmp_path / "files", source, adapter)
    path = {"folder": str(folder), "run": f"file://{tmp_path}/run", "bucket": join_uri(s3, uuid4().hex)}[place]
    if place != "folder":
        raycheck.catalog.import_checkpoint(str(folder), path)
    model, adapter = debug_model(seed=1)

    load_hugging_face(path, model, adapter)

    expected = dict(source.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name].to(torch.bfloat16).float()), name


def test_hugging_face_files_that_cannot_be_read_are_refused_with_the_way_to_read_them(tmp_path: Path, s3: str) -> None:
    model, adapter = debug_model()
    own = f"file://{tmp_path}/own"
    save_model(own, model)
    bucket = join_uri(s3, uuid4().hex)

    with pytest.raises(ConfigError, match=r"no checkpoint of a raycheck run at s3://.* by raycheck import"):
        load_hugging_face(bucket, model, adapter)
    with pytest.raises(ConfigError, match=r"has no model\.lm_head\.weight|has no model\.model\.embed"):
        load_hugging_face(own, model, adapter)
    with pytest.raises(ConfigError, match=r"initial_load_in_hf: '/nowhere' is not a folder"):
        load_hugging_face("/nowhere", model, adapter)
    with pytest.raises(ConfigError, match=r"no state_dict_adapter"):
        load_hugging_face("/nowhere", model, None)
    with pytest.raises(ValueError, match="not supported with a remote"):
        load_hugging_face(bucket, model, adapter, initial_load_in_hf_quantized=True)


def test_the_guides_way_from_a_run_to_hugging_face_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from tests.support.frameworks.torchtitan_on_cpu import debug_model as debug_config

    monkeypatch.chdir(tmp_path)
    source, adapter = debug_model()
    save_model(f"file://{tmp_path}/runs/my-run", source)
    (recipe,) = [one.text for one in blocks(PACKAGE / "docs/torchtitan.md") if "save_torch_state_dict" in one.text]
    names = {"os": os, "torch": torch, "raycheck": raycheck, "huggingface_hub": huggingface_hub}

    exec(recipe.replace("s3://bucket", f"file://{tmp_path}"), {**names, "llama3_debugmodel": debug_config})

    model, adapter = debug_model(seed=1)
    load_hugging_face(str(tmp_path / "llama3"), model, adapter)
    expected = dict(source.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@pytest.mark.slow
def test_sharded_ranks_begin_alike_from_hugging_face_files_and_from_a_run_of_them(
    assets: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = hugging_face_folder(tmp_path / "files", *debug_model(seed=3))
    imported = f"file://{tmp_path}/imported"
    raycheck.catalog.import_checkpoint(str(folder), imported)
    fresh = ["--training.steps", "2", "--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path"]
    losses = {name: tmp_path / f"{name}.json" for name in ("folder", "run", "random")}

    run(assets, f"file://{tmp_path}/one", losses["folder"], *fresh, str(folder), ranks=2)
    run(assets, f"file://{tmp_path}/two", losses["run"], *fresh, imported, ranks=2)
    run(assets, f"file://{tmp_path}/three", losses["random"], "--training.steps", "2", ranks=2)

    assert read(losses["run"]) == read(losses["folder"]) != read(losses["random"])
