"""A model that keeps n rows asks n prompts, through dbt."""

from tests.functional.test_rows import made_up
from tests.project import Project


def test_the_first_rows_are_asked_and_no_others(project: Project) -> None:
    project.model(
        "top", "select i, llm_generate('x' || i) as r from range(5000) t(i) order by i desc limit 5"
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("top").startswith("5 prompts, 0 stored, 5 generated")
    expected = [(i, made_up(f"x{i}")) for i in (4999, 4998, 4997, 4996, 4995)]
    assert project.query("select i, r from top order by rowid") == expected
    assert project.dbt("run").summary("top").startswith("5 prompts, 5 stored, 0 generated")


def test_one_per_group_through_a_cte_and_a_contract(project: Project) -> None:
    project.model(
        "tops",
        "with asked as (select distinct on (i % 3) i, llm_generate('x' || i) as r\n"
        "               from range(300) t(i) order by i % 3, i desc)\n"
        "select i::bigint as i, r from asked -- the last of each",
    )
    project.write(
        "models/tops.yml",
        "models: [{name: tops, config: {contract: {enforced: true}}, columns: ["
        "{name: i, data_type: bigint}, {name: r, data_type: varchar}]}]",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("tops").startswith("3 prompts, 0 stored, 3 generated")
    expected = [(i, made_up(f"x{i}")) for i in (297, 298, 299)]
    assert project.query("select i, r from tops order by i") == expected


def test_limit_over_a_cte_in_an_incremental_model(project: Project) -> None:
    project.model(
        "growing",
        "with answers as (select *, llm_generate('x' || i) as r from range(1000) t(i))\n"
        "select * from answers {% if is_incremental() %}\n"
        "where i > (select max(i) from {{ this }}){% endif %} order by i limit 4",
        materialized="incremental",
        unique_key="i",
    )
    for n in (1, 2):
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        assert outcome.summary("growing").startswith("4 prompts, 0 stored, 4 generated")
        expected = [(i, made_up(f"x{i}")) for i in range(4 * n)]
        assert project.query("select i, r from growing order by i") == expected


def test_what_must_ask_for_all_rows_says_so(project: Project) -> None:
    project.model(
        "best", "select i, llm_generate('x' || i) as r from range(20) t(i) order by r, i limit 2"
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("best").startswith("20 prompts, 0 stored, 20 generated")
    assert "best: a call may be asked for more rows than the query keeps: ORDER BY" in outcome.log
    rows = sorted((made_up(f"x{i}"), i) for i in range(20))[:2]
    assert project.query("select r, i from best order by r") == rows
