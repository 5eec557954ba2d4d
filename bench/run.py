"""Measures what dbt-llm adds to the work itself, each against a baseline in the same run.

    make bench                                    all measures
    python bench/run.py plumbing warm --rows 100000 --runs 3

Every figure is the median of several runs, alternating with its baseline, so that a machine that
slows down slows both. Ratios are what to quote; seconds depend on the machine.
"""

import argparse
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import lakehouse, over_http, store_upkeep, tail, with_replay, with_vllm
from bench.figures import HEAD

MEASURES = {
    "imports": (with_replay.imports, [0]),
    "idle": (with_replay.idle, [0]),
    "plumbing": (with_replay.plumbing, [100_000, 1_000_000]),
    "warm": (with_replay.warm, [100_000, 1_000_000, 10_000_000]),
    "incremental": (with_replay.incremental, [100_000, 1_000_000, 10_000_000]),
    "dedupe": (with_replay.dedupe, [20_000]),
    "commits": (with_replay.commits, [40_000]),
    "upkeep": (store_upkeep.upkeep, [40_000]),
    "memory": (with_replay.memory, [10_000_000]),
    "lakehouse": (lakehouse.lakehouse, [1_000_000]),
    "http": (over_http.http, [3_000]),
    "tail": (tail.tail, [10_000]),
    "efficiency": (with_vllm.efficiency, [512]),
    "prefix": (with_vllm.prefix, [1_000]),
    "start": (with_vllm.start, [0]),
}
"""What is measured, and at how many rows where --rows does not say."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measures", nargs="*", help=", ".join(MEASURES), default=[])
    parser.add_argument("--rows", type=int, nargs="*", help="instead of the usual numbers of rows")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    packages = ("duckdb", "ray", "deltalake", "dbt-core", "dbt-duckdb")
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in packages)
    )
    print(f"command: {' '.join(sys.argv)}; medians of {arguments.runs} alternating runs\n")
    print(HEAD)
    for name in arguments.measures or MEASURES:
        measure, usual_rows = MEASURES[name]
        for rows in arguments.rows or usual_rows:
            for figure in measure(rows, arguments.runs):
                print(figure.row(), flush=True)


if __name__ == "__main__":
    main()
