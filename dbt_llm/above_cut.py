"""Writes a SELECT anew, with the calls of its list above the cut of its rows (see `limits.py`)."""

import functools
from dataclasses import dataclass

import duckdb
import sqlglot
from sqlglot import TokenType as T
from sqlglot import exp

from dbt_llm import sql
from dbt_llm.select_text import CALLS, Query, Select

# A WHERE that calls does not hinder the calls of the select list from moving; these do.
WHOLE = ("order", "qualify", "distinct on", "group", "having")
_ONE_BY_ONE = " Select the answer in a subquery or CTE of its own, and cut there."


class UnmovableError(Exception):
    """Why the calls of a SELECT cannot be asked after it is cut."""


@dataclass
class Item:
    """One entry of a select list: tokens `begin` to `end`, of which the expression is a part."""

    begin: int
    end: int
    value: tuple[int, int]
    alias: str | None
    name: str | None
    columns: list[tuple[int, int, str]]
    """First and last token of each column in it, and the name where it is unqualified."""
    has_call: bool
    is_star: bool
    moves: bool = False

    @property
    def is_column_too(self) -> bool:
        """Whether its alias is certainly a column of the table too: it uses that itself."""
        return any(name == (self.alias or "").lower() for _, _, name in self.columns)


def wrap(query: Query, select: Select, cut: str = "") -> str:
    """Return a SELECT with its calls above its own cut, or above a given one."""
    if query.in_expression(select):
        raise UnmovableError("it is in a subquery within an expression. Join instead.")
    items = read_items(query, select)
    _choose_what_moves(query, items)
    _check_names(query, select, items)
    edits = _ordinals(query, select, items)
    keys = _group_keys(query, select, items)
    pushed: dict[str, str] = {}
    kept = [query.span(item.begin, item.end) for item in items if not item.moves]
    moved: dict[int, str] = {}
    for n, item in enumerate(items):
        if item.moves:
            parts = _parts(query, item, keys)
            for a, b in parts:
                pushed.setdefault(query.span(a, b), f"dbt_llm_c{len(pushed) + 1}")
            names = {(a, b): pushed[query.span(a, b)] for a, b in parts}
            begin, end = (item.begin, item.end) if item.alias else item.value
            moved[n] = query.edited(begin, end, names)
            if not item.alias:
                name = item.name or name_of(query.span(item.begin, item.end))
                moved[n] += f" as {sql.identifier(name)}"
    inner_list = [*kept, *(f"{part} as {name}" for part, name in pushed.items())]
    head = query.span(select.begin, select.items[0][0])
    inner = f"{head} {', '.join(inner_list or ['1 as dbt_llm_c0'])} "
    inner += query.edited(select.list_end, select.end, edits)
    if cut:
        inner = f"select * from ({inner}) {cut}"
    hidden = ", ".join([*(list(pushed.values()) if inner_list else ["dbt_llm_c0"]), "dbt_llm_o"])
    outer = _outer_list(items, moved, f"* exclude ({hidden})")
    wrapped = (
        f"select {outer} from (select *, row_number() over () as dbt_llm_o "
        f"from ({inner}) as dbt_llm_i) as dbt_llm_s order by dbt_llm_o"
    )
    return f"({wrapped})" if select.in_set else wrapped


def read_items(query: Query, select: Select) -> list[Item]:
    """Return the entries of a select list."""
    return [_read_item(query, begin, end) for begin, end in select.items]


def _read_item(query: Query, begin: int, end: int) -> Item:
    tree = sqlglot.parse_one(f"select {query.span(begin, end)}", dialect="duckdb")
    (node,) = tree.expressions
    at = {token.start: i for i, token in enumerate(query.tokens)}
    shift = query.tokens[begin].start - len("select ")
    value, alias, inside = (begin, end), None, node
    if isinstance(node, exp.Alias):
        alias, inside = node.alias, node.this
        i = at[shift + node.args["alias"].meta["start"]]
        value = (begin + 2, end) if i == begin else (begin, i - (query.type(i - 1) is T.ALIAS))
    calls = query.calls([(begin, end)])
    for call in tree.find_all(exp.Anonymous):
        if call.name.lower() in CALLS and call.find_ancestor(exp.Lambda, exp.Comprehension):
            raise UnmovableError("it is called for the elements of a list." + _ONE_BY_ONE)
    columns = []
    for column in inside.find_all(exp.Column):
        places = [
            shift + part.meta[edge]
            for part in column.parts
            if isinstance(part, exp.Identifier)
            for edge in ("start",)
        ]
        if not isinstance(column.this, exp.Star):
            name = "" if column.table else column.name.lower()
            columns.append((at[min(places)], at[max(places)], name))
    unnests = any(query.function(i) in {"unnest", "unlist", "columns"} for i in range(*value))
    is_star = unnests or isinstance(inside, exp.Star) or inside.is_star
    if is_star and calls:
        raise UnmovableError("it stands within a star, columns() or unnest()." + _ONE_BY_ONE)
    name = alias or (inside.name if isinstance(inside, exp.Column) else None)
    return Item(begin, end, value, alias, name, columns, bool(calls), is_star, bool(calls))


def _choose_what_moves(query: Query, items: list[Item]) -> None:
    """Move also what stands apart from a star: only one run of `*` can stay as it is."""
    stars = [n for n, item in enumerate(items) if item.is_star and not item.moves]
    if not stars:
        return
    last = stars[0]
    while last + 1 < len(items) and not items[last + 1].moves:
        last += 1
    first = stars[0]
    while first > 0 and not items[first - 1].moves:
        first -= 1
    for n, item in enumerate(items):
        item.moves = item.moves or not first <= n <= last
        if item.moves and item.is_star:
            raise UnmovableError("it stands between two stars. List the columns.")


def _check_names(query: Query, select: Select, items: list[Item]) -> None:
    if "distinct" in select.clauses:
        raise UnmovableError("SELECT DISTINCT depends on the answer. No way around.")
    for clause in WHOLE:
        if clause in select.clauses and query.calls([select.clauses[clause]]):
            raise UnmovableError(f"{title(clause)} depends on the answer. No way around.")
    for item in items:
        if not item.moves or item.alias is None:
            continue
        for clause in select.clauses:
            if clause != "from" and depends_on(query, item, select, clause):
                raise UnmovableError(
                    f"{title(clause)} depends on {item.alias}. If that is a column of the "
                    "table, write it with the table's name."
                )
        others = [other.value for other in items if other is not item]
        used = any(query.names(item.alias, *value) for value in others)
        if used and not item.is_column_too:
            raise UnmovableError(
                f"{item.alias} is used again in the select list. Repeat the call there: equal "
                "calls are asked once."
            )


def depends_on(query: Query, item: Item, select: Select, clause: str) -> bool:
    """Whether a clause means an item by its alias; outside ORDER BY, a column comes first."""
    first = item.is_column_too and clause not in {"order", "distinct on"}
    return not first and query.names(item.alias or "", *select.clauses[clause])


def _ordinals(query: Query, select: Select, items: list[Item]) -> dict[tuple[int, int], str]:
    """Return what replaces the numbers in ORDER BY and GROUP BY once items have moved."""
    edits = {}
    for clause in ("order", "group", "distinct on"):
        begin, end = select.clauses.get(clause, (0, 0))
        start = begin + (3 if clause == "distinct on" else 1)
        for a, _ in query.split(start, end):
            if query.word(a) == "all" and (
                clause == "order" or not all(_aggregates(query, i) for i in items if i.has_call)
            ):
                raise UnmovableError(f"{title(clause)} ALL depends on the answer.")
            if query.type(a) is T.NUMBER:
                n = int(query.word(a)) - 1
                if clause == "distinct on" or any(item.is_star for item in items):
                    raise UnmovableError("a number stands for a column. Use its name.")
                if items[n].moves:
                    raise UnmovableError(f"{title(clause)} {n + 1} depends on the answer.")
                place = 1 + sum(not item.moves for item in items[:n])
                edits[a, a + 1] = str(place)
    return edits


def _aggregates(query: Query, item: Item) -> bool:
    return any(_kinds().get(query.function(i) or "") == "aggregate" for i in range(*item.value))


def _group_keys(query: Query, select: Select, items: list[Item]) -> list[list[str]]:
    begin, end = select.clauses.get("group", (0, 0))
    spans = query.split(begin + 1, end)
    spans += [i.value for i in items if not i.moves and not i.is_star and begin < end]
    return [_texts(query, a, b) for a, b in spans if b - a > 1]


def _texts(query: Query, begin: int, end: int) -> list[str]:
    return [query.span(i, i + 1) for i in range(begin, end)]


def _is_whole(query: Query, begin: int, end: int) -> bool:
    """Whether some tokens are an operand by themselves, not `b + c` out of `a * b + c`."""
    opened = begin if query.type(begin) is T.L_PAREN else begin + 1
    if query.close.get(opened) == end - 1 and query.type(begin - 1) is not T.DOT:
        return query.word(end) not in {"over", "filter", "within"}
    around = {query.type(begin - 1), query.type(end)}
    return around <= {T.L_PAREN, T.COMMA, T.R_PAREN}


def _parts(query: Query, item: Item, keys: list[list[str]]) -> list[tuple[int, int]]:
    """Return what of a moved item has to be computed below: columns, aggregates, subqueries."""
    parts = []
    i, end = item.value
    while i < end:
        stop = _part_end(query, i, end, keys)
        if stop is None:
            i += 1
            continue
        if query.calls([(i, stop)]):
            name = query.function(i) or "a subquery"
            raise UnmovableError(f"it is inside {name} in the select list." + _ONE_BY_ONE)
        if query.type(i - 1) is T.DOT:
            raise UnmovableError(f"{query.word(i)} is called with a dot.")
        parts.append((i, stop))
        i = stop
    columns = [(first, last + 1) for first, last, _ in item.columns]
    return sorted({*parts, *(c for c in columns if not any(a <= c[0] < b for a, b in parts))})


def _part_end(query: Query, i: int, end: int, keys: list[list[str]]) -> int | None:
    for key in keys:
        stop = min(end, i + len(key))
        if _texts(query, i, stop) == key and _is_whole(query, i, stop):
            return stop
    if query.type(i) is T.L_PAREN and query.type(i + 1) in {T.SELECT, T.WITH, T.FROM}:
        if query.type(i - 1) in {T.IN, T.EXISTS, T.ANY, T.ALL, T.SOME}:
            raise UnmovableError("a subquery with IN or EXISTS stands beside it.")
        return query.close[i] + 1
    name = query.function(i)
    if name in CALLS and query.type(i - 1) is T.DOT:
        raise UnmovableError("it is called with a dot. Write it as llm_generate(prompt).")
    if not needs_rows(query, i):
        return None
    stop = query.close[i + 1] + 1
    while query.word(stop) in {"over", "filter", "within", "group"}:
        stop = query.close[stop + 1] + 1 if query.type(stop + 1) is T.L_PAREN else stop + 2
    return stop


def _outer_list(items: list[Item], moved: dict[int, str], rest: str) -> str:
    stay = [n for n, item in enumerate(items) if not item.moves]
    if stay and stay[-1] - stay[0] + 1 == len(stay):
        parts = {**moved, stay[0]: rest}
    else:
        parts = {**moved, **{n: f"#{place}" for place, n in enumerate(stay, 1)}}
    return ", ".join(parts[n] for n in sorted(parts))


def title(clause: str) -> str:
    """Return a clause as people write it."""
    return {"order": "ORDER BY", "group": "GROUP BY"}.get(clause, clause.upper())


@functools.cache
def _kinds() -> dict[str, str]:
    """Return the kinds of DuckDB's own functions; a name that is an aggregate too counts as one."""
    with duckdb.connect() as connection:
        rows = connection.execute(
            "select function_name, function_type from duckdb_functions() "
            "where internal and function_type in ('scalar', 'aggregate') "
            "order by function_type desc"
        ).fetchall()
    return {**dict(rows), **dict.fromkeys(("unnest", "unlist"), "rows")}


def needs_rows(query: Query, i: int) -> bool:
    """Whether token i begins a function that may see more than its own row, or make rows.

    Such are aggregates, window functions, `unnest`, and what DuckDB does not know by itself.
    """
    name = query.function(i)
    if name is None or (name in CALLS and query.type(i - 1) is not T.DOT):
        return False
    if query.word(query.close[i + 1] + 1) in {"over", "filter", "within"}:
        return True
    is_keyword = query.type(i) not in {T.VAR, T.IDENTIFIER}
    return _kinds().get(name, "scalar" if is_keyword else "unknown") != "scalar"


@functools.cache
def name_of(expression: str) -> str:
    """Return the column name that DuckDB gives an expression: its own text of it."""
    with duckdb.connect() as connection:
        text = connection.execute(
            "select json_deserialize_sql(json_serialize_sql(?))", [f"select {expression}"]
        ).fetchone()
    return str(text[0]).removeprefix("SELECT ") if text else expression
