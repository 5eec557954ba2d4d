"""Measures with the `replay` engine, which makes answers up: what dbt-llm itself takes."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import yaml

from bench.figures import Figure, alternate, timed
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.engine_replay import made_up_answer
from tests.project import Project

BODY = "'Prompt number ' || i || ', with as much text as a short instruction has.'"


def new_project(rows: int, columns: int, body: str = BODY) -> Project:
    """Return a project with an upstream table of prompts and a model that asks them."""
    project = Project(Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "project")
    upstream(project, rows, body)
    calls = ", ".join(
        f"llm_generate(body, system := 'column {number}') as c{number}" for number in range(columns)
    )
    project.model("answers", f"select i, {calls} from {{{{ ref('prompts') }}}}")
    project.model("nothing", "select i from {{ ref('prompts') }} limit 1")
    return project


def upstream(project: Project, rows: int, body: str = BODY) -> None:
    """Build the table of prompts."""
    project.model("prompts", f"select i, {body} as body from range({rows}) t(i)")
    assert project.dbt("--quiet", "run", "--select", "prompts").success


def dbt_seconds(project: Project, *models: str) -> float:
    """Return how long dbt takes to build some models, its own start excluded."""

    def run() -> None:
        outcome = project.dbt("--quiet", "run", "--select", *models)
        assert outcome.success, outcome.log

    return timed(run) - timed(lambda: project.dbt("--quiet", "run", "--select", "nothing"))


def anew(project: Project, *models: str) -> Callable[[], float]:
    """Return what measures a build for which nothing is stored."""

    def run() -> float:
        shutil.rmtree(project.store, ignore_errors=True)
        return dbt_seconds(project, *models)

    return run


def plumbing(rows: int, runs: int) -> list[Figure]:
    """New prompts through the replay engine, against a script written by hand for it."""
    project = new_project(rows, columns=1)
    ours, baseline = alternate(
        runs, anew(project, "answers"), lambda: timed(lambda: _by_hand(project))
    )
    label = f"plumbing, {rows:,} new prompts ({rows / ours:,.0f} rows/s)"
    return [Figure(label, ours, baseline, target="≤ 1.5")]


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


def warm(rows: int, runs: int) -> list[Figure]:
    """Three LLM columns, everything stored, against the bare joins that they stand for."""
    project = new_project(rows, columns=3)
    assert project.dbt("--quiet", "run", "--select", "answers").success
    hashes = [
        project.generations("any_value(call_hash)", f"call like '%column {number}%'")[0][0]
        for number in range(3)
    ]

    database = str(project.folder / project.database)

    def bare() -> None:
        with duckdb.connect(database) as connection:
            load_delta_extension(connection)
            columns = ", ".join(f"s{n}.output as c{n}" for n in range(3))
            # With the call as a filter, as somebody who knows the store would write it.
            joins = " ".join(
                f"left join (from delta_scan('{project.store}') where call_hash = '{call_hash}') "
                f"as s{n} on s{n}.prompt_hash = sha256('{call_hash}' || body)"
                for n, call_hash in enumerate(hashes)
            )
            connection.execute(
                f"create or replace table bare as select i, {columns} from prompts {joins}"
            )

    def baseline() -> float:
        # A part of the table is written as the database is closed.
        seconds = timed(bare)
        with duckdb.connect(database) as connection:
            counts = "select count(c0), count(c1), count(c2) from bare"
            assert connection.execute(counts).fetchall() == [(rows, rows, rows)]
        return seconds

    result = alternate(runs, lambda: dbt_seconds(project, "answers"), baseline)
    return [Figure(f"warm rerun, {rows:,} rows, three columns", *result, target="≤ 1.2")]


def incremental(rows: int, runs: int) -> list[Figure]:
    """One in a hundred rows is new, against a warm rerun and a hundredth of a cold one."""
    project = new_project(rows, columns=1)
    cold = anew(project, "answers")()
    more, pairs = rows, []
    for _ in range(runs):
        # The first rerun after questions looks whether a key occurs twice.
        dbt_seconds(project, "answers")
        warm_s = dbt_seconds(project, "answers")
        more += rows // 100
        upstream(project, more)
        before = project.generations("count(*)")[0][0]
        ours = dbt_seconds(project, "answers")
        asked = project.generations("count(*)")[0][0] - before
        assert asked == rows // 100, f"{asked} were asked"
        pairs.append((ours, warm_s + cold / 100))
    ours, baseline = (sorted(side)[len(side) // 2] for side in zip(*pairs, strict=True))
    return [Figure(f"1 % new of {rows:,} rows", ours, baseline, target="≤ 1.1")]


def dedupe(rows: int, runs: int) -> list[Figure]:
    """Every prompt ten times, in two models, against each once; an answer takes its time."""
    project = new_project(rows, columns=1)
    # As many answers a second as a fast engine gives.
    project.llms = {"default": {"engine": "replay", "latency_s": 0.1, "concurrency": 200}}
    for name in ("one", "two"):
        project.model(
            name,
            "select i, copy, llm_generate(body) as r "
            "from {{ ref('prompts') }}, range(5) as copies(copy)",
        )
    project.model("each", "select i, llm_generate(body) as r from {{ ref('prompts') }}")

    def ours() -> float:
        seconds = anew(project, "one", "two")()
        assert project.generations("count(*)") == [(rows,)]
        return seconds

    result = alternate(runs, ours, anew(project, "each"))
    label = f"dedupe, {rows:,} prompts ten times in two models"
    return [Figure(label, *result, target="≤ 1.05 (9.5 times faster)")]


def commits(rows: int, runs: int) -> list[Figure]:
    """Commits every second, against one at the end."""
    often, once = new_project(rows, columns=1), new_project(rows, columns=1)
    for project, interval_s in ((often, 1.0), (once, 3600.0)):
        project.llms = {"default": {"engine": "replay", "latency_s": 0.1, "concurrency": 200}}
        project.config["commit_interval_s"] = interval_s
    result = alternate(runs, anew(often, "answers"), anew(once, "answers"))
    return [Figure(f"commits every second, {rows:,} answers", *result, target="≤ 1.01")]


def imports(rows: int, runs: int) -> list[Figure]:
    """`import dbt_llm` in a fresh process, against a process that imports nothing."""

    def process(program: str) -> float:
        return timed(lambda: subprocess.run([sys.executable, "-c", program], check=True))

    result = alternate(runs, lambda: process("import dbt_llm"), lambda: process("pass"))
    return [Figure("import dbt_llm", *result, target="0.1 s more")]


def idle(rows: int, runs: int) -> list[Figure]:
    """A dbt process without any LLM call, with the plugin and without."""
    with_plugin, without = (_without_calls(dispatch) for dispatch in (True, False))

    def run(project: Project) -> float:
        command = project.command("--quiet", "run")
        if project is without:
            _remove_plugin(project.folder / "profiles.yml")
        return timed(lambda: subprocess.run(command, cwd=project.folder, check=True))

    result = alternate(runs, lambda: run(with_plugin), lambda: run(without))
    return [Figure("dbt run without a call, with the plugin", *result, target="0.2 s more")]


def _without_calls(dispatch: bool) -> Project:
    folder = Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "project"
    project = Project(folder, dispatch=dispatch)
    for number in range(5):
        project.model(f"model_{number}", f"select {number} as i")
    return project


def _remove_plugin(profile: Path) -> None:
    content = yaml.safe_load(profile.read_text())
    del content["test"]["outputs"]["dev"]["plugins"]
    profile.write_text(yaml.safe_dump(content))


def memory(rows: int, runs: int) -> list[Figure]:
    """The largest resident set of a dbt process with prompts of 1 kB; a tenth as the baseline."""
    body = "repeat('A sentence of fifty characters, more or less. ', 20) || i"
    large, small = (_peak_gib(count, body) for count in (rows, rows // 10))
    return [Figure(f"memory, {rows:,} prompts of 1 kB", large, small, "GiB", "≤ 1.2, under 2 GiB")]


def _peak_gib(rows: int, body: str) -> float:
    project = new_project(rows, columns=1, body=body)
    # By default DuckDB takes four fifths of the memory before it puts anything on the disk.
    project.output = {"settings": {"memory_limit": "1GB"}}
    process = subprocess.Popen(
        project.command("--quiet", "run", "--select", "answers"), cwd=project.folder
    )
    watched, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        info = watched.memory_full_info() if watched.is_running() else None
        peak = max(peak, info.uss if info else 0)
        time.sleep(0.5)
    assert process.returncode == 0
    shutil.rmtree(project.folder)
    return peak / 2**30
