"""Which queries get their keys as columns, and that they ask and give the same as without."""

import duckdb
import pyarrow.parquet as pq
import pytest

from dbt_llm.key_columns import rows_pass_by, with_key_columns
from dbt_llm.resolve_loop import Build, with_keyed
from tests.unit.generations import prompt_hash
from tests.unit.test_limits import Database

KEYED = {
    "plain": "select i, llm_generate(p) as r from t",
    "options": "select llm_generate('About ' || p, seed := 7, system := 'It''s; --') as r from t",
    "star": "select *, llm_generate(p) as r from t",
    "star after": "select llm_generate(p) as r, t.* exclude (g), 1 as one from t",
    "between": "select i, llm_generate(p) as r, upper(p), llm_filter(p, 'Odd?') as o, g from t",
    "no name": "select i, llm_generate('x' || p) from t",
    "from first": "from t select llm_generate(p) as r, i",
    "field": "select llm_details(p).output::varchar as o, llm_details(p).status as s from t",
    "struct": """select i, llm_extract(p, '{"a": "VARCHAR"}') as e from t""",
    "list": "select i, llm_classify(p, ['yes', 'no']) = 'yes' as y from t",
    "joined": "select t.i, llm_generate(t.p || u.p) as r from t join u using (i) where t.i > 5",
    "cte": "with c as (select i, llm_generate(p) as r from t) select max(r), count(*) from c",
    "chained": "select i, llm_generate(r) from (select i, llm_generate(p) as r from t)",
    "grouped": "select g, llm_generate(string_agg(p order by i)) as r from t group by g",
    "union": "select llm_generate(p) as r from t union all select llm_generate(p) from u",
    "filtered too": "select i, llm_generate(p) as r from t where llm_filter(p, 'Odd?')",
    "NULL": "select i, llm_generate(nullif(p, 'p0003')) as r from t",
    "not text": "select i, llm_generate(i) as r from t",
    "a literal": "select i, llm_generate('one') as r from t",
    "own window": "select row_number() over (order by i) as n, llm_generate(p) as r from t",
    "column of the name": "select i, llm_generate(p) as p from t",
    "odd names": """select "i" as "A ""b", llm_generate('👩' || t."p") as "r ""q" from t""",
    "key": "select llm_prompt_hash(p) as h, llm_generate(p) as r from t",
    "lateral": "select t.i, l.r from t, (select llm_generate(t.p) as r from range(1)) as l",
    "unnest": "select unnest([1, 2]) as n, llm_generate(p) as r from t",
    "split": "select llm_generate(p) as r, regexp_split_to_table(p, '0') as n from t",
    "beside a guard": "select llm_generate(p), if(i < 5, llm_generate(p), '') as s from t",
}

LEFT = {
    "guarded": "select case when i < 5 then llm_generate(p) end as r from t",
    "around": "select upper(llm_generate(p)) as r from t",
    "nested": "select llm_generate(llm_generate(p)) as r from t",
    "with another column": "select llm_generate(p) || p as r from t",
    "where alone": "select i from t where llm_filter(p, 'Odd?')",
    "ordered": "select i, llm_generate(p) as r from t order by i",
    "distinct": "select distinct llm_generate(p) as r from t",
    "between stars": "select t.*, llm_generate(t.p) as r, u.* from t join u using (i)",
    "group by place": "select llm_generate(p) as r, count(*) from t group by 1",
    "group by all": "select llm_generate(p) as r, g from t group by all",
    "group by alias": "select llm_generate(p) as r, count(*) from t group by p, r",
    "where with the alias": "select i, llm_generate(p) as r from t where r is not null",
    "alias used again": "select llm_generate(p) as r, upper(r) as u from t",
    "correlated": "select i, (select llm_generate(t.p || u.p) from u where u.i = t.i) as r from t",
    "recursive": """with recursive c as (
        select 'one' as r union all select llm_generate(r) as r from c where length(r) < 12
    ) from c""",
    "named prompt": "select llm_generate(prompt := p) as r from t",
    "a method": "select p.llm_generate() as r from t",
    "no table": "select llm_generate('one') as r",
    "no call": "select i, 'llm_generate(p)' as r from t",
    "not SQL": "select llm_generate(p) as r from t where (",
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return Database(tmp_path_factory.mktemp("key-columns"))


@pytest.fixture
def database(shared):
    shared.forget()
    return shared


def rewritten(database, query):
    with database.resolution():
        found = with_key_columns(database.connection, query)
        return None if found is None else found.query


def collected(database, query):
    """Run a query; return what it gives, and what it collects: keys, call hashes and prompts."""
    with database.resolution() as resolution:
        result = database.result(query)
        path = resolution.spool.take()
        calls = set(resolution.calls)
    rows = [] if path is None else pq.read_table(path).to_pylist()
    return result, {tuple(row.values()) for row in rows}, calls


@pytest.mark.parametrize("query", KEYED.values(), ids=KEYED)
def test_key_columns_change_neither_what_is_asked_nor_what_comes(database, query):
    keyed = rewritten(database, query)
    assert keyed is not None and "dbt_llm_h1" in keyed
    while True:
        (columns, rows), *asked = collected(database, query)
        (columns_too, rows_too), *asked_too = collected(database, keyed)
        assert columns_too == columns
        assert sorted(rows_too, key=repr) == sorted(rows, key=repr)
        assert asked_too == asked
        if not database.ask(query):
            break
    assert any(value is not None for value in rows[-1])


@pytest.mark.parametrize("query", LEFT.values(), ids=LEFT)
def test_what_is_not_as_plain_is_left_as_it_is(database, query):
    assert rewritten(database, query) is None


@pytest.mark.parametrize("name", ["plain", "between", "joined", "grouped", "union"])
def test_rows_are_not_kept_for_the_lookup(database, name):
    query = KEYED[name]
    database.ask_all(query)

    def plan(text):
        return str(database.connection.execute(f"explain {text}").fetchall()).lower()

    assert "delim" in plan(query)
    assert "delim" not in plan(rewritten(database, query))


@pytest.mark.parametrize("threads", [1, 8])
def test_rows_keep_their_order(database, threads):
    query = "select i, llm_generate(p) as r from t"
    database.ask_all(query)
    database.connection.execute(f"set threads = {threads}")
    rows = database.connection.execute(rewritten(database, query)).fetchall()
    assert [i for i, _ in rows] == list(range(len(rows)))


def test_a_prompt_is_computed_once(database):
    query = "select llm_generate('about ' || uuid() || random()) as r from t where random() >= 0"
    _, asked, *_ = collected(database, rewritten(database, query))
    assert len(asked) == 3000
    assert all(prompt_hash(call, prompt) == key for key, call, prompt in asked)


def test_a_failing_prompt_fails_as_before(database):
    query = "select llm_generate('x' || cast(p as integer)) as r from t"
    for text in (query, rewritten(database, query)):
        with pytest.raises(duckdb.ConversionException, match="Could not convert string 'p"):
            database.connection.execute(text).fetchall()


def test_rows_pass_by_unless_there_are_many_more_answers(database):
    few = rewritten(database, "select i, llm_generate(p) as r from t where i < 10")
    all_rows = rewritten(database, "select i, llm_generate(p) as r, llm_details(p) as d from t")
    for keyed in (few, all_rows):
        assert rows_pass_by(database.connection, keyed), "no answers"
    database.ask_all("select llm_generate(p) from t")
    assert rows_pass_by(database.connection, all_rows)
    for n in range(9):
        database.ask_all(f"select llm_generate('{n}' || p) from t")
    assert not rows_pass_by(database.connection, few)
    assert "RIGHT" in str(database.connection.execute(f"explain {few}").fetchall())


def test_a_build_has_one_with_key_columns_beside_it(database):
    query = "select i, llm_generate(p) as r, llm_filter(p, 'Odd?') as o from t"
    with database.resolution() as resolution:
        connection = database.connection
        build = with_keyed(
            connection, Build(query, f"create table x as ({query})", "x"), resolution
        )
        twice = f"create table x as ({query} union all {query})"
        assert with_keyed(connection, Build(query, twice, "x"), resolution).keyed is None
    assert build.keyed.statement == f"create table x as ({build.keyed.query})"
    assert "dbt_llm_h2" in build.keyed.query
    assert resolution.call_sites == 0
