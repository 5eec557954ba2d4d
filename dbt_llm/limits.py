"""Makes a query that keeps n rows ask at most n prompts per call.

DuckDB computes the select list before it cuts rows by LIMIT, OFFSET or DISTINCT ON, so a call would
be asked for rows that are then thrown away. Such a SELECT is wrapped:

    select id, llm_generate('About ' || body) as r from t order by id limit 5

becomes

    select * exclude (dbt_llm_c1, dbt_llm_o), llm_generate('About ' || dbt_llm_c1) as r
    from (select *, row_number() over () as dbt_llm_o
          from (select id, body as dbt_llm_c1 from t order by id limit 5)) order by dbt_llm_o

The row number keeps the order: SQL promises none for what a subquery gives. The text is edited in
place and never rendered anew, since a renderer that reads `string_agg(distinct a, b)` wrongly would
change prompts. QUALIFY alone needs no help: DuckDB filters by it before it computes the calls.
"""

import re
from typing import Any

import duckdb
from sqlglot import TokenType as T
from sqlglot.errors import SqlglotError

from dbt_llm.above_cut import WHOLE, UnmovableError, depends_on, needs_rows, read_items, title, wrap
from dbt_llm.errors import CallError
from dbt_llm.select_text import CUTTING, Query, Select, may_call

_CUTS = re.compile(r"\b(limit|offset|fetch|qualify|distinct\s+on)\b", re.IGNORECASE)


def ask_after_limit(query: str) -> tuple[str, list[str]]:
    """Move LLM calls above the cut of their SELECT.

    Returns:
        The query, which is the text received where nothing needs to change, and a warning for each
        reason why some call is still asked for rows that the query does not keep.
    """
    if not may_call(query) or not _CUTS.search(query):
        return query, []
    warnings: list[str] = []
    text = query
    try:
        # Each pass wraps one SELECT, whose text then has no cut beside a call any more.
        while (wrapped := _wrap_one(text, warnings)) is not None:
            text, warnings = wrapped, []
    except (SqlglotError, IndexError, KeyError, ValueError) as error:
        return query, [_warning(f"the query could not be read ({str(error).splitlines()[0]}).")]
    return text, list(dict.fromkeys(warnings))


def same_columns(cursor: Any, query: str, other: str) -> bool:
    """Whether two queries have columns of the same names and types, as DuckDB plans them.

    Raises:
        CallError: the second cannot be planned, and DuckDB 2.0 has ended the transaction for it.
    """
    one = cursor.execute(f"describe {query}").fetchall()
    try:
        two = cursor.execute(f"describe {other}").fetchall()
    except duckdb.Error as error:
        try:
            cursor.execute("select 1").fetchall()
        except duckdb.Error:
            raise CallError(
                "The query could not be changed so that it asks only for the rows that it keeps: "
                f"{error}\nPut what cuts the rows (LIMIT, DISTINCT ON) into a CTE, and call the "
                "LLM function on the CTE's rows."
            ) from None
        return False
    return bool(one == two)


def _warning(reason: str) -> str:
    return f"a call may be asked for more rows than the query keeps: {reason}"


def _wrap_one(text: str, warnings: list[str]) -> str | None:
    query = Query(text)
    for select in query.selects:
        cuts = CUTTING & select.clauses.keys()
        try:
            if cuts or "qualify" in select.clauses:
                warnings += map(_warning, _depending(query, select))
            if cuts and query.calls(select.items):
                wrapped = wrap(query, select)
                return query.replace(select.begin, select.end, wrapped)
            if cuts or "qualify" in select.clauses:
                below = _below(query, select)
                if below is not None:
                    wrapped = wrap(query, below, _cut_for(query, select, below))
                    return query.replace(below.begin, below.end, wrapped)
        except UnmovableError as reason:
            warnings.append(_warning(str(reason)))
    for begin, end in query.cuts_of_sets:
        if query.callers(begin, end):
            warnings.append(
                _warning("LIMIT follows a UNION or parentheses. Put it into each part as well.")
            )
    return None


def _depending(query: Query, select: Select) -> list[str]:
    """Return which clauses need the answers of all rows before the cut."""
    names = ["where", *WHOLE]
    found = [c for c in names if c in select.clauses and query.calls([select.clauses[c]])]
    if "qualify" in select.clauses and "qualify" not in found and query.calls(select.items):
        answers = [item for item in read_items(query, select) if item.has_call and item.alias]
        if any(depends_on(query, item, select, "qualify") for item in answers):
            found.append("qualify")
    return [f"{title(clause)} depends on the answer. No way around." for clause in found]


def _below(query: Query, select: Select) -> Select | None:
    """Return the SELECT with calls that this one cuts; None where there is none."""
    begin, end = select.clauses.get("from", (0, 0))
    callers = query.callers(begin, end)
    if not callers:
        return None
    opened, once = _source(query, begin)
    direct = (
        len(callers) == 1
        and opened is not None
        and (opened, query.close[opened]) == (callers[0].begin - 1, callers[0].end)
    )
    if not direct or not once or not _is_plain(query, select, end):
        raise UnmovableError(
            "the call is in a subquery or CTE, and the rows are cut further out. Put the LIMIT "
            "where the call is, or call in the query that cuts."
        )
    return callers[0]


def _source(query: Query, begin: int) -> tuple[int | None, bool]:
    """Return the bracket of what a FROM reads, and whether nothing else reads it.

    A source that is just `select * from another` stands for that other.
    """
    ctes, once = query.ctes(), True
    while True:
        named = query.type(begin + 1) is not T.L_PAREN
        opened = ctes.get(query.word(begin + 1)) if named else begin + 1
        once = once and (not named or query.used_once(begin + 1))
        passes = opened is not None and query.close[opened] == opened + 5
        if opened is None or not passes or not once:
            return opened, once
        if [query.type(opened + k) for k in (1, 2, 3)] != [T.SELECT, T.STAR, T.FROM]:
            return opened, once
        begin = opened + 3


def _is_plain(query: Query, select: Select, from_end: int) -> bool:
    """Whether a SELECT keeps the first n rows of its one source, as they are."""
    begin, _ = select.clauses["from"]
    source_end = query.close.get(begin + 1, begin + 1) + 1
    alias = [query.type(i) for i in range(source_end, from_end)]
    limit, limit_end = select.clauses.get("limit", (0, 0))
    list_tokens = range(select.first, select.list_end)
    return (
        alias in ([], [T.VAR], [T.ALIAS, T.VAR])
        and select.clauses.keys() <= {"from", "where", "order", "limit"}
        and [query.type(i) for i in range(limit + 1, limit_end)] == [T.NUMBER]
        and all(
            query.type(i) is not T.SELECT and not needs_rows(query, i)
            for i in list_tokens
            if i > select.first
        )
    )


def _cut_for(query: Query, select: Select, caller: Select) -> str:
    """Return the cut of a SELECT in a form that stands around its source."""
    begin, end = select.clauses["from"]
    bare = query.type(begin + 1) is not T.L_PAREN
    source_end = query.close.get(begin + 1, begin + 1) + 1
    alias = query.span(source_end, end) or (query.span(begin + 1, end) if bare else "dbt_llm_l")
    spans = [select.clauses[c] for c in ("where", "order") if c in select.clauses]
    ordered = query.split(spans[-1][0] + 1, spans[-1][1]) if "order" in select.clauses else []
    if any(query.type(a) is T.NUMBER or query.word(a) == "all" for a, _ in ordered):
        raise UnmovableError("a number or ALL stands for columns in ORDER BY. Use their names.")
    below = [i.alias or i.name for i in read_items(query, caller) if i.has_call]
    own = [i.alias for i in read_items(query, select)]
    for name in filter(None, [*below, *own]):
        if any(query.word(i) == name.lower() for span in spans for i in range(*span)):
            raise UnmovableError(f"WHERE or ORDER BY depends on {name}, or may do so.")
    limit = select.clauses["limit"]
    return f"{alias} " + " ".join(query.span(*span) for span in [*spans, limit])
