"""Installs RL frameworks beside the repository, in one virtual environment, and trains there.

verl comes from PyPI, the others from their repositories at the commits below, and DeepSpeed is found where its own tests
have it. All else is found in the repository's own environment. Where GitHub cannot be reached, git's setting
`url.<copy>.insteadOf` names a copy of a repository.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tests.support.frameworks import deepspeed_training
from tests.support.processes.child_processes import LONG_TEST_S
from tests.support.processes.virtual_environments import prepare_venv

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".venv-rl"
PYTHON = FOLDER / "bin/python"
GUIDE = ROOT / "raycheck/docs/rl-frameworks.md"
PACKAGES = (
    "verl==0.9.1",
    "tensordict==0.10.0",
    "pyvers==0.1.0",
    "codetiming==1.4.0",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "antlr4-python3-runtime==4.9.3",
    "cloudpickle==3.1.2",
    "importlib-metadata==8.7.0",
    "zipp==3.23.0",
    "cachetools==6.2.4",
    "colorlog==6.10.1",
    "pybase64==1.4.3",
    "aiofiles==25.1.0",
    "ai2-olmo-core==2.6.0",
    "backoff==2.2.1",
    "dataclass-extensions==0.4.0",
    "lark==1.3.1",
    "tabulate==0.9.0",
    "uvicorn==0.38.0",
    "fastapi==0.121.1",
    "starlette==0.49.3",
    "pylatexenc==2.10",
    "loguru==0.7.3",
    "jaxtyping==0.3.7",
    "wadler-lindig==0.1.7",
    "cloudpathlib==0.23.0",
    "tenacity==9.1.2",
)
SOURCES = {
    "inclusionAI/AReaL": ("4aef98d8d818af55b43621aaadba047ae10f4e77", ("areal",)),
    "NovaSky-AI/SkyRL": ("a9564572eb8e91076be43c1bd5e4615e3de17265", ("skyrl", "skyrl-gym/skyrl_gym")),
    "allenai/open-instruct": ("e6c3044aa6201c8bfa4573c1b03142af599e730d", ("open_instruct",)),
    "OpenRLHF/OpenRLHF": ("3c3be6234e0cb353e76bb8019947db9dfe99fca7", ("openrlhf",)),
}
"""The commit of each repository, and the packages in it that are checked out."""
TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
"""The settings of the model that all frameworks train, of Llama's and Qwen2's kind."""


def prepare() -> None:
    deepspeed_training.prepare()
    prepare_venv(FOLDER, "packages-6", "--no-deps", *PACKAGES, finds_ours=True)
    (site,) = FOLDER.glob("lib/python*/site-packages")
    (deepspeed,) = deepspeed_training.FOLDER.glob("lib/python*/site-packages")
    (site / "deepspeed.pth").write_text(f"{deepspeed}\n")
    for repository in SOURCES:
        add_source(FOLDER, repository)


def add_source(folder: Path, repository: str) -> None:
    """Check a repository out into a virtual environment, so that its packages are found there."""
    commit, packages = SOURCES[repository]
    place = folder / "sources" / f"{repository.partition('/')[2]}-{commit[:12]}"
    if not place.exists():
        _check_out(place, repository, commit, packages)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = [f"{(place / package).parent}\n" for package in packages]
    (site / f"{place.name}.pth").write_text("".join(paths))


def _check_out(place: Path, repository: str, commit: str, packages: Sequence[str]) -> None:
    """Check the packages out, whole or not at all."""
    unfinished = place.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    address = f"https://github.com/{repository}"
    for command in (
        ("git", "clone", "--quiet", "--no-checkout", "--filter=blob:none", address, str(unfinished)),
        ("git", "-C", str(unfinished), "sparse-checkout", "set", *packages),
        ("git", "-C", str(unfinished), "checkout", "--quiet", commit),
    ):
        subprocess.run(command, check=True, timeout=600)
    unfinished.rename(place)


def recipe(*headings: str) -> dict[str, Any]:
    """Run the code that the guide shows under these headings, as one module, and return the names that it defines."""
    made: dict[str, Any] = {"__name__": f"{GUIDE.stem}: {headings[0]}"}
    for heading in headings:
        _, _, section = GUIDE.read_text().partition(f"\n## {heading}\n")
        for code in re.findall(r"```text\n(.*?)```", section.partition("\n## ")[0], re.DOTALL):
            exec(compile(code, f"{GUIDE.name}: {heading}", "exec"), made)
    return made


RUN = "import sys; from tests.support.frameworks import rl_frameworks; rl_frameworks.train_all(*sys.argv[1:])"
WITHIN_S = LONG_TEST_S - 30
"""How long the trainings of one test may take. If they hang, that test fails before its limit ends all tests."""


def run(module: str, *trainings: dict[str, Any], also: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """Call train() of a module of this folder for each training, in one process and one Ray with the frameworks.

    Return what the calls return. also: folders with further packages.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *also))),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_prestart_worker_first_driver": "0",  # twelve processes that no training may come to use
    }
    with NamedTemporaryFile("r") as results:
        done = subprocess.run(
            [PYTHON, "-c", RUN, f"{__package__}.{module}", json.dumps(trainings), results.name],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        found = [json.loads(line) for line in results]
    if len(found) != len(trainings):
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return found


def train_all(module: str, trainings: str, results: str) -> None:
    """Do in this process what `run` says, and write to the file what each call returns, as a line of JSON.

    The module is imported by its name, by which Ray's workers find its classes.
    """
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    train = importlib.import_module(module).train
    ray.init(num_cpus=12, num_gpus=12, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    for training in json.loads(trainings):
        try:
            found = train(**training)
        except Exception as error:
            found = {"losses": {}, "error": f"{type(error).__name__}: {error}"}
        with Path(results).open("a") as file:  # what is printed would be mixed with what Ray prints
            file.write(f"{json.dumps(found)}\n")
        for group in ray.util.placement_group_table():  # the actors of a group end with it
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))
    ray.shutdown()


if __name__ == "__main__":
    prepare()
