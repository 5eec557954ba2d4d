"""The generic tests llm_error_ratio and llm_judge: what they find, and what is asked for it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dbt_llm.call import make_call, prompt_hash
from dbt_llm.config import load_config
from tests.functional.test_citizenship import asks
from tests.project import Outcome, Project

QUESTION = "Is this reply polite?"
RUDE = {"contains": "rude", "output": "no"}
POLITE = {"output": "yes"}
JUDGE = {"engine": "replay", "rules": [RUDE, POLITE]}
FOUND = "polite"
"""The table of the stored failures."""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    project.llms = {"default": {"engine": "replay"}, "judge": dict(JUDGE)}
    return project


def add_test(
    project: Project,
    name: str,
    *,
    model: str = "replies",
    column: str | None = None,
    config: dict[str, Any] | None = None,
    version: int | None = None,
    **arguments: Any,
) -> None:
    """Give a model, or a column of it, one generic test of the package."""
    test = {f"dbt_llm.{name}": {"name": FOUND, "arguments": arguments, "config": config or {}}}
    entry: dict[str, Any] = {"name": model}
    if column is not None:
        entry["columns"] = [{"name": column, "data_tests": [test]}]
    elif version is not None:
        entry["versions"] = [{"v": version, "data_tests": [test]}, {"v": version + 1}]
    else:
        entry["data_tests"] = [test]
    project.write("models/tests.yml", yaml.safe_dump({"models": [entry]}))


def judge_replies(project: Project, *, config: dict[str, Any] | None = None, **more: Any) -> None:
    """Write six rows, of which one is NULL and three are rude, and let them be judged."""
    project.model(
        "replies",
        "select * from (values (1, 'thanks'), (2, 'rude: no'), (3, 'rude: no'), (4, null), "
        "(5, 'rude: go'), (6, 'thanks')) t(i, reply)",
    )
    arguments = {"question": QUESTION, "judge": "judge", **more}
    add_test(project, "llm_judge", column="reply", config=config, **arguments)


def check(
    project: Project, asked: int, status: str, failures: int | None = None, command: str = "build"
) -> Outcome:
    """Build the models and run the test; look at what is asked and found."""
    with asks(project, asked):
        outcome = project.dbt(command)
    assert outcome.statuses[FOUND] == status, outcome.log
    assert all(outcome.statuses[name] == "success" for name in outcome.statuses.keys() - {FOUND})
    if failures is not None:
        assert result(project)["failures"] == failures
    return outcome


def result(project: Project) -> Any:
    """Return what run_results.json says of the test."""
    results = json.loads((project.folder / "target" / "run_results.json").read_text())["results"]
    (found,) = (one for one in results if one["unique_id"].startswith("test."))
    return found


def stored_failures(project: Project, columns: str = "value, n_records, verdict") -> Any:
    return project.query(f'select {columns} from "main_dbt_test__audit".{FOUND}')


# llm_judge


def test_each_distinct_value_is_judged_once_and_never_again(project: Project) -> None:
    judge_replies(project)
    outcome = check(project, 3, "fail", 2)
    assert outcome.summary(FOUND).startswith("3 prompts, 0 stored, 3 generated")
    assert sorted(project.generations("prompt, output, llm")) == [
        ("rude: go", "no", "judge"),
        ("rude: no", "no", "judge"),
        ("thanks", "yes", "judge"),
    ]
    outcome = check(project, 0, "fail", 2, "test")
    assert outcome.summary(FOUND) == "3 prompts, 3 stored, 0 generated"


def test_polite_replies_pass(project: Project) -> None:
    judge_replies(project, config={"where": "i in (1, 4, 6)"})
    check(project, 1, "pass", 0)


def test_the_question_and_the_options_are_those_of_llm_filter(project: Project) -> None:
    project.model(
        "same",
        f"select llm_filter('thanks', '{QUESTION}', model := 'judge', max_tokens := 3, "
        "stop := ['.'], extra := {'k': 1}) as r",
    )
    assert project.dbt("run").success
    assert project.generations("prompt, output") == [("thanks", "yes")]
    judge_replies(project, max_tokens=3, stop=["."], extra={"k": 1})
    check(project, 2, "fail", 2)


def test_the_log_and_the_results_have_a_row_of_the_test(project: Project) -> None:
    judge_replies(project)
    check(project, 3, "fail")
    found = result(project)
    response = found["adapter_response"]["llm"]
    assert (response["prompts"], response["stored"], response["generated"]) == (3, 0, 3)
    project.model("log", "select * from {{ dbt_llm.runs() }}")
    assert project.dbt("run", "--select", "log").success
    assert found["unique_id"].startswith(f"test.my_project.{FOUND}.")
    assert project.query("select node_id, run_id, status, asked, llm from log") == [
        (found["unique_id"], response["run_id"], "ok", 3, "judge")
    ]


@pytest.mark.parametrize("kind", ["table", "view"])
def test_failures_are_stored_as_a_table(project: Project, kind: str) -> None:
    judge_replies(project, config={"store_failures_as": kind})
    for asked in (3, 0):
        check(project, asked, "fail", 2)
        assert stored_failures(project) == [("rude: no", 2, "no"), ("rude: go", 1, "no")]


def test_a_limit_cuts_the_failures_and_not_the_judging(project: Project) -> None:
    judge_replies(project, config={"limit": 1})
    outcome = check(project, 3, "fail", 1)
    assert "may be asked for more rows" not in outcome.log
    judge_replies(project, config={"limit": 1, "store_failures": True})
    outcome = check(project, 0, "fail", 1)
    assert stored_failures(project) == [("rude: no", 2, "no")]
    assert "may be asked for more rows" not in outcome.log


def test_a_limit_does_not_end_the_judging_of_many_values(project: Project) -> None:
    judge_replies(project, config={"limit": 1})
    project.model("replies", "select 'rude ' || i as reply from range(5000) t(i)")
    outcome = check(project, 5000, "fail", 1)
    assert outcome.summary(FOUND).startswith("5,000 prompts, 0 stored, 5,000 generated")


def test_configs_of_tests_work(project: Project) -> None:
    judge_replies(project, config={"where": "i < 3"})
    check(project, 2, "fail", 1)
    judge_replies(project, config={"severity": "warn"})
    check(project, 1, "warn", 2)
    for config, status, failures in (
        ({"error_if": "> 2"}, "warn", 2),
        ({"error_if": "> 2", "warn_if": "> 2"}, "pass", 0),
        ({"fail_calc": "coalesce(sum(n_records), 0)"}, "fail", 3),
        ({"fail_calc": "count(*) filter (verdict = 'not judged')"}, "pass", 0),
    ):
        judge_replies(project, config=config)
        check(project, 0, status, failures)


def test_a_value_without_a_verdict_fails(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    broken = {"contains": "thanks", "error_code": "truncated"}
    project.llms["judge"] = {"engine": "replay", "rules": [broken, RUDE]}
    judge_replies(project, config={"store_failures": True})
    for asked in (3, 0):
        check(project, asked, "fail", 3)
        assert sorted(stored_failures(project)) == [
            ("rude: go", 1, "no"),
            ("rude: no", 2, "no"),
            ("thanks", 2, "not judged"),
        ]


def test_too_many_failures_of_the_judge_are_an_error(project: Project) -> None:
    project.llms["judge"]["rules"] = [{"contains": "thanks", "error_code": "timeout"}, RUDE]
    judge_replies(project)
    outcome = check(project, 3, "error")
    assert "1 of 3 prompts failed (timeout: 1), more than max_error_ratio = 0.05" in outcome.log
    project.llms["judge"] = dict(JUDGE)
    check(project, 1, "fail", 2)


def test_modes_limits_and_budgets_hold(project: Project) -> None:
    judge_replies(project, config={"store_failures": True})
    with asks(project, 0):
        outcome = project.dbt("build", llm_mode="cached")
        assert outcome.statuses == {"replies": "success", FOUND: "error"}
        assert "llm_mode is cached and 3 prompt(s) have no stored answer" in outcome.log
        outcome = project.dbt("test", llm_mode="null")
        assert outcome.statuses == {FOUND: "fail"}
    assert {row[2] for row in stored_failures(project)} == {"not judged"}
    with asks(project, 1):
        outcome = project.dbt("test", llm_limit=1)
    assert outcome.statuses == {FOUND: "fail"}
    assert [row[2] for row in stored_failures(project)].count("not judged") == 2
    project.config["budget"] = {"max_requests": 1}
    outcome = check(project, 0, "error")
    assert "budget.max_requests = 1" in outcome.log
    project.config["budget"] = {}
    check(project, 2, "fail", 2)


def test_looking_at_a_judged_column_asks_nothing(project: Project) -> None:
    judge_replies(project)
    for command in (["build", "--empty"], ["parse"], ["compile"], ["docs", "generate"], ["ls"]):
        outcome = project.dbt(*command)
        assert outcome.success, outcome.log
    assert not project.store.exists()


def test_show_of_a_judge_asks_nothing(project: Project) -> None:
    judge_replies(project)
    assert project.dbt("run").success
    outcome = project.dbt("show", "--select", FOUND)
    assert not project.store.exists()
    assert outcome.success, outcome.log
    assert "3 prompt(s) have no stored answer and are NULL here" in outcome.log
    assert re.findall(r"^\| (\S+).*\| +(\d) \| not judged \|$", outcome.log, re.MULTILINE) == [
        ("rude:", "2"),
        ("thanks", "2"),
        ("rude:", "1"),
    ]


def test_a_judge_without_the_dispatch_block_never_passes(tmp_path: Path) -> None:
    project = Project(tmp_path / "project", dispatch=False)
    project.llms = {"default": {"engine": "replay"}, "judge": dict(JUDGE)}
    judge_replies(project)
    outcome = check(project, 0, "error")
    assert "In a model, or in the test llm_judge, this means that dbt_project.yml" in outcome.log
    assert "search_order: ['my_project', 'dbt_llm', 'dbt']" in outcome.log


def test_other_tests_read_stored_answers_as_before(project: Project) -> None:
    judge_replies(project)
    project.write(
        "tests/other.sql", "select 1 from {{ ref('replies') }} where llm_generate(reply) = 'x'"
    )
    project.write("tests/plain.sql", "select 1 from {{ ref('replies') }} where i > 6 limit 3")
    with asks(project, 3):
        outcome = project.dbt("build")
    assert outcome.statuses == {
        "replies": "success",
        FOUND: "fail",
        "other": "error",
        "plain": "pass",
    }


def test_a_question_must_be_a_text(project: Project) -> None:
    judge_replies(project, question=5)
    outcome = project.dbt("parse")
    assert not outcome.success
    assert "llm_judge: question is 5; use a text that yes or no answers." in outcome.log


def test_an_unknown_judge_or_option_is_named(project: Project) -> None:
    judge_replies(project, judge="nobody")
    assert "names the model 'nobody', which is not among" in check(project, 0, "error").log
    add_test(project, "llm_judge", column="reply", question=QUESTION, colour="blue")
    outcome = project.dbt("parse")
    assert not outcome.success
    assert "llm_judge: colour is no argument of it; use question, judge, system," in outcome.log


# llm_error_ratio


def ask(project: Project, prompts: str, **config: Any) -> None:
    """Write a model that asks some prompts; those with a word of a rule fail."""
    project.config["max_error_ratio"] = 1.0
    project.llms["default"]["rules"] = [
        {"contains": "long", "error_code": "context_length"},
        {"contains": "slow", "error_code": "timeout"},
    ]
    project.model("replies", f"select p, llm_generate(p) as reply from ({prompts}) t(p)", **config)


MANY = "select unnest(['long 1', 'long 2', 'slow 1'] || ['good ' || i for i in range(7)])"


def hash_of(project: Project, prompt: str) -> str:
    config = load_config({**project.config, "llms": project.llms})
    return prompt_hash(make_call('{"model": "default"}', config.llms).call_hash, prompt)


def test_the_rows_are_the_codes_with_counts_and_no_prompt(project: Project) -> None:
    add_test(project, "llm_error_ratio", config={"store_failures": True})
    ask(project, MANY)
    check(project, 10, "fail", 2)
    example = min(hash_of(project, "long 1"), hash_of(project, "long 2"))
    assert stored_failures(project, "columns(*)") == [
        ("context_length", 2, 0.2, example),
        ("timeout", 1, 0.1, hash_of(project, "slow 1")),
    ]


@pytest.mark.parametrize(("max_ratio", "status"), [(0, "fail"), (0.29, "fail"), (0.3, "pass")])
def test_the_ratio_is_of_the_distinct_prompts(
    project: Project, max_ratio: float, status: str
) -> None:
    add_test(project, "llm_error_ratio", max_ratio=max_ratio)
    ask(project, f"({MANY}) union all ({MANY})")
    check(project, 10, status)


def test_a_good_answer_of_anyone_counts_and_prompts_of_others_do_not(project: Project) -> None:
    add_test(project, "llm_error_ratio")
    project.model("others", "select llm_generate('long ' || i) as r from range(100) t(i)")
    ask(project, "values ('good'), ('slow')")
    check(project, 102, "fail", 1)
    project.llms["default"]["rules"] = []
    project.model("others", "select llm_generate('slow') as r")
    assert project.dbt("run", "--select", "others").success
    check(project, 0, "pass", command="test")


def test_a_good_answer_counts_though_a_newer_one_failed(project: Project) -> None:
    add_test(project, "llm_error_ratio", max_ratio=0.5)
    ask(project, "values ('good'), ('long')")
    check(project, 2, "pass")
    project.llms["default"]["rules"] = [{"error_code": "content_filter"}]
    with asks(project, 2):
        outcome = project.dbt("build", llm_refresh=True)
    assert outcome.statuses == {"replies": "success", FOUND: "pass"}


def test_old_prompts_can_be_left_out(project: Project) -> None:
    ask(project, "values ('long')")
    assert project.dbt("run").success
    ((newest,),) = project.generations("max(created_at)::varchar")
    ask(project, "values ('good')")
    add_test(project, "llm_error_ratio")
    check(project, 1, "fail", 1)
    add_test(project, "llm_error_ratio", since=f"timestamptz '{newest}' + interval 1 microsecond")
    check(project, 0, "pass", command="test")


def test_a_model_that_asked_nothing_passes(project: Project) -> None:
    add_test(project, "llm_error_ratio", max_ratio=0)
    project.model("replies", "select 1 as i")
    with asks(project, 0):
        outcome = project.dbt("build")
    assert outcome.statuses == {"replies": "success", FOUND: "pass"}


def test_a_model_with_an_alias_and_a_schema_is_found(project: Project) -> None:
    add_test(project, "llm_error_ratio")
    ask(project, "values ('long')", alias="renamed", schema="elsewhere")
    check(project, 1, "fail", 1)


def test_a_version_has_its_own_prompts(project: Project) -> None:
    ask(project, "values ('good')")
    add_test(project, "llm_error_ratio", model="answers", version=1)
    project.model("answers_v1", "select llm_generate('long') as r")
    project.model("answers_v2", "select llm_generate('good') as r")
    outcome = check(project, 2, "fail", 1)
    assert outcome.summary("answers.v1").startswith("1 prompt, 0 stored, 0 generated, 1 failed")


def test_a_singular_test_can_use_it(project: Project) -> None:
    ask(project, "values ('long')")
    project.write(
        f"tests/{FOUND}.sql", "{{ dbt_llm.test_llm_error_ratio(ref('replies'), max_ratio=0.5) }}"
    )
    check(project, 1, "fail", 1)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_its_failures_can_be_a_view(project: Project, kind: str) -> None:
    project.config["store"]["format"] = kind
    add_test(project, "llm_error_ratio", config={"store_failures_as": "view"})
    ask(project, "values ('long')")
    for asked in (1, 0):
        check(project, asked, "fail", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_ratio": 1.5}, "max_ratio is 1.5; use a number from 0 to 1."),
        ({"max_ratio": True}, "max_ratio is true; use a number from 0 to 1."),
        ({"max_ratio": "few"}, 'max_ratio is "few"; use a number from 0 to 1.'),
        ({"since": 7}, "since is 7; use SQL for a time"),
    ],
)
def test_wrong_arguments_are_refused(
    project: Project, arguments: dict[str, Any], message: str
) -> None:
    project.model("replies", "select 1 as i")
    add_test(project, "llm_error_ratio", **arguments)
    outcome = project.dbt("parse")
    assert not outcome.success
    assert f"llm_error_ratio: {message}" in outcome.log


def test_what_cannot_be_tested_says_so(project: Project) -> None:
    project.model("replies", "select llm_generate('x') as r", materialized="ephemeral")
    add_test(project, "llm_error_ratio")
    assert "replies is ephemeral, and its prompts are asked by" in check(project, 0, "error").log
    project.model("replies", "select 1 as i")
    add_test(project, "llm_error_ratio", config={"where": "i = 1"})
    assert "and the config `where` chooses rows" in check(project, 0, "error").log
    add_test(project, "llm_error_ratio", config={"where": ""})
    check(project, 0, "pass")
    project.write("seeds/replies.csv", "i\n1\n")
    (project.folder / "models" / "replies.sql").unlink()
    project.write("models/tests.yml", "")
    project.write(
        "seeds/tests.yml",
        f"seeds: [{{name: replies, data_tests: [{{dbt_llm.llm_error_ratio: {{name: {FOUND}}}}}]}}]",
    )
    assert "is no model or snapshot of this project" in check(project, 0, "error").log
