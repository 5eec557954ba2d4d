"""Measures of lakehouse tables: a change of few rows, against writing the table anew."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, alternate
from bench.with_replay import dbt_seconds, upstream
from tests.project import Project

# 300 characters that hardly compress, as text of people does not.
BODY = (
    "(select string_agg(sha256(i || '-' || n), '') from range(5) as parts(n))[:300] || ' row ' || i"
)
NOW = "epoch_us(now())"


def lakehouse(rows: int, runs: int) -> Iterator[Figure]:
    """A merge of one row in a hundred, and a run without a change, against an overwrite of all."""
    project = Project(Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "project")
    upstream(project, rows, BODY)
    project.model("nothing", "select i from {{ ref('prompts') }} limit 1")
    ranged, spread = f"i >= {rows * 99 // 100}", "i % 100 = 0"
    queries = {
        "1 % of the rows, neighbours by key": f"select i, body, {NOW} as v from t where {ranged}",
        "1 % of the rows, all over the table": f"select i, body, {NOW} as v from t where {spread}",
        "all rows, 1 % neighbours differ": (
            f"select i, body, case when {ranged} then {NOW} else 0 end as v from t"
        ),
        "all rows, none differs": "select i, body, 0::bigint as v from t",
    }
    for label, query in queries.items():
        yield _merge(project, label, query, rows, runs)
        # Every overwrite left a version of the whole table.
        shutil.rmtree(project.folder / "lake")
    shutil.rmtree(project.folder)


def _merge(project: Project, label: str, query: str, rows: int, runs: int) -> Figure:
    project.model("whole", _over(f"select i, body, {NOW} as v from t"), materialized="lakehouse")
    first = "select i, body, 0::bigint as v from t"
    for text, arguments in ((first, ["--full-refresh"]), (query, [])):
        project.model("merged", _over(text), materialized="lakehouse", unique_key="i")
        outcome = project.dbt("--quiet", "run", "--select", "merged", *arguments)
        assert outcome.success, outcome.log
    result = alternate(
        runs, lambda: dbt_seconds(project, "merged"), lambda: dbt_seconds(project, "whole")
    )
    return Figure(f"lakehouse, merge into {rows:,} rows: {label}", *result, target="≤ 1")


def _over(query: str) -> str:
    return query.replace(" from t", " from {{ ref('prompts') }}")
