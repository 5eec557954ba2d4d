"""`dbt-llm plan`: what a run would ask, and that the run then asks just that."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dbt_llm.runner import node_name
from tests.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    project.llms = {
        "default": {"engine": "replay", "price": {"prompt": 100.0, "completion": 300.0}},
        "other": {"engine": "replay", "model": "m2"},
    }
    project.model("words", "select i, 'word number ' || i as w from range(60) t(i)")
    project.model(
        "answers",
        "select i, llm_generate(w) as a, llm_classify(w, ['x', 'y'], model := 'other') as b "
        "from {{ ref('words') }}",
    )
    return project


def command(project: Project, *arguments: str) -> "subprocess.CompletedProcess[str]":
    project.command("run")
    return subprocess.run(
        [sys.executable, "-m", "dbt_llm.cli", "plan", *arguments],
        cwd=project.folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def plan(project: Project, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the plans by the names of their models."""
    code, text = project.dbt_llm("plan", "--json", *arguments)
    assert code == 0, text
    return {node_name(entry["node_id"]): entry for entry in json.loads(text)}


def numbers(entry: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(call["llm"], call["stored"], call["to_ask"]) for call in entry["calls"]]


def asked(project: Project) -> dict[str, int]:
    """Return how many generations each model has made."""
    return dict(
        project.generations("split_part(node_id, '.', 3), count(*)", "true group by node_id")
    )


def test_a_plan_asks_nothing_and_the_run_asks_what_it_says(project: Project) -> None:
    assert project.dbt("run", "--select", "words").success
    planned = plan(project)
    assert list(planned) == ["answers"]
    assert planned["answers"]["rows"] == 60
    assert numbers(planned["answers"]) == [("default", 0, 60), ("other", 0, 60)]
    assert not project.store.exists()
    assert not list(project.folder.glob("target/llm/*.json"))
    assert project.dbt("run").success
    assert asked(project) == {"answers": 120}
    assert numbers(plan(project)["answers"]) == [("default", 60, 0), ("other", 60, 0)]
    # New rows are asked, and the others are known now.
    project.model("words", "select i, 'word number ' || i as w from range(75) t(i)")
    assert project.dbt("run", "--select", "words").success
    entry = plan(project)["answers"]
    assert numbers(entry) == [("default", 60, 15), ("other", 60, 15)]
    assert project.dbt("run").success
    ((prompt_tokens, completion_tokens, cost),) = project.generations(
        "sum(prompt_tokens), sum(completion_tokens), sum(cost_usd)",
        "llm = 'default' and run_id = (select arg_max(run_id, created_at) from generations)",
    )
    call = entry["calls"][0]
    assert call["prompt_tokens"] == pytest.approx(prompt_tokens, rel=0.05)
    assert call["completion_tokens"] == pytest.approx(completion_tokens, rel=0.05)
    assert call["cost_usd"] == pytest.approx(cost, rel=0.05)
    assert call["seconds"] > 0


@pytest.mark.parametrize("few", [0, 16])
def test_what_somebody_removed_is_planned_and_asked_again(
    project: Project, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With the Delta extension and without.
    monkeypatch.setattr("dbt_llm.lookup._FEW_FILES", few)
    project.config["store"]["compact"] = False
    project.model("words", "select 'word ' || i as w from range({{ var('rows') }}) t(i)")
    project.model("answers", "select llm_generate(w) as a from {{ ref('words') }}")
    for rows in (1, 2, 3):
        assert project.dbt("run", "--vars", f"{{rows: {rows}}}").success
    _, file, _ = sorted(project.store.glob("*.parquet"))
    file.unlink()
    rows = ("--vars", "{rows: 3}")
    assert numbers(plan(project, *rows)["answers"]) == [("default", 2, 1)]
    assert project.dbt("run", "--vars", "{rows: 3, llm_mode: 'null'}").success
    assert project.query("select count(*), count(a) from answers") == [(3, 2)]
    outcome = project.dbt("run", *rows)
    assert outcome.summary("answers").startswith("3 prompts, 2 stored, 1 generated")


def test_a_prompt_of_two_models_is_asked_and_planned_once(project: Project) -> None:
    project.model("more", "select llm_generate(w) as a from {{ ref('words') }} where i < 70")
    assert project.dbt("run", "--select", "words").success
    planned = plan(project)
    assert sum(call["to_ask"] for entry in planned.values() for call in entry["calls"]) == 120
    assert project.dbt("run").success
    assert sum(asked(project).values()) == 120


def test_a_model_that_only_wants_keys_is_not_planned(project: Project) -> None:
    project.model("keys", "select llm_prompt_hash(w) as h from {{ ref('words') }}")
    assert list(plan(project)) == ["answers"]
    assert project.dbt("run", "--select", "words").success
    assert list(plan(project)) == ["answers"]


def test_limits_of_queries_and_of_runs_are_planned(project: Project) -> None:
    project.model(
        "answers", "select llm_generate(w) as a from {{ ref('words') }} order by i limit 9"
    )
    assert project.dbt("run", "--select", "words").success
    assert numbers(plan(project)["answers"]) == [("default", 0, 9)]
    assert numbers(plan(project, "--vars", "{llm_limit: 4}")["answers"]) == [("default", 0, 4)]
    project.config["limit"] = 3
    assert numbers(plan(project)["answers"]) == [("default", 0, 3)]


def test_an_incremental_model_is_planned_for_its_new_rows(project: Project) -> None:
    project.model(
        "answers",
        "{{ config(materialized='incremental', unique_key='i') }} "
        "select i, llm_generate(w) as a from {{ ref('words') }} "
        "{% if is_incremental() %} where i >= 50 {% endif %}",
    )
    assert project.dbt("run", "--select", "words").success
    entry = plan(project)["answers"]
    assert (entry["rows"], numbers(entry)) == (60, [("default", 0, 60)])
    assert project.dbt("run").success
    entry = plan(project)["answers"]
    assert (entry["rows"], numbers(entry)) == (10, [("default", 10, 0)])


def test_what_cannot_be_known_is_said(project: Project) -> None:
    project.model("deep", "select llm_generate('again ' || a) as r from {{ ref('answers') }}")
    planned = plan(project)
    assert "words does not exist" in planned["answers"]["unknown"]
    assert "answers does not exist" in planned["deep"]["unknown"]
    assert project.dbt("run").success
    project.model("answers", "select i, llm_generate(w || '?') as a from {{ ref('words') }}")
    planned = plan(project)
    (warning,) = planned["deep"]["warnings"]
    assert warning.startswith("it reads answers, whose answers the run asks first")


def test_a_model_that_asks_everything_anew_is_warned_of(project: Project) -> None:
    assert project.dbt("run").success
    assert plan(project)["answers"]["warnings"] == []
    project.model(
        "answers",
        "select llm_generate(w || ' at 12:00') as a, "
        "llm_classify(w, ['x', 'y'], model := 'other') as b from {{ ref('words') }}",
    )
    (warning,) = plan(project)["answers"]["warnings"]
    assert warning.startswith("it asks default everything anew: none of its prompts has an answer")
    assert "the store has 60 of this model" in warning


def test_a_prompt_that_is_far_longer_than_the_rest_is_warned_of(project: Project) -> None:
    project.model(
        "answers",
        "select llm_generate(w || if(i = 7, repeat(' x', 20_000), '')) as a "
        "from {{ ref('words') }}",
    )
    assert project.dbt("run", "--select", "words").success
    (warning,) = plan(project)["answers"]["warnings"]
    assert warning == "its longest prompt has 40,013 bytes, and the mean is 680"


def test_the_table_is_for_people(project: Project) -> None:
    assert project.dbt("run", "--select", "words").success
    done = command(project, "--select", "answers")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "model",
        "call",
        "rows",
        "stored",
        "to",
        "ask",
        "tokens",
        "USD",
        "time",
    ]
    assert lines[2].split()[:6] == ["answers", "default", "(text)", "60", "0", "60"]
    assert lines[4].split()[:2] == ["total", "120"]
    nothing = command(project, "--select", "words")
    assert nothing.stdout == "None of the selected models calls an LLM.\n"


def test_a_wrong_project_is_an_error_with_its_reason(project: Project) -> None:
    project.model("wrong", "select {{ no_such_macro() }}")
    done = command(project)
    assert done.returncode == 1
    assert "no_such_macro" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_wrong_call_is_said_in_the_plan(project: Project) -> None:
    project.model("answers", "select llm_generate('x', model := 'nobody') as r")
    assert "nobody" in plan(project)["answers"]["unknown"]


def test_a_test_that_asks_is_planned_as_well(project: Project) -> None:
    project.write(
        "models/models.yml",
        """
models:
  - name: answers
    columns:
      - name: a
        data_tests:
          - dbt_llm.llm_judge: {name: a_is_good, arguments: {question: Good?, judge: other}}
          - not_null
""",
    )
    assert project.dbt("run").success
    entry = plan(project)["a_is_good"]
    assert numbers(entry) == [("other", 0, 60)]
    project.dbt("test")
    assert numbers(plan(project)["a_is_good"]) == [("other", 60, 0)]


def test_the_variables_of_a_run_are_those_of_its_plan(project: Project) -> None:
    assert project.dbt("run").success
    assert numbers(plan(project)["answers"]) == [("default", 60, 0), ("other", 60, 0)]
    again = plan(project, "--vars", "{llm_refresh: true, llm_limit: '100'}")["answers"]
    assert sum(to_ask for _, _, to_ask in numbers(again)) == 100
    text = (project.folder / "dbt_project.yml").read_text()
    project.write("dbt_project.yml", text + "vars: {my_project: {llm_refresh: true}}\n")
    assert numbers(plan(project)["answers"]) == [("default", 0, 60), ("other", 0, 60)]
    cached = plan(project, "--vars", "{llm_mode: cached}")["answers"]
    assert cached["warnings"] == ["llm_mode is cached: a run asks none of these prompts, and fails"]
    done = command(project, "--vars", "{llm_limit: many}")
    assert done.returncode == 1
    assert done.stderr.startswith("dbt-llm: The dbt variable llm_limit is 'many'")


def test_answers_that_change_far_upstream_are_warned_of(project: Project) -> None:
    project.model("between", "select i, a from {{ ref('answers') }}", materialized="view")
    project.model("last", "select llm_generate(a) as r from {{ ref('between') }}")
    assert project.dbt("run").success
    project.model(
        "answers",
        "select i, llm_generate(w || '!') as a, null::varchar as b from {{ ref('words') }}",
    )
    (warning,) = plan(project)["last"]["warnings"]
    assert warning.startswith("it reads answers, whose answers the run asks first")
