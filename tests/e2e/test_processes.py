"""dbt in processes of its own: killed, interrupted, alone on one CPU, beside another Ray."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.project import Outcome, Project

ROWS = 200
SLOW = {"default": {"engine": "replay", "latency_s": 0.2, "concurrency": 4}}
FAST = {"default": {"engine": "replay"}}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "a project")
    project.model("answers", f"select i, llm_generate('x' || i) as r from range({ROWS}) t(i)")
    return project


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def start(project: Project, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            project.command("run"),
            cwd=project.folder,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def committed(project: Project) -> int:
    if not (project.store / "_delta_log").is_dir():
        return 0
    return project.generations("count(*)")[0][0] if project.version() > 0 else 0


def assert_exact(project: Project) -> None:
    assert project.query(
        "select count(*), count(distinct i), count(*) filter (r = made_up('x' || i)) from answers"
    ) == [(ROWS, ROWS, ROWS)]


def test_sigkill_in_the_middle_and_a_rerun_that_asks_for_the_rest(
    project: Project, tmp_path: Path
) -> None:
    project.llms = SLOW
    process = start(project, tmp_path / "killed.log")
    wait_until(lambda: committed(project) >= 8, "the first commits")
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if not child.name().endswith("Agent")]
    process.kill()
    process.wait()
    # Ray's two agents, which hold no engine and no file of ours, take a minute to notice.
    psutil.wait_procs(workers, timeout=30)
    left = [child for child in workers if child.is_running() and child.status() != "zombie"]
    assert left == [], "the killed process left its workers behind"
    found = committed(project)
    assert 0 < found < ROWS

    project.llms = FAST
    outcome = project.dbt_process("run")
    assert outcome.success, outcome.log
    assert_exact(project)
    rows, keys = project.generations("count(*), count(distinct prompt_hash)")[0]
    assert keys == ROWS
    # Asked twice is what was in flight or buffered when the process died: at most one commit
    # interval of 1 s, at 20 answers a second, and the four requests that were under way.
    assert rows - keys <= 40
    asked_again = project.generations("count(*)", "latency_s < 0.1")[0][0]
    assert asked_again <= ROWS - found


def test_parts_that_were_written_and_not_committed_are_taken_in(project: Project) -> None:
    assert project.dbt_process("run").success
    log = project.store / "_delta_log"
    commits = sorted(log.glob("*.json"))
    # As if the process had died between writing its parts and committing them.
    for commit in commits[1:]:
        commit.unlink()
    assert committed(project) == 0
    outcome = project.dbt_process("run")
    assert outcome.summary("answers") == f"{ROWS} prompts, {ROWS} stored, 0 generated"
    assert_exact(project)


def test_ctrl_c_stops_soon_and_keeps_what_was_answered(project: Project, tmp_path: Path) -> None:
    project.llms = SLOW
    log = tmp_path / "interrupted.log"
    process = start(project, log)
    wait_until(lambda: committed(project) >= 8, "the first commits")
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    process.wait(timeout=60)
    assert time.monotonic() - started < 15
    assert process.returncode != 0
    found = committed(project)
    assert 8 <= found < ROWS
    project.llms = FAST
    outcome = project.dbt_process("run")
    summary = outcome.summary("answers")
    assert summary.startswith(f"{ROWS} prompts, {found} stored, {ROWS - found} generated"), summary
    assert_exact(project)


def test_ctrl_c_does_not_wait_for_an_engine_that_hangs(project: Project, tmp_path: Path) -> None:
    # Prompts are asked in alphabetical order, and this one comes after about half of them.
    rules = [{"prompt": "x19", "death": "hang"}]
    project.llms = {"default": {**SLOW["default"], "rules": rules}}
    process = start(project, tmp_path / "interrupted.log")
    wait_until(lambda: committed(project) >= 8, "the first commits")
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert process.wait(timeout=90) != 0
    # A flush would be waited for a minute.
    assert time.monotonic() - started < 30
    project.llms = FAST
    assert project.dbt_process("run").success
    assert_exact(project)


def test_a_second_ctrl_c_ends_at_once(project: Project, tmp_path: Path) -> None:
    project.llms = SLOW
    process = start(project, tmp_path / "interrupted.log")
    wait_until(lambda: committed(project) >= 8, "the first commits")
    found = committed(project)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert process.wait(timeout=90) != 0
    assert time.monotonic() - started < 15
    project.llms = FAST
    outcome = project.dbt_process("run")
    assert outcome.success, outcome.log
    stored = int(outcome.summary("answers").split(" ")[2])
    assert found <= stored < ROWS
    assert_exact(project)


def test_killed_engine_is_replaced_and_nothing_is_lost(project: Project, tmp_path: Path) -> None:
    project.llms = SLOW
    process = start(project, tmp_path / "replaced.log")
    wait_until(lambda: committed(project) >= 8, "the first commits")
    engines = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name().startswith("ray::Eng")
    ]
    assert len(engines) == 1
    engines[0].kill()
    assert process.wait(timeout=120) == 0, (tmp_path / "replaced.log").read_text()
    assert_exact(project)
    rows, keys = project.generations("count(*), count(distinct prompt_hash)")[0]
    assert keys == ROWS
    assert rows - keys <= 40


def test_two_replicas_share_the_work(project: Project) -> None:
    entry = {"engine": "replay", "latency_s": 0.05, "concurrency": 4, "replicas": 2}
    project.llms = {"default": entry}
    outcome = project.dbt_process("run")
    assert outcome.success, outcome.log
    assert_exact(project)
    logs = list((project.folder / "target/llm/logs").glob("*.log"))
    assert len(logs) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_one_cpu_is_enough(project: Project) -> None:
    outcome = project.dbt_process("run", prefix=("taskset", "-c", "0"))
    assert outcome.success, outcome.log
    assert_exact(project)


def test_a_ray_that_is_there_is_used_and_left_running(project: Project) -> None:
    project._prepare()
    program = (
        "import ray; ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False); "
        "node = ray.get_runtime_context().get_node_id()\n"
        "from dbt.cli.main import dbtRunner\n"
        "assert dbtRunner().invoke(['run']).success\n"
        "assert ray.is_initialized() and ray.get_runtime_context().get_node_id() == node\n"
        "assert len(ray.nodes()) == 1\n"
        "print('still running')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.endswith("still running\n"), done.stdout + done.stderr
    assert_exact(project)


def test_private_ray_listens_on_loopback_only(project: Project, tmp_path: Path) -> None:
    project.llms = SLOW
    process = start(project, tmp_path / "listening.log")
    try:
        wait_until(lambda: committed(project) >= 8, "the first commits")
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        addresses = {
            connection.laddr.ip
            for member in family
            for connection in member.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
    finally:
        process.kill()
        process.wait()
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_cluster_that_does_not_answer_is_said_soon(project: Project) -> None:
    project.config["ray"] = {"address": "127.0.0.1:1"}
    started = time.monotonic()
    outcome = project.dbt_process("run")
    assert not outcome.success
    assert "No Ray cluster answers at '127.0.0.1:1'" in outcome.log
    assert time.monotonic() - started < 60


def test_json_log_is_json_line_by_line(project: Project) -> None:
    project.llms = SLOW
    project.model("answers", "select i, llm_generate('x' || i) as r from range(90) t(i)")
    done = subprocess.run(
        project.command("--log-format", "json", "run"),
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0
    messages = [json.loads(line)["info"]["msg"] for line in done.stdout.splitlines()]
    assert any(message.startswith("llm: answers: 90 prompts") for message in messages)
    assert done.stderr == ""


def test_quiet_run_prints_nothing(project: Project) -> None:
    done = subprocess.run(
        project.command("--quiet", "run"),
        cwd=project.folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_key_no_prompt_in_the_spec_and_workers_read_parquet(project: Project) -> None:
    assert project.dbt_process("run").success
    text = (project.folder / "target/llm/model.my_project.answers.json").read_text()
    spec = json.loads(text)
    assert "x199" not in text
    assert [Path(file["path"]).suffix for file in spec["requests"]] == [".parquet"]
    assert spec["requests"][0]["rows"] == ROWS
    assert "duckdb" not in text
    # The spool is gone with the run.
    assert list((project.folder / "target/llm/spool").iterdir()) == []


def test_first_run_with_relative_paths_a_space_and_no_extension(project: Project) -> None:
    project.config["store"]["path"] = "my lake/the store"
    assert _without_extension(project).success
    for outcome in (_without_extension(project), project.dbt_process("run")):
        assert outcome.summary("answers") == f"{ROWS} prompts, {ROWS} stored, 0 generated"
    assert (project.folder / "my lake/the store/generations/_delta_log").is_dir()
    assert_exact(project)


def _without_extension(project: Project) -> Outcome:
    # An empty extension folder, and a package of the same name that ships nothing.
    project.write("hide/duckdb_extension_delta/__init__.py", "")
    project.write("hide/extensions/.keep", "")
    command = project.command("run")
    profile = project.folder / "profiles.yml"
    folder = project.folder / "hide" / "extensions"
    text = profile.read_text().replace(
        "      type: duckdb",
        f"      type: duckdb\n      config_options: {{extension_directory: '{folder}'}}",
    )
    assert "config_options" in text
    profile.write_text(text)
    path = os.pathsep.join([str(project.folder / "hide"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=project.folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return Outcome(done.returncode == 0, done.stdout + done.stderr)


def test_names_with_dots_spaces_and_keywords(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.database = "dev-1.duckdb"
    project.schema = "My Schema"
    project.model(
        "my.model",
        'select i as "the id", llm_generate(\'x\' || i) as "the answer" from range(3) t(i)',
        alias="select",
    )
    project.model(
        "my.increment",
        'select i as "the id", llm_generate(\'x\' || i) as "the answer" from range(3) t(i)',
        alias="order by",
        materialized="incremental",
        unique_key='"the id"',
    )
    for _ in range(2):
        outcome = project.dbt_process("run")
        assert outcome.success, outcome.log
    for table in ("select", "order by"):
        assert project.query(
            f'select count(*) filter ("the answer" = made_up(\'x\' || "the id")), count(*) '
            f'from "My Schema"."{table}"'
        ) == [(3, 3)]


def test_dbt_deps_installs_the_package(project: Project) -> None:
    project._prepare()
    (project.folder / "dbt_packages/dbt_llm").unlink()
    deps = project.dbt_process("deps")
    assert deps.success, deps.log
    assert (project.folder / "dbt_packages/dbt_llm/macros/create_table_as.sql").exists()
    assert project.dbt_process("run").success
    assert_exact(project)
