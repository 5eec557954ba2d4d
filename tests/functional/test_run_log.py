"""The run log: what every run asked, and what it cost."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.project import Project
from tests.unit.generations import good, write_part

NODE, LLM = "model.my_project.answers", ("default", "replay")
PRICED = {"engine": "replay", "price": {"prompt": 150.0, "completion": 600.0}}


@pytest.fixture(params=["delta", "parquet"])
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Project:
    project = Project(tmp_path / "project")
    project.config["store"]["format"] = request.param
    project.llms = {"default": dict(PRICED)}
    return project


def runs(project: Project, columns: str) -> list[tuple[Any, ...]]:
    """Read the log through the macro, in a model of its own."""
    project.model("log", "select * from {{ dbt_llm.runs() }}")
    outcome = project.dbt("run", "--select", "log")
    assert outcome.success, outcome.log
    return project.query(f"select {columns} from log order by started_at")


def test_a_run_and_a_rerun_have_a_row_each(project: Project) -> None:
    project.model("answers", "select i, llm_generate('p' || i) as r from range(20) t(i)")
    for _ in range(2):
        assert project.dbt("run", "--select", "answers", "--target", "dev").success
    assert runs(
        project,
        "node_id, status, error, prompts, stored, asked, generated, failed, errors, left_null, "
        "llm, model, engine, engine_version, target, dbt_version is not null",
    ) == [
        (NODE, "ok", None, 20, 0, 20, 20, 0, "{}", 0, *LLM, "replay", "1", "dev", True),
        (NODE, "ok", None, 20, 20, 0, 0, 0, "{}", 0, *LLM, None, None, "dev", True),
    ]
    ((total, start, generating, committing, rate, rows_per_s),) = project.query(
        "select total_s, engine_start_s, generating_s, committing_s, tokens_per_s, rows_per_s "
        "from log where asked > 0"
    )
    assert total >= start + generating > generating > committing > 0
    assert rate > rows_per_s > 0


def test_the_log_of_ten_runs_adds_up_to_the_store(project: Project) -> None:
    project.llms["other"] = {"engine": "replay", "price": {"prompt": 1.0, "completion": 7.0}}
    project.llms["default"]["rules"] = [{"contains": "7", "error_code": "timeout"}]
    project.config["max_error_ratio"] = 1.0
    draw = random.Random(5)
    for _ in range(10):
        first, rows = draw.randrange(50), draw.randrange(1, 30)
        project.model(
            "answers",
            "select llm_generate('p' || i) as a, llm_generate('q' || i, model := 'other') as b "
            f"from range({first}, {first + rows}) t(i)",
        )
        assert project.dbt("run", "--select", "answers").success
    logged = runs(
        project,
        "run_id, asked, generated, failed, prompt_tokens, completion_tokens, cost_usd, errors",
    )
    assert len(logged) == 10
    stored = project.generations(
        "run_id, count(*), count(*) filter (status = 'ok'), count(*) filter (status = 'error'), "
        "sum(prompt_tokens) filter (completion_tokens is not null), sum(completion_tokens), "
        "sum(cost_usd)",
        "true group by run_id",
    )
    by_run = {run_id: counts for run_id, *counts in stored}
    for run_id, *counts, cost, errors in logged:
        *expected, expected_cost = by_run.pop(run_id, [0, 0, 0, 0, 0, 0.0])
        assert counts == [count or 0 for count in expected]
        assert cost == pytest.approx(expected_cost, abs=1e-9)
        assert sum(json.loads(errors).values()) == counts[2]
    assert by_run == {}


def test_a_node_with_two_llms_has_one_row_with_both(project: Project) -> None:
    project.llms["other"] = {"engine": "replay", "model": "m2"}
    project.model(
        "answers", "select llm_generate('a') as a, llm_generate('b', model := 'other') as b"
    )
    assert project.dbt("run").success
    ((llm, model, asked, jobs),) = runs(project, "llm, model, asked, jobs")
    assert (llm, model, asked) == ("default, other", "m2, replay", 2)
    assert [(job["llm"], job["model"], job["asked"]) for job in jobs] == [
        ("default", "replay", 1),
        ("other", "m2", 1),
    ]


def test_a_run_that_fails_has_a_row_with_what_it_stored(project: Project) -> None:
    project.llms["default"]["rules"] = [{"contains": "1", "error_code": "timeout"}]
    project.model("answers", "select llm_generate('p' || i) as r from range(4) t(i)")
    assert not project.dbt("run").success
    assert runs(project, "status, error, asked, generated, failed, errors, prompts") == [
        ("error", "TooManyErrorsError", 4, 3, 1, '{"timeout": 1}', None)
    ]


def test_answers_of_a_run_that_was_killed_are_in_the_log_too(project: Project) -> None:
    project.model("answers", "select llm_generate('mine') as r")
    write_part(project.store, ["a", "b"], good, run_id="killed")
    assert project.dbt("run").success
    assert runs(project, "run_id = 'killed', status, asked, generated, prompt_tokens") == [
        (True, "unfinished", 2, 2, 0),
        (False, "ok", 1, 1, 2),
    ]


def test_the_nodes_result_has_the_counts(project: Project) -> None:
    project.model("plain", "select 1 as i")
    project.model("answers", "select i, llm_generate('p' || i) as r from range(5) t(i)")
    project.model(
        "more",
        "{{ config(materialized='incremental', unique_key='i') }}"
        "select i, llm_generate('p' || i) as r from range(7) t(i) "
        "where i < {{ 6 if is_incremental() else 5 }} -- {{ ref('answers') }}",
    )
    for stored, generated in ((5, 0), (5, 1)):
        assert project.dbt("run", "--threads", "1").success
        results = json.loads((project.folder / "target/run_results.json").read_text())["results"]
        responses = {
            result["unique_id"].split(".")[-1]: result["adapter_response"] for result in results
        }
        assert "llm" not in responses["plain"]
        counts = responses["more"]["llm"]
        assert (counts["stored"], counts["generated"]) == (stored, generated)
        assert counts["prompts"] == stored + generated
        assert counts["completion_tokens"] == 5 * generated
    logged = runs(project, "run_id, prompts")
    assert (counts["run_id"], counts["prompts"]) == logged[-1]


def test_where_nothing_may_be_asked_nothing_is_logged(project: Project) -> None:
    project.model("answers", "select llm_generate('a') as r")
    for mode in ("cached", "null"):
        project.dbt("run", "--vars", f"{{llm_mode: '{mode}'}}")
    assert not (project.store.parent / "runs").exists()
    assert runs(project, "*") == []
    assert [name for name, *_ in project.query("describe log")][:3] == [
        "run_id",
        "node_id",
        "invocation_id",
    ]


def test_a_log_that_cannot_be_written_fails_no_model(project: Project) -> None:
    project.model("answers", "select llm_generate('a') as r")
    project.store.parent.mkdir(parents=True)
    (project.store.parent / "runs").write_text("in the way")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert "The run log" in outcome.log and "cannot be written" in outcome.log
    assert project.query("select count(r) from answers") == [(1,)]


def test_generations_are_queried_by_a_macro(project: Project) -> None:
    project.model("answers", "select llm_generate('p' || i) as r from range(3) t(i)")
    project.model(
        "stored",
        "-- depends_on: {{ ref('answers') }}\n"
        "select prompt, output, cost_usd from {{ dbt_llm.generations() }}",
    )
    assert project.dbt("run", "--select", "stored").success
    assert project.query("select count(*) from stored") == [(0,)]
    assert project.dbt("run").success
    assert project.query("select prompt from stored order by 1") == [("p0",), ("p1",), ("p2",)]
