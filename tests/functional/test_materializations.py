"""Every place of a query and every materialization that may call an LLM function."""

from typing import Any

import pytest

from tests.project import Project

# Name: the query, what it must give without any LLM, and how many prompts it may ask.
SHAPES: dict[str, tuple[str, str, int]] = {
    "cte": (
        "with a as (select i, llm_generate('x' || i) as r from range(5) t(i)) select * from a",
        "select i, made_up('x' || i) from range(5) t(i)",
        5,
    ),
    "where": (
        "select i from range(50) t(i) where llm_generate('x' || i) like '%a%'",
        "select i from range(50) t(i) where made_up('x' || i) like '%a%'",
        50,
    ),
    "guarded by a filter": (
        "select i, llm_generate('x' || i) as r from range(1000) t(i) where i % 100 = 0",
        "select i, made_up('x' || i) from range(1000) t(i) where i % 100 = 0",
        10,
    ),
    "case": (
        "select i, case when i < 3 then llm_generate('x' || i) else 'none' end as r "
        "from range(10) t(i)",
        "select i, case when i < 3 then made_up('x' || i) else 'none' end from range(10) t(i)",
        3,
    ),
    "union": (
        "select llm_generate('x' || i) as r from range(3) t(i) "
        "union all select llm_generate('y' || i) from range(3) t(i)",
        "select made_up('x' || i) from range(3) t(i) "
        "union all select made_up('y' || i) from range(3) t(i)",
        6,
    ),
    "aggregate": (
        "select i % 3 as g, llm_generate(string_agg('x' || i, ',' order by i)) as r "
        "from range(30) t(i) group by g",
        "select i % 3 as g, made_up(string_agg('x' || i, ',' order by i)) "
        "from range(30) t(i) group by g",
        3,
    ),
    "window": (
        "select i, llm_generate('x' || l) as r "
        "from (select i, lag(i, 1, 0) over (order by i) as l from range(5) t(i))",
        "select i, made_up('x' || l) "
        "from (select i, lag(i, 1, 0) over (order by i) as l from range(5) t(i))",
        4,
    ),
    "nested": (
        "select i, llm_generate('y' || llm_generate('x' || i)) as r from range(4) t(i)",
        "select i, made_up('y' || made_up('x' || i)) from range(4) t(i)",
        8,
    ),
    "inner join": (
        "select a.i, llm_generate('x' || b.j) as r "
        "from range(10) a(i) join (select i * 2 as j from range(3) t(i)) b on a.i = b.j",
        "select j, made_up('x' || j) from (select i * 2 as j from range(3) t(i))",
        3,
    ),
    "correlated subquery": (
        "select i, (select llm_generate('x' || max(j)) from range(9) u(j) where j % 3 = i) as r "
        "from range(3) t(i)",
        "select i, made_up('x' || (6 + i)) from range(3) t(i)",
        3,
    ),
    "literal": ("select llm_generate('hello') as r", "select made_up('hello')", 1),
    "numbers and dates are cast": (
        "select llm_generate(i) as r, llm_generate(date '2026-01-02') as d from range(2) t(i)",
        "select made_up(i::varchar), made_up('2026-01-02') from range(2) t(i)",
        3,
    ),
    "repeated prompts": (
        "select i, llm_generate('x' || i % 4) as r from range(100) t(i)",
        "select i, made_up('x' || i % 4) from range(100) t(i)",
        4,
    ),
    "names like ours": (
        "with dbt_llm_generations as (select 'p' || i as prompt, 'm' as model, i as output, "
        "'h' as prompt_hash, 's' as system from range(3) t(i)) "
        "select output, llm_generate(prompt || model || prompt_hash || system) as r "
        "from dbt_llm_generations",
        "select i, made_up('p' || i || 'mhs') from range(3) t(i)",
        3,
    ),
}


def test_query_shapes(project: Project) -> None:
    # Each shape has prompts of its own, so that none finds the answers of another.
    shapes = {
        name: (
            query.replace("'x'", f"'x{number}-'"),
            expected.replace("'x'", f"'x{number}-'"),
            asked,
        )
        for number, (name, (query, expected, asked)) in enumerate(SHAPES.items())
    }
    for number, (query, _, _) in enumerate(shapes.values()):
        project.model(f"shape_{number}", query)
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    for number, (name, (_, expected, asked)) in enumerate(shapes.items()):
        table = f"shape_{number}"
        difference = project.query(
            f"(from {table} except all ({expected})) "
            f"union all (({expected}) except all from {table})"
        )
        assert difference == [], name
        node = f"model.my_project.{table}"
        assert project.generations("count(*)", f"node_id = '{node}'") == [(asked,)], name


def test_incremental_asks_only_for_new_rows(project: Project) -> None:
    project.model("posts", "select i as id, 'p' || i as body from range({{ var('n') }}) t(i)")
    project.model(
        "answers",
        "select id, llm_generate(body) as answer from {{ ref('posts') }} "
        "{% if is_incremental() %} where id > (select max(id) from {{ this }}) {% endif %}",
        materialized="incremental",
        unique_key="id",
    )
    assert project.dbt("run", n=10).summary("answers").startswith("10 prompts, 0 stored, 10 gener")
    assert (
        project.dbt("run", n=15).summary("answers").startswith("5 prompts, 0 stored, 5 generated")
    )
    assert project.dbt("run", n=15).summary("answers") == "0 prompts, 0 stored, 0 generated"
    refreshed = project.dbt("run", "--full-refresh", n=15)
    assert refreshed.summary("answers") == "15 prompts, 15 stored, 0 generated"
    assert project.query(
        "select count(*), count(*) filter (answer = made_up('p' || id)) from answers"
    ) == [(15, 15)]


@pytest.mark.parametrize("strategy", ["append", "delete+insert", "merge"])
def test_incremental_strategies_after_a_full_refresh_on_two_threads(
    project: Project, strategy: str
) -> None:
    project.threads = 2
    for name in ("one", "two"):
        where = (
            "{% if is_incremental() %} where i > (select max(i) from {{ this }}) {% endif %}"
            if strategy == "append"
            else ""
        )
        project.model(
            name,
            f"select i, llm_generate('x' || i) as r from range({{{{ var('n') }}}}) t(i) {where}",
            materialized="incremental",
            incremental_strategy=strategy,
            **({} if strategy == "append" else {"unique_key": "i"}),
        )
    for arguments, n in ((("run",), 3), (("run", "--full-refresh"), 4), (("run",), 6)):
        outcome = project.dbt(*arguments, n=n)
        assert outcome.success, outcome.log
    for name in ("one", "two"):
        assert project.query(
            "select count(*), count(distinct i), count(*) filter (r = made_up('x' || i)) "
            f"from {name}"
        ) == [(6, 6, 6)]


def test_external(project: Project) -> None:
    project.model(
        "answers",
        "select i, llm_generate('x' || i) as r from range(4) t(i)",
        materialized="external",
        location="answers.parquet",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select count(*) from 'answers.parquet' where r = made_up('x' || i)") == [
        (4,)
    ]
    assert project.dbt("run").summary("answers") == "4 prompts, 4 stored, 0 generated"


def test_external_upstream_without_rows_asks_nothing(project: Project) -> None:
    project.model(
        "posts",
        "select 'a' as body where false",
        materialized="external",
        location="posts.parquet",
    )
    project.model("answers", "select llm_generate(body) as r from {{ ref('posts') }}")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("answers") == "0 prompts, 0 stored, 0 generated"
    assert project.query("select count(*) from answers") == [(0,)]


def test_snapshot(project: Project) -> None:
    project.model(
        "posts", "select i as id, 'p' || i || '{{ var('v') }}' as body from range(3) t(i)"
    )
    project.write(
        "snapshots/kept.sql",
        "{% snapshot kept %}{{ config(unique_key='id', strategy='check', check_cols=['answer']) }}"
        "select id, llm_generate(body) as answer from {{ ref('posts') }}{% endsnapshot %}",
    )
    assert project.dbt("build", v="").success
    assert project.dbt("build", v="!").success
    assert project.query(
        "select count(*), count(*) filter (dbt_valid_to is null), count(answer) from kept"
    ) == [(6, 3, 6)]
    assert project.query(
        "select count(*) from kept "
        "where dbt_valid_to is null and answer = made_up('p' || id || '!')"
    ) == [(3,)]


def test_ephemeral_upstream_with_a_call(project: Project) -> None:
    project.model(
        "inner_answers",
        "select i, llm_generate('x' || i) as r from range(3) t(i)",
        materialized="ephemeral",
    )
    project.model("answers", "select * from {{ ref('inner_answers') }}")
    assert project.dbt("run").success
    assert project.query("select count(*) from answers where r = made_up('x' || i)") == [(3,)]


def test_contract_holds_and_a_mismatch_asks_nothing(project: Project) -> None:
    project.model("answers", "select 1 as id, llm_generate('hello') as answer")
    columns: list[dict[str, Any]] = [
        {"name": "id", "data_type": "integer"},
        {"name": "answer", "data_type": "varchar"},
    ]
    for data_type, success in (("integer", False), ("varchar", True)):
        columns[1]["data_type"] = data_type
        project.write(
            "models/answers.yml",
            str(
                {
                    "models": [
                        {
                            "name": "answers",
                            "config": {"contract": {"enforced": True}},
                            "columns": columns,
                        }
                    ]
                }
            ),
        )
        outcome = project.dbt("run")
        assert outcome.success is success, outcome.log
        assert project.store.exists() is success


def test_sql_header_and_pre_hook_are_seen_and_run_once(project: Project) -> None:
    project.write(
        "models/answers.sql",
        "{{ config(pre_hook=\"create temp table word as select 'hook' as w\") }}"
        "{% call set_sql_header(config) %} create temp macro shout(x) as upper(x); {% endcall %}"
        "select llm_generate(shout(w)) as r from word",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select r = made_up('HOOK') from answers") == [(True,)]


def test_model_without_a_call_is_left_to_dbt(project: Project) -> None:
    project.model("plain", "select 1 as one")
    outcome = project.dbt("run")
    assert outcome.success
    assert "llm:" not in outcome.log
    assert project.query("select * from plain") == [(1,)]
    assert not project.store.exists()


def test_a_model_that_only_wants_keys_is_left_to_dbt(project: Project) -> None:
    project.model("hashes", "select llm_prompt_hash('x') as h, llm_prompt_hash('y') as g")
    project.model("wrong", "select llm_prompt_hash('x', model := 'nobody') as h")
    outcome = project.dbt("run")
    assert outcome.statuses == {"hashes": "success", "wrong": "error"}
    assert "llm: hashes" not in outcome.log and "nobody" in outcome.log
    assert project.query("select length(h), h <> g from hashes") == [(64, True)]
    assert not project.store.exists()


def test_view_with_a_call_is_refused_and_others_work(project: Project) -> None:
    project.model("fine", "select 1 as one", materialized="view")
    project.model("bad", "select llm_generate('x') as r", materialized="view")
    project.model("hashes", "select llm_prompt_hash('x') as h", materialized="view")
    outcome = project.dbt("run")
    assert outcome.statuses == {"fine": "success", "bad": "error", "hashes": "error"}
    assert "calls an LLM function and is a view" in outcome.log
    assert not project.store.exists()


def test_four_models_on_four_threads_and_a_view_over_one_are_real_relations(
    project: Project,
) -> None:
    for name in ("one", "two", "three"):
        project.model(name, f"select i, llm_generate('{name}' || i) as r from range(5) t(i)")
    project.model("four", "select * from {{ ref('one') }}", materialized="view")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    for name, source in (("one", "one"), ("two", "two"), ("three", "three"), ("four", "one")):
        assert project.query(f"select count(*) from {name} where r = made_up('{source}' || i)") == [
            (5,)
        ]
    assert project.query(
        "select table_name, table_type from information_schema.tables order by all"
    ) == [("four", "VIEW"), ("one", "BASE TABLE"), ("three", "BASE TABLE"), ("two", "BASE TABLE")]
