"""`dbt-llm store`, and upkeep that runs by itself: no answer is lost, none is asked twice."""

import json
import re
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dbt_llm.config import StoreConfig
from dbt_llm.run_log import RunLog
from dbt_llm.store import open_store
from dbt_llm.store_upkeep import tidy
from tests.project import ROOT, Outcome, Project
from tests.unit.generations import good, write_part

PRICED = {"engine": "replay", "price": {"prompt": 150.0, "completion": 600.0}}


@pytest.fixture(params=["delta", "parquet"])
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Project:
    project = Project(tmp_path / "project")
    project.config["store"]["format"] = request.param
    # One part of each job, however slow the machine is.
    project.config["commit_interval_s"] = 3600.0
    project.llms = {"default": dict(PRICED)}
    return project


def store_config(project: Project, **changes: Any) -> StoreConfig:
    return StoreConfig(**{**project.config["store"], **changes})


def counting_rows(project: Project) -> list[tuple[Any, ...]]:
    """Return the rows that count, whatever else lies in the folder."""
    store = open_store(store_config(project))
    relation = store.relation(store.snapshot(), False)
    rows = duckdb.connect().execute(f"select * from {relation}").fetchall()
    return sorted(rows, key=repr)


def ask(project: Project, rows: int) -> Outcome:
    project.model("answers", f"select i, llm_generate('p' || i) as r from range({rows}) t(i)")
    return project.dbt("run", "--select", "answers")


def files(project: Project, table: str = "generations") -> int:
    return len(open_store(store_config(project), table).snapshot().files)


def stats(project: Project) -> dict[str, Any]:
    code, text = project.dbt_llm("store", "stats", "--json")
    assert code == 0, text
    found: dict[str, Any] = json.loads(text)
    return found


def test_compact_and_vacuum_change_no_answer(project: Project) -> None:
    project.config["store"]["compact"] = False
    for rows in (5, 8, 12):
        assert ask(project, rows).success
    assert files(project) == files(project, "runs") == 3
    before, answers = counting_rows(project), project.query("from answers order by i")
    report = project.dbt_llm("report", "--json")
    code, text = project.dbt_llm("store", "compact")
    assert code == 0, text
    assert re.fullmatch(
        r"generations: 3 files of \d+\.\d KiB became 1 of \d+\.\d KiB\n"
        r"runs: 3 files of \d+\.\d KiB became 1 of \d+\.\d KiB\n",
        text,
    )
    assert (files(project), files(project, "runs")) == (1, 1)
    assert counting_rows(project) == before
    assert project.dbt_llm("report", "--json") == report
    # A week has to pass, and a rerun asks nothing.
    code, text = project.dbt_llm("store", "vacuum")
    assert (code, text) == (
        0,
        "generations: 0 files of 0 B removed\nruns: 0 files of 0 B removed\n",
    )
    outcome = ask(project, 12)
    assert outcome.summary("answers").startswith("12 prompts, 12 stored")
    assert project.query("from answers order by i") == answers
    shown = project.dbt_llm("store", "vacuum", "--retention-hours", "0", "--dry-run", "--json")
    code, text = project.dbt_llm("store", "vacuum", "--retention-hours", "0", "--json")
    assert shown == (code, text)
    assert {table: one["files"] for table, one in json.loads(text).items()} == {
        "generations": 3,
        "runs": 3,
    }
    outcome = ask(project, 13)
    assert outcome.summary("answers").startswith("13 prompts, 12 stored, 1 generated")
    assert len(counting_rows(project)) == 13
    assert project.dbt_llm("store", "compact")[1].startswith("generations: 2 files of")
    assert len(counting_rows(project)) == 13


def test_stats_say_what_is_there(project: Project) -> None:
    is_delta = project.config["store"]["format"] == "delta"
    project.config["store"]["compact"] = False
    project.command("run")
    code, text = project.dbt_llm("store", "stats")
    assert (code, "holds no answers yet" in text) == (0, True)
    assert not project.store.exists()
    project.llms["other"] = {"engine": "replay", "model": "m2"}
    assert ask(project, 5).success
    project.model("more", "select llm_generate('x', model := 'other') as r")
    assert project.dbt("run", "--select", "more").success
    assert project.dbt("run", "--select", "more", llm_refresh=True).success
    project.dbt_llm("store", "compact")
    assert ask(project, 6).success
    write_part(project.store, ["killed"], good)
    found = stats(project)
    assert (found["answers"], found["superseded_rows"]) == (7 - is_delta + 1, 1)
    generations, runs = found["tables"]
    assert (generations["rows"], runs["rows"]) == (9 - is_delta, 4)
    # One file of each call, and one more since.
    assert generations["files"] == generations["small_files"] == 4 - is_delta
    assert generations["replaced_files"] == 2
    assert generations["uncommitted_files"] == is_delta
    assert (generations["version"] is None) is not is_delta
    assert [(one["llm"], one["model"], one["calls"], one["rows"]) for one in found["llms"]] == [
        ("default", "replay", 1, 7 - is_delta),
        ("other", "m2", 1, 2),
    ]
    code, text = project.dbt_llm("store", "stats")
    assert code == 0
    assert ("uncommitted" in text) is is_delta
    assert "and 1 row that a later answer stands for" in text
    assert re.search(r"^other +m2 +1 +2 +0$", text, re.M)


def test_options_that_belong_to_another_action(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    from dbt_llm.cli import main

    for arguments in (
        ["stats", "--dry-run"],
        ["compact", "--retention-hours", "1"],
        ["vacuum", "--retention-hours", "-1"],
        ["shrink"],
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["store", *arguments])
    assert "is no number of hours; give 0 or more" in capsys.readouterr().err


def fill(project: Project, commits: int = 12) -> None:
    """Leave what so many earlier runs of one answer each leave, the run log less."""
    store = open_store(store_config(project))
    store.create()
    for number in range(commits):
        store.commit([write_part(store.folder, [f"earlier {number}"], good)])
    log = RunLog(store_config(project))
    row = {"node_id": "model.a", "invocation_id": "i", "status": "ok", "generated": 0, "failed": 0}
    for number in range(commits):
        when = datetime(2026, 1, 1, tzinfo=UTC)
        log.append({**row, "run_id": f"r{number}", "started_at": when})


def test_a_run_tidies_the_store_by_itself(project: Project) -> None:
    fill(project)
    assert ask(project, 3).success
    assert (files(project), files(project, "runs")) == (1, 1)
    outcome = ask(project, 5)
    assert outcome.summary("answers").startswith("5 prompts, 3 stored, 2 generated")
    assert (files(project), files(project, "runs")) == (2, 2)
    found = stats(project)
    assert found["answers"] == found["tables"][0]["rows"] == 17
    assert project.query("select count(*) filter (r = made_up('p' || i)) from answers") == [(5,)]
    _, text = project.dbt_llm("report", "--json")
    made = json.loads(text)
    assert made["total"]["asked"] == made["stored"]["asked"] == 17


def test_upkeep_that_fails_is_a_warning(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from dbt_llm import compaction

    fill(project)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compaction, "_write", full)
    outcome = ask(project, 2)
    assert outcome.success
    assert "the store's table generations is left as it is" in outcome.log
    assert "No space left on device" in outcome.log
    assert project.query("select count(r) from answers") == [(2,)]
    assert files(project) == 13


# Several processes

WRITER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from dbt_llm.config import StoreConfig
from dbt_llm.store import open_store
from dbt_llm.store_upkeep import tidy
from tests.unit.generations import good, write_part

config = StoreConfig(path=sys.argv[2], format=sys.argv[3])
store = open_store(config)
store.create()
for number in range(4):
    store.commit([write_part(store.folder, [f"{sys.argv[4]}-{number}", "shared"], good)])
    store.adopt()
    tidy(config, "generations")
"""


@pytest.mark.parametrize(("format_", "processes"), [("delta", 16), ("parquet", 4)])
def test_many_processes_write_and_compact_one_store(
    tmp_path: Path, format_: str, processes: int
) -> None:
    command = [sys.executable, "-c", WRITER, str(ROOT), str(tmp_path), format_]
    writers = [
        subprocess.Popen([*command, f"w{number}"], stderr=subprocess.PIPE, text=True)
        for number in range(processes)
    ]
    errors = [writer.communicate(timeout=300)[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * processes, errors
    config = StoreConfig(path=str(tmp_path), format=format_)
    tidy(config, "generations")
    store = open_store(config)
    assert store.adopt() == 0
    relation = store.relation(store.snapshot(), False)
    rows = duckdb.connect().execute(f"select prompt from {relation}").fetchall()
    assert sorted(prompt for (prompt,) in rows) == sorted(
        ["shared"] * (4 * processes)
        + [f"w{writer}-{number}" for writer in range(processes) for number in range(4)]
    )
    # Some of the commits were merged on the way.
    assert len(store.snapshot().files) <= 10


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
import os, signal
from dbt_llm import compaction, store_upkeep
from dbt_llm.config import StoreConfig

left = int(sys.argv[4])

def traced(frame, event, argument):
    global left
    if frame.f_code.co_filename in {compaction.__file__, store_upkeep.__file__}:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return traced

sys.settrace(traced)
store_upkeep.compact(StoreConfig(path=sys.argv[2], format=sys.argv[3]), "generations")
print("done")
"""


@pytest.mark.parametrize("format_", ["delta", "parquet"])
def test_compactions_that_are_killed_anywhere(tmp_path: Path, format_: str) -> None:
    """SIGKILL after every so many lines of the compaction, again and again on one store."""
    config = StoreConfig(path=str(tmp_path), format=format_, compact=False)
    store = open_store(config)
    store.create()
    for number in range(6):
        store.commit([write_part(store.folder, [f"p{number}"], good)])
    relation = store.relation(store.snapshot(), False)
    before = sorted(duckdb.connect().execute(f"select * from {relation}").fetchall(), key=repr)
    step, killed = 40, 0
    while True:
        command = [sys.executable, "-c", KILLED, str(ROOT), str(tmp_path), format_, str(step)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        again = open_store(config)
        again.create()
        assert again.adopt() == 0
        relation = again.relation(again.snapshot(), False)
        rows = duckdb.connect().execute(f"select * from {relation}").fetchall()
        assert sorted(rows, key=repr) == before, step
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        killed += 1
        step += 97
    assert killed >= 3
    assert len(again.snapshot().files) == 1


def test_two_dbt_processes_share_a_store(project: Project, tmp_path: Path) -> None:
    """Each has a database of its own, some prompts in common, and upkeep after each model."""
    fill(project, 8)
    other = Project(tmp_path / "other")
    other.config = project.config
    other.llms = project.llms
    both = {"one": (project, 0), "two": (other, 3)}
    for one, first in both.values():
        for number in range(3):
            start = first + number * 3
            one.model(
                f"m{number}",
                f"select i, llm_generate('p' || i) as r from range({start}, {start + 9}) t(i)",
            )
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> None:
        outcomes[name] = both[name][0].dbt_process("run", "--threads", "1")

    threads = [threading.Thread(target=run, args=(name,)) for name in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, outcome in outcomes.items():
        assert outcome.success, (name, outcome.log)
    for one, first in both.values():
        for number in range(3):
            start = first + number * 3
            assert one.query(
                f"select count(*), min(i), count(*) filter (r = made_up('p' || i)) from m{number}"
            ) == [(9, start, 9)]
    rows = counting_rows(project)
    # Two processes may ask one prompt at the same time; neither loses an answer, nor has it twice.
    assert len({row[0] for row in rows}) == 18 + 8
    assert len({(row[0], row[24]) for row in rows}) == len(rows)
    for one, _ in both.values():
        outcome = one.dbt("run")
        assert outcome.success
        assert len(re.findall(r"m\d: 9 prompts, 9 stored", outcome.log)) == 3
    assert counting_rows(project) == rows


def test_a_run_under_way_reads_what_another_compacts(project: Project) -> None:
    """A compaction in the middle of a run: what it had found stays where it found it."""
    project.config["store"]["compact"] = False
    for rows in range(1, 6):
        assert ask(project, rows).success
    from dbt_llm import resolve_loop
    from dbt_llm.store_upkeep import compact

    real = resolve_loop.show_answers
    done = []

    def compacted_meanwhile(*arguments: Any, **options: Any) -> Any:
        snapshot = real(*arguments, **options)
        done.append(compact(store_config(project), "generations").files)
        return snapshot

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve_loop, "show_answers", compacted_meanwhile)
        outcome = ask(project, 9)
    assert outcome.summary("answers").startswith("9 prompts, 5 stored, 4 generated")
    assert max(done) > 1
    assert project.query("select count(*) filter (r = made_up('p' || i)) from answers") == [(9,)]
    assert len(counting_rows(project)) == 9
