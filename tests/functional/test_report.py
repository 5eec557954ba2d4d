"""`dbt-llm report`: what past runs asked and cost, equal to what the store holds."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dbt_llm.cli import main
from dbt_llm.schema import Answer
from tests.project import Project, _close_database
from tests.unit.generations import failing, write_part

Report = Callable[..., Any]


@pytest.fixture(params=["delta", "parquet"])
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Project:
    project = Project(tmp_path / "project")
    project.config["store"]["format"] = request.param
    project.config["max_error_ratio"] = 1.0
    project.llms = {
        "default": {
            "engine": "replay",
            "price": {"prompt": 150.0, "completion": 600.0},
            "rules": [
                {"contains": "7", "error_code": "timeout"},
                {"contains": "5", "error_code": "invalid_request"},
            ],
        },
        "other": {"engine": "replay", "model": "m2", "price": {"prompt": 3000.0}},
        "free": {"engine": "replay", "model": "m3"},
    }
    project.model("tickets", "select llm_generate('ticket ' || i) as r from range(20) t(i)")
    project.model(
        "labels",
        "select llm_classify('text ' || i, ['x', 'y'], model := 'other') as a, "
        "llm_generate('more ' || i) as b from range(9) t(i)",
    )
    return project


@pytest.fixture
def text(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Report]:
    def text(*arguments: str) -> str:
        project.command("run")
        monkeypatch.chdir(project.folder)
        capsys.readouterr()
        assert main(["report", *arguments]) == 0
        return capsys.readouterr().out

    yield text
    _close_database()


@pytest.fixture
def report(text: Report) -> Report:
    return lambda *arguments: json.loads(text("--json", *arguments))


SUMS = (
    "count(*), count(*) filter (status = 'error'), "
    "coalesce(sum(prompt_tokens) filter (completion_tokens is not null), 0), "
    "coalesce(sum(completion_tokens), 0), coalesce(sum(cost_usd), 0)"
)


def sums(entry: dict[str, Any]) -> tuple[Any, ...]:
    names = ("asked", "failed", "prompt_tokens", "completion_tokens")
    return (*(entry[name] for name in names), pytest.approx(entry["cost_usd"], abs=1e-9))


def dear(prompt_hash: str, prompt: str) -> Answer:
    return Answer(prompt_hash, output="x", prompt_tokens=3_001, completion_tokens=2_003)


def killed(project: Project) -> None:
    """Leave what a run leaves that is killed: answers, and no row in the log."""
    origin = {"node_id": "model.my_project.tickets.v2", "run_id": "killed", "invocation_id": "i9"}
    write_part(project.store, ["a", "b", "c"], failing("server_error"), **origin)
    write_part(project.store, ["d"], failing("timeout"), **origin)
    prices = {"price_prompt": 5.0, "price_completion": 20.0}
    write_part(project.store, ["e", "f"], dear, **origin, **prices)


def test_it_adds_up_to_the_store(project: Project, report: Report) -> None:
    for select in ("tickets", "labels", "tickets labels"):
        assert project.dbt("run", "--select", *select.split()).success
    killed(project)
    # The next run takes them in.
    project.model("labels", "select llm_generate('even more ' || i) as b from range(3) t(i)")
    assert project.dbt("run").success
    made = report()
    assert [sums(made["total"])] == project.generations(SUMS)
    assert made["total"] == pytest.approx(made["stored"])
    assert made["total"]["cost_usd"] > 0.05
    for key, entries in (("node_id", made["models"]), ("invocation_id", made["invocations"])):
        stored = {
            name: tuple(found)
            for name, *found in project.generations(f"{key}, {SUMS}", f"true group by {key}")
        }
        asked = {entry[key]: sums(entry) for entry in entries if entry["asked"]}
        assert asked == stored
    by_node = {model["node_id"]: model for model in made["models"]}
    codes: dict[str, dict[str, int]] = {}
    for node, code, rows in project.generations(
        "node_id, error_code, count(*)", "status = 'error' group by all"
    ):
        codes.setdefault(node, {})[code] = rows
    assert {name: model["errors"] for name, model in by_node.items() if model["errors"]} == codes
    unfinished = by_node["model.my_project.tickets.v2"]
    assert unfinished["cost_usd"] == pytest.approx(2 * (3_001 * 5 + 2_003 * 20) / 1e6)
    assert codes["model.my_project.tickets.v2"] == {"server_error": 3, "timeout": 1}
    costs = [model["cost_usd"] for model in made["models"]]
    assert costs == sorted(costs, reverse=True)


def test_runs_are_listed_newest_first(project: Project, report: Report) -> None:
    assert project.dbt("run", "--select", "tickets").success
    project.config["max_error_ratio"] = 0.0
    assert not project.dbt("run", "--select", "labels", "--target", "dev").success
    made = report()
    assert made["invocations_in_all"] == 2
    newest, oldest = made["invocations"]
    assert [newest["status"], oldest["status"]] == ["error", "ok"]
    assert (newest["models"], oldest["models"]) == (1, 1)
    assert newest["target"] == oldest["target"] == "dev"
    assert (newest["asked"], oldest["asked"]) == (18, 20)
    assert newest["started_at"] > oldest["started_at"]
    assert newest["started_at"].endswith("+00:00")
    assert 0 < oldest["seconds"] < 600
    killed(project)
    project.config["max_error_ratio"] = 1.0
    assert project.dbt("run").success
    made = report()
    status = {entry["invocation_id"]: entry for entry in made["invocations"]}
    assert status["i9"]["status"] == "unfinished"
    assert status["i9"]["seconds"] is None
    # Fewer runs are listed; the models are still those of all runs.
    fewer = report("--runs", "1")
    assert fewer["invocations"] == made["invocations"][:1]
    assert (fewer["models"], fewer["total"]) == (made["models"], made["total"])


def test_the_text_is_for_people(project: Project, text: Report) -> None:
    for _ in range(2):
        assert project.dbt("run").success
    lines = text("--runs", "1").splitlines()
    assert lines[0] == "The last 1 of 2 runs of dbt, the newest first (UTC)"
    assert lines[2].split() == [
        *("when", "target", "commit", "status", "models", "asked", "failed", "tokens", "USD"),
        "seconds",
    ]
    second = lines[4].split()
    # The passing errors were asked again.
    assert second[2] == "dev" and second[-6:-3] == ["2", "3", "3"]
    assert lines[6] == "All models of all runs, the most expensive first"
    rows = {line.split()[0]: line for line in lines[10:]}
    assert list(rows) == ["labels", "tickets", "total"]
    assert rows["labels"].endswith("%  1 invalid_request, 2 timeout")
    assert rows["tickets"].endswith("%  2 invalid_request, 4 timeout")
    assert rows["total"].split()[1:3] == ["41", "9"]
    assert text().startswith("All runs of dbt, the newest first (UTC)\n")


def test_without_prices_there_are_no_shares(project: Project, text: Report) -> None:
    project.llms = {"default": project.llms["free"]}
    project.model("labels", "select 1 as i")
    assert project.dbt("run").success
    assert "0.0000" in text() and "%" not in text()


def test_an_empty_store_is_a_sentence(project: Project, text: Report, report: Report) -> None:
    assert text() == "No run has called an LLM yet: the store has no answers and no run log.\n"
    assert report()["invocations"] == report()["models"] == []
    assert not (project.folder / "lake").exists()


def test_answers_that_were_removed_are_said(project: Project, text: Report) -> None:
    assert project.dbt("run").success
    assert "were removed" not in text()
    if project.config["store"].get("format") == "delta":
        from deltalake import DeltaTable

        DeltaTable(str(project.store)).delete("llm = 'other'")
    else:
        for file in project.store.glob("part-*.parquet"):
            file.unlink()
    assert "answers were removed from the store, or its run log could not be written" in " ".join(
        text().split()
    )


def test_it_does_not_open_dbts_database(project: Project, text: Report) -> None:
    assert project.dbt("run").success
    (project.folder / project.database).unlink()
    assert "tickets" in text()
    assert not (project.folder / project.database).exists()


def test_a_wrong_profile_is_said(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.config["limt"] = 1
    project.command("run")
    monkeypatch.chdir(project.folder)
    assert main(["report"]) == 1
    assert "limt: no such key" in capsys.readouterr().err
