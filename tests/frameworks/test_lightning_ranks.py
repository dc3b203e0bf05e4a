"""raycheck.lightning on several ranks, which are processes with gloo: DDP and FSDP2, restarted at other world sizes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import raycheck
from raycheck.bucket.store import open_store
from tests.support.frameworks.lightning_training import Killed, Regression, Training, samples
from tests.support.histories.invariants import assert_invariants
from tests.support.processes import gloo_ranks
from tests.support.processes.fork_server import run_code
from tests.support.processes.gloo_ranks import Ranks

pytestmark = [pytest.mark.filterwarnings("ignore")]


class Sharded(Regression):
    """Shards its layers over all ranks, and has no dropout, so that the world size changes rounding alone."""

    def __init__(self, *, killed_at: int | None = None) -> None:
        super().__init__(killed_at=killed_at)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.is_sharded = False

    def configure_model(self) -> None:
        if not self.is_sharded and self.device_mesh is not None:
            self.is_sharded = True
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def whole_weights(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in self.state_dict().items()
        }


class Replicated(Regression):
    def __init__(self, *, killed_at: int | None = None) -> None:
        super().__init__(killed_at=killed_at)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def whole_weights(self) -> dict[str, torch.Tensor]:
        return dict(self.state_dict())


class Averaged(Sharded):
    """Keeps a moving average of its sharded weights in buffers, as the guide advises."""

    def configure_model(self) -> None:
        if self.is_sharded:
            return
        super().configure_model()
        for name, parameter in list(self.net.named_parameters()):
            self.register_buffer(f"average_{name.replace('.', '_')}", parameter.detach().clone())

    def on_train_batch_end(self, *args: Any) -> None:
        for name, parameter in self.net.named_parameters():
            self.get_buffer(f"average_{name.replace('.', '_')}").lerp_(parameter.detach(), 0.1)


MODULES = {"ddp": Replicated, "fsdp2": Sharded, "averaged": Averaged}


def train(rank: int, world_size: int, uri: str, kind: str, killed_at: int | None, epochs: int = 3) -> Any:
    """Train on one rank; the global batch is 6 x the first world size. Returns the whole weights; None if killed."""
    training = Training(
        module=MODULES[kind],
        options={"strategy": raycheck.lightning.strategy("ddp" if kind == "ddp" else "fsdp2"), "max_epochs": epochs},
        settings={"every_steps": 3},
        data=lambda: {"train_dataloaders": DataLoader(samples(48), batch_size=6, shuffle=True)},
    )
    try:
        module, trainer = training.run(raycheck.torchrun_group(uri), killed_at=killed_at)
    except Killed:
        return None
    dist.barrier()
    return trainer.global_step, {name: tensor.detach().clone() for name, tensor in module.whole_weights().items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_ranks, "ANSWER_WITHIN_S", 230.0)  # the first answer comes after Lightning's import
        found = Ranks(3, tmp_path_factory.mktemp("rendezvous"))
        yield found
        found.stop()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("ddp", (2, 2)),
        pytest.param("fsdp2", (2, 2), marks=pytest.mark.slow),
        pytest.param("ddp", (2, 1), marks=pytest.mark.slow),
        ("fsdp2", (2, 3)),
        pytest.param("averaged", (2, 2), marks=pytest.mark.slow),
        pytest.param("averaged", (2, 3), marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_a_killed_run_goes_on_with_the_same_batches_at_any_world_size(
    tmp_path: Any, ranks: Ranks, kind: str, sizes: tuple[int, int]
) -> None:
    whole, hurt = (f"file://{tmp_path}/{name}" for name in ("whole", "hurt"))

    (step, expected), *_ = ranks.run(train, sizes[0], whole, kind, None)
    assert ranks.run(train, sizes[0], hurt, kind, 7) == [None] * sizes[0]
    (steps, found), *others = ranks.run(train, sizes[1], hurt, kind, None)

    assert step == steps == 12  # 48 samples in batches of 12, three times
    if sizes[0] == sizes[1]:
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
        assert all(torch.equal(one[name], found[name]) for _, one in others)
    assert_invariants(open_store(hurt))


def refused(rank: int, world_size: int, uri: str, averages: bool) -> str:
    options = {"strategy": raycheck.lightning.strategy("fsdp2")} if averages else {}
    callbacks = [EMAWeightAveraging(decay=0.9)] if averages else []
    training = Training(module=Sharded, options=options, callbacks=lambda: callbacks)
    with pytest.raises(raycheck.errors.ConfigError) as error:
        training.run(raycheck.torchrun_group(uri))
    return str(error.value)


@pytest.mark.parametrize("averages", [False, True])
def test_what_several_workers_cannot_do_is_refused(tmp_path: Any, ranks: Ranks, averages: bool) -> None:
    """Each training a model of its own, and averaging weights that are sharded."""
    messages = ranks.run(refused, 2, f"file://{tmp_path}/run", averages)

    expected = 'EMAWeightAveraging with strategy("fsdp2")' if averages else "1 processes, but there are 2 workers"
    assert all(expected in message for message in messages)


OTHER_PACKAGE = """
import sys, warnings; warnings.simplefilter("ignore")
import pytorch_lightning as pl, torch
from torch.utils.data import DataLoader, TensorDataset
import raycheck
from tests.support.processes.coordinator_in_thread import group_of
torch.set_num_threads(1)
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def run(epochs):
    callback = raycheck.lightning.Callback(group=group_of("memory://other")[0])
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        callbacks=[callback], strategy=raycheck.lightning.strategy("ddp"))
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    return trainer
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run(1)
again = run(2)
assert again.global_step == 4, again.global_step
assert isinstance(again.strategy, pl.strategies.DDPStrategy)
print("lightning.pytorch" in sys.modules)
"""


def test_pytorch_lightning_under_its_own_name_is_used_alone() -> None:
    done = run_code(OTHER_PACKAGE, timeout_s=200)

    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr[-3000:]
