"""What is refused, before anything is asked, and what the message says to do."""

import pytest

from tests.project import Project

BAD_CALLS = {
    "llm_generate('x', model := 'nobody')": "names the model 'nobody', which is not among",
    "llm_generate('x', max_tokens := 0)": "max_tokens: Input should be greater than 0 (got 0)",
    "llm_generate('x', temperature := 'hot')": "Input should be a valid number (got 'hot')",
    "llm_generate('x', choices := [])": "choices: is an empty list",
    "llm_generate('x', choices := ['a', 'a'])": "choices: holds a choice twice",
    "llm_generate('x', json_schema := '')": "json_schema: is no valid JSON (got '')",
    "llm_generate('x', extra := '{')": "extra: is no valid JSON (got '{')",
}


@pytest.mark.parametrize("call, message", BAD_CALLS.items())
def test_wrong_option_is_named(project: Project, call: str, message: str) -> None:
    project.model("answers", f"select {call} as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert message in outcome.log
    assert not project.store.exists()


def test_option_from_a_column_is_refused(project: Project) -> None:
    project.model(
        "answers", "select llm_generate('x', model := m) as r from (values ('default')) t(m)"
    )
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "constant" in outcome.log
    assert not project.store.exists()


@pytest.mark.parametrize(
    "prompt",
    [
        "'rows: ' || count(*)",
        "'sum ' || sum(1)",
        "row_number() over ()",
        "lag(i, 1, 0) over (order by i)",
    ],
)
def test_aggregates_and_windows_that_would_see_one_row_are_refused(
    project: Project, prompt: str
) -> None:
    project.model("answers", f"select llm_generate({prompt}) as r from range(5) t(i)")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "compute these in a CTE or an upstream model" in outcome.log
    assert not project.store.exists()


def test_prompts_that_never_settle_are_paid_for_once(project: Project) -> None:
    project.model(
        "answers", "select llm_generate(p) as r from (select 'x' || random() as p from range(10))"
    )
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "prompts differ at every evaluation. Look for random()" in outcome.log
    assert project.generations("count(*)") == [(10,)]


def test_missing_dispatch_block_is_shown(tmp_path) -> None:
    project = Project(tmp_path / "p", dispatch=False)
    project.model("answers", "select llm_generate('x') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "search_order: ['my_project', 'dbt_llm', 'dbt']" in outcome.log
    assert not project.store.exists()


def test_data_test_on_a_missing_prompt_fails_loudly(project: Project) -> None:
    project.model("posts", "select 'a' as body")
    project.write(
        "tests/known.sql", "select 1 from {{ ref('posts') }} where llm_generate(body) = 'x'"
    )
    outcome = project.dbt("build")
    assert outcome.statuses == {"posts": "success", "known": "error"}
    assert "met 1 prompt(s) without a stored answer" in outcome.log


def test_data_test_reads_stored_answers(project: Project) -> None:
    project.model("answers", "select 'a' as body, llm_generate('a') as r")
    project.write(
        "tests/same.sql",
        "select 1 from {{ ref('answers') }} where llm_generate(body) is distinct from r",
    )
    outcome = project.dbt("build")
    assert outcome.statuses == {"answers": "success", "same": "pass"}


def test_data_test_that_stores_its_failures_asks_nothing(project: Project) -> None:
    project.model("posts", "select 'a' as body")
    project.write(
        "tests/known.sql",
        "{{ config(store_failures=true) }} "
        "select 1 as one from {{ ref('posts') }} where llm_generate(body) = 'x'",
    )
    outcome = project.dbt("build")
    assert outcome.statuses == {"posts": "success", "known": "error"}
    assert "1 prompt(s) have no stored answer" in outcome.log
    assert not project.store.exists() or project.generations("count(*)") == [(0,)]


def test_post_hook_reads_stored_answers(project: Project) -> None:
    project.model(
        "answers",
        "select llm_generate('a') as r",
        post_hook="create or replace table hooked as select llm_generate('a') as r",
    )
    assert project.dbt("run").success
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select r = made_up('a') from hooked") == [(True,)]


def test_show_gives_null_for_what_is_missing(project: Project) -> None:
    project.model("answers", "select llm_generate('a') as r")
    outcome = project.dbt("show", "--select", "answers")
    assert outcome.success, outcome.log
    assert "1 prompt(s) have no stored answer and are NULL here" in outcome.log
    assert not project.store.exists()


@pytest.mark.parametrize("command", [("parse",), ("compile",), ("docs", "generate"), ("ls",)])
def test_looking_commands_ask_nothing(project: Project, command: tuple[str, ...]) -> None:
    project.model("answers", "select llm_generate('a') as r")
    outcome = project.dbt(*command)
    assert outcome.success, outcome.log
    assert not project.store.exists()


def test_profile_problems_are_reported_together(project: Project) -> None:
    project.config["store"]["format"] = "csv"
    project.config["colour"] = "blue"
    project.llms = {"default": {"engine": "magic"}, "other": {"engine": "vllm"}}
    project.model("answers", "select llm_generate('a') as r")
    outcome = project.dbt("run")
    assert not outcome.success
    for problem in (
        "store.format: input should be 'delta' or 'parquet' (got 'csv')",
        "colour: no such key",
        "llms.default.engine: 'magic' is no engine",
        "llms.other.model: is missing",
    ):
        assert problem in outcome.log


def test_package_of_another_version_is_refused(project: Project, monkeypatch) -> None:
    monkeypatch.setattr("dbt_llm.plugin.__version__", "9.9.9")
    project.model("answers", "select llm_generate('a') as r")
    outcome = project.dbt("run")
    assert (
        "The dbt package dbt_llm has version 0.1.0, the Python package dbt-llm 9.9.9" in outcome.log
    )
    assert not project.store.exists()


def test_engine_that_cannot_start_says_why(project: Project) -> None:
    project.llms = {"default": {"engine": "replay", "answers": "no/such/file.jsonl"}}
    project.model("answers", "select llm_generate('a') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "The replay answers no/such/file.jsonl cannot be read: No such file" in outcome.log


def test_engine_that_takes_too_long_to_start_is_given_up(project: Project) -> None:
    project.llms = {"default": {"engine": "replay", "start_timeout_s": 0.001}}
    project.model("answers", "select llm_generate('a') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "No engine of LLM 'default' started within start_timeout_s = 0.001" in outcome.log
    assert "'CPU':" in outcome.log
