"""Measures what dbt-llm adds to the work itself, each against a baseline in the same run.

    make bench                      all measures at 100,000 and 1,000,000 rows
    python bench/run.py --rows 100000 --runs 3 plumbing warm

Every figure is the median of several runs, alternating with its baseline, so that a machine that
slows down slows both. Ratios are what to quote; seconds depend on the machine.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import duckdb
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.over_http import LATENCY_S, SLOTS, Server, client_seconds, engine_seconds
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.engine_replay import made_up_answer
from tests.project import Project

BODY = "'Prompt number ' || i || ', with as much text as a short instruction has.'"


def alternate(
    runs: int, ours: Callable[[], float], baseline: Callable[[], float]
) -> tuple[float, float]:
    """Return the medians of both, measured in turn after one warm-up of each."""
    ours(), baseline()
    pairs = [(ours(), baseline()) for _ in range(runs)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def new_project(rows: int, columns: int) -> Project:
    """Return a project with an upstream table of prompts and a model that asks them."""
    project = Project(Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "project")
    project.model("prompts", f"select i, {BODY} as body from range({rows}) t(i)")
    calls = ", ".join(
        f"llm_generate(body, system := 'column {number}') as c{number}" for number in range(columns)
    )
    project.model("answers", f"select i, {calls} from {{{{ ref('prompts') }}}}")
    project.model("nothing", "select i from {{ ref('prompts') }} limit 1")
    assert project.dbt("--quiet", "run", "--select", "prompts").success
    return project


def dbt_seconds(project: Project, model: str) -> float:
    """Return how long dbt takes to build one model, its own start excluded."""

    def run() -> None:
        outcome = project.dbt("--quiet", "run", "--select", model)
        assert outcome.success, outcome.log

    return timed(run) - timed(lambda: project.dbt("--quiet", "run", "--select", "nothing"))


def plumbing(rows: int, runs: int) -> tuple[str, float, float]:
    """New prompts through the replay engine, against a script written by hand for it."""
    project = new_project(rows, columns=1)

    def ours() -> float:
        shutil.rmtree(project.store, ignore_errors=True)
        return dbt_seconds(project, "answers")

    def baseline() -> float:
        return timed(lambda: _by_hand(project))

    return (f"plumbing, {rows:,} new prompts", *alternate(runs, ours, baseline))


def _by_hand(project: Project) -> None:
    import deltalake

    folder = project.folder / "by_hand"
    shutil.rmtree(folder, ignore_errors=True)
    schema = pa.schema(
        [("prompt_hash", pa.string()), ("prompt", pa.string()), ("output", pa.string())]
    )
    deltalake.write_deltalake(str(folder), schema.empty_table())
    with duckdb.connect(str(project.folder / project.database)) as connection:
        load_delta_extension(connection)
        missing = connection.execute(
            f"select distinct sha256('call' || body) as prompt_hash, body as prompt from prompts "
            f"anti join delta_scan('{folder}') as s on s.prompt_hash = sha256('call' || body)"
        ).to_arrow_table()
        outputs = [made_up_answer(prompt) for prompt in missing["prompt"].to_pylist()]
        answers = missing.append_column("output", pa.array(outputs))
        deltalake.write_deltalake(str(folder), answers, mode="append")
        connection.execute(
            f"create or replace table by_hand as select p.i, s.output as c0 from prompts as p "
            f"left join delta_scan('{folder}') as s on s.prompt_hash = sha256('call' || body)"
        )


def warm(rows: int, runs: int) -> tuple[str, float, float]:
    """Three LLM columns, everything stored, against the bare joins that they stand for."""
    project = new_project(rows, columns=3)
    assert project.dbt("--quiet", "run", "--select", "answers").success
    hashes = [
        project.generations("any_value(call_hash)", f"call like '%column {number}%'")[0][0]
        for number in range(3)
    ]

    def baseline() -> float:
        with duckdb.connect(str(project.folder / project.database)) as connection:
            load_delta_extension(connection)
            columns = ", ".join(f"s{n}.output as c{n}" for n in range(3))
            joins = " ".join(
                f"left join delta_scan('{project.store}') as s{n} "
                f"on s{n}.prompt_hash = sha256('{call_hash}' || body)"
                for n, call_hash in enumerate(hashes)
            )
            seconds = timed(
                lambda: connection.execute(
                    f"create or replace table bare as select i, {columns} from prompts {joins}"
                )
            )
            found = connection.execute(
                "select count(c0), count(c1), count(c2) from bare"
            ).fetchall()
            assert found == [(rows, rows, rows)]
            return seconds

    result = alternate(runs, lambda: dbt_seconds(project, "answers"), baseline)
    return (f"warm rerun, {rows:,} rows, three columns", *result)


def http(rows: int, runs: int) -> tuple[str, float, float]:
    """New prompts over HTTP: the `openai` engine against a bare client of the same SDK."""
    server = Server()
    try:
        return (
            f"HTTP, {rows:,} prompts, {SLOTS} slots of {LATENCY_S:g} s",
            *alternate(
                runs,
                lambda: engine_seconds(server.base_url, rows),
                lambda: client_seconds(server.base_url, rows),
            ),
        )
    finally:
        server.close()


def imports(rows: int, runs: int) -> tuple[str, float, float]:
    """`import dbt_llm` in a fresh process, against a process that imports nothing."""

    def process(program: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", program], check=True))

    return (
        "import dbt_llm",
        *alternate(runs, lambda: process("import dbt_llm"), lambda: process("pass")),
    )


MEASURES = {"imports": imports, "plumbing": plumbing, "warm": warm, "http": http}
# These do not grow with --rows.
FIXED_ROWS = {"imports": [0], "http": [3_000]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measures", nargs="*", help=", ".join(MEASURES), default=[])
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    packages = ("duckdb", "ray", "deltalake", "dbt-core", "dbt-duckdb")
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in packages)
    )
    print(f"command: {' '.join(sys.argv)}; medians of {arguments.runs} alternating runs\n")
    print("| measure | dbt-llm, s | baseline, s | ratio |")
    print("|---|---|---|---|")
    for name in arguments.measures or MEASURES:
        for rows in FIXED_ROWS.get(name, arguments.rows):
            label, ours, baseline = MEASURES[name](rows, arguments.runs)
            print(f"| {label} | {ours:.2f} | {baseline:.2f} | {ours / baseline:.2f} |", flush=True)


if __name__ == "__main__":
    main()
