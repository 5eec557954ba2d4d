"""Real answers, recorded to a file and served from it without the endpoint."""

import json
from pathlib import Path

import pytest

from tests.endpoint import Endpoint, echo, error
from tests.project import Project

MODEL = """
select
    i,
    llm_generate('prompt ' || i) as answer,
    llm_classify('prompt ' || i, ['good', 'bad']) as label,
    llm_extract('prompt ' || i, '{"n": "INTEGER", "name": "VARCHAR"}') as facts,
    llm_embed('prompt ' || i) as vector
from range(20) t(i)
"""


def rows(project: Project) -> list[tuple]:
    return project.query("select * from answers order by i")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "a project")
    project.config["max_error_ratio"] = 1.0
    project.model("answers", MODEL)
    return project


def refuse_seven(request):
    if "/chat/" in request.path and "prompt 7" in request.prompt:
        return error(400, "no", code="content_filter")
    return None


def test_recorded_answers_build_the_same_table_without_the_endpoint(project: Project) -> None:
    with Endpoint(refuse_seven) as endpoint:
        project.llms = {
            "default": {"engine": "openai", "model": "hosted", "base_url": endpoint.base_url}
        }
        assert project.dbt("run").success
        asked = len(endpoint.requests)
    real = rows(project)
    assert real[3][1] == echo("prompt 3")
    assert real[7][1:4] == (None, None, None)

    outcome = project.dbt("run-operation", "dbt_llm.record", "--args", "{path: seen/answers.jsonl}")
    assert outcome.success
    assert "llm: 80 answers recorded in seen/answers.jsonl" in outcome.log
    path = project.folder / "seen" / "answers.jsonl"
    text = path.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == 80
    assert asked >= 60  # three chat calls each for twenty prompts
    assert {tuple(sorted(line["call"])) for line in lines} == {
        ("output",),
        ("output", "sampling"),
        ("output", "sampling", "wrap"),
    }
    assert [p.name for p in path.parent.iterdir()] == ["answers.jsonl"]

    # Recorded again, nothing differs.
    assert project.dbt("run-operation", "dbt_llm.record", "--args", "{path: again.jsonl}").success
    assert (project.folder / "again.jsonl").read_text(encoding="utf-8") == text

    # A fresh clone of the project in CI: no store, no endpoint, another model name.
    project.config["store"] = {"path": str(project.folder / "ci" / "llm"), "format": "parquet"}
    project.database = "ci.duckdb"
    project.llms = {
        "default": {
            "engine": "replay",
            "answers": str(path),
            "otherwise": "error",
        }
    }
    assert project.dbt("run").success
    assert rows(project) == real


def test_what_was_not_recorded_fails(project: Project) -> None:
    with Endpoint() as endpoint:
        entry = {"engine": "openai", "model": "m", "base_url": endpoint.base_url}
        project.llms = {"default": entry}
        assert project.dbt("run").success
    assert project.dbt("run-operation", "dbt_llm.record", "--args", "{path: answers.jsonl}").success
    project.config["store"] = {"path": str(project.folder / "ci" / "llm")}
    project.config["max_error_ratio"] = 0.0
    project.llms = {
        "default": {
            "engine": "replay",
            "answers": str(project.folder / "answers.jsonl"),
            "otherwise": "error",
        }
    }
    # The same words in another call are another question.
    project.model("answers", "select llm_classify('prompt 1', ['good', 'bad', 'ugly']) as label")
    outcome = project.dbt("run")
    assert not outcome.success
    assert "no recorded answer fits this prompt" in outcome.log


def test_nothing_to_record_is_an_error(project: Project) -> None:
    outcome = project.dbt("run-operation", "dbt_llm.record", "--args", "{path: answers.jsonl}")
    assert not outcome.success
    assert "There is nothing to record: no answer is stored in" in outcome.log


def test_answers_without_prompts_cannot_be_recorded(project: Project) -> None:
    project.config["store"]["keep_prompts"] = False
    assert project.dbt("run").success
    outcome = project.dbt("run-operation", "dbt_llm.record", "--args", "{path: answers.jsonl}")
    assert not outcome.success
    assert "Set store.keep_prompts to true" in outcome.log
    assert not (project.folder / "answers.jsonl").exists()
