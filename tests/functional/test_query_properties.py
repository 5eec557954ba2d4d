"""Random queries give what a plain function in their place would give, and ask nothing twice.

In each generated query a call stands between two marks. Rendered once, it is a call of an LLM
function, resolved against an empty store; rendered the other way, a plain function that knows every
answer, in a DuckDB without the plugin. Both must give the same rows.

`DBT_LLM_EXAMPLES=2000` runs more of them.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest

from dbt_llm.collector import Collector
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import CallError
from dbt_llm.functions import NO_GENERATIONS, register_functions, register_macros
from dbt_llm.schema import Answer
from tests.project import ROOT
from tests.unit.generations import LLMS, call_of, prompt_hash
from tests.unit.test_resolve_loop import Warehouse

FEATURES = {
    *("select", "group", "having", "call in aggregate", "distinct", "distinct on", "union"),
    *("union all", "scalar", "exists", "in", "join", "left join", "call in on", "window"),
    *("subquery", "cte", "limit", "qualify", "nested", "refusable"),
}
"""What the queries together must have."""
FORMATS = ("delta", "parquet", "parquet")
EXAMPLES = int(os.environ.get("DBT_LLM_EXAMPLES", "100"))


@dataclass(frozen=True)
class Asking:
    """One way to call: the SQL around the prompt, and what the answer is."""

    begin: str
    end: str
    type: str
    options: dict[str, Any]
    output: Callable[[str], str]
    """The stored output, by the prompt hash."""
    plain: str
    """SQL of the result, where `h` is the prompt hash."""

    @property
    def call_hash(self) -> str:
        return call_of(**self.options).call_hash


def _text(options: dict[str, Any], begin: str = "llm_generate(", end: str = ")") -> Asking:
    return Asking(begin, end, "text", options, lambda h: f"re:{h[:8]}", "'re:' || left(h, 8)")


def _either(one: str, other: str) -> Callable[[str], str]:
    return lambda h: one if h[1] < "8" else other


ASKING = {
    "a": _text({}),
    "b": _text({"model": "other"}, end=", model := 'other')"),
    "c": _text({"system": "It's; --", "seed": 7}, end=", system := 'It''s; --', seed := 7)"),
    "d": _text({}, begin="llm_details(", end=").output"),
    "e": Asking(
        "llm_classify(",
        ", ['good', 'ba''d'])",
        "text",
        {"function": "classify", "labels": ["good", "ba'd"]},
        _either("good", "ba'd"),
        "case when h[2] < '8' then 'good' else 'ba''d' end",
    ),
    "f": Asking(
        "llm_filter(",
        ", 'Is it odd?')",
        "bool",
        {"function": "filter", "question": "Is it odd?"},
        _either("yes", "no"),
        "h[2] < '8'",
    ),
    "g": Asking(
        "llm_extract(",
        """, '{"n": "INTEGER"}').n""",
        "int",
        {"function": "extract", "fields": {"n": "INTEGER"}},
        lambda h: f'{{"n": {ord(h[1])}}}',
        "ord(h[2])",
    ),
}
KIND_OF = {asking.call_hash: kind for kind, asking in ASKING.items()}
FAILS = "0"
"""A prompt whose hash begins so fails for good, and the call is NULL."""


def answer(hash_: str, prompt: str) -> Answer:
    if hash_[0] == FAILS:
        return Answer(hash_, error_code="content_filter", error="no")
    (kind,) = (k for call, k in KIND_OF.items() if prompt_hash(call, prompt) == hash_)
    return Answer(hash_, output=ASKING[kind].output(hash_))


# Rendering


def mark(kind: str, prompt: str) -> str:
    return f"<{kind}<{prompt}>{kind}>"


def with_llm(query: str) -> str:
    query = re.sub(r"<([a-g])<", lambda m: ASKING[m[1]].begin, query)
    return re.sub(r">([a-g])>", lambda m: ASKING[m[1]].end, query)


def with_plain(query: str) -> str:
    return re.sub(r">[a-g]>", ")", re.sub(r"<([a-g])<", r"plain_\1(", query))


# The grammar

Columns = dict[str, str]
"""Types (int, text, bool) by name."""
Row = tuple[int | None, str | None]


@dataclass(frozen=True)
class Source:
    """What can stand in a FROM: its text and its columns."""

    text: str
    columns: Columns
    key: tuple[str, ...]
    """Columns that order the rows in one way only; all, where nothing less does."""


@dataclass
class Grammar:
    """Draws queries; `depth` bounds what lies in what."""

    random: Random
    names: int = 0
    ctes: list[str] = field(default_factory=list)
    features: set[str] = field(default_factory=set)

    def one_of(self, *options: Any) -> Any:
        return self.random.choice(options)

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def name(self) -> str:
        self.names += 1
        return f"x{self.names}"

    def column(self, columns: Columns, type_: str) -> str | None:
        names = [name for name, own in columns.items() if own == type_]
        return self.one_of(*names) if names else None

    def text(self, columns: Columns, depth: int) -> str:
        column = self.column(columns, "text") or "'z'"
        if depth <= 0:
            return column
        shape = self.one_of("column", "concat", "number", "call", "call", "call", "case", "or")
        if shape == "concat":
            return f"('to ' || {self.text(columns, depth - 1)})"
        if shape == "number":
            return f"('n' || {self.number(columns, depth - 1)})"
        if shape == "call":
            return self.call("text", columns, depth)
        if shape == "case":
            otherwise = f" else {self.text(columns, depth - 1)}" if self.chance(50) else ""
            condition = self.condition(columns, depth - 1)
            return f"case when {condition} then {self.text(columns, depth - 1)}{otherwise} end"
        if shape == "or":
            return f"coalesce({self.text(columns, depth - 1)}, {self.text(columns, depth - 1)})"
        return column

    def call(self, type_: str, columns: Columns, depth: int) -> str:
        kinds = [kind for kind, asking in ASKING.items() if asking.type == type_]
        self.features.add("call")
        prompt = self.text(columns, depth - 1)
        if "<" in prompt:
            self.features.add("nested")
        return mark(self.one_of(*kinds), prompt)

    def number(self, columns: Columns, depth: int) -> str:
        column = self.column(columns, "int") or "3"
        if depth <= 0:
            return column
        shape = self.one_of("column", "length", "plus", "call")
        if shape == "length":
            return f"length({self.text(columns, depth - 1)})"
        if shape == "plus":
            return f"({column} + {self.one_of(0, 1, 2)})"
        return self.call("int", columns, depth) if shape == "call" else column

    def condition(self, columns: Columns, depth: int) -> str:
        column = self.column(columns, "int") or "1"
        if depth <= 0:
            return f"{column} {self.one_of('<', '>=', '=', '<>')} {self.one_of(0, 1, 2, 3)}"
        shape = self.one_of("number", "null", "equal", "call", "not", "and", "or", "in", "exists")
        if shape == "null":
            return f"{self.text(columns, depth - 1)} is {self.one_of('', 'not ')}null"
        if shape == "equal":
            other = self.one_of("'b'", "'re:8'", "'good'")
            return f"{self.text(columns, depth - 1)} >= {other}"
        if shape == "call":
            return self.call("bool", columns, depth)
        if shape == "not":
            return f"not ({self.condition(columns, depth - 1)})"
        if shape in {"and", "or"}:
            parts = [self.condition(columns, depth - 1) for _ in range(2)]
            return f"({parts[0]} {shape} {parts[1]})"
        if shape == "in":
            self.features.add("in")
            inner = self.text({"tag": "text", "k": "int"}, depth - 1)
            return f"{self.text(columns, depth - 1)} in (select {inner} from u)"
        if shape == "exists":
            self.features.add("exists")
            return f"exists (select 1 from u where u.k = {column})"
        return f"{self.number(columns, depth - 1)} > {self.one_of(0, 1, 50)}"

    def source(self, depth: int) -> Source:
        shapes = ["t", "t", "u"]
        if depth > 0:
            shapes += ["join", "left join", "subquery", "cte", "window"]
        shape = self.one_of(*shapes)
        if shape == "t":
            return Source("t", {"i": "int", "g": "int", "body": "text"}, ("i",))
        if shape == "u":
            return Source("u", {"j": "int", "k": "int", "tag": "text"}, ("j",))
        self.features.add(shape)
        if shape in {"join", "left join"}:
            columns = {"i": "int", "g": "int", "body": "text"}
            on = "t.g = u.k"
            if shape == "join" and self.chance(30):
                self.features.add("call in on")
                on += f" and {self.condition({'body': 'text', 'g': 'int', 'tag': 'text'}, 2)}"
            return Source(
                f"t {shape} u on {on}",
                {**columns, "j": "int", "k": "int", "tag": "text"},
                ("i", "j"),
            )
        if shape == "window":
            prefix = self.name()
            # A window over the answers of the rows, so these are asked first.
            inner = self.text({"i": "int", "g": "int", "body": "text"}, 1)
            parts = (
                f"select i, g, {inner} as {prefix}a from t",
                f"select i, {prefix}a, row_number() over (partition by g order by i) as {prefix}r, "
                f"lag({prefix}a) over (order by i) as {prefix}b",
            )
            types = {"i": "int", f"{prefix}a": "text", f"{prefix}r": "int", f"{prefix}b": "text"}
            return Source(f"({parts[1]} from ({parts[0]}) as {prefix}) as {prefix}w", types, ("i",))
        inner = self.query(depth - 1)
        name = self.name()
        if shape == "cte":
            materialized = self.one_of("", "", "materialized ", "not materialized ")
            self.ctes.append(f"{name} as {materialized}({inner.text})")
            return Source(name, inner.columns, inner.key)
        return Source(f"({inner.text}) as {name}", inner.columns, inner.key)

    def query(self, depth: int) -> Source:
        shapes = ["select"] * 4 + ["group", "group", "distinct", "distinct on", "scalar"]
        if depth > 0:
            shapes += ["union all", "union"]
        shapes += ["refusable"] * self.chance(10)
        shape = self.one_of(*shapes)
        self.features.add(shape)
        drawn: Source = getattr(self, "_" + shape.replace(" ", "_"))(depth)
        if self.chance(35):
            return self.cut(drawn)
        return drawn

    def cut(self, drawn: Source) -> Source:
        """Order in one way only, and keep some rows."""
        self.features.add("limit")
        order = self.order(drawn)
        limit = f"limit {self.one_of(1, 2, 3)}" + (" offset 1" if self.chance(25) else "")
        return Source(f"{drawn.text} {order} {limit}", drawn.columns, drawn.key)

    def order(self, drawn: Source) -> str:
        keys = list(drawn.key)
        if self.chance(20):
            keys = [self.one_of(*drawn.columns), *keys]
        direction = self.one_of("", " desc", " desc nulls last")
        return "order by " + ", ".join(f"{key}{direction}" for key in dict.fromkeys(keys))

    def items(self, source: Source, depth: int) -> tuple[str, Columns]:
        items, columns = [], {}
        if self.chance(30):
            items.append("*")
            columns |= source.columns
        else:
            for key in source.key:
                items.append(key)
                columns[key] = source.columns[key]
        for _ in range(self.one_of(1, 1, 2, 3)):
            type_ = self.one_of("text", "text", "text", "int", "bool")
            expression = {"text": self.text, "int": self.number, "bool": self.condition}[type_]
            spare = [c for c, own in source.columns.items() if own == type_ and c not in columns]
            name = self.one_of(*spare) if spare and self.chance(30) else self.name()
            items.append(f"{expression(source.columns, depth)} as {name}")
            columns[name] = type_
        return ", ".join(items), columns

    def _select(self, depth: int) -> Source:
        source = self.source(depth)
        items, columns = self.items(source, 3)
        text = f"select {items} from {source.text}"
        if self.chance(35):
            text += f" where {self.condition(source.columns, 2)}"
        if self.chance(12):
            self.features.add("qualify")
            text += f" qualify row_number() over (order by {', '.join(source.key)}) <= 2"
        return Source(text, columns, source.key)

    def _distinct(self, depth: int) -> Source:
        source = self.source(depth)
        items, columns = self.items(source, 2)
        return Source(f"select distinct {items} from {source.text}", columns, tuple(columns))

    def _distinct_on(self, depth: int) -> Source:
        prompt = self.text({"g": "int", "body": "text", "i": "int"}, 3)
        name = self.name()
        text = f"select distinct on (g) g, i, {prompt} as {name} from t order by g, i"
        return Source(f"select * from ({text}) as {name}d", {"g": "int", "i": "int", name: "text"},
                      ("g",))  # fmt: skip

    def _group(self, depth: int) -> Source:
        inner = self.text({"body": "text", "i": "int"}, 1)
        joined = f"string_agg({inner}, ' | ' order by i)"
        if "<" in inner:
            # A call in an aggregate in a call needs a CTE between them on DuckDB 1.5.
            outer = joined
            self.features.add("call in aggregate")
        else:
            outer = self.text({joined: "text", "max(i)": "int", "g": "int"}, 2)
        x, n = self.name(), self.name()
        text = f"select g, {outer} as {x}, count(*) as {n} from t group by g"
        if self.chance(30):
            self.features.add("having")
            text += f" having {self.condition({'min(body)': 'text', 'count(i)': 'int'}, 1)}"
        return Source(text, {"g": "int", x: "text", n: "int"}, ("g",))

    def _scalar(self, depth: int) -> Source:
        source = self.source(0)
        inner = self.text({"tag": "text", "j": "int"}, 2)
        name, own = self.name(), self.name()
        where = f" where u.k = {self.column(source.columns, 'int')}" if self.chance(50) else ""
        subquery = f"(select max({inner}) from u{where})"
        prompt = self.text({**source.columns, subquery: "text"}, 1)
        keys = ", ".join(source.key)
        return Source(
            f"select {keys}, {subquery} as {name}, {prompt} as {own} from {source.text}",
            {**dict.fromkeys(source.key, "int"), name: "text", own: "text"},
            source.key,
        )

    def _refusable(self, depth: int) -> Source:
        kind, name = self.one_of("a", "b", "c"), self.name()
        shape = self.one_of("window", "count", "left join", "lambda", "try")
        condition = f"u.tag = {mark(kind, 'body')}"
        counted = "'n' || count(*)"
        text = {
            "window": f"select i, {mark(kind, 'lag(body) over (order by i)')} as {name} from t",
            "count": f"select max(i) as i, {mark(kind, counted)} as {name} from t",
            "left join": f"select t.i, u.tag as {name} from t left join u on {condition} "
            "qualify row_number() over (partition by t.i order by u.j) = 1",
            "lambda": f"select i, array_to_string([x for x in [{mark(kind, 'body')}]], '') "
            f"as {name} from t",
            "try": f"select i, try({mark(kind, 'body')}) as {name} from t",
        }[shape]
        self.features |= {"call", f"refusable: {shape}"}
        return Source(f"select * from ({text}) as {name}r", {"i": "int", name: "text"}, ("i",))

    def _union_all(self, depth: int, word: str = "union all") -> Source:
        sides = []
        for _ in range(2):
            source = self.source(depth - 1)
            side = f"select {self.text(source.columns, 2)} as a, {self.number(source.columns, 1)}"
            sides.append(f"{side} as b from {source.text}")
        name = self.name()
        return Source(f"select * from ({f' {word} '.join(sides)}) as {name}",
                      {"a": "text", "b": "int"}, ("a", "b"))  # fmt: skip

    def _union(self, depth: int) -> Source:
        return self._union_all(depth, "union")


@dataclass(frozen=True)
class Example:
    query: str
    ordered: bool
    features: frozenset[str]


def query_of(random: Random) -> Example:
    """Draw queries until one has a call."""
    grammar = Grammar(random)
    drawn = grammar.query(grammar.one_of(0, 1, 1, 2))
    if "call" not in grammar.features:
        return query_of(random)
    text = drawn.text
    cut = re.search(r" limit \d( offset 1)?$", text) is not None
    ordered = cut or grammar.chance(50)
    if ordered and not cut:
        text += " " + grammar.order(drawn)
    if grammar.ctes:
        text = f"with {', '.join(grammar.ctes)} {text}"
    return Example(text, ordered, frozenset(grammar.features))


TEXTS = (None, "", "a", "b", "b", "it's", "e\u0301", "\u00e9", "\0", "a long text")


def rows_of(random: Random, most: int) -> list[Row]:
    """Return rows of a number and a text; with repetitions, NULLs and, rarely, none at all."""
    return [
        (random.choice((None, 0, 1, 1, 2)), random.choice(TEXTS))
        for _ in range(random.randint(0, most) or random.randint(0, most))
    ]


# The two databases


class Databases:
    """One with the plugin's functions, one with plain functions in their place."""

    def __init__(self) -> None:
        self.llm = duckdb.connect()
        self.collector = Collector(LLMS)
        register_functions(self.llm, self.collector)
        load_delta_extension(self.llm)
        self.cursor = self.llm.cursor()
        register_macros(self.cursor)
        self.plain = duckdb.connect()
        self.needed: set[str] = set()
        for kind, asking in ASKING.items():
            self.plain.create_function(
                f"hash_{kind}", self._hash(asking.call_hash), ["VARCHAR"], "VARCHAR"
            )
            # What follows the hash mentions it more than once; a lambda computes it once.
            self.plain.execute(
                f"create macro plain_{kind}(p) as list_transform([hash_{kind}(p)], lambda h: "
                f"case when h is null or left(h, 1) = '{FAILS}' then null "
                f"else {asking.plain} end)[1]"
            )

    def _hash(self, call_hash: str) -> Callable[[str], str]:
        def hash_(prompt: str) -> str:
            found = prompt_hash(call_hash, prompt)
            self.needed.add(found)
            return found

        return hash_

    def fill(self, t: list[Row], u: list[Row]) -> None:
        """Forget the store and the prompts of the last example, and make the tables anew."""
        self.cursor.execute(f"create or replace temp view dbt_llm_generations as {NO_GENERATIONS}")
        self.needed.clear()
        for connection in (self.llm, self.plain):
            connection.execute("create or replace table t (i integer, g integer, body varchar)")
            connection.execute("create or replace table u (j integer, k integer, tag varchar)")
            for table, rows in (("t", t), ("u", u)):
                numbered = [(number, *row) for number, row in enumerate(rows)]
                if numbered:
                    places = ", ".join(["(?, ?, ?)"] * len(numbered))
                    values = [value for row in numbered for value in row]
                    connection.execute(f"insert into {table} values {places}", values)

    def close(self) -> None:
        self.llm.close()
        self.plain.close()


SPARING = re.compile(
    r"\b(case|coalesce|where|having|limit|qualify|join|distinct on|exists|in|and|or|max)\b"
)
"""With such words DuckDB may compute a plain function for rows that do not need it."""


@pytest.fixture(scope="module")
def databases() -> Iterator[Databases]:
    databases = Databases()
    yield databases
    databases.close()


def documented_refusals() -> re.Pattern[str]:
    """Return what fits the messages in the tables of docs/troubleshooting.md."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page[page.index("### If this is about an LLM function") :]
    section = section[: section.index("### The generation store")]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    cells = [cell.strip() for row in rows for cell in row[: len(row) - 2]]
    messages = [cell for cell in cells if len(cell) > 20]
    assert len(messages) > 8
    return re.compile("|".join(".+".join(map(re.escape, m.split("…"))) for m in messages))


REFUSALS = documented_refusals()


def check(databases: Databases, folder: Path, example: Example, format_: str, tables: Any) -> str:
    """Compare both databases; return what became of the example."""
    warehouse = Warehouse(databases.llm, databases.collector, folder, format_)
    databases.fill(*tables)
    expected = databases.plain.execute(with_plain(example.query)).fetchall()
    needed = set(databases.needed)
    asked: list[str] = []

    def noting(hash_: str, prompt: str) -> Answer:
        asked.append(hash_)
        return answer(hash_, prompt)

    query = with_llm(example.query)
    warnings: list[str] = []
    try:
        summary, rows = warehouse.build(
            query, warehouse.jobs(noting), cursor=databases.cursor, warn=warnings.append
        )
    except CallError as error:
        assert REFUSALS.search(str(error)), error
        return "refused"
    if summary is None:
        assert "call" not in example.features
        return "without a call"
    assert in_order(rows, example) == in_order(expected, example)
    assert len(asked) == len(set(asked))
    if not SPARING.search(example.query):
        assert needed <= set(asked), "not everything was asked"
    kept = re.search(r" limit (\d)( offset 1)?$", example.query)
    if kept and not warnings and example.features <= {"call", "nested", "select", "limit"}:
        # A query that keeps n rows asks at most n prompts per call.
        calls = len(re.findall(r"<[a-g]<", example.query))
        assert len(asked) <= int(kept[1]) * calls, "more was asked than is kept"
    again = warehouse.jobs(noting)
    _, rows = warehouse.build(query, again, cursor=databases.cursor)
    assert in_order(rows, example) == in_order(expected, example)
    assert again.rounds == []
    return "resolved" if asked else "asked nothing"


def in_order(rows: list[Any], example: Example) -> list[Any]:
    return rows if example.ordered else sorted(rows, key=repr)


ROWS = [(i % 3, f"text {i}") for i in range(7)]
CUT = {"call", "nested", "select", "limit"}


@pytest.mark.parametrize("format_", ["delta", "parquet"])
@pytest.mark.parametrize(
    ("query", "features", "tables"),
    [
        # DuckDB 1.5 computes the calls in its first plan, and needs none of them in the second.
        (
            "select i, (select max(<a<coalesce(tag, tag)>a>) from u where u.k = i) as x, "
            "<d<(select max(<a<coalesce(tag, tag)>a>) from u where u.k = i)>d> as y "
            "from t order by i desc limit 2",
            {"call", "nested", "scalar", "limit"},
            ([], [(1, "b"), (1, ""), (1, None), (1, None)]),
        ),
        (
            "select i, <c<<e<<d<body>d>>e>>c> as body from t order by i desc limit 1",
            CUT,
            (ROWS, []),
        ),
        (
            "select *, body as x, <f<body>f> as y from t order by i limit 2 offset 1",
            CUT,
            (ROWS, []),
        ),
        (
            "select i, length('n' || i) as x, <g<body>g> as y from t order by i limit 3",
            CUT,
            (ROWS, []),
        ),
    ],
)
def test_a_query_that_once_found_something(
    databases: Databases,
    tmp_path: Path,
    query: str,
    features: set[str],
    tables: Any,
    format_: str,
) -> None:
    example = Example(query, True, frozenset(features))
    assert check(databases, tmp_path, example, format_, tables) == "resolved"


def test_a_query_gives_what_a_plain_function_would_give(
    databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcomes: Counter[str] = Counter()
    features: Counter[str] = Counter()
    for seed in range(EXAMPLES):
        random = Random(seed)
        example = query_of(random)
        tables = rows_of(random, 7), rows_of(random, 4)
        folder = tmp_path_factory.mktemp("example")
        try:
            outcome = check(databases, folder, example, random.choice(FORMATS), tables)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {tables}: {with_llm(example.query)}") from error
        finally:
            shutil.rmtree(folder)
        outcomes[outcome] += 1
        features.update(example.features)
    assert outcomes["resolved"] >= 0.75 * EXAMPLES, outcomes
    assert outcomes["refused"] <= 0.05 * EXAMPLES, outcomes
    if EXAMPLES >= 100:
        assert features.keys() >= FEATURES, FEATURES - features.keys()
