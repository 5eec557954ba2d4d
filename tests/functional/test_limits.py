"""A model that keeps n rows asks n prompts, through dbt."""

import json
import re

from tests.functional.test_rows import made_up
from tests.project import ROOT, Project

PAGE = (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n## How many prompts a query asks\n")[2].partition("\n## ")[0]


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


def counted_queries() -> list[tuple[str, int, int, bool]]:
    """Return query, rows kept, prompts asked and whether it warns, of each row in the docs."""
    kept, warning, costly = SECTION.partition("and a warning says so")
    assert warning
    return [
        (query, int(rows), int(asked), part is costly)
        for part in (kept, costly)
        for query, rows, asked in re.findall(r"^\| `(.+)` \| (\d+) \| (\d+)\D", part, re.MULTILINE)
    ]


def test_the_docs_count_what_a_query_asks(project: Project) -> None:
    queries = counted_queries()
    assert len(queries) == SECTION.count("\n| `") == 20
    (messages,) = re.findall(r"^    (select .*)$", SECTION, re.MULTILINE)
    # Prompts of its own for each query, as equal ones are asked once.
    answers = []
    for number, (query, *_) in enumerate(queries):
        prefix = f"Message of query {number}, "
        project.model(f"messages_{number}", messages.replace("Message ", prefix))
        project.model(
            f"query_{number}",
            re.sub(r"\bmessages\b", f"{{{{ ref('messages_{number}') }}}}", query),
        )
        if "llm_filter" in query:
            answers += [
                {"prompt": f"{prefix}{i}", "output": ["no", "yes"][i % 2]} for i in range(1000)
            ]
    project.write("answers.jsonl", "".join(json.dumps(answer) + "\n" for answer in answers))
    project.llms = {
        "default": {"engine": "replay", "answers": str(project.folder / "answers.jsonl")}
    }
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    counts = [f"select {n} as n, count(*) as rows from query_{n}" for n in range(len(queries))]
    kept = dict(project.query(" union all ".join(counts)))
    for number, (query, rows, asked, warns) in enumerate(queries):
        name = f"query_{number}"
        warning = f"{name}: a call may be asked for more rows than the query keeps"
        counted = int(outcome.summary(name).split(" prompts, 0 stored")[0].replace(",", ""))
        assert (query, kept[number], counted, warning in outcome.log) == (query, rows, asked, warns)
