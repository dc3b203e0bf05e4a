"""Imports of what other programs have written, restored into live objects and compared to the last bit.

What is not imported, such as the state of an optimizer that only numbers its parameters, is named.
"""

import ast
import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from raycheck.bucket.store import open_store
from raycheck.bucket.store.local import LocalStore
from raycheck.catalog.importing import entries, new_checkpoint, torch_file
from raycheck.catalog.importing.import_checkpoint import import_checkpoint
from raycheck.errors import ConfigError, CorruptError, RaycheckError, StoreError
from raycheck.run import export_hf, open_run
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.command_line import raycheck
from tests.support.processes.gloo_ranks import Ranks, mesh_of
from tests.support.samples import hf_models


class Net(torch.nn.Module):
    """Has parameters of several shapes, buffers, a tied weight and a frozen one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.last = torch.nn.Linear(8, 4)
        self.tied = torch.nn.Linear(8, 4)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) + self.tied(self.first(x))


def trained(
    seed: int = 0, *, steps: int = 3, split: bool = False, named: bool = False
) -> tuple[Net, torch.optim.AdamW]:
    net = Net(seed)
    groups: Any = net.named_parameters() if named else net.parameters()
    if split:
        named = dict(net.named_parameters())
        groups = [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        net(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def flat(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: item for key, inner in value.items() for name, item in flat(inner, f"{at}.{key}").items()}
    if isinstance(value, list | tuple):
        return {name: item for key, inner in enumerate(value) for name, item in flat(inner, f"{at}.{key}").items()}
    return {at: value}


def assert_equal(found: Any, expected: Any) -> None:
    here, there = flat(found), flat(expected)
    assert here.keys() == there.keys()
    for name, value in there.items():
        if isinstance(value, torch.Tensor):
            assert here[name].dtype == value.dtype, name
            assert torch.equal(here[name], value), name
        else:
            assert here[name] == value, name


def checked(uri: str) -> Any:
    """Returns the head of an imported run, which must be whole and keep every invariant."""
    run = open_run(uri)
    assert run.head is not None
    assert {finding.problem for finding in run.head.verify()} == {""}
    assert_invariants(run._store, before=run._latest)
    return run.head


def assert_restores(uri: str, net: Net, optimizer: torch.optim.Optimizer, **kind: bool) -> None:
    live, its_optimizer = trained(9, steps=1, **kind)

    checked(uri).restore(into={"model": live, "optimizer": its_optimizer})

    assert_equal(live.state_dict(), net.state_dict())
    assert_equal(its_optimizer.state_dict(), optimizer.state_dict())


def assert_has_weights(uri: str, net: Net) -> None:
    """The weights of an imported run are these to the last bit, and it has nothing else."""
    live = Net(9)

    head = checked(uri)
    head.restore(into={"model": live})

    assert_equal(live.state_dict(), net.state_dict())
    assert [name for name in head.details(values=True).values if name not in ("assets", "progress")] == ["model"]


def test_the_weights_of_a_dict_of_state_dicts_come_and_all_else_is_left_out_by_name(tmp_path: Path) -> None:
    net, optimizer = trained()
    states = {
        "model_state_dict": net.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10).state_dict(),
        "no name of an entry": 1,
        "global_step": 30,
        "epoch": 2,
    }
    torch.save(states, tmp_path / "last.pt")

    done = import_checkpoint(str(tmp_path / "last.pt"), f"file://{tmp_path}/runs/new")

    assert (done.step, done.kind, done.is_new) == (30, "torch", True)
    assert {e.name: e.kind for e in done.entries} == {"model": "module"}
    assert done.left_out == ("optimizer", "scheduler", "no name of an entry", "global_step", "epoch")
    assert done.notes == (f"{entries.WEIGHTS_ALONE}: optimizers start with an empty state",)
    assert_has_weights(done.uri, net)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["by name", "by name in groups", "flat", "numbers next to names"])
def test_a_directory_of_stock_dcp_is_imported_whole(tmp_path: Path, form: str) -> None:
    kind = {"split": form == "by name in groups", "named": form == "numbers next to names"}
    net, optimizer = trained(**kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    own = optimizer.state_dict() if kind["named"] else get_optimizer_state_dict(net, optimizer, options=options)
    state = {"model": get_model_state_dict(net), "optimizer": own, "scheduler": scheduler.state_dict(), "step": 12}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    done = import_checkpoint(str(tmp_path / "dcp"), f"file://{tmp_path}/runs/new")

    assert (done.kind, done.step, done.left_out) == ("dcp", 12, ())
    assert {e.name: e.kind for e in done.entries} == {
        "model": "module", "optimizer": "optimizer", "scheduler": "object", "step": "value"
    }  # fmt: skip
    assert_restores(done.uri, net, optimizer, **kind)
    again = torch.optim.lr_scheduler.StepLR(trained(1, steps=0)[1], 99)
    checked(done.uri).restore(into={"scheduler": again})
    assert_equal(again.state_dict(), scheduler.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_of_dcp_whose_parameters_have_numbers_is_left_out_by_name_and_never_guessed(
    tmp_path: Path,
) -> None:
    net, optimizer = trained()
    state = {"model": net.state_dict(), "its_optimizer": optimizer.state_dict(), "step": 12}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    dcp.save({"alone": optimizer.state_dict()}, checkpoint_id=str(tmp_path / "alone"), no_dist=True)
    dest = f"file://{tmp_path}/runs/new"

    with pytest.raises(ConfigError, match=r"its_optimizer cannot be imported: .* numbers and no names"):
        import_checkpoint(str(tmp_path / "dcp"), dest, entries={"model": "model", "its_optimizer": "its_optimizer"})
    with pytest.raises(ConfigError, match=r"nothing to import: alone is left out: .* numbers and no names"):
        import_checkpoint(str(tmp_path / "alone"), dest, entries=None)
    assert not (tmp_path / "runs/new/latest").exists()
    done = import_checkpoint(str(tmp_path / "dcp"), dest)

    assert done.left_out == ("its_optimizer",)
    assert done.notes == (f"its_optimizer is left out: {entries.NUMBERS_ALONE}",)
    assert [entry.name for entry in done.entries] == ["model", "step"]
    live = Net(9)
    checked(dest).restore(into={"model": live})
    assert_equal(live.state_dict(), net.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_of_dcp_with_one_name_for_two_parameters_is_refused(tmp_path: Path) -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = ["w"] * len(state["param_groups"][0]["params"])
    dcp.save({"optimizer": state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    with pytest.raises(CorruptError, match="optimizer: two of its parameters have one name"):
        import_checkpoint(str(tmp_path / "dcp"), f"file://{tmp_path}/runs/new")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_that_only_pickle_could_make_is_refused_by_name_or_left_out(tmp_path: Path) -> None:
    net, _ = trained()
    state = {"model": net.state_dict(), "seen": Path("x")}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    dest = f"file://{tmp_path}/runs/new"

    with pytest.raises(ConfigError, match=r"seen holds objects of other kinds .*skip_values=True"):
        import_checkpoint(str(tmp_path / "dcp"), dest)
    assert not (tmp_path / "runs/new/latest").exists()
    done = import_checkpoint(str(tmp_path / "dcp"), dest, skip_values=True)

    assert done.left_out == ("seen",)
    checked(dest)


def test_tensors_are_cut_into_shards_that_memory_can_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.arange(1000.0).view(100, 10), "b": torch.arange(7)}, tmp_path / "model.pt")
    monkeypatch.setattr(new_checkpoint, "SHARD_BYTES", 500)
    dest = f"file://{tmp_path}/runs/new"

    import_checkpoint(str(tmp_path / "model.pt"), dest)

    head = checked(dest)
    assert len(head._stored.read_manifest().components[0].shards) > 7
    live = {"w": torch.zeros(100, 10), "b": torch.zeros(7, dtype=torch.int64)}
    module = torch.nn.Module()
    module.register_buffer("w", live["w"])
    module.register_buffer("b", live["b"])
    head.restore(into={"model": module})
    assert torch.equal(live["w"], torch.arange(1000.0).view(100, 10))
    assert torch.equal(live["b"], torch.arange(7))


def test_names_lose_one_module_of_ddp_and_a_note_says_so(tmp_path: Path) -> None:
    given = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})
    own, wrapped = given.state_dict(), {f"module.{name}": item for name, item in given.state_dict().items()}
    compiled = {f"_orig_mod.{name}": item for name, item in wrapped.items()}
    for number, state in enumerate((own, wrapped, compiled)):
        torch.save(state, tmp_path / f"{number}.pt")

    done = [import_checkpoint(f"{tmp_path}/{number}.pt", f"file://{tmp_path}/{number}") for number in range(3)]

    assert ["without it, as 'weight'" in "".join(item.notes) for item in done] == [True, False, False]
    assert ["without it, as 'module.weight'" in "".join(item.notes) for item in done] == [False, True, True]
    for item, into in zip(
        done,
        (torch.nn.Linear(3, 2), *(torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)}) for _ in "ab")),
        strict=True,
    ):
        checked(item.uri).restore(into={"model": into})
        assert [torch.equal(*pair) for pair in zip(into.state_dict().values(), own.values(), strict=True)] == [
            True,
            True,
        ]
    with pytest.raises(RaycheckError, match="weight"):  # never quietly another model
        checked(done[0].uri).restore(into={"model": torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})})


@pytest.mark.parametrize("has_model", [True, False])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_names_that_begin_with_module_are_kept_on_request_in_the_optimizer_too(tmp_path: Path, has_model: bool) -> None:
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["module"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    by_name = {
        "state": {names[number]: slots for number, slots in state["state"].items()},
        "param_groups": [{**group, "params": [names[at] for at in group["params"]]} for group in state["param_groups"]],
    }
    parts = {"optimizer": by_name} | ({"model": model.state_dict()} if has_model else {})
    dcp.save(parts, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    done = raycheck("import", f"{tmp_path}/dcp", f"{tmp_path}/runs/kept", "--keep-names")
    bare = import_checkpoint(f"{tmp_path}/dcp", f"{tmp_path}/runs/bare", keep_names=False)

    assert done.returncode == 0, done.stderr
    assert "without it" not in done.stdout
    assert ("import with --keep-names" in "".join(bare.notes)) == has_model
    head = checked(f"{tmp_path}/runs/kept")
    moments = {tensor.name for tensor in head.tensors() if "exp_avg." in f"{tensor.name}."}
    assert len(moments) == 2
    assert all(".module." in name for name in moments)
    if has_model:
        live = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2)})
        live_optimizer = torch.optim.AdamW(live.parameters())
        head.restore(into={"model": live, "optimizer": live_optimizer})
        assert_equal(live_optimizer.state_dict(), state)
        assert_equal(live.state_dict(), model.state_dict())


def test_a_note_says_what_wrappers_had_put_into_the_names(tmp_path: Path) -> None:
    steps = "_orig_mod.module.layers.0._checkpoint_wrapped_module.weight"
    torch.save({"model": {steps: torch.ones(2)}, "other": {"weight": torch.ones(2)}}, tmp_path / "last.pt")

    plain = import_checkpoint(f"{tmp_path}/last.pt", f"{tmp_path}/runs/plain", dry_run=True)
    kept = import_checkpoint(f"{tmp_path}/last.pt", f"{tmp_path}/runs/plain", dry_run=True, keep_names=True)

    wrappers = (
        "model: names are kept without '_orig_mod' and '_checkpoint_wrapped_module', which wrappers had put into them"
    )
    assert [note for note in kept.notes if note.startswith("model")] == [wrappers]
    assert wrappers in plain.notes
    assert "as 'layers.0.weight'" in plain.notes[0]
    assert not any(note.startswith("other") for note in plain.notes)


@pytest.mark.parametrize("form", ["safetensors", "sharded", "bin"])
def test_a_hugging_face_directory_comes_back_out_of_an_export(tmp_path: Path, form: str) -> None:
    model = hf_models.llama(seed=3)
    folder = tmp_path / "hf"
    if form == "bin":
        folder.mkdir()
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(folder, max_shard_size="20KB" if form == "sharded" else "5GB")
    hf_models.tokenizer().save_pretrained(folder)

    done = import_checkpoint(str(folder), f"file://{tmp_path}/runs/new")

    live = hf_models.llama(seed=4)
    checked(done.uri).restore(into={"model": live})
    assert_equal(live.state_dict(), model.state_dict())
    export_hf(done.uri, str(tmp_path / "out"))
    assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / "out")), hf_models.logits(model))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()


def test_the_hubs_cache_is_followed_to_its_blobs_and_nowhere_else(tmp_path: Path) -> None:
    model = hf_models.llama(seed=3)
    cache = tmp_path / "models--org--tiny"
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("a" * 40)
    model.save_pretrained(tmp_path / "plain")
    (cache / "blobs").mkdir()
    for file in (tmp_path / "plain").iterdir():
        file.rename(cache / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")

    for number, source in enumerate((cache, snapshot)):
        done = import_checkpoint(str(source), f"file://{tmp_path}/runs/{number}")
        live = hf_models.llama(seed=4)
        checked(done.uri).restore(into={"model": live})
        assert_equal(live.state_dict(), model.state_dict())

    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../../secret.json")
    with pytest.raises(CorruptError, match="leads out of"):
        import_checkpoint(str(snapshot), f"file://{tmp_path}/runs/other")


def test_a_checkpoint_of_the_trainer_of_transformers_in_an_experiment_of_ray(tmp_path: Path) -> None:
    model = hf_models.llama(seed=3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=hf_models.IDS, labels=hf_models.IDS).loss.backward()
    optimizer.step()
    for number in (8, 10, 9):
        folder = tmp_path / f"experiment/TorchTrainer_1/checkpoint_{number:06}/checkpoint"
        model.save_pretrained(folder)
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": 10 * number, "epoch": 1.5}))
        torch.save({"args": Path("x")}, folder / "training_args.bin")

    done = import_checkpoint(str(tmp_path / "experiment"), f"file://{tmp_path}/runs/new")

    assert done.step == 100
    assert "checkpoint_000010: the last of 3 by name" in done.notes
    assert done.left_out == ("optimizer.pt", "training_args.bin")
    assert [entry.name for entry in done.entries] == ["model"]
    live = hf_models.llama(seed=4)
    checked(done.uri).restore(into={"model": live})
    assert_equal(live.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(0)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(batch).square().sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    module = Module()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=5))
    folder = tmp_path / "experiment/checkpoint_2026-01-02_03-04-05.678901"
    trainer.save_checkpoint(folder / "checkpoint.ckpt")

    done = import_checkpoint(str(tmp_path / "experiment"), f"file://{tmp_path}/runs/new")

    assert (done.kind, done.step) == ("lightning", trainer.global_step)
    assert {"optimizer_states", "lr_schedulers"} <= set(done.left_out)
    assert [entry.name for entry in done.entries] == ["model"]
    live = Module()
    checked(done.uri).restore(into={"model": live})
    assert_equal(live.state_dict(), module.state_dict())


def _fsdp_rank(rank: int, world_size: int, folder: str) -> None:
    net, optimizer = sharded_net(mesh_of(world_size))
    out = Path(folder, "global_step_7/policy")
    out.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), out / f"model_world_size_2_rank_{rank}.pt")
    torch.save(optimizer.state_dict(), out / f"optim_world_size_2_rank_{rank}.pt")
    torch.save({"rng": rank}, out / f"extra_state_world_size_2_rank_{rank}.pt")
    full = {name: tensor.full_tensor() for name, tensor in net.state_dict().items()}
    slots = get_optimizer_state_dict(net, optimizer)["state"]
    moments = {name: slots[name]["exp_avg"].full_tensor() for name in full}
    if rank == 0:
        torch.save({"full": full, "moments": moments}, Path(folder, "expected.pt"))
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    torch.distributed.barrier()


def sharded_net(mesh: Any) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 3))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.fixture(scope="module")
def of_two_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks of FSDP2 wrote: a directory of DCP, and files of torch.save one by one."""
    folder = tmp_path_factory.mktemp("fsdp")
    ranks.run(_fsdp_rank, 2, str(folder))
    return folder


def test_the_dcp_directory_that_the_ranks_of_fsdp_wrote_is_imported_whole(of_two_ranks: Path, tmp_path: Path) -> None:
    done = import_checkpoint(f"{of_two_ranks}/dcp", f"file://{tmp_path}/runs/new")

    assert (done.kind, done.left_out) == ("dcp", ())
    live = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(live.parameters())
    checked(done.uri).restore(into={"model": live, "optimizer": optimizer})
    expected = torch.load(of_two_ranks / "expected.pt")
    assert_equal(live.state_dict(), expected["full"])
    assert_equal(
        {name: optimizer.state[parameter]["exp_avg"] for name, parameter in live.named_parameters()},
        expected["moments"],
    )


def test_the_weights_in_the_files_that_the_ranks_of_fsdp_wrote_one_by_one(of_two_ranks: Path, tmp_path: Path) -> None:
    source = tmp_path / "global_step_7/policy"
    shutil.copytree(of_two_ranks / "global_step_7/policy", source)

    done = import_checkpoint(str(source), f"file://{tmp_path}/runs/new")

    assert (done.kind, done.step) == ("fsdp", 7)
    assert done.left_out == ("extra_state_world_size_2_rank_*.pt", "optim_world_size_2_rank_*.pt")
    live = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Linear(7, 3))
    checked(done.uri).restore(into={"model": live})
    assert_equal(live.state_dict(), torch.load(of_two_ranks / "expected.pt")["full"])
    (source / "model_world_size_2_rank_1.pt").unlink()
    with pytest.raises(CorruptError, match=r"ranks \[1\] of 2 are missing"):
        import_checkpoint(str(source), f"file://{tmp_path}/runs/other")


def test_a_source_in_a_bucket_and_an_import_that_is_repeated(tmp_path: Path) -> None:
    net, optimizer = trained()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    source, dest = "memory://sources/last.pt", "memory://bucket/runs/new"
    open_store("memory://sources").put("last.pt", (tmp_path / "last.pt").read_bytes())
    dry = import_checkpoint(source, dest, dry_run=True)
    assert open_store(dest).list_names("checkpoints/") == []

    first = import_checkpoint(source, dest, step=5)
    again = import_checkpoint(source, dest, step=5)

    assert (dry.is_new, first.is_new, again.is_new) == (False, True, False)
    assert dry.entries == first.entries == again.entries
    assert first.checkpoint == again.checkpoint == "step-000000005-a0-s1"
    assert dry.left_out == first.left_out == again.left_out == ("optimizer",)
    assert_has_weights(dest, net)
    open_store("memory://sources").put("other.pt", (tmp_path / "last.pt").read_bytes())
    with pytest.raises(ConfigError, match="there is already a run"):
        import_checkpoint("memory://sources/other.pt", dest)
    with pytest.raises(ConfigError, match="differs from this import"):
        import_checkpoint(source, dest, step=6)
    with pytest.raises(ConfigError, match="differs from this import"):
        import_checkpoint(source, dest, step=5, entries={"net": "model"})
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    open_store("memory://sources").put("last.pt", (tmp_path / "last.pt").read_bytes())
    with pytest.raises(ConfigError, match="differs from this import"):
        import_checkpoint(source, dest, step=5)


def test_weights_further_down_are_chosen_by_their_key_and_what_lies_next_to_them_is_named(tmp_path: Path) -> None:
    net, optimizer = trained()
    inner = {"net": net.state_dict(), "opt": optimizer.state_dict(), "others": [{"w": torch.ones(1)}, {"lr": 1.0}]}
    torch.save({"app": inner, "seed": 3}, tmp_path / "x.pt")
    dest = f"file://{tmp_path}/runs/new"

    with pytest.raises(
        ConfigError, match=r"nothing to import: only the weights .*--entry NAME=KEY .*there are: app, seed"
    ):
        import_checkpoint(str(tmp_path / "x.pt"), dest)
    with pytest.raises(ConfigError, match="optimizer cannot be imported: only the weights"):
        import_checkpoint(str(tmp_path / "x.pt"), dest, entries={"model": "app.net", "optimizer": "app.opt"})
    assert not (tmp_path / "runs/new/latest").exists()
    done = import_checkpoint(str(tmp_path / "x.pt"), dest, entries={"model": "app.net", "other": "app.others.0"})

    assert done.left_out == ("app.opt", "app.others.1", "seed")
    live = Net(9)
    checked(done.uri).restore(into={"model": live})
    assert_equal(live.state_dict(), net.state_dict())


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/raycheck-import-was-evil"),)


def test_foreign_files_are_loaded_by_torchs_restricted_loader_alone() -> None:
    folder = Path(new_checkpoint.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [
        call for call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads", "dcp.load")
    ]

    assert [ast.unparse(call) for call in loads] == [
        "torch.load(path, map_location='cpu', weights_only=True, mmap=True)"
    ]


def _header(about: Any, data: bytes = b"") -> bytes:
    text = json.dumps(about).encode()
    return len(text).to_bytes(8, "little") + text + data


def hostile_sources(folder: Path) -> dict[str, Path]:
    """Makes sources that must be refused, by what is wrong with them."""
    whole = io.BytesIO()
    torch.save({"w": torch.arange(5000.0), "n": 3}, whole)
    data = whole.getvalue()
    flipped = bytearray(data)
    flipped[data.index(torch.arange(5000.0).numpy().tobytes()[4000:4040])] ^= 1
    bomb = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item) + b"\0" * (1 << 20 if "data/0" in item.filename else 0))
    evil = io.BytesIO()
    torch.save({"w": torch.ones(2), "x": Evil()}, evil)
    repeated = io.BytesIO()
    torch.save({"w": torch.ones(1).expand(1 << 40)}, repeated)
    nested: Any = [1]
    for _ in range(40):
        nested = [nested] * 10
    laughs = io.BytesIO()
    torch.save({"w": torch.ones(2), "x": nested}, laughs)
    f32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    files = {
        "evil.pt": evil.getvalue(),
        "pickle.pt": pickle.dumps(Evil()),
        "truncated.pt": data[: len(data) // 2],
        "flipped.pt": bytes(flipped),
        "bomb.pt": bomb.getvalue(),
        "repeated.pt": repeated.getvalue(),
        "laughs.pt": laughs.getvalue(),
        "empty.pt": b"",
        "huge.safetensors": (1 << 62).to_bytes(8, "little") + b"{}",
        "short.safetensors": _header({"w": f32}, b"1234"),
        "overflow.safetensors": _header({"w": {**f32, "shape": [1 << 40, 1 << 40]}}, b"12345678"),
        "negative.safetensors": _header({"w": {**f32, "shape": [-1, -2]}}, b"12345678"),
        "overlap.safetensors": _header({"w": f32, "v": f32}, b"12345678"),
        "list.safetensors": _header([1]),
    }
    sources = {}
    for name, body in files.items():
        sources[name] = folder / name
        sources[name].write_bytes(body)
    for name, target in (("up", "../secret.safetensors"), ("absent", "gone.safetensors"), ("number", 3)):
        sources[name] = folder / f"index-{name}"
        sources[name].mkdir()
        index = {"weight_map": {"w": target}}
        (sources[name] / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "secret.safetensors").write_bytes(_header({"w": f32}, b"12345678"))
    for name, body in (
        ("evil", pickle.dumps(Evil())),
        ("junk", b"junk"),
        ("odd", pickle.dumps({"a": torch.Size([2])})),
    ):
        sources[f"metadata-{name}"] = folder / f"dcp-{name}"
        sources[f"metadata-{name}"].mkdir()
        (folder / f"dcp-{name}/.metadata").write_bytes(body)
    return sources


@pytest.mark.filterwarnings("ignore")
def test_hostile_sources_are_refused_by_name_and_nothing_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = Path("/tmp/raycheck-import-was-evil")
    mark.unlink(missing_ok=True)
    monkeypatch.setattr(torch_file, "MAX_VALUES", 100_000)
    dest = f"file://{tmp_path}/runs/new"

    for what, source in hostile_sources(tmp_path).items():
        with pytest.raises(RaycheckError) as caught:
            import_checkpoint(str(source), dest)
        assert source.name in str(caught.value), what
        assert not isinstance(caught.value, StoreError), what

    assert not (tmp_path / "runs/new/latest").exists()
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_follows_an_empty_dict_in_a_list_of_dcp_keeps_its_place(tmp_path: Path) -> None:
    state = {"parts": [torch.zeros(2), {}, torch.ones(2)], "model": {"w": torch.ones(3)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)

    done = import_checkpoint(str(tmp_path / "dcp"), f"file://{tmp_path}/runs/new")

    assert "parts.1" in done.notes[0]
    head = checked(done.uri)
    parts = head.details(values=True).values["parts"]
    assert parts["$held"] == [{"$tensor": "parts.0"}, {}, {"$tensor": "parts.2"}]


def test_a_submodule_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 1)})
    torch.save({"model": net.state_dict()}, tmp_path / "last.pt")

    done = import_checkpoint(str(tmp_path / "last.pt"), f"file://{tmp_path}/runs/new")

    live = torch.nn.ModuleDict({"module": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 1)})
    checked(done.uri).restore(into={"model": live})
    assert_equal(live.state_dict(), net.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_metadata_that_points_elsewhere_is_refused(tmp_path: Path) -> None:
    for what, change in (("../secret", None), (None, 1 << 60)):
        folder = tmp_path / f"dcp{what is None}"
        dcp.save({"w": torch.ones(4)}, checkpoint_id=str(folder), no_dist=True)
        found = pickle.loads((folder / ".metadata").read_bytes())
        for place in found.storage_data.values():
            place.relative_path = what or place.relative_path
            place.offset = change or place.offset
        (folder / ".metadata").write_bytes(pickle.dumps(found))
        with pytest.raises(CorruptError, match=r"not one of its files|truncated"):
            import_checkpoint(str(folder), f"file://{tmp_path}/runs/new")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["zero_to_fp32.py", "global_step1/mp_rank_00_model_states.pt"], "zero_to_fp32"),
        (["adapter_model.safetensors", "adapter_config.json"], "without its base model"),
        (["latest", "checkpoints/step-000000001-a1-s1/manifest.json"], "fit\\(resume=\\.\\.\\.\\)"),
        (["notes.txt"], "nothing here can be imported"),
        (["a.pt", "b.pt"], "name one"),
    ],
)
def test_what_is_not_imported_is_told_what_to_do_instead(tmp_path: Path, files: list[str], advice: str) -> None:
    for name in files:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(b"{}")

    with pytest.raises(ConfigError, match=advice):
        import_checkpoint(str(tmp_path / "source"), f"file://{tmp_path}/runs/new")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_crash_at_any_write_leaves_no_run_and_the_next_try_succeeds(tmp_path: Path) -> None:
    net, optimizer = trained()
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    for at in range(1, 20):
        dest = f"file://{tmp_path}/runs/{at}"
        calls = 0

        def crash(self: Any, *args: Any, real: Any, at: int = at) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt
            return real(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("put_parts", "put_if_absent"):
                real = getattr(LocalStore, name)
                patch.setattr(LocalStore, name, lambda self, *args, real=real: crash(self, *args, real=real))
            try:
                import_checkpoint(str(tmp_path / "dcp"), dest)
            except KeyboardInterrupt:
                assert not (tmp_path / f"runs/{at}/latest").exists()
            else:
                break
        import_checkpoint(str(tmp_path / "dcp"), dest)
        assert_restores(dest, net, optimizer)
    else:
        pytest.fail("the import never came to its end")
    assert at > 4
