"""Rewrites SELECTs so that the key of a call is a column, by which DuckDB joins the answers.

A macro can look an answer up only in a correlated subquery. DuckDB plans that as a join on the
prompt, and keeps all rows of the query in memory for it, prompts included, up to three times. With
the key as a column the rows just pass by the answers:

    select id, llm_generate('About ' || body, seed := 7) as r from t

becomes

    select #1, dbt_llm_answer_llm_generate(
        dbt_llm_g1.dbt_llm_hit, dbt_llm_h1, dbt_llm_p1, seed := 7
    ) as r
    from (select *, dbt_llm_key_llm_generate(dbt_llm_p1, seed := 7) as dbt_llm_h1
          from (select * replace (unnest([dbt_llm_p1]) as dbt_llm_p1)
                from (select id, cast('About ' || body as varchar) as dbt_llm_p1 from t)))
    left join dbt_llm_stored_llm_generate(seed := 7) as dbt_llm_g1
    on dbt_llm_g1.dbt_llm_hash = dbt_llm_h1

The prompt is computed where the call stood, for the same rows, and once for each: `unnest` keeps
DuckDB from computing it again. What is not as plain as this stays as it is: it gives the same, and
takes longer. The generations view has one row per key, or the join would repeat rows.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
from sqlglot import TokenType as T
from sqlglot.errors import SqlglotError

from dbt_llm import functions, sql
from dbt_llm.above_cut import Item, UnmovableError, name_of, read_items
from dbt_llm.gaps import Gap, Gapped, gapped
from dbt_llm.limits import same_columns
from dbt_llm.select_text import CALLS, Query, Select, may_call

# Other clauses see all rows, or are computed after the select list.
_CLAUSES = {"from", "where", "group"}


@dataclass
class _Asked:
    """An item of a select list that is a call, and perhaps something after it."""

    item: Item
    function: str
    prompt: tuple[int, int]
    options: str
    """The text of the other arguments."""
    after: str
    """The text after the call, up to the alias: `.status`, `::int`."""

    def macro(self, prefix: str, *first: str) -> str:
        """Return a call of one of the function's other macros, with the same options."""
        arguments = [*first, self.options] if self.options else first
        return f"{prefix}{self.function}({', '.join(arguments)})"


@dataclass(frozen=True)
class Keyed:
    """A query with key columns."""

    query: str
    gapped: Gapped | None
    """The same for a table that is filled later; None where its calls do not allow it."""


@dataclass(frozen=True)
class _Rewritten:
    """The whole text of a query, one SELECT of which has key columns."""

    query: str
    open_query: str
    """It has the keys of missing answers as well, as columns of that SELECT."""
    gaps: list[Gap]
    is_outermost: bool


def with_key_columns(cursor: Any, query: str) -> Keyed | None:
    """Return a query with key columns where its calls allow it; None where none does.

    `cursor` is another one than that of the build, since DuckDB 2.0 ends a transaction in which a
    query cannot be planned. It has the macros and the build's token.
    """
    if not may_call(query):
        return None
    text, done = query, []
    try:
        while (rewritten := _rewrite_one(text)) is not None:
            text = rewritten.query
            done.append(rewritten)
        if not done or not same_columns(cursor, query, text):
            return None
        # Answers of any other call may decide what the rows are, or are no columns of the table.
        alone = len(done) == 1 and done[0].is_outermost and not _all_calls(Query(text))
        return Keyed(text, gapped(cursor, done[0].open_query, done[0].gaps) if alone else None)
    except (SqlglotError, IndexError, KeyError, ValueError, duckdb.Error):
        return None


def rows_pass_by(cursor: Any, query: str) -> bool:
    """Tell whether DuckDB would let the rows of a query with key columns pass by the answers.

    Where it expects fewer rows than answers it does the reverse, and the rows come in the order of
    the store.
    """
    (plan,) = json.loads(cursor.execute(f"explain (format json) {query}").fetchall()[0][1])
    return set(_join_types(plan)) <= {"LEFT"}


def _join_types(node: dict[str, Any]) -> Iterator[str]:
    """Yield the types of all joins on a key column."""
    about = node.get("extra_info", {})
    if "Join Type" in about and re.search(r"\bdbt_llm_h\d", str(about)):
        yield about["Join Type"]
    for child in node.get("children", []):
        yield from _join_types(child)


def _all_calls(query: Query) -> list[int]:
    return query.calls([(0, len(query.tokens))])


def _rewrite_one(text: str) -> _Rewritten | None:
    query = Query(text)
    if any(token.token_type is T.RECURSIVE for token in query.tokens):
        return None
    for select in query.selects:
        if "from" not in select.clauses or not select.clauses.keys() <= _CLAUSES:
            continue
        if not query.calls(select.items) or query.in_expression(select):
            continue
        try:
            items = read_items(query, select)
        except UnmovableError:
            continue
        asked = _asked(query, select, items)
        rewritten = _rewritten(query, select, items, asked) if asked else None
        if rewritten is not None:
            return rewritten
    return None


def _asked(query: Query, select: Select, items: list[Item]) -> dict[int, _Asked]:
    """Return the items with a plain call, by their place in the select list."""
    begin, end = select.clauses.get("group", (0, 0))
    keys = [a for a, _ in query.split(begin + 1, end)]
    if any(query.type(key) is T.NUMBER or query.word(key) == "all" for key in keys):
        return {}
    others = [span for clause, span in select.clauses.items() if clause != "from"]
    asked = {}
    for place, item in enumerate(items):
        found = _read_call(query, item)
        named = any(query.names(item.alias, *span) for span in others) if item.alias else False
        if found is not None and not named:
            asked[place] = found
    return asked


def _read_call(query: Query, item: Item) -> _Asked | None:
    begin, end = item.value
    function = query.function(begin)
    if function is None or function not in CALLS:
        return None
    stop = query.close[begin + 1]
    arguments = query.split(begin + 2, stop)
    if not arguments or query.type(arguments[0][0] + 1) is T.COLON_EQ:
        return None
    prompt = arguments[0]
    if query.calls([prompt, *arguments[1:], (stop + 1, end)]):
        return None
    if any(not prompt[0] <= first < prompt[1] for first, _, _ in item.columns):
        return None
    after = range(stop + 1, end)
    if any(query.type(i) is T.SELECT or query.function(i) for i in after):
        return None
    return _Asked(
        item,
        function,
        prompt,
        query.span(arguments[0][1] + 1, stop),
        query.span(stop + 1, end),
    )


def _rewritten(
    query: Query, select: Select, items: list[Item], asked: dict[int, _Asked]
) -> _Rewritten | None:
    prompts, keys, joins, hidden, gaps, missing = [], [], [], [], [], []
    answers, edits = {}, {}
    for number, (place, call) in enumerate(asked.items(), 1):
        prompt, key, found = f"dbt_llm_p{number}", f"dbt_llm_h{number}", f"dbt_llm_g{number}"
        gap = f"dbt_llm_gap{number}"
        hidden += [prompt, key]
        edits[call.item.begin, call.item.end] = (
            f"cast({query.span(*call.prompt)} as varchar) as {prompt}"
        )
        prompts.append(f"unnest([{prompt}]) as {prompt}")
        keys.append(f"{call.macro(functions.KEY_MACRO, prompt)} as {key}")
        stored = call.macro(functions.STORED_MACRO)
        joins.append(f"left join {stored} as {found} on {found}.dbt_llm_hash = dbt_llm_s.{key}")
        missing.append(f"case when {found}.dbt_llm_hit is null then dbt_llm_s.{key} end as {gap}")
        name = call.item.alias or name_of(query.span(call.item.begin, call.item.end))
        looked_up = (f"{found}.dbt_llm_hit", f"dbt_llm_s.{key}", f"dbt_llm_s.{prompt}")
        answer = call.macro(functions.ANSWER_MACRO, *looked_up) + call.after
        answers[place] = f"{answer} as {sql.identifier(name)}"
        put_in = ("dbt_llm_g.dbt_llm_hit", "dbt_llm_g.dbt_llm_hash", "null")
        later = call.macro(functions.ANSWER_MACRO, *put_in) + call.after
        gaps.append(Gap(gap, name, later, stored))
    outer = _outer_list(items, answers, hidden)
    if outer is None:
        return None
    inner = query.edited(select.begin, select.end, edits)
    once = f"select * replace ({', '.join(prompts)}) from ({inner}) as dbt_llm_i"
    keyed = f"select *, {', '.join(keys)} from ({once}) as dbt_llm_u"
    rows = f"from ({keyed}) as dbt_llm_s {' '.join(joins)}"

    def with_list(select_list: str) -> str:
        return query.replace(select.begin, select.end, f"select {select_list} {rows}")

    return _Rewritten(
        with_list(outer),
        with_list(f"{outer}, {', '.join(missing)}"),
        gaps,
        is_outermost=query.parent[select.first] == -1 and not select.in_set,
    )


def _outer_list(items: list[Item], answers: dict[int, str], hidden: list[str]) -> str | None:
    """Return the select list with the answers in their places; None where SQL cannot say it."""
    kept = [place for place in range(len(items)) if place not in answers]
    if not any(items[place].is_star for place in kept):
        return ", ".join(answers.get(place, f"#{place + 1}") for place in range(len(items)))
    # Nothing but one star can stand for what another star gives.
    if kept[-1] - kept[0] + 1 != len(kept):
        return None
    parts = {**answers, kept[0]: f"dbt_llm_s.* exclude ({', '.join(hidden)})"}
    return ", ".join(parts[place] for place in sorted(parts))
