"""Two scripts as people write them, and the same with raycheck: few changed lines, in a guide, and they run. So do the
scripts in the texts that need a Ray."""

import difflib
import os
import signal
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest
import ray.cloudpickle

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.examples import (
    accelerate_bert,
    accelerate_bert_with_raycheck,
    ddp,
    ddp_with_raycheck,
    deepspeed_bert,
    deepspeed_bert_with_raycheck,
    fsdp,
    fsdp_with_raycheck,
    hf_trainer,
    hf_trainer_with_raycheck,
    lightning_ddp,
    lightning_ddp_with_raycheck,
    torchtitan_llama,
    torchtitan_llama_with_raycheck,
    trl_sft,
    trl_sft_with_raycheck,
)
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.samples.documents import GUIDES, README, blocks
from tests.support.servers.http_fault_proxy import fault_proxy

MAX_CHANGED = 9
DIFFS = [block.text for path in (README, *GUIDES) for block in blocks(path) if block.kind == "diff"]
PAIRS = {
    "ddp": (ddp, ddp_with_raycheck),
    "fsdp": (fsdp, fsdp_with_raycheck),
    "transformers": (hf_trainer, hf_trainer_with_raycheck),
    "trl": (trl_sft, trl_sft_with_raycheck),
    "lightning": (lightning_ddp, lightning_ddp_with_raycheck),
    "accelerate": (accelerate_bert, accelerate_bert_with_raycheck),
    "deepspeed": (deepspeed_bert, deepspeed_bert_with_raycheck),
    "torchtitan": (torchtitan_llama, torchtitan_llama_with_raycheck),
}
of_ray = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def changes(before: ModuleType, after: ModuleType) -> list[str]:
    """Changed lines as `diff -w` shows them: indentation alone is no change."""
    old, new = (Path(module.__file__).read_text().splitlines() for module in (before, after))
    matcher = difflib.SequenceMatcher(
        None, [line.strip() for line in old], [line.strip() for line in new], autojunk=False
    )
    found = []
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            found += [f"-{line}" for line in old[a:b] if line] + [f"+{line}" for line in new[c:d] if line]
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_raycheck_takes_at_most_nine_new_lines_and_the_guide_shows_them(name: str) -> None:
    lines = changes(*PAIRS[name])

    added = [line for line in lines if line.startswith("+")]
    assert 0 < len(added) <= MAX_CHANGED, "\n".join(added)
    assert "\n".join(lines) + "\n" in DIFFS, "the guide should show this diff:\n" + "\n".join(lines)


def test_every_diff_in_a_text_is_one_of_these() -> None:
    assert len(DIFFS) == len(PAIRS)


SCRIPTS = {
    path: [block for block in blocks(path) if block.kind == "python" and block.needs_ray] for path in (README, *GUIDES)
}


@pytest.mark.parametrize("path", [path for path in SCRIPTS if SCRIPTS[path]], ids=lambda path: path.stem)
@of_ray[0]
@of_ray[1]
def test_the_scripts_of_the_texts_run(cluster: None, path: Path, tmp_path: Path) -> None:
    names = {"__name__": "__main__"}  # so that what they define travels by value, as from a script

    for block in SCRIPTS[path]:
        exec(compile(block.text.replace("s3://bucket", f"file://{tmp_path}"), str(block), "exec"), names)

    runs = sorted((tmp_path / "runs").glob("*"))
    assert runs or path.stem == "ray", "that guide only defines a trial"
    for run in runs:
        assert_invariants(open_store(f"file://{run}"))


@pytest.mark.slow
@pytest.mark.parametrize("module", [ddp, fsdp], ids=["ddp", "fsdp"])
@of_ray[0]
@of_ray[1]
def test_the_scripts_run_without_raycheck(cluster: None, tmp_path: Path, module: ModuleType) -> None:
    ray.cloudpickle.register_pickle_by_value(module)

    module.main(str(tmp_path), epochs=1)


@pytest.mark.parametrize(
    ("module", "run", "options", "last"),
    [
        (ddp_with_raycheck, "classifier", {"epochs": 10}, 160),
        (fsdp_with_raycheck, "fine-tune", {"epochs": 10, "patience": 1000}, 160),
    ],
    ids=["ddp", "fsdp"],
)
@pytest.mark.slow
@of_ray[0]
@of_ray[1]
def test_the_scripts_survive_a_killed_worker_with_raycheck(
    cluster: None, s3: str, module: ModuleType, run: str, options: dict[str, int], last: int
) -> None:
    ray.cloudpickle.register_pickle_by_value(module)
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        upload = proxy.rule("hold", "PUT", f"step-{last:09d}-a1-.*/__1_0.distcp")
        training = InThread(lambda: module.main(storage, **options))

        upload.wait(300)
        os.kill(train_workers()[-1], signal.SIGKILL)  # whichever rank it is: the upload stays held, so no save ends
        training.join()

    body = assert_invariants(open_store(join_uri(join_uri(s3, storage.rpartition("/")[2].partition("?")[0]), run)))
    assert [attempt.restore_key for attempt in body.attempts] == [None, "step-000000100-a1-s1"]
    assert body.entry(body.head).step == last


def train_workers() -> list[int]:
    """Process ids of the Ray Train workers that descend from this process."""
    parents, workers = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended while we looked
        if name.startswith(b"ray::RayTrainWorker"):
            workers.append(int(folder.name))

    def is_ours(process: int) -> bool:
        return process == os.getpid() or (process in parents and is_ours(parents[process]))

    return sorted(worker for worker in workers if is_ours(worker))
