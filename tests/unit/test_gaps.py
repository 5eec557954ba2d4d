"""Which tables are filled once their answers are there, and that they are as if built anew."""

import threading

import pytest

from dbt_llm.gaps import can_be_filled
from dbt_llm.schema import Answer
from dbt_llm.spool import Prepared
from tests.unit.generations import failing, good
from tests.unit.test_resolve_loop import Warehouse

ROWS = 5_000
FIELDS = '{"a": "VARCHAR"}'
FILLED = {
    "plain": "select i, llm_generate(p) as r from v",
    "star": "select *, llm_generate(p, system := 'It''s {} {0}') as r from v",
    "two calls": "select llm_generate(p) as r, i, llm_generate(p, seed := 7) as s from v",
    "one call twice": "select i, llm_generate(p) as r, llm_generate(p) as s from v",
    "some without": "select i, llm_generate(case when i % 3 = 0 then p end) as r from v",
    "repeated": "select i, llm_generate(p) as r from (from v union all from v)",
    "joined": "select v.i, llm_generate(v.p || s.p) as r from v join stock as s on v.i = s.i",
    "grouped": "select i // 2, llm_generate(string_agg(p order by i)) as r from v group by i // 2",
    "cte": "with c as (select i, upper(p) as p from v) select i, llm_generate(p) as r from c",
    "field": "select i, llm_details(p).output as r, llm_details(p).status as s from v",
    "details": "select llm_details(p) as d, i from v",
    "number": "select i, length('x')::int as n, llm_generate(p)::varchar as r from v",
    "odd names": """select i as "a ""b", llm_generate(p) as "R 'q" from v""",
    "no name": "select i, llm_generate('x' || p) from v",
    "extract": f"select i, llm_extract(p, '{FIELDS}') as e from v",
    "filter": "select i, llm_filter(p, 'Odd?') as f from v",
    "classify": "select i, llm_classify(p, ['yes', 'no']) = 'yes' as y from v",
    "key": "select i, llm_prompt_hash(p) as h, llm_generate(p) as r from v",
}
BUILT_ANEW = {
    "embedding": "select i, llm_embed(p) as e from v",
    "list": "select i, [llm_generate(p)] as r from v",
    "around": "select i, upper(llm_generate(p)) as r from v",
    "used below": "with c as (select i, llm_generate(p) as r from v) select i, upper(r) from c",
    "union": "select i, llm_generate(p) as r from v union all select i, llm_generate(p) from v",
    "filtered too": "select i, llm_generate(p) as r from v where llm_filter(p, 'Odd?') is null",
    "ordered": "select i, llm_generate(p) as r from v order by i",
    "same name twice": "select llm_generate(p) as r, i, llm_generate('x' || p) as R from v",
    "a macro of the user's": "select i, llm_generate(p) as r, about(p) as a from v",
}


class Shop(Warehouse):
    """A table of which most prompts are answered; it counts how often its rows are looked at."""

    def __init__(self, connection, collector, folder, format_):
        super().__init__(connection, collector, folder, format_)
        self.seen = 0
        connection.execute(f"""
            create or replace table stock as
            select i, 'p' || i || ' ✓ ''"' as p, i % 97 = 3 as is_new from range({ROWS}) as r(i)""")
        if connection.execute("from duckdb_functions() where function_name = 'looked'").fetchall():
            connection.remove_function("looked")
        connection.create_function("looked", self.look, ["BIGINT"], "BIGINT", type="arrow")
        self.show("not is_new")

    def look(self, column):
        self.seen += len(column)
        return column

    def show(self, condition):
        self.connection.execute(
            f"create or replace view v as select looked(i) as i, p from stock where {condition}"
        )

    def cursor(self):
        cursor = super().cursor()
        cursor.execute("create or replace temp macro about(x) as llm_generate('about ' || x)")
        return cursor

    def build(self, *arguments, **options):
        self.seen = 0
        return super().build(*arguments, **options)


@pytest.fixture(params=["delta", "parquet"])
def shop(database, tmp_path, request):
    return Shop(*database, tmp_path, request.param)


def typed(hash_, prompt):
    """Answer so that every function can read it."""
    if prompt.startswith("p1"):
        return failing("context_length")(hash_, prompt)
    return Answer(hash_, output="yes" if "7" in prompt else "no", finish_reason="stop")


def as_json(hash_, prompt):
    return Answer(hash_, output='{"a": "of ' + prompt[:4] + '"}', finish_reason="stop")


def vector(hash_, prompt):
    return Answer(hash_, embedding=[1.0, float(len(prompt))])


def answer_of(query):
    kinds = {"llm_extract": as_json, "llm_filter": typed, "llm_classify": typed, "embed": vector}
    return next((answer for name, answer in kinds.items() if name in query), good)


def built(shop, query):
    """Build a query when most answers are there; return its rows, and those of a rerun."""
    jobs = shop.jobs(answer_of(query))
    shop.build(query, jobs)
    shop.show("true")
    jobs.rounds.clear()
    _, rows = shop.build(query, jobs)
    seen, asked = shop.seen, jobs.asked
    _, again = shop.build(query, jobs)
    assert asked
    assert jobs.asked == asked
    return rows, again, round(seen / shop.seen)


@pytest.mark.parametrize("query", FILLED.values(), ids=FILLED)
def test_a_filled_table_is_as_if_built_anew(shop, query):
    rows, again, evaluations = built(shop, query)
    assert sorted(rows, key=repr) == sorted(again, key=repr)
    assert evaluations == 1
    assert any(row[-1] is not None for row in rows)


@pytest.mark.parametrize("query", BUILT_ANEW.values(), ids=BUILT_ANEW)
def test_what_cannot_be_filled_is_built_anew(shop, query):
    rows, again, evaluations = built(shop, query)
    assert sorted(rows, key=repr) == sorted(again, key=repr)
    assert evaluations == 2


PLAIN = FILLED["plain"]


def changed(shop, jobs=None, **settings):
    """Build the plain query when most answers are there; return its answers by prompt number."""
    shop.build(PLAIN)
    shop.show("true")
    summary, rows = shop.build(PLAIN, jobs, **settings)
    return summary, dict(rows)


def test_only_rows_of_new_prompts_are_counted_as_asked(shop):
    new = len(range(3, ROWS, 97))
    summary, answers = changed(shop)
    assert (summary.prompts, summary.generated, summary.left_null) == (ROWS, new, 0)
    assert all(answers[i] == f"<p{i} ✓ '\">" for i in range(ROWS))


def test_what_a_limit_left_is_null_and_counted(shop):
    summary, answers = changed(shop, limit=10)
    assert (summary.generated, summary.left_null) == (10, len(range(3, ROWS, 97)) - 10)
    assert sum(answer is None for answer in answers.values()) == summary.left_null


def test_failed_rows_are_null(shop):
    jobs = shop.jobs(failing("timeout"))
    summary, answers = changed(shop, jobs)
    assert shop.seen == ROWS
    assert summary.failed == len(range(3, ROWS, 97))
    assert [i for i, answer in answers.items() if answer is None] == list(range(3, ROWS, 97))


def test_what_another_model_asks_is_waited_for(shop, monkeypatch):
    """The other's answers have another run_id, so that the table is built anew."""
    shop.build(PLAIN)
    shop.show("true")
    asked = shop.jobs()
    asked.run_id = "other"
    claim = shop.in_flight.claim

    def taken(run_id, prepare):
        prepared, _ = claim(run_id, prepare)
        asked(prepared.files)
        return Prepared([], prepared.rows), [done]

    done = threading.Event()
    done.set()
    monkeypatch.setattr(shop.in_flight, "claim", taken)
    summary, rows = shop.build(PLAIN)
    assert summary.generated == 0
    assert all(answer is not None for _, answer in rows)


@pytest.mark.parametrize("settings", [{"refresh": True}, {}], ids=["refresh", "many are missing"])
def test_where_most_rows_change_the_table_is_built_anew(shop, settings):
    shop.show("i < 100 or i >= 100" if settings else "i < 4000")
    shop.build(PLAIN)
    shop.show("true")
    jobs = shop.jobs(lambda hash_, prompt: Answer(hash_, output="new"))
    _, rows = shop.build(PLAIN, jobs, **settings)
    assert sum(answer == "new" for _, answer in rows) == (ROWS if settings else 1000)
    assert shop.seen == 2 * ROWS


def test_a_rerun_leaves_no_column_behind(shop):
    shop.build(PLAIN)
    for condition in ("not is_new", "true"):
        shop.show(condition)
        _, rows = shop.build("select *, llm_generate(p) as r from v")
        assert {len(row) for row in rows} == {3}


@pytest.mark.parametrize(
    ("statement", "fits"),
    [
        ('create  table\n  "db"."main"."x"\n  as (\n  Q\n  );', True),
        ("create temporary table x as (Q)", True),
        ("CREATE TEMP TABLE x AS (Q)", True),
        ("create table x (i int); insert into x (i) (select i from (Q))", False),
        ("create table x as (select * from (Q) limit 0)", False),
        ("create or replace table x as (Q)", False),
        ("create table y as (Q)", False),
    ],
)
def test_only_a_plain_table_is_filled(database, statement, fits):
    table = '"db"."main"."x"' if "db" in statement else "x"
    assert can_be_filled(database[0], statement, "Q", table) is fits


def test_a_table_of_another_catalog_is_not_filled():
    """DuckDB has no catalog of another kind without an extension, so this one is made up."""

    class Cursor:
        def execute(self, query):
            assert "type <> 'duckdb'" in query and query.endswith("'lake'")
            return self

        def fetchall(self):
            return [(1,)]

    assert not can_be_filled(Cursor(), "create table lake.main.x as (Q)", "Q", "lake.main.x")
