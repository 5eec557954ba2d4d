"""Puts answers into a table that was built before they were there.

A query that lacks some answers would have to be evaluated again once they are stored, however few
they are. Where its rows are those of the table and a call is a column of them (see
`key_columns.py`), the table is built with one more column per call, which has the key where the
answer is missing. The answers go to these rows by their keys, and the columns are dropped.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbt_llm import sql

# An update of many rows takes as long as evaluating again, and they lie in memory until then.
_MOST_ROWS = 1_000_000
_MOST_SHARE = 1 / 8
_FOUND = "temp.main.dbt_llm_found"
# DuckDB updates a row with such a column by removing it and adding it at the end of the table.
_MOVING_TYPES = ("[", "MAP(", "UNION(")


@dataclass(frozen=True)
class Gap:
    """A column of answers, some of which are missing."""

    key: str
    """The column that has the key where the answer is missing, and NULL elsewhere."""
    name: str
    """The column of the answer."""
    answer: str
    """A SQL expression for it, from a row of `stored`, which is named `dbt_llm_g`."""
    stored: str
    """A SQL expression for FROM: the stored answers of the call."""


@dataclass(frozen=True)
class Gapped:
    """A query whose result can be filled later."""

    query: str
    """It has the columns of the model's query, and after them the keys of all gaps."""
    gaps: Sequence[Gap]


def gapped(cursor: Any, query: str, gaps: Sequence[Gap]) -> Gapped | None:
    """Return a query with its gaps; None where a table of its result could not be filled."""
    described = cursor.execute(f"describe {query}").fetchall()
    types = {name.lower(): type_ for name, type_, *_ in described}
    # A table calls the second of two columns of a name otherwise.
    if len(types) < len(described) or any(gap.name.lower() not in types for gap in gaps):
        return None
    if any(kind in types[gap.name.lower()] for gap in gaps for kind in _MOVING_TYPES):
        return None
    return Gapped(query, gaps)


def can_be_filled(cursor: Any, statement: str, query: str, table: str) -> bool:
    """Whether a statement does nothing but create a table of DuckDB's own from a query."""
    from sqlglot import exp

    name = re.escape(table)
    plain = rf"\s*create\s+(temp(orary)?\s+)?table\s+{name}\s+as\s*\(\s*\)\s*;?\s*"
    if not re.fullmatch(plain, statement.replace(query, "", 1), re.IGNORECASE):
        return False
    database = exp.to_table(table, dialect="duckdb").catalog
    others = "select count(*) from duckdb_databases() where type <> 'duckdb' and database_name = "
    return not sql.scalar(cursor, others + sql.literal(database))


def count_missing(cursor: Any, table: str, gaps: Sequence[Gap]) -> int:
    """Return how many answers a table lacks."""
    counts = " + ".join(f"count({gap.key})" for gap in gaps)
    return int(sql.scalar(cursor, f"select {counts} from {table}"))


def are_all_and_few(cursor: Any, table: str, gaps: Sequence[Gap], collected: int) -> bool:
    """Whether a table lacks all answers that were asked for, and few enough to be filled.

    More were asked for where a macro of the user's has a call in it, which no text shows.
    """
    missing = count_missing(cursor, table, gaps)
    rows = sql.scalar(cursor, f"select count(*) from {table}")
    return missing == collected and missing <= min(_MOST_ROWS, rows * _MOST_SHARE)


def fill(cursor: Any, table: str, gaps: Sequence[Gap]) -> None:
    """Put the answers that the generations view shows where they are missing."""
    for gap in gaps:
        # A table of known size is what DuckDB joins the rows with as they lie in theirs. An update
        # in the order of the answers would take many times as long.
        cursor.execute(
            f"create or replace temp table {_FOUND} as "
            f"select dbt_llm_g.dbt_llm_hash as key, {gap.answer} as answer "
            f"from {gap.stored} as dbt_llm_g"
        )
        cursor.execute(
            f"update {table} as t set {sql.identifier(gap.name)} = found.answer, {gap.key} = null "
            f"from {_FOUND} as found where found.key = t.{gap.key}"
        )
        cursor.execute(f"drop table {_FOUND}")


def close(cursor: Any, table: str, gaps: Sequence[Gap]) -> None:
    """Remove the columns with the keys."""
    for gap in gaps:
        cursor.execute(f"alter table {table} drop column {gap.key}")
