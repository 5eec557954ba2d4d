"""Budgets: what a run may ask, spend and use."""

from pathlib import Path

import pytest

from tests.project import Outcome, Project

ROWS = 1000
TOKENS = 9
"""Of a prompt of this file and its answer, with the `replay` engine."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    price = {"prompt": 1_000_000.0, "completion": 1_000_000.0}
    project.llms = {"default": {"engine": "replay", "price": price, "concurrency": 10}}
    project.model(
        "answers",
        f"select i, llm_generate('prompt ' || lpad(i::varchar, 4, '0'), max_tokens := 5) as r "
        f"from range({ROWS}) t(i)",
    )
    return project


def run(project: Project, budget: dict[str, object], *arguments: str) -> Outcome:
    project.config["budget"] = budget
    return project.dbt("run", *arguments)


def stored(project: Project) -> int:
    if not any(project.store.glob("part-*")):
        return 0
    return int(project.generations("count(*)")[0][0])


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"max_requests": 999}, "budget.max_requests = 999 requests, of which 0 are used"),
        ({"max_tokens": 5000}, "budget.max_tokens = 5,000 tokens"),
        ({"max_cost_usd": 5000.5}, "budget.max_cost_usd = 5,000.5 USD"),
    ],
)
def test_a_model_over_the_budget_is_refused_before_the_first_request(
    project: Project, budget: dict[str, object], words: str
) -> None:
    outcome = run(project, budget)
    assert outcome.statuses == {"answers": "error"}
    assert "answers would ask 1,000 requests, of about " in outcome.log
    assert words in outcome.log
    assert "Nothing was asked for it." in outcome.log
    assert stored(project) == 0
    assert not (project.folder / "target/llm/answers.json").exists()


def test_a_partial_budget_of_requests_asks_exactly_so_many_and_the_next_runs_the_rest(
    project: Project,
) -> None:
    budget = {"max_requests": 400, "on_exceeded": "partial"}
    for asked, left in ((400, 600), (800, 200), (1000, 0)):
        outcome = run(project, budget)
        assert outcome.success, outcome.log
        assert stored(project) == asked
        assert project.query("select count(r), count(*) from answers") == [(asked, ROWS)]
        words = f"{left:,} of {left + 400:,} prompts were not asked, because budget.max_requests"
        assert (words in outcome.log) is (left > 0)
    assert project.query(
        "select count(*) from answers where r <> made_up('prompt ' || lpad(i::varchar, 4, '0'))"
    ) == [(0,)]


@pytest.mark.parametrize("budget", [{"max_tokens": 400 * TOKENS}, {"max_cost_usd": 400.0 * TOKENS}])
def test_a_partial_budget_of_tokens_or_dollars_is_passed_by_no_more_than_is_in_flight(
    project: Project, budget: dict[str, object]
) -> None:
    outcome = run(project, {**budget, "on_exceeded": "partial"})
    assert outcome.success, outcome.log
    (limit,) = budget.values()
    ((tokens, cost),) = project.generations("sum(prompt_tokens + completion_tokens), sum(cost_usd)")
    assert cost == tokens
    assert limit <= tokens + 10 * 2 * TOKENS
    assert tokens <= limit + 20 * TOKENS


def test_a_budget_holds_over_all_models_of_a_run(project: Project) -> None:
    for name in ("b", "c"):
        project.model(name, f"select llm_generate('{name}' || i) as r from range(300) t(i)")
    outcome = run(project, {"max_requests": 500, "on_exceeded": "partial"})
    assert outcome.success, outcome.log
    assert stored(project) == 500


def test_of_two_models_at_a_time_one_is_refused_where_both_do_not_fit(project: Project) -> None:
    project.llms["default"]["latency_s"] = 0.05
    project.model("b", "select llm_generate('b' || i, max_tokens := 5) as r from range(1000) t(i)")
    outcome = run(project, {"max_requests": 1500})
    assert sorted(outcome.statuses.values()) == ["error", "success"], outcome.log
    assert "Nothing was asked for it." in outcome.log
    assert stored(project) == 1000


def test_a_model_waits_for_what_another_one_has_only_reserved(project: Project) -> None:
    # 512 tokens are expected of an answer, which takes six.
    project.llms["default"] |= {"latency_s": 0.02, "concurrency": 300}
    for name in ("answers", "b", "c"):
        project.model(name, f"select llm_generate('{name}' || i) as r from range(300) t(i)")
    outcome = run(project, {"max_tokens": 200_000, "on_exceeded": "partial"})
    assert outcome.success, outcome.log
    assert stored(project) == 900


def test_an_engine_that_dies_does_not_use_the_budget_up(project: Project) -> None:
    project.llms["default"]["rules"] = [{"contains": "0500", "death": "process"}]
    project.llms["default"] |= {"latency_s": 0.05, "concurrency": 200}
    outcome = run(project, {"max_requests": ROWS, "on_exceeded": "partial"})
    assert outcome.success, outcome.log
    assert "were not asked" not in outcome.log
    codes = project.generations("error_code, count(*)", "true group by error_code order by 2")
    assert codes == [("engine_died", 1), (None, ROWS - 1)]


def test_a_budget_of_an_llm_holds_for_it_alone(project: Project) -> None:
    project.llms["default"]["budget"] = {"max_requests": 10}
    project.llms["other"] = {"engine": "replay"}
    project.model("b", "select llm_generate('b' || i, model := 'other') as r from range(30) t(i)")
    outcome = run(project, {"on_exceeded": "partial"})
    assert outcome.success, outcome.log
    assert sorted(project.generations("llm, count(*)", "true group by llm")) == [
        ("default", 10),
        ("other", 30),
    ]


def test_the_variable_is_a_tighter_budget_for_one_run(project: Project) -> None:
    outcome = run(project, {}, "--vars", "{llm_max_cost_usd: 50}")
    assert outcome.statuses == {"answers": "error"}
    assert "budget.max_cost_usd = 50 USD" in outcome.log
    outcome = run(project, {"max_cost_usd": 20}, "--vars", "{llm_max_cost_usd: 50}")
    assert "budget.max_cost_usd = 20 USD" in outcome.log
    outcome = run(project, {}, "--vars", "{llm_max_cost_usd: much}")
    assert "llm_max_cost_usd is 'much'" in outcome.log
    assert stored(project) == 0


def test_answers_that_take_more_than_expected_stop_a_model_where_the_budget_ends(
    project: Project,
) -> None:
    project.llms["default"]["rules"] = [{"contains": "prompt", "completion_tokens": 100}]
    outcome = run(project, {"max_tokens": 30_000})
    assert outcome.statuses == {"answers": "error"}
    assert "the answers took more than was expected" in outcome.log
    ((tokens,),) = project.generations("sum(prompt_tokens + completion_tokens)")
    assert 25_000 < tokens <= 30_000 + 20 * 110


def test_a_target_may_have_a_limit_of_its_own(project: Project) -> None:
    project.config["limit"] = 7
    assert project.dbt("run").success
    assert project.query("select count(r), count(*) from answers") == [(7, ROWS)]
    assert project.dbt("run", "--vars", "{llm_limit: 5}").success
    assert stored(project) == 12


def test_the_log_says_what_was_asked(project: Project) -> None:
    project.model("log", "-- depends_on: {{ ref('answers') }}\nselect * from {{ dbt_llm.runs() }}")
    assert run(project, {"max_requests": 3, "on_exceeded": "partial"}).success
    assert project.query("select asked, generated, left_null from log") == [(3, 3, 997)]
