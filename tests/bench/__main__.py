"""`python -m tests.bench`: raycheck and its peers against what machine and store can do at best, in one run."""

import argparse
import logging
import os
import shlex
import sys
import warnings
from pathlib import Path
from time import perf_counter

import torch

from tests.bench.measures import measure
from tests.bench.peers import EXPECTED_WARNINGS
from tests.bench.plots import write_plots
from tests.bench.report import document, print_table, write_json, write_readme
from tests.bench.scale import FULL, QUICK, RESULTS, Bench
from tests.bench.servers import started


def main() -> int:
    """0 when all was measured, whether goals are met or not; 1 when something could not be."""
    arguments = _arguments()
    for text in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=text)
    logging.getLogger("raycheck").setLevel(logging.WARNING)
    began = perf_counter()
    with started(arguments.server) as server:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        bench = Bench(server=server, scale=QUICK if arguments.quick else FULL)
        print(f"{server.name}; {server.placement}", flush=True)
        rows = measure(bench, arguments.only, tell=lambda line: print(line, flush=True))
    command = shlex.join(["python", "-m", "tests.bench", *sys.argv[1:]])
    doc = document(rows, bench, command=command, took_s=perf_counter() - began)
    print_table(doc)
    write_json(doc, RESULTS / "latest.json")
    if arguments.json:
        write_json(doc, arguments.json)
    if arguments.write_readme:
        write_readme(doc)
    try:
        write_plots(doc, RESULTS)
    except ImportError as error:
        print(f"no plots: {error.name} is not installed (pip install 'raycheck[bench]')")
    return 1 if any(row.value is None for row in rows) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller states, fewer rounds: a few minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument(
        "--only", type=_goals, default=(), metavar="R1,R9", help="these goals, and what comes with them"
    )
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto"), default="auto")
    parser.add_argument("--write-readme", action="store_true", help="put the figures into tests/bench/README.md")
    return parser.parse_args()


def _goals(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
