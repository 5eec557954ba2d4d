"""Each row of docs/dbt.md: what a command or a feature of dbt asks, and what it gives."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import project as harness
from tests.functional.test_rows import made_up
from tests.project import ROOT, Outcome, Project

PAGE = (ROOT / "docs" / "dbt.md").read_text(encoding="utf-8")

PROVED: dict[str, tuple[str, str]] = {
    "`dbt parse`": ("nothing", "test_refusals.py::test_looking_commands_ask_nothing[parse]"),
    "`dbt compile`": ("nothing", "test_refusals.py::test_looking_commands_ask_nothing[compile]"),
    "`dbt docs generate`": (
        "nothing",
        "test_refusals.py::test_looking_commands_ask_nothing[docs]",
    ),
    "`dbt ls`": ("nothing", "test_refusals.py::test_looking_commands_ask_nothing[ls]"),
    "`dbt run`": ("what is missing", "test_rerun.py::test_first_run_answers_every_row"),
    "`dbt run` again": ("nothing", "test_rerun.py::test_rerun_starts_no_ray_and_loads_no_engine"),
    "`dbt run --full-refresh`": ("nothing", "test_rerun.py::test_full_refresh_asks_nothing"),
    "`dbt run-operation dbt_llm.record`": (
        "nothing",
        "test_record.py::test_recorded_answers_build_the_same_table_without_the_endpoint",
    ),
    "Ctrl-C": (
        "nothing more",
        "../e2e/test_processes.py::test_ctrl_c_stops_soon_and_keeps_what_was_answered",
    ),
    "`table`": ("what is missing", "test_materializations.py::test_query_shapes"),
    "`view`": (
        "nothing",
        "test_materializations.py::test_view_with_a_call_is_refused_and_others_work",
    ),
    "`ephemeral`": (
        "by the models that use it",
        "test_materializations.py::test_ephemeral_upstream_with_a_call",
    ),
    "`incremental`": (
        "what is missing for the rows that its filter selects",
        "test_materializations.py::test_incremental_asks_only_for_new_rows",
    ),
    **{
        f"`incremental_strategy: {strategy}`": (
            "what is missing",
            "test_materializations.py::"
            f"test_incremental_strategies_after_a_full_refresh_on_two_threads[{strategy}]",
        )
        for strategy in ("append", "delete+insert", "merge")
    },
    "`snapshot`": ("what is missing", "test_materializations.py::test_snapshot"),
    "`external`": ("what is missing", "test_materializations.py::test_external"),
    "`lakehouse`": ("what is missing", "test_lakehouse.py::test_an_enriched_table_is_read_by_all"),
    "`external` without rows upstream": (
        "nothing",
        "test_materializations.py::test_external_upstream_without_rows_asks_nothing",
    ),
    "a Python model": (
        "what is missing, in `dbt_llm.resolve`",
        "test_python_models.py::test_python_model_uses_the_profile_and_the_store",
    ),
    "a contract": (
        "nothing if it is broken",
        "test_materializations.py::test_contract_holds_and_a_mismatch_asks_nothing",
    ),
    "`sql_header`, `pre_hook`": (
        "nothing by themselves",
        "test_materializations.py::test_sql_header_and_pre_hook_are_seen_and_run_once",
    ),
    "`post_hook`": ("nothing", "test_refusals.py::test_post_hook_reads_stored_answers"),
    "a data test": ("nothing", "test_refusals.py::test_data_test_reads_stored_answers"),
    "a data test that meets a missing prompt": (
        "nothing",
        "test_refusals.py::test_data_test_on_a_missing_prompt_fails_loudly",
    ),
    "a data test with `store_failures`": (
        "nothing",
        "test_refusals.py::test_data_test_that_stores_its_failures_asks_nothing",
    ),
    "the test [`llm_error_ratio`](tests.md#llm_error_ratio)": (
        "nothing",
        "test_generic_tests.py::test_the_rows_are_the_codes_with_counts_and_no_prompt",
    ),
    "the test [`llm_judge`](tests.md#llm_judge)": (
        "the values without a stored verdict",
        "test_generic_tests.py::test_each_distinct_value_is_judged_once_and_never_again",
    ),
    "`llm_mode: cached`": (
        "nothing",
        "test_rerun.py::test_cached_mode_fails_on_a_missing_prompt",
    ),
    "`llm_mode: null`": ("nothing", "test_rerun.py::test_null_mode_asks_nothing"),
    "`llm_limit: n`": (
        "at most n prompts per model",
        "test_rerun.py::test_limit_asks_for_so_many_and_leaves_the_rest_null",
    ),
    "`llm_refresh: true`": (
        "all prompts of the selected models",
        "test_rerun.py::test_refresh_asks_again_and_keeps_one_row_per_key",
    ),
}
"""What a row of the page says is asked, and the test that proves the row.

`test[case]` is the case of a parametrized test that has "case" in its list.
"""

ANSWERS = "select id, body, llm_generate(body) as answer from {{ ref('posts') }}"
NEW_ROWS = " {% if is_incremental() %} where id > (select max(id) from {{ this }}) {% endif %}"
MISSING = "An LLM function met 1 prompt(s) without a stored answer where none can be asked"


def proves(feature: str, asked: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Note that a test of this file proves a row."""

    def note(test: Callable[..., None]) -> Callable[..., None]:
        assert feature not in PROVED
        PROVED[feature] = (asked, f"{Path(__file__).name}::{test.__name__}")
        return test

    return note


def write_posts(project: Project, number: int) -> None:
    project.model(
        "posts",
        "select i as id, 'p' || i as body, timestamp '2026-01-01' + to_days(i::int) as written_at "
        f"from range({number}) t(i)",
        event_time="written_at",
    )


def write_answers(project: Project, sql: str = ANSWERS, **config: Any) -> None:
    """Write a model of three posts, and one with the answer to each."""
    write_posts(project, 3)
    project.model("answers", sql, **config)


def configure(project: Project, **entries: Any) -> None:
    """Set entries of dbt_project.yml."""
    path = project.folder / "dbt_project.yml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    project.write("dbt_project.yml", yaml.safe_dump({**settings, **entries}))


def dbt(project: Project, *arguments: str, **variables: Any) -> Outcome:
    """Run a dbt command that must succeed."""
    outcome = project.dbt(*arguments, **variables)
    assert outcome.success, outcome.log
    return outcome


@contextmanager
def asks(project: Project, number: int) -> Iterator[None]:
    """Check how many requests are asked within."""
    before = len(project.generations("1")) if project.store.exists() else 0
    yield
    after = len(project.generations("1")) if project.store.exists() else 0
    assert after - before == number


def right(project: Project, table: str = "answers") -> tuple[int, int]:
    """Return the number of rows, and of those with the right answer."""
    ((rows, right_rows),) = project.query(
        f"select count(*), count(*) filter (answer = made_up(body)) from {table}"
    )
    return rows, right_rows


def tables(project: Project) -> list[tuple[str, str, str]]:
    return project.query(
        "select table_schema, table_name, table_type from information_schema.tables order by all"
    )


def keep_state(project: Project) -> str:
    """Keep the artifacts as the state of an earlier run, and return their folder."""
    state = project.folder / "state"
    shutil.copytree(project.folder / "target", state)
    return str(state)


def test_every_row_has_its_test_and_every_test_its_row() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", PAGE, re.MULTILINE)
    rows = [row for row in rows if row[1] != "asked"]
    assert len(rows) == len(dict(rows)) > 50
    assert dict(rows) == {feature: asked for feature, (asked, _) in PROVED.items()}
    here = Path(__file__)
    for _, test in PROVED.values():
        found = re.fullmatch(r"(.+)::(\w+)(?:\[(.+)\])?", test)
        assert found, test
        file, name, case = found.groups()
        text = (here.parent / file).read_text(encoding="utf-8")
        before = rf'@pytest.mark.parametrize\(.*"{re.escape(case)}".*\n' if case else ""
        assert re.search(rf"^{before}def {name}\(", text, re.MULTILINE), test
    proving = {test.partition("::")[2] for _, test in PROVED.values() if here.name in test}
    tests = re.findall(r"^def (test_\w+)", here.read_text(encoding="utf-8"), re.MULTILINE)
    assert proving == set(tests[1:])


@proves("`dbt show` of a model or `--inline`", "nothing")
def test_show_reads_what_is_stored(project: Project) -> None:
    write_answers(project)
    dbt(project, "run")
    write_posts(project, 4)
    dbt(project, "run", "--select", "posts")
    with asks(project, 0):
        model = dbt(project, "show", "--select", "answers")
        inline = dbt(project, "show", "--inline", "select llm_generate('p1') as r")
    shown = re.findall(r"^\| +(\d) \| (p\d) +\| (.*?) +\|$", model.log, re.MULTILINE)
    assert shown == [(str(i), f"p{i}", made_up(f"p{i}")) for i in range(3)] + [("3", "p3", "")]
    assert "1 prompt(s) have no stored answer and are NULL here" in model.log
    assert f"| {made_up('p1')} |" in inline.log
    assert "no stored answer" not in inline.log


@proves("`dbt run --empty`", "nothing")
def test_empty_builds_tables_without_rows(project: Project) -> None:
    write_answers(project)
    project.model("one", "select llm_generate('hello') as answer")
    project.write(
        "models/another.py",
        "import dbt_llm\n\ndef model(dbt, session):\n"
        "    dbt.config(materialized='table')\n"
        "    return dbt_llm.resolve(session, \"select llm_generate('hello') as answer\")\n",
    )
    with asks(project, 0):
        # In a process of its own, as a Python model keeps the database open.
        outcome = project.dbt_process("run", "--empty")
        assert outcome.success, outcome.log
    assert project.query("select count(*) from answers") == [(0,)]
    assert project.query("from one union all from another") == [(None,), (None,)]


@proves("`dbt run --sample`", "what is missing for the sample's rows")
def test_sample_asks_for_its_rows(project: Project) -> None:
    write_answers(project)
    dbt(project, "run", "--select", "posts")
    with asks(project, 2):
        sample = '{"start": "2026-01-02", "end": "2026-01-09"}'
        dbt(project, "run", "--select", "answers", "--sample", sample)
    assert right(project) == (2, 2)
    with asks(project, 1):
        dbt(project, "run", "--select", "answers")
    assert right(project) == (3, 3)


@proves("`dbt build`", "what is missing")
@proves("`dbt seed`", "nothing")
def test_build_of_seeds_models_and_tests(project: Project) -> None:
    project.model("answers", ANSWERS)
    project.write(
        "models/tests.yml",
        "seeds: [{name: posts, columns: [{name: id, data_tests: [unique]}]}]\n"
        "models: [{name: answers, columns: [{name: answer, data_tests: [not_null]}]}]",
    )
    project.write("seeds/posts.csv", "id,body\n1,p1\n1,p2\n")
    with asks(project, 0):
        outcome = project.dbt("build")
    assert outcome.statuses == {
        "posts": "success",
        "unique_posts_id": "fail",
        "answers": "skipped",
        "not_null_answers_answer": "skipped",
    }
    project.write("seeds/posts.csv", "id,body\n1,p1\n2,p2\n")
    with asks(project, 2):
        outcome = dbt(project, "build")
    assert outcome.statuses["not_null_answers_answer"] == "pass"
    project.write("seeds/posts.csv", "id,body\n1,p1\n2,changed\n")
    with asks(project, 0):
        dbt(project, "seed")
    with asks(project, 1):
        dbt(project, "run")
    assert right(project) == (2, 2)


@proves("`dbt retry`", "what is still missing")
def test_retry_asks_for_the_rest(project: Project) -> None:
    write_answers(project, post_hook="create table kept as from {{ var('kept') }}")
    project.model("others", ANSWERS.replace("(body)", "('other ' || body)"))
    rule = {"prompt": "other p1", "error_code": "server_error"}
    project.llms = {"default": {"engine": "replay", "rules": [rule]}}
    with asks(project, 6):
        outcome = project.dbt("run", kept="nothing")
    assert outcome.statuses == {"posts": "success", "answers": "error", "others": "error"}
    project.llms = harness.REPLAY
    with asks(project, 1):
        outcome = dbt(project, "retry", kept="{{ this }}")
    assert outcome.statuses == {"answers": "success", "others": "success"}
    assert outcome.summary("answers") == "3 prompts, 3 stored, 0 generated"
    assert right(project) == (3, 3)
    assert project.query(
        "select count(*) from others where answer = made_up('other ' || body)"
    ) == [(3,)]


@proves("`dbt clone`", "nothing")
def test_clone_shows_the_answers_of_the_other_schema(project: Project) -> None:
    write_answers(project)
    project.schema = "prod"
    dbt(project, "run")
    state = keep_state(project)
    project.schema = "mine"
    with asks(project, 0):
        dbt(project, "clone", "--state", state)
    assert ("mine", "answers", "VIEW") in tables(project)
    assert right(project, "mine.answers") == (3, 3)


@proves("`dbt run-operation` of your own macro", "nothing")
def test_operation_reads_what_is_stored(project: Project) -> None:
    write_answers(project)
    dbt(project, "run")
    project.write(
        "macros/look.sql",
        "{% macro look(prompt) %}\n"
        '{% set found = run_query("select llm_generate(\'" ~ prompt ~ "\')") %}\n'
        "{% do log('found ' ~ found.rows[0][0], info=True) %}\n"
        "{% endmacro %}",
    )
    with asks(project, 0):
        outcome = dbt(project, "run-operation", "look", "--args", json.dumps({"prompt": "p1"}))
        assert f"found {made_up('p1')}" in outcome.log
        outcome = project.dbt("run-operation", "look", "--args", json.dumps({"prompt": "new"}))
        assert not outcome.success
        assert MISSING in outcome.log


@proves("`microbatch`", "what is missing, batch by batch")
@proves("`dbt retry` after a failed batch", "what is still missing in that batch")
def test_microbatches_at_a_time_ask_for_their_own_rows(project: Project) -> None:
    write_posts(project, 6)
    project.model(
        "answers",
        ANSWERS.replace("id,", "id, written_at,"),
        materialized="incremental",
        incremental_strategy="microbatch",
        event_time="written_at",
        begin="2026-01-01",
        batch_size="day",
        concurrent_batches=True,
    )
    days = ("--event-time-start", "2026-01-01", "--event-time-end", "2026-01-06")
    rule = {"prompt": "p2", "error_code": "server_error"}
    project.llms = {"default": {"engine": "replay", "rules": [rule]}}
    with asks(project, 5):
        outcome = project.dbt("run", *days)
    assert outcome.statuses["answers"] == "partial success"
    assert outcome.log.count("answers: asking default (replay) for 1 answer") == 5
    assert right(project) == (4, 4)
    project.llms = harness.REPLAY
    with asks(project, 1):
        outcome = dbt(project, "retry")
    assert outcome.log.count("llm: answers: 1 prompt, 0 stored, 1 generated") == 1
    assert right(project) == (5, 5)
    with asks(project, 1):
        dbt(project, "run", "--event-time-start", "2026-01-05", "--event-time-end", "2026-01-07")
    assert right(project) == (6, 6)


@proves("`on_schema_change: ignore`", "what is missing, new columns too")
@proves("`on_schema_change: fail`", "nothing if the columns changed")
@proves("`on_schema_change: append_new_columns`", "what is missing for the new rows")
@proves("`on_schema_change: sync_all_columns`", "what is missing for the new rows")
def test_changed_columns_of_incremental_models(project: Project) -> None:
    kinds = ("ignore", "fail", "append_new_columns", "sync_all_columns")

    def write_models(posts: int, **columns: str) -> None:
        write_posts(project, posts)
        for kind in kinds:
            project.model(
                kind,
                f"select id, body, llm_generate(body) as answer, {columns[kind]} "
                f"from {{{{ ref('posts') }}}}{NEW_ROWS}",
                materialized="incremental",
                on_schema_change=kind,
            )

    write_models(2, **dict.fromkeys(kinds, "'x' as old"))
    with asks(project, 2):
        dbt(project, "run")
    columns = {kind: f"'x' as old, llm_generate('{kind} ' || body) as new" for kind in kinds}
    columns["sync_all_columns"] = "llm_generate('sync ' || body) as new"
    write_models(3, **columns)
    with asks(project, 4):
        outcome = project.dbt("run")
    assert outcome.statuses == {"posts": "success", **dict.fromkeys(kinds, "success")} | {
        "fail": "error"
    }
    assert "the query has other columns than its table. New: new. Gone: none." in outcome.log
    found = {
        kind: (
            [name for name, *_ in project.query(f"describe {kind}")][3:],
            right(project, kind),
        )
        for kind in kinds
    }
    assert found == {
        "ignore": (["old"], (3, 3)),
        "fail": (["old"], (2, 2)),
        "append_new_columns": (["old", "new"], (3, 3)),
        "sync_all_columns": (["new"], (3, 3)),
    }
    for kind, word in (("append_new_columns", "append_new_columns"), ("sync_all_columns", "sync")):
        assert project.query(f"select id, new from {kind} order by id") == [
            (0, None),
            (1, None),
            (2, made_up(f"{word} p2")),
        ]
    with asks(project, 3):
        dbt(project, "run", "--select", "fail", "--full-refresh")
    assert project.query("select count(*) from fail where new = made_up('fail ' || body)") == [(3,)]


@proves("`table_function`", "by the models that use it")
def test_table_function_asks_where_it_is_used(project: Project) -> None:
    write_answers(project, ANSWERS + " where id < n", materialized="table_function", parameters="n")
    project.model("two", "from {{ ref('answers') }}(2)")
    with asks(project, 0):
        dbt(project, "run", "--exclude", "two")
    with asks(project, 2):
        dbt(project, "run", "--select", "two")
    assert right(project, "two") == (2, 2)
    with pytest.raises(AssertionError, match="llm_generate does not exist"):
        project.query("from answers(2)")


@proves("`persist_docs`, `grants`", "nothing")
@proves("`schema`, `alias`, your own `generate_schema_name`", "what is missing")
def test_names_docs_and_grants(project: Project) -> None:
    project.write(
        "macros/generate_schema_name.sql",
        "{% macro generate_schema_name(name, node) %}{{ name or 'My Schema' }}{% endmacro %}",
    )
    write_answers(
        project,
        schema="enriched",
        alias="the answers",
        grants={"select": ["someone"]},
        persist_docs={"relation": True, "columns": True},
    )
    project.write(
        "models/answers.yml",
        "models: [{name: answers, description: All answers.,"
        " columns: [{name: answer, description: It's one.}]}]",
    )
    with asks(project, 3):
        outcome = dbt(project, "run")
    assert "Grants for relations are not supported by DuckDB" in outcome.log
    assert tables(project) == [
        ("My Schema", "posts", "BASE TABLE"),
        ("enriched", "the answers", "BASE TABLE"),
    ]
    assert right(project, 'enriched."the answers"') == (3, 3)
    assert project.query(
        "select comment from duckdb_tables() where table_name = 'the answers' union all "
        "select comment from duckdb_columns() where column_name = 'answer'"
    ) == [("All answers.",), ("It's one.",)]


@proves("a model of an installed package", "what is missing")
def test_model_of_a_package(project: Project) -> None:
    project._prepare()
    package = {"name": "shop", "models": {"+materialized": "table"}}
    project.write("dbt_packages/shop/dbt_project.yml", yaml.safe_dump(package))
    project.write(
        "dbt_packages/shop/models/answers.sql",
        "select 'p' || i as body, {{ dbt_llm.llm_generate(\"'p' || i\") }} as answer "
        "from range(3) t(i)",
    )
    project.model("again", "select body, llm_generate(body) as answer from {{ ref('answers') }}")
    with asks(project, 3):
        dbt(project, "run")
    assert right(project) == right(project, "again") == (3, 3)
    assert project.generations("distinct node_id") == [("model.shop.answers",)]


@proves("`run_query` in a model's Jinja", "nothing")
@proves("an analysis", "nothing")
def test_queries_of_jinja_and_analyses(project: Project) -> None:
    write_answers(project)
    project.model(
        "widest",
        "-- depends_on: {{ ref('answers') }}\n"
        "{% set query = \"select max(llm_generate(body)) from \" ~ ref('posts') %}\n"
        "select '{{ run_query(query).rows[0][0] if execute }}' as answer",
    )
    project.write("analyses/explore.sql", "select llm_generate('never asked') as r")
    with asks(project, 0):
        outcome = project.dbt("run", "--exclude", "answers")
    assert outcome.statuses == {"posts": "success", "widest": "error"}
    assert MISSING.replace("1 prompt", "3 prompt") in outcome.log
    with asks(project, 0):
        outcome = dbt(project, "compile")
    assert "3 prompt(s) have no stored answer and are NULL here" in outcome.log
    compiled = project.folder / "target/compiled/my_project/analyses/explore.sql"
    assert compiled.read_text(encoding="utf-8") == "select llm_generate('never asked') as r"
    with asks(project, 3):
        dbt(project, "build")
    assert project.query("from widest") == [(max(made_up(f"p{i}") for i in range(3)),)]


@proves("`dbt test`", "nothing, but for `llm_judge`")
@proves("a unit test that overrides a macro with the call", "nothing")
@proves("a unit test of a plain call", "nothing")
def test_unit_tests_read_the_store_or_override_the_call(project: Project) -> None:
    project.write(
        "macros/ask.sql", "{% macro ask(prompt) %}llm_generate({{ prompt }}){% endmacro %}"
    )
    write_answers(project, ANSWERS.replace("llm_generate(body)", "{{ ask('body') }}"))
    given = [{"input": "ref('posts')", "rows": [{"id": 1, "body": "p1"}]}]
    expected = {"id": 1, "body": "p1", "answer": made_up("p1")}
    unit_tests = [
        {"name": "plain", "model": "answers", "given": given, "expect": {"rows": [expected]}},
        {
            "name": "overridden",
            "model": "answers",
            "overrides": {"macros": {"ask": "'a fixed answer'"}},
            "given": given,
            "expect": {"rows": [{**expected, "answer": "a fixed answer"}]},
        },
    ]
    project.write("models/tests.yml", yaml.safe_dump({"unit_tests": unit_tests}))
    with asks(project, 0):
        outcome = project.dbt("build", "--exclude", "overridden")
        assert outcome.statuses == {"posts": "success", "plain": "error", "answers": "skipped"}
        assert MISSING in outcome.log
        outcome = dbt(project, "test", "--select", "overridden")
        assert outcome.statuses == {"overridden": "pass"}
    with asks(project, 3):
        dbt(project, "run")
    with asks(project, 0):
        outcome = dbt(project, "test")
    assert outcome.statuses == {"plain": "pass", "overridden": "pass"}


@proves("tags, also `tag:llm*`, and `selectors.yml`", "what the selected models miss")
@proves("exposures", "what the selected models miss")
def test_selection(project: Project) -> None:
    for name, tag in (("one", "llm_cheap"), ("two", "llm_dear"), ("three", "other")):
        project.model(name, f"select llm_generate('{name}') as answer", tags=[tag])
    project.write(
        "selectors.yml",
        "selectors: [{name: cheap, definition: {method: tag, value: llm_cheap}}]",
    )
    project.write(
        "models/exposures.yml",
        "exposures: [{name: board, type: dashboard, owner: {email: a@example.com},"
        " depends_on: [ref('three')]}]",
    )
    asked = {
        ("--selector", "cheap"): {"one": 1},
        ("--select", "tag:llm*"): {"one": 0, "two": 1},
        ("--select", "+exposure:board"): {"three": 1},
    }
    for selection, models in asked.items():
        with asks(project, sum(models.values())):
            outcome = dbt(project, "run", *selection)
        assert set(outcome.statuses) == set(models)
        for name, number in models.items():
            assert f", {number} generated" in outcome.summary(name)
            assert project.query(f"select answer = made_up('{name}') from {name}") == [(True,)]


@proves("`state:modified`, nothing changed", "nothing")
@proves("`state:modified`, a prompt was edited", "the new prompts")
@proves("`state:modified`, an LLM was edited in the profile", "nothing")
def test_state_modified(project: Project) -> None:
    write_answers(project)
    dbt(project, "run")
    modified = ("run", "--select", "state:modified", "--state", keep_state(project))
    with asks(project, 0):
        assert dbt(project, *modified).statuses == {}
    project.llms = {"default": {"engine": "replay", "system": "Be brief."}}
    with asks(project, 0):
        assert dbt(project, *modified).statuses == {}
    with asks(project, 3):
        dbt(project, "run")
    project.model(
        "answers", ANSWERS.replace("llm_generate(body)", "llm_generate('Sum up ' || body)")
    )
    with asks(project, 3):
        assert dbt(project, *modified).statuses == {"answers": "success"}
    assert project.query(
        "select count(*) from answers where answer = made_up('Sum up ' || body)"
    ) == [(3,)]


@proves("`--defer --state`", "what the selected models miss")
def test_defer_reads_the_other_schema(project: Project) -> None:
    write_answers(project)
    project.model(
        "seconds",
        "select id, answer as body, llm_generate(answer) as answer from {{ ref('answers') }}",
    )
    project.schema = "prod"
    dbt(project, "run", "--exclude", "seconds")
    state = keep_state(project)
    project.schema = "mine"
    with asks(project, 3):
        dbt(project, "run", "--select", "seconds", "--defer", "--state", state)
    assert right(project, "mine.seconds") == (3, 3)
    assert [name for schema, name, _ in tables(project) if schema == "mine"] == ["seconds"]


@proves("`threads: 8`", "what is missing")
def test_eight_models_at_a_time(project: Project) -> None:
    project.threads = 8
    names = [f"model_{number}" for number in range(8)]
    for name in names:
        project.model(
            name,
            f"select '{name} ' || i as body, llm_generate(body) as answer from range(5) t(i)",
        )
    with asks(project, 40):
        dbt(project, "run")
    union = " union all by name ".join(f"from {name}" for name in names)
    assert right(project, f"({union})") == (40, 40)
    assert project.generations("count(distinct prompt_hash), count(distinct node_id)") == [(40, 8)]


@proves("partial parsing", "what is missing")
@proves("`dbtRunner`, several times in one process", "what is missing")
def test_invocations_of_one_process(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write_answers(project, ANSWERS.replace("(body)", "('{{ var(\"tone\") }} ' || body)"))
    with monkeypatch.context() as patch:
        # A process that goes on keeps its database, and with it the plugin.
        patch.setattr(harness, "_close_database", lambda: None)
        with asks(project, 3):
            dbt(project, "run", tone="calm")
        with asks(project, 0):
            outcome = dbt(project, "run", tone="calm")
        assert "Nothing changed, skipping partial parsing" in outcome.log
        with asks(project, 0):
            outcome = project.dbt("run", tone="angry", llm_mode="cached")
            assert outcome.statuses == {"posts": "success", "answers": "error"}
        with asks(project, 3):
            dbt(project, "run", tone="angry")
        project.llms = {"default": {"engine": "replay", "system": "Be brief."}}
        with asks(project, 3):
            dbt(project, "run", tone="angry")
    harness._close_database()
    assert project.query(
        "select count(*) from answers where answer = made_up('angry ' || body)"
    ) == [(3,)]


class InMemory(Project):
    """A project whose database ends with its process."""

    def _prepare(self) -> None:
        super()._prepare()
        profiles = self.folder / "profiles.yml"
        text = profiles.read_text(encoding="utf-8")
        profile = yaml.safe_load(text)
        profile["test"]["outputs"]["dev"]["path"] = ":memory:"
        profiles.write_text(yaml.safe_dump(profile), encoding="utf-8")


@proves("`path: ':memory:'`", "what is missing")
def test_store_outlives_a_database_in_memory(tmp_path: Path) -> None:
    project = InMemory(tmp_path / "in memory")
    write_answers(project)
    project.write(
        "tests/right.sql",
        "select * from {{ ref('answers') }}\n"
        "where answer is distinct from 'replay ' || left(sha256(body), 12)",
    )
    with asks(project, 3):
        outcome = dbt(project, "build")
    assert outcome.statuses["right"] == "pass"
    again = project.dbt_process("build")
    assert again.success, again.log
    assert again.summary("answers") == "3 prompts, 3 stored, 0 generated"
    assert list(project.folder.glob("*.duckdb")) == []


@proves("`on-run-start`, `on-run-end`", "nothing")
def test_hooks_of_a_run_read_what_is_stored(project: Project) -> None:
    write_answers(project)
    hook = "create or replace table {} as select llm_generate('{}') as answer"
    configure(project, **{"on-run-end": hook.format("ended", "p2")})
    with asks(project, 3):
        dbt(project, "run")
    configure(
        project,
        **{"on-run-start": hook.format("started", "p1"), "on-run-end": hook.format("no", "p9")},
    )
    with asks(project, 0):
        outcome = project.dbt("run")
    assert not outcome.success
    assert outcome.statuses["answers"] == "success"
    assert MISSING in outcome.log
    assert project.query("from started union all from ended") == [
        (made_up("p1"),),
        (made_up("p2"),),
    ]
    assert "no" not in [name for _, name, _ in tables(project)]
