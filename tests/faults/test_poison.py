"""Prompts that kill the engine: they end up alone and coded, and all others are answered."""

from pathlib import Path

import pytest

from dbt_llm import job_pass
from dbt_llm.engine_replay import made_up_answer
from tests.project import Project

ROWS = 300


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "a project")
    project.config["commit_interval_s"] = 0.2
    project.model("answers", f"select i, llm_generate('x' || i) as r from range({ROWS}) t(i)")
    return project


def poison(*prompts: str, death: str = "process") -> dict[str, object]:
    rules = [{"prompt": prompt, "death": death} for prompt in prompts]
    return {"default": {"engine": "replay", "rules": rules, "concurrency": 16}}


def good_rows(project: Project) -> tuple[int, int]:
    """Return how many rows there are, and how many of them have the right answer."""
    query = "select count(*), count(*) filter (r = made_up('x' || i)) from answers"
    return project.query(query)[0]


@pytest.mark.parametrize("death", ["engine", "process"])
def test_a_prompt_that_kills_every_engine_is_given_up_and_the_others_are_answered(
    project: Project, death: str
) -> None:
    project.llms = poison("x17", death=death)
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert good_rows(project) == (ROWS, ROWS - 1)
    assert project.query("select i from answers where r is null") == [(17,)]
    failed = project.generations("prompt, error_code, attempts, error", "status = 'error'")
    assert [row[:3] for row in failed] == [("x17", "engine_died", 2)]
    assert "the engine died 2 times while it had this request alone" in failed[0][3]
    assert project.generations("count(*), count(distinct prompt_hash)") == [(ROWS, ROWS)]
    assert "1 row failed with engine_died" in outcome.log

    # The next run asks for it alone; by then the engine has been repaired.
    project.llms = {"default": {"engine": "replay"}}
    assert (
        project.dbt("run")
        .summary("answers")
        .startswith(f"{ROWS} prompts, {ROWS - 1} stored, 1 generated")
    )
    assert good_rows(project) == (ROWS, ROWS)


def test_two_of_them_are_both_found(project: Project) -> None:
    project.llms = poison("x17", "x18")
    assert project.dbt("run").success
    assert good_rows(project) == (ROWS, ROWS - 2)
    failed = project.generations("prompt, error_code", "status = 'error' order by prompt")
    assert failed == [("x17", "engine_died"), ("x18", "engine_died")]


def test_one_in_the_second_job_of_a_model_costs_that_one_alone(project: Project) -> None:
    project.model(
        "answers",
        f"select i, llm_generate(llm_generate('x' || i)) as r from range({ROWS}) t(i)",
    )
    project.llms = poison(made_up_answer("x17"))
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    query = "select i from answers where r is distinct from made_up(made_up('x' || i))"
    assert project.query(query) == [(17,)]
    assert project.generations("count(*), count(distinct prompt_hash)") == [(2 * ROWS, 2 * ROWS)]
    assert outcome.summary("answers").startswith(
        f"{2 * ROWS} prompts, 0 stored, {2 * ROWS - 1} generated, 1 failed"
    )


def test_a_job_of_nothing_else_ends(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    project.llms = poison("x0")
    project.model("answers", "select 0 as i, llm_generate('x0') as r")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select r from answers") == [(None,)]
    assert project.generations("error_code") == [("engine_died",)]


def test_engines_that_die_of_everything_end_the_job(project: Project) -> None:
    project.llms = poison(*(f"x{i}" for i in range(ROWS)))
    outcome = project.dbt("run")
    assert not outcome.success
    assert "died 3 times without finishing anything in between" in outcome.log
    assert list(project.store.glob("part-*.parquet")) == []


def test_an_engine_that_hangs_is_replaced(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_pass, "_HUNG_S", 2.0)
    project.llms = poison("x17", death="hang")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert good_rows(project) == (ROWS, ROWS - 1)
    failed = project.generations("prompt, error_code", "status = 'error'")
    assert failed == [("x17", "engine_died")]
