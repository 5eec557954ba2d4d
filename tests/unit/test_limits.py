"""Which queries ask only for the rows that they keep, measured on the DuckDB in use."""

import json
from contextlib import contextmanager

import duckdb
import pyarrow.parquet as pq
import pytest

from dbt_llm.collector import Collector, Mode
from dbt_llm.functions import COLUMNS, TOKEN_VARIABLE, register_functions, register_macros
from dbt_llm.limits import ask_after_limit, same_columns
from tests.unit.generations import LLMS

ROWS = 3000


class Database:
    """Runs a query against a store that the query itself has filled."""

    def __init__(self, folder):
        self.folder = folder
        self.connection = duckdb.connect()
        self.connection.execute(f"""
            create table t as
            select i, i % 10 as g, 'p' || lpad(i::varchar, 4, '0') as p, {{'a': i}} as s
            from range({ROWS}) as r(i)""")
        self.connection.execute("create table u as select i, 'u' || i as p from t")
        self.collector = Collector(LLMS)
        register_functions(self.connection, self.collector)
        register_macros(self.connection)
        self.forget()

    def forget(self):
        self.connection.execute(
            "create or replace table kept (prompt_hash varchar, call_hash varchar, output varchar)"
        )
        columns = {**{c: f"null::{type_}" for c, type_ in COLUMNS.items()}, "status": "'ok'"}
        columns |= {name: name for name in ("prompt_hash", "call_hash", "output")}
        select = ", ".join(f"{value} as {name}" for name, value in columns.items())
        self.connection.execute(
            f"create or replace temp view dbt_llm_generations as select {select} from kept"
        )

    @contextmanager
    def resolution(self):
        """Let the connection's queries ask within a resolution."""
        token, resolution = self.collector.open(Mode.GENERATE, self.folder / "spool")
        self.connection.execute(f"set variable {TOKEN_VARIABLE} = '{token}'")
        try:
            yield resolution
        finally:
            self.collector.close(token)
            self.connection.execute(f"set variable {TOKEN_VARIABLE} = null")

    def ask(self, query):
        """Run a query, and store what it asked; return the number of prompts of each call."""
        with self.resolution() as resolution:
            self.connection.execute(query).fetchall()
            path = resolution.spool.take()
        if path is None:
            return []
        asked = pq.read_table(path, columns=["prompt_hash", "call_hash", "prompt"])
        kinds = {h: json.loads(call.text)["output"]["type"] for h, call in resolution.calls.items()}
        self.connection.execute(
            "create or replace temp macro kind(h) as ({})".format(
                " ".join(["case", *(f"when h = '{h}' then '{k}'" for h, k in kinds.items()), "end"])
            )
        )
        self.connection.register("asked", asked)
        self.connection.execute("""
            insert into kept select distinct prompt_hash, call_hash, case kind(call_hash)
                when 'text' then 'of ' || prompt
                when 'choice' then if(prompt < 'p1000', 'yes', 'no')
                else '{"a": "of ' || prompt || '"}' end
            from asked""")
        counts = self.connection.execute(
            "select count(distinct prompt_hash) from asked group by call_hash"
        ).fetchall()
        self.connection.unregister("asked")
        return sorted(n for (n,) in counts)

    def ask_all(self, query):
        """Ask until nothing is missing; return the prompts of each round."""
        rounds = []
        while asked := self.ask(query):
            rounds.append(asked)
        return rounds

    def result(self, query):
        rows = self.connection.execute(query).fetchall()
        columns = self.connection.execute(f"describe from ({query})").fetchall()
        return [column[:2] for column in columns], rows


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Database(tmp_path_factory.mktemp("limits"))


@pytest.fixture
def database(shared):
    shared.forget()
    return shared


# A query, the rows that it keeps, and the prompts per call of each round of questions.
KEPT = {
    "order by": ("select i, llm_generate('x' || i) as r from t order by i desc limit 5", 5, [[5]]),
    "plain limit": ("select llm_generate(p) as r, i from t limit 5", 5, [[5]]),
    "long limit": ("select llm_generate(p) as r, i from t limit 2500", 2500, [[2500]]),
    "more than there is": ("select i, llm_generate(p) as r from t limit 9999", 3000, [[3000]]),
    "nothing": ("select i, llm_generate(p) as r from t order by i limit 0", 0, []),
    "offset": ("select i, llm_generate(p) as r from t order by i limit 5 offset 7", 5, [[5]]),
    "offset alone": ("select i, llm_generate(p) as r from t order by i offset 2990", 10, [[10]]),
    "percent": ("select i, llm_generate(p) as r from t order by i limit 1%", 30, [[30]]),
    "computed": ("select i, llm_generate(p) as r from t order by i limit (select 4)", 4, [[4]]),
    "fetch": ("select i, llm_generate(p) as r from t order by i fetch first 5 rows only", 5, [[5]]),
    "numbers": (
        "select llm_generate(p) as r, g, i, s.a from t order by 2 desc, 3 limit 5", 5, [[5]]
    ),
    "between": ("select i, llm_generate(p) as r, g, upper(p) from t order by i limit 3", 3, [[3]]),
    "no name": ("select llm_generate('x' || p), i from t order by i limit 3", 3, [[3]]),
    "field, no name": ("select llm_details(p).status from t order by i limit 3", 3, [[3]]),
    "odd names": (
        'select "i" as "A ""b", llm_generate(\'👩\' || t."p") as "r ""q" from t order by i limit 3',
        3, [[3]],
    ),
    "one name twice": ("select i, i, llm_generate(p) as r from t order by t.i limit 3", 3, [[3]]),
    "star": ("select *, llm_generate(p) as r from t order by i desc limit 3", 3, [[3]]),
    "star after": ("select llm_generate(p) as r, t.* from t order by i desc limit 3", 3, [[3]]),
    "around a star": (
        "select 1 as a, * exclude (g), llm_generate(p) as r, upper(p) as b from t "
        "order by i desc limit 3", 3, [[3]],
    ),
    "unnest": (
        "select i, unnest([1, 2]) as n, llm_generate(p) as r, g from t order by i limit 4", 4, [[2]]
    ),
    "join": (
        "select *, llm_generate(t.p || u.p) as r from t left join u using (i) "
        "order by i limit 3", 3, [[3]],
    ),
    "from first": ("from t select llm_generate(p) as r, i order by i limit 3", 3, [[3]]),
    "name first": ("select r: llm_generate(p), a: i from t order by i limit 3", 3, [[3]]),
    "comments": (
        "select i, -- one, two\n llm_generate(p) as r, /* ) */ from t -- limit\norder by i limit 3",
        3, [[3]],
    ),
    "literal": ("select llm_generate('const') as r from t order by i limit 3", 3, [[1]]),
    "in an expression": (
        "select upper(llm_generate(p)) || i as r, not llm_filter(p, 'q?') as f, "
        "llm_details(p, seed := 1).output as o, "
        "llm_extract(p, '{\"a\": \"VARCHAR\"}').a from t order by i desc limit 3",
        3, [[3, 3, 3, 3]],
    ),
    "options": (
        "select llm_classify(p, ['yes', 'no'], model := 'other') = 'yes' and i > 3 as k, "
        "llm_generate(p, stop := ['a', 'b'], max_tokens := 5, system := $$it's, $$) as r "
        "from t order by i limit 6", 6, [[6, 6]],
    ),
    "a call in a call": (
        "select i, llm_generate('s' || llm_generate('t' || i, seed := 1)) as r "
        "from t order by i limit 4", 4, [[4], [4]],
    ),
    "case": (
        "select i, case when i > 1 then llm_generate(p) when i = 0 then p end as c "
        "from t order by i limit 4", 4, [[2]],
    ),
    "lambda in a prompt": (
        "select i, llm_generate(list_transform([p], lambda z: z || i)[1]) as r "
        "from t order by i limit 3", 3, [[3]],
    ),
    "subquery in a prompt": (
        "select i, llm_generate(t.p || (select max(p) from u)) as r from t order by i limit 3",
        3, [[3]],
    ),
    "window beside": (
        "select row_number() over (order by i desc) as n, llm_generate(p) as r from t "
        "order by n limit 3", 3, [[3]],
    ),
    "group by": (
        "select g, llm_generate(string_agg(p, ',' order by i)) as r from t "
        "group by g having count(*) > 1 order by g limit 2", 2, [[2]],
    ),
    "group by number": (
        "select llm_generate(string_agg(distinct p, ',' order by p)) as r, g, count(*) as n "
        "from t group by 2 order by n, 2 limit 2", 2, [[2]],
    ),
    "group by expression": (
        "select upper(p), llm_generate('x' || upper(p) || count(i)) as r from t "
        "group by upper(p) order by 1 desc limit 2", 2, [[2]],
    ),
    "a part that looks like a key": (
        "select i + 1 as k, llm_generate((2 * (i) + 1)::varchar || upper('A')) as r from t "
        "group by i order by k limit 2", 2, [[2]],
    ),
    "arrow for an option": (
        "select i, llm_generate(p, seed => 3) as r from t order by i limit 3", 3, [[3]]
    ),
    "group by all": (
        "select g, llm_generate('x' || string_agg(p, ',' order by i)) as r from t "
        "group by all order by g limit 2", 2, [[2]],
    ),
    "all rows in one": (
        "select llm_generate(string_agg(p, ',' order by i)) as r, count(*) from t limit 2", 1, [[1]]
    ),
    "distinct on": (
        "select distinct on (g) i, llm_generate(p) as r from t order by g, i desc", 10, [[10]]
    ),
    "distinct on, limit": (
        "select distinct on (g) i, llm_generate(p) as r from t order by g, i limit 3", 3, [[3]]
    ),
    "qualify": (
        "select i, llm_generate(p) as r from t "
        "qualify row_number() over (partition by g order by i) = 1 order by i", 10, [[10]],
    ),
    "qualify, limit": (
        "select i, llm_generate(p) as r from t window w as (partition by g order by i) "
        "qualify row_number() over w = 1 order by i desc limit 3", 3, [[3]],
    ),
    "cte": (
        "with c as (select i, llm_generate(p) as r from t order by i desc limit 5) "
        "select r, i from c where i > 2996 order by i", 3, [[3]],
    ),
    "subquery": (
        "select * from (select i, llm_generate(p) as r from t order by i limit 5) order by i",
        5, [[5]],
    ),
    "branches": (
        "from ((select i, llm_generate(p) as r from t order by i limit 2) union all "
        "(select i, llm_generate(p, seed := 1) from t order by i desc limit 3)) order by i",
        5, [[2, 3]],
    ),
    "branch with distinct on": (
        "from (select -1 as i, '' as r union all "
        "select distinct on (g) g, llm_generate(g::varchar) from t) order by i", 11, [[10]],
    ),
    "same name as its column": (
        "select i, llm_generate(p) as p from t where p > 'p0002' order by t.i limit 3", 3, [[3]]
    ),
    "below, in a subquery": (
        "select * from (select i, llm_generate(p) as r from t) as q order by q.i desc limit 5",
        5, [[5]],
    ),
    "below, in a cte": (
        "with c as (select *, llm_generate(p) as r from t) "
        "select upper(r) as big, c.i from c where c.i > 10 order by c.g, i limit 5", 5, [[5]],
    ),
    "below, in a chain": (
        "with c as (select *, llm_generate(p) as r from t), d as (select * from c) "
        "select * from d order by i limit 5", 5, [[5]],
    ),
    "below and above": (
        "select *, llm_generate(r, seed := 1) as s2 from "
        "(select i, llm_generate(p) as r from t) order by i limit 5", 5, [[5], [5]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("query", "kept", "asked"), KEPT.values(), ids=KEPT)
def test_a_query_asks_for_what_it_keeps(database, query, kept, asked):
    rewritten, warnings = ask_after_limit(query)
    assert warnings == []
    assert database.ask_all(rewritten) == asked
    # The query as it was asks for more and gives the same: columns, types, rows and their order.
    database.ask_all(query)
    columns, rows = database.result(rewritten)
    assert len(rows) == kept
    assert (columns, rows) == database.result(query)


@pytest.mark.parametrize("threads", [1, 8])
def test_rows_keep_their_order(database, threads):
    query = "select i, llm_generate(p) as r from t order by hash(i) limit 1000"
    database.ask_all(query)
    # A store that is larger than the rows changes the sides of the join between them.
    database.connection.execute("""
        insert into kept
            select sha256(i::varchar), (select any_value(call_hash) from kept), 'other'
            from range(300_000) as r(i)""")
    database.connection.execute(f"set threads = {threads}")
    database.connection.execute("set preserve_insertion_order = false")
    rewritten, _ = ask_after_limit(query)
    assert database.result(rewritten) == database.result(query)
    database.connection.execute("set preserve_insertion_order = true")


@pytest.mark.parametrize(
    "query",
    [
        "select i from t order by i limit 5",
        "select i, llm_generate(p) as r from t",
        "SELECT i,llm_generate(p) AS r\nFROM t  -- no limit 5\nORDER BY i",
        "select llm_prompt_hash(p) as h from t order by i limit 5",
        "select 'llm_generate(p)' as r from t order by i limit 5",
        'select i, llm_generate(p) as "limit" from t',
        "select i, llm_generate(p) as r from t where i in (select i from u order by i limit 5)",
        "select i, llm_generate(p) as r from (select * from t order by i limit 5)",
        "select i, llm_generate(p) as r from t qualify row_number() over (order by i) < 3",
        "select i, llm_generate(p) as r from t where g is distinct from 3",
    ],
)
def test_other_queries_are_the_same_text(query):
    assert ask_after_limit(query) == (query, [])


WARNINGS = {
    "select i, llm_generate(p) as r from t order by r limit 5": "ORDER BY depends on r",
    "select i, llm_generate(p) from t order by 2 limit 5": "ORDER BY 2 depends",
    "select i, llm_generate(p) as r from t order by all limit 5": "ORDER BY ALL depends",
    "select i from t order by llm_generate(p) limit 5": "ORDER BY depends on the answer",
    "select *, llm_generate(p) as r from t order by 1 limit 5": "a number stands for a column",
    "select distinct on (r) i, llm_generate(p) as r from t": "DISTINCT ON depends on r",
    "select distinct llm_generate(p) as r from t limit 5": "SELECT DISTINCT depends",
    "select i, llm_generate(p) as r from t qualify row_number() over (order by r) < 3": (
        "QUALIFY depends on the answer"
    ),
    "select llm_generate(p) as r, count(*) from t group by all limit 3": "GROUP BY ALL depends",
    "select llm_generate(p) as r, count(*) from t group by 1 limit 3": "GROUP BY 1 depends",
    "select max(llm_generate(p)) as m from t group by g limit 3": "it is inside max",
    "select my_macro(llm_generate(p)) as m from t limit 3": "it is inside my_macro",
    "select unnest([llm_generate(p)]) as m from t limit 3": "columns() or unnest()",
    "select * replace (llm_generate(p) as p) from t limit 3": "within a star",
    "select *, llm_generate(p) as r, * from t limit 3": "between two stars",
    "select (select llm_generate(t.p)) as r from t limit 3": "inside a subquery",
    "select list_transform([p], lambda x: llm_generate(x)) as r from t limit 3": "of a list",
    "select p.llm_generate() as r from t limit 3": "called with a dot",
    "select llm_details(p) as d, (d).status from t limit 3": "d is used again",
    "select i, (select llm_generate(u.p) from u where u.i = t.i limit 1) as r from t": (
        "subquery within an expression"
    ),
    "select i, llm_generate(p) as r from t union all select 1, 'b' order by i limit 5": (
        "LIMIT follows a UNION"
    ),
    "(select i, llm_generate(p) as r from t) limit 5": "LIMIT follows",
    "select * from (select i, llm_generate(p) as r from t) order by r limit 5": "depends on r",
    "select * from (select i, llm_generate(p) as r from t) where r > 'a' limit 5": "depends on r",
    "select * from (select i, llm_generate(p) as r from t) order by i limit 5 offset 1": (
        "the rows are cut further out"
    ),
    "select my_sum(i) as n from (select i, llm_generate(p) as r from t) limit 5": (
        "the rows are cut further out"
    ),
    "with c as (select i, llm_generate(p) as r from t) select * from c join c as d using (i) "
    "order by i limit 5": "the rows are cut further out",
    "select i, llm_generate(p) as r from t order by i limit 5 )": "could not be read",
}


@pytest.mark.parametrize(("query", "reason"), WARNINGS.items())
def test_what_must_ask_for_more_is_left_alone_and_says_why(query, reason):
    rewritten, (warning,) = ask_after_limit(query)
    assert rewritten == query
    assert reason in warning


def test_a_filter_needs_all_rows_but_the_select_list_does_not(database):
    query = "select i, llm_generate(p) as r from t where llm_filter(p, 'q?') order by i limit 5"
    rewritten, (warning,) = ask_after_limit(query)
    assert "WHERE depends on the answer" in warning
    assert database.ask_all(rewritten) == [[ROWS], [5]]
    assert database.result(rewritten)[1] == [(i, f"of p000{i}") for i in range(5)]


def test_only_the_part_that_changes_is_new_text():
    query = "WITH a AS (SELECT 1e0 AS x) SELECT llm_generate(p), * FROM t,a LIMIT 3  -- end"
    rewritten, _ = ask_after_limit(query)
    assert rewritten.startswith("WITH a AS (SELECT 1e0 AS x) select llm_generate(dbt_llm_c1)")
    assert "(SELECT *, p as dbt_llm_c1 FROM t,a LIMIT 3)" in rewritten
    assert rewritten.endswith("  -- end")


def test_columns_are_compared_by_name_and_type(database):
    query = "select i, p from t"
    assert same_columns(database.connection, query, "select i, p from t limit 3")
    assert not same_columns(database.connection, query, "select i, p as q from t")
    assert not same_columns(database.connection, query, "select p, i from t")
    assert not same_columns(database.connection, query, "select nothing from t")
