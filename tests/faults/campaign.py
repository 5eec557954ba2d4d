"""The kill campaign: `python -m tests.faults.campaign` kills processes of dbt runs, many times.

Each kill is one dbt run against a scripted endpoint, which knows exactly what was asked, and then
a rerun that must make the table what an undisturbed run makes of it. The table that it prints
stands in docs/reliability.md; `test_kills.py` is the short form.
"""

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from dbt_llm.pool import close_pools
from tests.endpoint import MODEL, Endpoint, echo, latency
from tests.faults.inject.sitecustomize import find_target
from tests.project import ROOT, Project

ROWS = 200
CONCURRENCY = 8
LATENCY_S = 0.15
COMMIT_INTERVAL_S = 0.5
_INJECT = Path(__file__).parent / "inject"
_WEIGHTS = ROOT / "example_project/weights/SmolLM2-135M-Instruct"
_FIRST_RUN_TIMEOUT_S = 300

STEPS = {
    "collect": ("dbt_llm.collector:Collector.collect", True),
    "spool": ("dbt_llm.spool:prepare_requests", True),
    "engine start": ("dbt_llm.engine:start_engine", True),
    "first answer": ("dbt_llm.part_writer:PartWriter.add", True),
    "half a part file": ("dbt_llm.storage:Path.rename", False),
    "part file": ("dbt_llm.part_writer:PartWriter._write_part", True),
    "before commit": ("dbt_llm.store:_check", False),
    "after commit": ("dbt_llm.job_pass:Pass._commit", True),
    "materialization": ("dbt_llm.resolve_loop:_Loop._finish", True),
    "after materialization": ("dbt_llm.plugin:Plugin.store", True),
}
"""Where a run can be hit: a function of the package, and whether it is done first."""
RANDOM = "random moment"


@dataclass(frozen=True)
class Fault:
    """What is killed, and when."""

    target: str
    """`dbt`, which is the job's driver too, or a process that it started."""
    step: str
    nth: int = 1
    """Which time the step comes, within one process."""
    at: float = 0.5
    """With a random moment: which share of an undisturbed run's time has passed."""
    format: str = "delta"
    materialized: str = "table"


@dataclass
class Recovery:
    """What came of a fault."""

    fault: Fault
    survived: bool
    """Whether the run that was hit made the table itself."""
    recover_s: float
    """How long the rerun took, within this process, or the run itself where it survived."""
    asked_twice: int = 0
    """Requests that came again; of a real engine this is not known."""
    oldest_s: float = 0.0
    """How long before the kill the first of these was sent for the first time."""
    wrong: list[str] = field(default_factory=list)
    """What is not as it must be; empty when all is well."""
    processes: set[psutil.Process] = field(default_factory=set)
    """All that the run which was hit had started."""


def undisturbed_s(folder: Path) -> float:
    """Return how long a run takes when nothing happens to it."""
    with Endpoint(latency(LATENCY_S)) as endpoint:
        project = _project(folder, endpoint, Fault("dbt", RANDOM))
        started = time.monotonic()
        outcome = project.dbt_process("run")
        assert outcome.success, outcome.log
        return time.monotonic() - started


def break_and_recover(folder: Path, fault: Fault, whole_s: float = 0.0) -> Recovery:
    """Run dbt, kill what the fault names, run dbt again and look at all that is left.

    Args:
        folder: an empty folder.
        fault: what to kill and when.
        whole_s: how long an undisturbed run takes, for random moments.
    """
    # The engines of earlier ones in this process, which nobody needs any more.
    close_pools()
    marker = folder / "killed"
    with Endpoint(latency(LATENCY_S)) as endpoint:
        project = _project(folder, endpoint, fault)
        process, processes = _start(project, fault, marker)
        started = time.monotonic()
        if fault.step == RANDOM:
            _kill_after(process, fault, whole_s, marker)
        survived = _wait(process) == 0
        log = (project.folder / "killed.log").read_text()
        if not survived:
            started = time.monotonic()
            outcome = project.dbt("run")
            log = outcome.log
            if not outcome.success:
                return Recovery(fault, False, 0.0, wrong=[f"the rerun failed:\n{log}"])
        recovery = Recovery(fault, survived, time.monotonic() - started, processes=processes)
        if marker.exists():
            _note_asked_twice(recovery, endpoint, float(marker.read_text()))
        else:
            recovery.wrong.append(f"nothing was killed:\n{log}")
        recovery.wrong += _wrong_rows(project, fault) + _wrong_store(project, recovery)
        asked = len(endpoint.requests)
        summary = project.dbt("run").summary("answers")
        if (
            summary != f"{ROWS} prompts, {ROWS} stored, 0 generated"
            or len(endpoint.requests) > asked
        ):
            recovery.wrong.append(f"a run after it asked again: {summary}")
    return recovery


def still_running(recoveries: list[Recovery], timeout_s: float = 120.0) -> list[str]:
    """Return what the runs left behind; Ray's agents take a minute to notice and to end."""
    processes = [process for recovery in recoveries for process in recovery.processes]
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{process.pid} {process.name()}" for process in alive]


def _project(folder: Path, endpoint: Endpoint, fault: Fault) -> Project:
    project = Project(folder / "project")
    project.config["commit_interval_s"] = COMMIT_INTERVAL_S
    project.config["store"]["format"] = fault.format
    project.llms = {"default": _real_engine() if _is_real(fault) else _http_engine(endpoint)}
    project.model(
        "answers",
        f"select i, llm_generate('x' || i) as r from range({ROWS}) t(i)",
        materialized=fault.materialized,
        # Or a rerun after a kill at the very end would append all rows once more.
        **({"unique_key": "i"} if fault.materialized == "incremental" else {}),
    )
    return project


def _is_real(fault: Fault) -> bool:
    return fault.target == "engine core"


def _http_engine(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "engine": "openai",
        "base_url": endpoint.base_url,
        "model": MODEL,
        "api_key": "none",
        "max_concurrency": CONCURRENCY,
    }


def _real_engine() -> dict[str, Any]:
    return {
        "engine": "vllm",
        "model": str(_WEIGHTS),
        "engine_args": {"max_model_len": 512, "dtype": "float32", "max_num_seqs": 16},
        "sampling": {"temperature": 0, "max_tokens": 8},
    }


def _start(
    project: Project, fault: Fault, marker: Path
) -> tuple[subprocess.Popen[bytes], set[psutil.Process]]:
    environment = dict(os.environ)
    if fault.step != RANDOM:
        step, after = STEPS[fault.step]
        hit = {"step": step, "after": after, "nth": fault.nth, "target": fault.target}
        environment["DBT_LLM_FAULT"] = json.dumps({**hit, "marker": str(marker)})
        path = [str(_INJECT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    with (project.folder / "killed.log").open("wb") as log:
        process = subprocess.Popen(
            project.command("run"),
            cwd=project.folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    processes: set[psutil.Process] = set()
    threading.Thread(target=_watch, args=(process, processes), daemon=True).start()
    return process, processes


def _watch(process: subprocess.Popen[bytes], processes: set[psutil.Process]) -> None:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        while process.returncode is None:
            processes.update(root.children(recursive=True))
            time.sleep(0.1)


def _kill_after(
    process: subprocess.Popen[bytes], fault: Fault, whole_s: float, marker: Path
) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=fault.at * whole_s)
    # Not there yet, or not any more: then the run goes undisturbed.
    with suppress(psutil.NoSuchProcess):
        for target in find_target(process.pid, fault.target):
            target.kill()
    marker.write_text(str(time.monotonic()))


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(timeout=_FIRST_RUN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"dbt hung for {_FIRST_RUN_TIMEOUT_S} s") from None


def _note_asked_twice(recovery: Recovery, endpoint: Endpoint, killed_at: float) -> None:
    again = [request for request in endpoint.requests if request.attempt > 0]
    prompts = {request.prompt for request in again}
    first = [r.time for r in endpoint.requests if r.attempt == 0 and r.prompt in prompts]
    recovery.asked_twice = len(again)
    recovery.oldest_s = max((killed_at - at for at in first), default=0.0)


def _wrong_rows(project: Project, fault: Fault) -> list[str]:
    rows = project.query("select i, r from answers order by i")
    if _is_real(fault):
        stored = dict(project.generations("prompt, output", "status = 'ok'"))
        expected = [(i, stored[f"x{i}"]) for i in range(ROWS)]
    else:
        expected = [(i, echo(f"x{i}")) for i in range(ROWS)]
    wrong = [
        f"{row}, not {other}" for row, other in zip(rows, expected, strict=False) if row != other
    ]
    return wrong if len(rows) == ROWS else [*wrong, f"{len(rows)} rows"]


def _wrong_store(project: Project, recovery: Recovery) -> list[str]:
    wrong = []
    select = "count(*), count(distinct prompt_hash), count(*) filter (status = 'error')"
    rows, keys, errors = project.generations(select)[0]
    if keys != ROWS or errors:
        wrong.append(f"the store has {keys} keys and {errors} errors")
    if not _is_real(recovery.fault) and rows - keys > recovery.asked_twice:
        wrong.append(f"{rows - keys} rows are stored twice")
    for path in project.store.iterdir():
        if path.name.startswith(("part-", "_delta_log", "_replaced", ".")):
            continue
        wrong.append(f"{path.name} lies in the store")
    for path in project.store.glob("part-*.parquet"):
        pq.read_table(path)
    return wrong


def plan(kills: int, seed: int) -> list[Fault]:
    """Return the faults of a campaign: every step first, the rest at random moments."""
    chance = random.Random(seed)
    faults = [Fault("dbt", step, nth) for step in STEPS for nth in (1, 2) if _comes(step, nth)]
    engine_steps = ["engine start", "first answer", "half a part file", "part file", "after commit"]
    faults += [Fault("engine", step) for step in engine_steps]
    faults += [Fault("engine", step, 2) for step in engine_steps[2:]]
    faults += [
        Fault(target, step)
        for target in ("raylet", "gcs")
        for step in ("engine start", "first answer", "after commit")
    ]
    faults += [Fault("engine core", step) for step in ("first answer", "part file", "after commit")]
    targets = ["dbt"] * 6 + ["engine"] * 3 + ["raylet", "gcs"]
    while len(faults) < kills:
        faults.append(Fault(chance.choice(targets), RANDOM, at=chance.uniform(0.2, 1.0)))
    variants = [(f, m) for f in ("delta", "parquet") for m in ("table", "incremental")]
    return [
        replace(fault, format=variants[number % 4][0], materialized=variants[number % 4][1])
        for number, fault in enumerate(faults[:kills])
    ]


def _comes(step: str, nth: int) -> bool:
    return nth == 1 or step in {"half a part file", "part file", "before commit", "after commit"}


def table(recoveries: list[Recovery]) -> str:
    """Return the campaign's table in Markdown, a row per fault and step."""
    groups: dict[tuple[str, str], list[Recovery]] = {}
    for recovery in recoveries:
        groups.setdefault((recovery.fault.target, recovery.fault.step), []).append(recovery)
    lines = [
        "| killed | at | times | the run | asked twice | sent before the kill | recovered in |",
        "|---|---|---|---|---|---|---|",
    ]
    for (target, step), group in groups.items():
        survived = sum(recovery.survived for recovery in group)
        known = target != "engine core"
        twice = max(recovery.asked_twice for recovery in group)
        oldest = max(recovery.oldest_s for recovery in group)
        seconds = sorted(recovery.recover_s for recovery in group)
        lines.append(
            f"| {target} | {step} | {len(group)} | {survived} of {len(group)} went on | "
            f"{twice if known else '?'} | {f'{oldest:.1f} s' if known else '?'} | "
            f"{seconds[len(seconds) // 2]:.0f} s |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    recoveries: list[Recovery] = []
    with tempfile.TemporaryDirectory() as folder:
        whole_s = undisturbed_s(Path(folder) / "undisturbed")
        faults = plan(arguments.kills, arguments.seed)
        for number, fault in enumerate(faults):
            # dbt prints what it does in this process.
            with redirect_stdout(io.StringIO()):
                recovery = break_and_recover(Path(folder) / str(number), fault, whole_s)
            recoveries.append(recovery)
            print(
                f"{number + 1}/{len(faults)} {fault.target} at {fault.step} {fault.nth}: "
                f"{'went on' if recovery.survived else 'died'}, {recovery.asked_twice} asked "
                f"twice, {recovery.recover_s:.1f} s {'; '.join(recovery.wrong) or 'all right'}",
                flush=True,
            )
    left = still_running(recoveries)
    wrong = [recovery for recovery in recoveries if recovery.wrong]
    print(f"\n{table(recoveries)}\n")
    print(
        f"{len(recoveries)} kills, {len(wrong)} with something wrong, {len(left)} processes left. "
        f"{ROWS} prompts, {CONCURRENCY} in flight, {LATENCY_S} s each, commits every "
        f"{COMMIT_INTERVAL_S} s; an undisturbed run takes {whole_s:.1f} s."
    )
    return 1 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
