import re
import threading
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm import sql
from dbt_llm.call import make_call, prompt_hash
from dbt_llm.collector import Collector, Mode
from dbt_llm.errors import CallError, UnresolvedError
from dbt_llm.functions import (
    COLUMNS,
    DETAILS,
    FUNCTIONS,
    NO_GENERATIONS,
    TOKEN_VARIABLE,
    macro_statements,
    register_functions,
    register_macros,
)
from tests.unit.generations import LLMS, call_of, key

OPTIONS = {function.name: function.options for function in FUNCTIONS}


class Database:
    """A DuckDB database with the functions, an empty store and a resolve that is open."""

    def __init__(self, folder, outside=None):
        self.connection = duckdb.connect()
        self.connection.execute("""
            create table t as
            select i, 'p' || i as prompt, i % 2 as g from range(4) as r(i)""")
        self.collector = Collector(LLMS, outside)
        register_functions(self.connection, self.collector)
        register_macros(self.connection)
        self.begin(folder)

    def begin(self, folder):
        self.token, self.resolution = self.collector.open(Mode.GENERATE, folder)
        self.set_token(self.connection, self.token)
        self.connection.execute(
            f"create or replace temp view dbt_llm_generations as {NO_GENERATIONS}"
        )

    def set_token(self, cursor, token):
        cursor.execute(f"set variable {TOKEN_VARIABLE} = {sql.literal(token)}")

    def rows(self, query, parameters=None):
        return self.connection.execute(query, parameters).fetchall()

    def value(self, query, parameters=None):
        ((value,),) = self.rows(query, parameters)
        return value

    def asked(self, query, parameters=None):
        """Run a query; return the prompts that it asked, without repetitions."""
        self.rows(query, parameters)
        return collected(self.resolution)

    def keep(self, answers, **options):
        """Put answers into the store: a dictionary from prompt to output, or to numbers."""
        rows = [
            {
                "prompt_hash": key(prompt, **options),
                "call_hash": call_of(**options).call_hash,
                "output": None if isinstance(answer, list) else answer,
                "embedding": answer if isinstance(answer, list) else None,
            }
            for prompt, answer in answers.items()
        ]
        schema = pa.schema(
            {
                "prompt_hash": pa.string(),
                "call_hash": pa.string(),
                "output": pa.string(),
                "embedding": pa.list_(pa.float32()),
            }
        )
        kept = pa.Table.from_pylist(rows, schema)
        self.connection.register("kept_rows", kept)
        self.connection.execute("create or replace temp table kept as from kept_rows")
        columns = {
            **{name: f"null::{type_}" for name, type_ in COLUMNS.items()},
            **{name: name for name in ("prompt_hash", "call_hash", "output", "embedding")},
            "status": "'ok'",
        }
        select = ", ".join(f"{expression} as {name}" for name, expression in columns.items())
        self.connection.execute(
            f"create or replace temp view dbt_llm_generations as select {select} from temp.kept"
        )


def collected(resolution):
    path = resolution.spool.take()
    return [] if path is None else sorted(set(pq.read_table(path)["prompt"].to_pylist()))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    database = Database(tmp_path_factory.mktemp("spool"))
    yield database
    database.connection.close()


@pytest.fixture
def database(shared, tmp_path):
    shared.begin(tmp_path / "spool")
    yield shared
    shared.begin(tmp_path / "next")


def hash_in_python(prompt, system=None):
    return key(prompt) if system is None else key(prompt, system=system)


# The hash


@given(prompt=st.text(), system=st.none() | st.text())
def test_sql_and_python_hash_a_parameter_alike(shared, prompt, system):
    query = "select llm_prompt_hash(?, system := ?)"
    assert shared.value(query, [prompt, system]) == hash_in_python(prompt, system)


@given(prompts=st.lists(st.text(), min_size=1, max_size=30), system=st.text())
def test_sql_and_python_hash_a_column_alike(shared, prompts, system):
    rows = pa.table({"i": range(len(prompts)), "prompt": pa.array(prompts, pa.string())})
    shared.connection.register("property_rows", rows)
    query = "select llm_prompt_hash(prompt, system := ?) from property_rows order by i"
    assert shared.rows(query, [system]) == [(hash_in_python(p, system),) for p in prompts]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "\0",
        "a\0b",
        "it's",
        '"',
        "\\n",
        "\n",
        "e\u0301",
        "\u00e9",
        "👩‍👩‍👧",
        "\ufeff",
        "\u2028",
        "{}",
    ],
)
def test_sql_and_python_hash_special_texts_alike(shared, prompt):
    query = "select llm_prompt_hash(?, system := ?)"
    assert shared.value(query, [prompt, prompt]) == hash_in_python(prompt, prompt)


@given(
    choices=st.lists(st.text(), min_size=1, unique_by=lambda c: c.strip().casefold()),
    temperature=st.floats(0, 2),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_sql_and_python_hash_options_alike(shared, choices, temperature, seed):
    query = "select llm_prompt_hash('p', choices := ?, temperature := ?, seed := ?)"
    options: dict[str, Any] = {"choices": choices, "temperature": temperature, "seed": seed}
    assert shared.value(query, list(options.values())) == key("p", **options)


@pytest.mark.parametrize(
    "option",
    [
        "model := 'other'",
        "system := 's'",
        "max_tokens := 9",
        "temperature := 0.5",
        "top_p := 0.5",
        "seed := 1",
        "stop := 'a'",
        "choices := ['a', 'b']",
        "json_schema := '{}'",
        "extra := '{\"top_k\": 1}'",
    ],
)
def test_every_option_changes_the_hash(shared, option):
    assert option.split(" ")[0] in OPTIONS["llm_prompt_hash"]
    assert shared.value(f"select llm_prompt_hash('p', {option})") != key("p")


def test_every_option_of_the_functions_is_an_option_of_a_call(shared):
    given_all = {"system": "s", "max_tokens": 1, "temperature": 1, "top_p": 1, "seed": 1}
    given_all |= {"stop": ["a"], "json_schema": {}, "extra": {}, "model": "other"}
    assert set(given_all) | {"choices"} == set(OPTIONS["llm_generate"])
    arguments = ", ".join(f"{name} := ?" for name in given_all if isinstance(name, str))
    values = ["{}" if value == {} else value for value in given_all.values()]
    assert shared.value(f"select llm_prompt_hash('p', {arguments})", values) == (
        key("p", **given_all)
    )


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("temperature := 0", "temperature := 0.0"),
        ("temperature := 0.10", "temperature := 1e-1"),
        ("temperature := 0", "model := 'default'"),
        ("model := 'default'", "system := null"),
        ("max_tokens := 512", "max_tokens := 512::bigint"),
        ("stop := 'a'", "stop := ['a']"),
        ("choices := ['a', 'b']", 'choices := (\'["a", "b"]\')::json::varchar[]'),
        ("json_schema := '{\"a\": 1}'", "json_schema := {'a': 1}"),
        ("json_schema := '{\"a\":1}'", "json_schema := '{ \"a\": 1 }'::json"),
        ("extra := '{\"k\": 1}'", "extra := {'k': 1}"),
        ("system := 'a' || 'b'", "system := 'ab'"),
    ],
)
def test_equal_options_written_differently_have_one_hash(shared, one, two):
    hashes = shared.rows(f"select llm_prompt_hash('p', {one}), llm_prompt_hash('p', {two})")
    assert hashes[0][0] == hashes[0][1]


def test_the_default_model_may_be_named_or_not(shared):
    query = "select llm_prompt_hash('p'), llm_prompt_hash('p', model := 'default')"
    assert shared.rows(query) == [(key("p"), key("p"))]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("5", "5"), ("date '2026-01-31'", "2026-01-31"), ("true", "true"), ("[1, 2]", "[1, 2]")],
)
def test_a_prompt_of_another_type_is_cast_to_text(shared, prompt, text):
    assert shared.value(f"select llm_prompt_hash({prompt})") == key(text)


# NULL and types


@pytest.mark.parametrize("function", ["llm_generate", "llm_details", "llm_prompt_hash"])
@pytest.mark.parametrize("prompt", ["null", "null::varchar", "nullif('a', 'a')"])
def test_a_null_prompt_gives_null_and_is_not_asked(database, function, prompt):
    assert database.rows(f"select {function}({prompt})") == [(None,)]
    assert collected(database.resolution) == []


def test_null_prompts_among_others_are_not_asked(database):
    query = "select llm_generate(nullif(prompt, 'p1')) from t"
    assert database.asked(query) == ["p0", "p2", "p3"]


def test_an_empty_prompt_is_a_prompt(database):
    assert database.asked("select llm_generate('')") == [""]


def test_llm_prompt_hash_asks_nothing(database):
    assert database.asked("select llm_prompt_hash(prompt) from t") == []


@pytest.mark.parametrize(
    ("function", "type_"),
    [
        ("llm_generate", "VARCHAR"),
        ("llm_prompt_hash", "VARCHAR"),
        (
            "llm_details",
            "STRUCT(output VARCHAR, status VARCHAR, error_code VARCHAR, error VARCHAR, "
            "finish_reason VARCHAR, prompt_tokens BIGINT, completion_tokens BIGINT, "
            "cost_usd DOUBLE, prompt_hash VARCHAR, created_at TIMESTAMP WITH TIME ZONE)",
        ),
    ],
)
@pytest.mark.parametrize("prompt", ["'stored'", "'missing'", "null"])
def test_the_type_of_a_function_does_not_depend_on_its_prompt(database, function, type_, prompt):
    database.keep({"stored": "S"})
    found = database.value(f"select typeof({function}({prompt}))")
    assert found.replace('"', "") == type_


# The store


def test_only_prompts_without_a_stored_answer_are_asked(database):
    database.keep({"p1": "one", "p3": "three"})
    assert database.rows("select i, llm_generate(prompt) from t order by i") == [
        (0, None),
        (1, "one"),
        (2, None),
        (3, "three"),
    ]
    assert collected(database.resolution) == ["p0", "p2"]


# DuckDB evaluates a literal while it plans, if it may.
@pytest.mark.parametrize(
    "source", ["", "from t", "where true", "from t where llm_generate('x') = 'X'"]
)
def test_a_literal_prompt_that_is_stored_is_not_asked(database, source):
    database.keep({"lit": "L", "x": "X"})
    assert set(database.rows(f"select llm_generate('lit') {source}")) == {("L",)}
    assert collected(database.resolution) == []


def test_an_answer_to_another_call_is_none(database):
    database.keep({"p0": "zero"}, temperature=1)
    query = "select llm_generate('p0'), llm_generate('p0', temperature := 1)"
    assert database.rows(query) == [(None, "zero")]
    assert collected(database.resolution) == ["p0"]


def test_only_generations_of_the_call_are_read(database, tmp_path):
    database.keep({"p0": "zero"})
    path = sql.literal(str(tmp_path / "kept.parquet"))
    kept = "from temp.main.dbt_llm_generations"
    database.connection.execute(
        f"copy ({kept} union all select * replace ('zz' as call_hash) {kept}) to {path}"
    )
    database.connection.execute(
        f"create or replace temp view dbt_llm_generations as from read_parquet({path})"
    )
    ((_, plan),) = database.rows("explain (format json) select llm_generate(prompt) from t")
    filters = [re.sub("[ ()]", "", text) for text in re.findall('"Filters": "([^"]*)"', plan)]
    assert filters == [f"call_hash='{call_of().call_hash}'"]


def test_a_stored_null_output_is_not_asked_again(database):
    database.keep({"p0": None, "p1": "one"})
    query = "select llm_generate(prompt) from t where i < 2 order by i"
    assert database.rows(query) == [(None,), ("one",)]
    assert collected(database.resolution) == []


def test_llm_details_gives_the_stored_row(database):
    database.keep({"p0": "zero"})
    details = database.value("select llm_details('p0')")
    assert list(details) == list(DETAILS)
    assert {name: value for name, value in details.items() if value is not None} == {
        "output": "zero",
        "status": "ok",
        "prompt_hash": key("p0"),
    }


def test_the_functions_share_one_stored_answer(database):
    database.keep({"p0": "zero"})
    query = """select llm_generate(prompt), llm_details(prompt).output, llm_prompt_hash(prompt)
        from t where i = 0"""
    assert database.rows(query) == [("zero", "zero", key("p0"))]


# Where a call may stand


def test_a_call_within_a_call_asks_the_outer_one_once_the_inner_is_there(database):
    nested = "select llm_generate('say ' || llm_generate(prompt)) from t where i < 2 order by i"
    assert database.asked(nested) == ["p0", "p1"]
    database.keep({"p0": "a"})
    assert database.asked(nested) == ["p1", "say a"]
    database.keep({"p0": "a", "p1": "b", "say a": "A", "say b": "B"})
    assert database.rows(nested) == [("A",), ("B",)]


@pytest.mark.parametrize(
    ("query", "prompts"),
    [
        ("select i from t where llm_generate(prompt) = 'yes'", ["p0", "p1", "p2", "p3"]),
        ("select i from t where i >= 2 and llm_generate(prompt) = 'yes'", ["p2", "p3"]),
        ("select i from t where llm_generate(prompt) = 'yes' and i >= 2", ["p2", "p3"]),
        (
            "select g, llm_generate(string_agg(prompt, '+' order by i)) from t group by g",
            ["p0+p2", "p1+p3"],
        ),
        ("select g from t group by g having llm_generate('g' || g) = 'yes'", ["g0", "g1"]),
        ("select llm_generate('g' || g), count(*) from t group by g", ["g0", "g1"]),
        ("select llm_generate('g' || g), count(*) from t group by all", ["g0", "g1"]),
        ("select llm_generate(prompt) as a, count(*) from t group by 1", ["p0", "p1", "p2", "p3"]),
        ("select g from t group by g order by llm_generate('g' || g)", ["g0", "g1"]),
        ("select count(*) filter (where llm_generate('g' || g) = 'yes') from t", ["g0", "g1"]),
        ("select string_agg(llm_generate('g' || g)) from t", ["g0", "g1"]),
        ("select distinct on (llm_generate('g' || g)) i from t", ["g0", "g1"]),
        (
            "select llm_generate(prompt) from t where i = 0 "
            "union all select llm_generate('q' || i) from t where i = 2",
            ["p0", "q2"],
        ),
        (
            "select rank() over (partition by llm_generate(prompt) order by i) from t where i < 2",
            ["p0", "p1"],
        ),
        (
            "select llm_generate(x) from (select lag(prompt) over (order by i) as x from t)",
            ["p0", "p1", "p2"],
        ),
        (
            "select i from t qualify row_number() over (partition by llm_generate(prompt)) = 1",
            ["p0", "p1", "p2", "p3"],
        ),
        ("with c as (select llm_generate(prompt) as x from t where i = 3) from c", ["p3"]),
        ("with c as (from t where i > 1) select llm_generate(prompt) from c", ["p2", "p3"]),
        ("with c as (select *, llm_generate(prompt) as x from t) select i from c", []),
        ("select i from t order by llm_generate(prompt)", ["p0", "p1", "p2", "p3"]),
        (
            "select a.i from t as a join t as b on a.i = b.i + 2 and llm_generate(a.prompt) = 'x'",
            ["p2", "p3"],
        ),
        (
            "select llm_generate(a.prompt || b.prompt) from t a join t b on a.i = b.i + 2",
            ["p2p0", "p3p1"],
        ),
        (
            "select a.i from t a join t b on llm_generate(a.prompt) = llm_generate('b' || b.i)",
            ["b0", "b1", "b2", "b3", "p0", "p1", "p2", "p3"],
        ),
        (
            "select (select llm_generate(s.prompt) from t s where s.i = t.i) from t",
            ["p0", "p1", "p2", "p3"],
        ),
        ("select exists (from t where llm_generate(prompt) = 'yes' and i = 1)", ["p1"]),
        (
            "select [llm_generate(prompt)], {'a': llm_generate('s' || i)} from t where i = 1",
            ["p1", "s1"],
        ),
        ("select llm_generate(prompt) from (select unnest(['u', 'v']) as prompt)", ["u", "v"]),
    ],
)
def test_a_query_asks_exactly_the_prompts_that_it_needs(database, query, prompts):
    assert database.asked(query) == prompts


@pytest.mark.parametrize(
    ("expression", "prompts"),
    [
        ("case when i = 2 then llm_generate(prompt) end", ["p2"]),
        (
            "case when i = 2 then llm_generate(prompt) else llm_generate('e' || i) end",
            ["e0", "e1", "e3", "p2"],
        ),
        ("case when i = 9 then llm_generate('never') end", []),
        ("case i when 1 then llm_details(prompt).output end", ["p1"]),
        ("coalesce(nullif(prompt, 'p3'), llm_generate(prompt))", ["p3"]),
        ("if(i = 0, llm_generate(prompt), '')", ["p0"]),
    ],
)
def test_a_condition_around_a_call_keeps_it_from_the_other_rows(database, expression, prompts):
    assert database.asked(f"select {expression} from t") == prompts


def test_a_recursive_query_may_call(database):
    database.keep({"p1": "p2", "p2": "p3"})
    query = """
        with recursive r as (
            select 'p1' as x, 1 as n union all select llm_generate(x), n + 1 from r where n < 3
        )
        select x from r order by n"""
    assert database.rows(query) == [("p1",), ("p2",), ("p3",)]
    assert collected(database.resolution) == []


def test_many_rows_are_asked_from_all_threads(database):
    database.connection.execute("set threads = 4")
    query = "select llm_generate('n' || i % 1000) from range(300000) as r(i)"
    assert database.asked(query) == sorted(f"n{i}" for i in range(1000))


# Names


@pytest.mark.parametrize(
    "name",
    [
        *sorted({option for options in OPTIONS.values() for option in options}),
        *("prompt", "output", "prompt_hash", "status", "hit", "call_hash", "temp", "main"),
        *("dbt_llm_prompt", "dbt_llm_call_hash", "dbt_llm_hash", "dbt_llm_hit", "dbt_llm_g"),
        *("dbt_llm_s", "dbt_llm_generations", "dbt_llm_token"),
    ],
)
def test_a_users_name_does_not_take_the_place_of_an_internal_one(database, name):
    database.keep({"p1": "one"})
    for query in (
        f"select llm_generate({name}) from (select 'p1' as {name})",
        f"select llm_generate({name}.{name}) from (select 'p1' as {name}) as {name}",
        f"select llm_generate(x.p) from (select 'p1' as p, 'z' as {name}) as x",
        f"with {name} as (select 'p1' as p, 'z' as output, 'z' as {name}) "
        f"select llm_generate(p) from {name}",
    ):
        assert (query, database.rows(query)) == (query, [("one",)])
    assert collected(database.resolution) == []


def test_a_users_table_named_like_the_view_is_another_table(database):
    database.keep({"p1": "one"})
    database.connection.execute(f"""
        create table main.dbt_llm_generations as
        select 'p1' as prompt, 'evil' as output, {sql.literal(key("p1"))} as prompt_hash""")
    query = "select llm_generate(prompt), output from memory.main.dbt_llm_generations"
    assert database.rows(query) == [("one", "evil")]
    database.connection.execute("drop table memory.main.dbt_llm_generations")


# Options


@pytest.mark.parametrize(
    ("function", "option"),
    [
        (name, option)
        for name in ("llm_generate", "llm_details", "llm_prompt_hash")
        for option in OPTIONS[name]
    ],
)
def test_an_option_that_is_a_column_is_refused(database, function, option):
    query = f"select {function}(prompt, {option} := o.o) from t, (select 'default' as o) as o"
    with pytest.raises(duckdb.Error, match="constant"):
        database.rows(query)
    assert collected(database.resolution) == []


def test_a_volatile_option_is_refused(database):
    with pytest.raises(duckdb.Error, match="constant"):
        database.rows("select llm_generate(prompt, temperature := random()) from t")


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("model := 'gpt'", "names the model 'gpt', which is not among the llms of the profile"),
        ("temperature := -1", "temperature: Input should be greater than or equal to 0 (got -1.0)"),
        ("temperature := 'hot'", "temperature: Input should be a valid number (got 'hot')"),
        ("max_tokens := 0", "max_tokens: Input should be greater than 0 (got 0)"),
        ("choices := []", "choices: is an empty list"),
        ("choices := ['a', null]", "choices.1: Input should be a valid string (got None)"),
        ("json_schema := '{'", "json_schema: is no valid JSON (got '{')"),
        ("system := 5", "system: Input should be a valid string (got 5)"),
    ],
)
@pytest.mark.parametrize("source", ["", "from t", "from t where i = 9"])
def test_a_wrong_option_is_known_once_the_query_is_planned(database, option, problem, source):
    database.rows(f"explain select llm_generate('p', {option}) {source}")
    assert isinstance(database.resolution.error, CallError)
    assert problem in str(database.resolution.error)


def test_a_wrong_option_fails_the_query(database):
    with pytest.raises(duckdb.Error, match="names the model 'gpt', which is not among the llms"):
        database.rows("select llm_generate(prompt, model := 'gpt') from t")
    assert collected(database.resolution) == []


def test_an_option_that_does_not_exist_is_refused(database):
    with pytest.raises(duckdb.BinderException, match="llm_generate"):
        database.rows("select llm_generate('p', tempature := 1)")


def test_planning_tells_which_calls_a_query_makes(database):
    database.rows("explain select llm_generate(prompt), llm_generate('x', seed := 1) from t")
    assert {
        call.content["sampling"].get("seed") for call in database.resolution.calls.values()
    } == {
        None,
        1,
    }
    assert database.resolution.call_sites == 2
    assert collected(database.resolution) == []


# Tokens


def test_two_resolves_at_once_stay_apart(database, tmp_path):
    resolutions, cursors = [], []
    for number in (1, 2):
        token, resolution = database.collector.open(Mode.GENERATE, tmp_path / str(number))
        cursor = database.connection.cursor()
        register_macros(cursor)
        database.set_token(cursor, token)
        resolutions.append(resolution)
        cursors.append(cursor)
    barrier = threading.Barrier(2)

    def run(number, cursor):
        barrier.wait()
        query = f"select llm_generate('n{number}-' || i) from range(20000) as r(i)"
        cursor.execute(f"create temp table result as {query}")

    threads = [threading.Thread(target=run, args=item) for item in enumerate(cursors)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, resolution in enumerate(resolutions):
        assert collected(resolution) == sorted(f"n{number}-{i}" for i in range(20000))
    assert collected(database.resolution) == []


def test_a_function_whose_resolve_is_closed_raises(database):
    database.collector.close(database.token)
    with pytest.raises(duckdb.Error, match="after the model it belongs to was finished"):
        database.rows("select llm_generate(prompt) from t")


def test_outside_a_resolve_missing_prompts_are_counted_and_null(tmp_path):
    missing = []
    database = Database(tmp_path, outside=missing.append)
    database.set_token(database.connection, "")
    database.keep({"p1": "one"})
    assert database.rows("select llm_generate(prompt) from t order by i") == [
        (None,),
        ("one",),
        (None,),
        (None,),
    ]
    assert sum(missing) == 3
    assert collected(database.resolution) == []


def test_outside_a_resolve_a_missing_prompt_may_be_an_error(tmp_path):
    def refuse(rows):
        raise UnresolvedError(f"{rows} prompt(s) are missing")

    database = Database(tmp_path, outside=refuse)
    database.set_token(database.connection, "")
    with pytest.raises(duckdb.Error, match=r"1 prompt\(s\) are missing"):
        database.rows("select llm_generate('p')")


@pytest.mark.parametrize("mode", [Mode.CACHED, Mode.NULL])
def test_other_modes_note_the_missing_keys_and_spool_nothing(database, mode):
    database.resolution.mode = mode
    assert database.asked("select llm_generate(prompt) from t where i < 2") == []
    assert database.resolution.missing == {key("p0"), key("p1")}


# Registering


def test_registering_again_replaces_the_collector(tmp_path):
    database = Database(tmp_path / "first")
    collector = Collector(LLMS)
    token, resolution = collector.open(Mode.GENERATE, tmp_path / "second")
    register_functions(database.connection, collector)
    register_macros(database.connection)
    database.set_token(database.connection, token)
    assert database.asked("select llm_generate('p')") == []
    assert collected(resolution) == ["p"]


def test_every_public_function_has_one_macro():
    names = [statement.split("temp macro ")[1].split("(")[0] for statement in macro_statements()]
    assert [name for name in names if not name.startswith("dbt_llm_")] == [
        "llm_generate",
        "llm_details",
        "llm_prompt_hash",
        "llm_classify",
        "llm_filter",
        "llm_extract",
        "llm_embed",
    ]


def test_the_macro_knows_the_options_of_make_call(shared):
    call = make_call('{"model": "default", "seed": 3}', LLMS)
    assert shared.value("select llm_prompt_hash('p', seed := 3)") == (
        prompt_hash(call.call_hash, "p")
    )
    assert call == call_of(seed=3)


# The typed functions

FIELDS = """{"name": "VARCHAR", "ages": "INTEGER[]", "born": ["DATE"],
    "home": {"city": "VARCHAR(40)", "zip": "BIGINT"}, "pets": [{"kind": "VARCHAR", "kg": "DOUBLE"}],
    "paid": "DECIMAL(9,2)", "at": "TIMESTAMP", "ok": "BOOLEAN"}"""
CLASSIFY = {"function": "classify", "labels": ["good", "bad"]}
FILTER = {"function": "filter", "question": "Late?"}
EXTRACT = {"function": "extract", "fields": FIELDS}
TYPED = {
    "llm_classify(TEXT, ['good', 'bad'])": "VARCHAR",
    "llm_filter(TEXT, 'Late?')": "BOOLEAN",
    f"llm_extract(TEXT, '{FIELDS}')": (
        "STRUCT(name VARCHAR, ages INTEGER[], born DATE[], home STRUCT(city VARCHAR, zip BIGINT), "
        "pets STRUCT(kind VARCHAR, kg DOUBLE)[], paid DECIMAL(9,2), at TIMESTAMP, ok BOOLEAN)"
    ),
    "llm_embed(TEXT)": "FLOAT[]",
}


@pytest.mark.parametrize(("call", "type_"), TYPED.items())
@pytest.mark.parametrize("text", ["'missing'", "null", "null::varchar", "prompt"])
def test_the_type_of_a_typed_function_does_not_depend_on_its_text(database, call, type_, text):
    found = database.rows(f"select distinct typeof({call.replace('TEXT', text)}) from t")
    assert [name.replace('"', "") for (name,) in found] == [type_]


@pytest.mark.parametrize("call", TYPED)
@pytest.mark.parametrize("text", ["null", "null::varchar", "nullif(prompt, prompt)"])
def test_a_null_text_gives_null_and_is_not_asked(database, call, text):
    assert database.rows(f"select distinct {call.replace('TEXT', text)} from t") == [(None,)]
    assert collected(database.resolution) == []


@pytest.mark.parametrize("call", TYPED)
def test_a_typed_function_asks_its_text_and_gives_null_until_it_is_there(database, call):
    query = f"select i, {call.replace('TEXT', 'nullif(prompt, $$p1$$)')} from t order by i"
    assert database.rows(query) == [(i, None) for i in range(4)]
    assert collected(database.resolution) == ["p0", "p2", "p3"]
    (made,) = database.resolution.calls.values()
    kind = made.content["output"]["type"]
    assert kind == {"VARCHAR": "choice", "BOOLEAN": "choice", "FLOAT[]": "embedding"}.get(
        TYPED[call], "json"
    )


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("llm_classify(prompt, ['good', 'bad'])", CLASSIFY),
        ("llm_classify(prompt, labels := ['good', 'bad'])", CLASSIFY),
        (
            "llm_classify(prompt, ['good', 'bad'], instruction := 'Which?', seed := 1)",
            {**CLASSIFY, "instruction": "Which?", "seed": 1},
        ),
        (
            "llm_classify(prompt, ['good', 'bad'], system := 's', stop := 'x')",
            {**CLASSIFY, "system": "s", "stop": "x"},
        ),
        ("llm_filter(prompt, 'Late?')", FILTER),
        (
            "llm_filter(prompt, question := 'Late?', model := 'other', max_tokens := 3)",
            {**FILTER, "model": "other", "max_tokens": 3},
        ),
        (f"llm_extract(prompt, '{FIELDS}')", EXTRACT),
        (
            f"llm_extract(prompt, '{FIELDS}', instruction := 'Read.', temperature := 1)",
            {**EXTRACT, "instruction": "Read.", "temperature": 1},
        ),
        ("llm_embed(prompt)", {"function": "embed"}),
        ("llm_embed(prompt, model := 'other')", {"function": "embed", "model": "other"}),
    ],
)
def test_the_macro_and_python_agree_on_the_call_and_the_key(database, written, options):
    database.rows(f"select {written} from t where i = 0")
    path = database.resolution.spool.take()
    assert pq.read_table(path)["prompt_hash"].to_pylist() == [key("p0", **options)]
    assert list(database.resolution.calls.values()) == [call_of(**options)]


def test_the_same_text_in_two_functions_is_two_requests(database):
    calls = ", ".join(call.replace("TEXT", "'same'") for call in TYPED)
    database.rows(f"select {calls}, llm_generate('same')")
    path = database.resolution.spool.take()
    assert len(set(pq.read_table(path)["prompt_hash"].to_pylist())) == len(TYPED) + 1


# Stored answers of the typed functions


def test_a_stored_label_is_given(database):
    database.keep({"p0": "good", "p1": "bad", "p2": None}, **CLASSIFY)
    query = "select llm_classify(prompt, ['good', 'bad']) from t where i < 3 order by i"
    assert database.rows(query) == [("good",), ("bad",), (None,)]
    assert collected(database.resolution) == []


def test_a_stored_yes_or_no_is_true_or_false(database):
    database.keep({"p0": "yes", "p1": "no", "p2": None}, **FILTER)
    query = "select llm_filter(prompt, 'Late?') from t where i < 3 order by i"
    assert database.rows(query) == [(True,), (False,), (None,)]
    assert collected(database.resolution) == []


def test_a_stored_object_is_a_struct_of_its_types(database):
    full = """{"name": "Ann", "ages": [3, null], "born": ["2026-01-31"],
        "home": {"city": "Ulm", "zip": 89073}, "pets": [{"kind": "cat", "kg": 4.5}, {"kind": null}],
        "paid": 12.345, "at": "2026-01-31 12:30:00", "ok": true}"""
    empty = """{"name": null, "ages": null, "born": [], "home": {"city": null, "zip": null},
        "pets": null, "paid": null, "at": null, "ok": null}"""
    database.keep({"p0": full, "p1": empty, "p2": None}, **EXTRACT)
    query = f"select llm_extract(prompt, '{FIELDS}') from t where i < 3 order by i"
    nothing = dict.fromkeys(["name", "ages", "pets", "paid", "at", "ok"])
    assert database.rows(query) == [
        (
            {
                "name": "Ann",
                "ages": [3, None],
                "born": [date(2026, 1, 31)],
                "home": {"city": "Ulm", "zip": 89073},
                "pets": [{"kind": "cat", "kg": 4.5}, {"kind": None, "kg": None}],
                "paid": Decimal("12.35"),
                "at": datetime(2026, 1, 31, 12, 30),
                "ok": True,
            },
        ),
        ({**nothing, "born": [], "home": {"city": None, "zip": None}},),
        (None,),
    ]
    fields = f"select (llm_extract(prompt, '{FIELDS}')).home.city from t where i = 0"
    assert database.rows(fields) == [("Ulm",)]
    assert collected(database.resolution) == []


def test_a_stored_embedding_is_a_list_of_numbers(database):
    database.keep({"p0": [0.5, -1.0], "p1": [0.5, -1.0], "p2": None}, function="embed")
    query = "select llm_embed(prompt) from t where i < 3 order by i"
    assert database.rows(query) == [([0.5, -1.0],), ([0.5, -1.0],), (None,)]
    similar = "select list_cosine_similarity(llm_embed('p0'), llm_embed('p1'))"
    assert database.value(similar) == pytest.approx(1.0)
    assert collected(database.resolution) == []


@pytest.mark.parametrize("call", TYPED)
def test_a_stored_literal_text_is_not_asked(database, call):
    options = [CLASSIFY, FILTER, EXTRACT, {"function": "embed"}][list(TYPED).index(call)]
    answer = ["good", "yes", '{"name": "Ann"}', [1.0]][list(TYPED).index(call)]
    database.keep({"lit": answer}, **options)
    for source in ("", "from t", "where true"):
        database.rows(f"select {call.replace('TEXT', '$$lit$$')} {source}")
    assert collected(database.resolution) == []


@pytest.mark.parametrize(
    ("where", "prompts"),
    [
        ("i >= 2 and llm_filter(prompt, 'Late?')", ["p2", "p3"]),
        ("llm_filter(prompt, 'Late?') and i >= 2", ["p2", "p3"]),
        ("not llm_filter(prompt, 'Late?') and g = 1", ["p1", "p3"]),
        ("llm_filter(prompt, 'Late?') and prompt like '%0'", ["p0"]),
        ("llm_classify(prompt, ['a', 'b']) = 'a' and i = 3", ["p3"]),
        ('(llm_extract(prompt, \'{"x": "INTEGER"}\')).x > 1 and i = 3', ["p3"]),
        ("i = 9 and llm_filter(prompt, 'Late?')", []),
    ],
)
def test_a_cheap_predicate_beside_a_call_goes_first(database, where, prompts):
    assert database.asked(f"select i from t where {where}") == prompts


def test_a_filter_keeps_the_rows_that_are_answered_yes(database):
    database.keep({"p0": "yes", "p1": "no", "p2": "yes", "p3": None}, **FILTER)
    assert database.rows("select i from t where llm_filter(prompt, 'Late?') order by i") == [
        (0,),
        (2,),
    ]
    assert database.rows("select i from t where not llm_filter(prompt, 'Late?')") == [(1,)]


# Constants of the typed functions


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("llm_classify('x', [])", "labels: is an empty list; give at least one label (got [])"),
        ("llm_classify('x', null)", "labels: Field required"),
        ("llm_classify('x', 'good')", "labels: Input should be a valid list (got 'good')"),
        ("llm_classify('x', ['a', null])", "labels.1: Input should be a valid string (got None)"),
        ("llm_classify('x', ['a', 'A'])", "twice, but for case and spaces (got ['a', 'A'])"),
        ("llm_classify('x', ['a'], instruction := 5)", "instruction: Input should be a valid str"),
        ("llm_classify('x', ['a'], model := 'gpt')", "names the model 'gpt', which is not among"),
        ("llm_filter('x', null)", "question: Field required"),
        ("llm_filter('x', 5)", "question: Input should be a valid string (got 5)"),
        ("llm_filter('x', '?', max_tokens := 0)", "max_tokens: Input should be greater than 0"),
        ("llm_extract('x', null)", "fields: Field required"),
        ("llm_extract('x', '{\"a\": \"BLOB\"}')", "fields: the type 'BLOB' of 'a' is unknown"),
        (
            "llm_extract('x', '{\"a\": [\"INT[4]\"]}')",
            "fields: the type 'INT[4]' of 'a' is unknown",
        ),
        ("llm_embed('x', model := 'gpt')", "names the model 'gpt', which is not among the llms"),
    ],
)
@pytest.mark.parametrize("source", ["", "from t", "from t where i = 9"])
def test_a_wrong_constant_is_known_once_the_query_is_planned(database, call, problem, source):
    database.rows(f"explain select {call} {source}")
    assert isinstance(database.resolution.error, CallError)
    assert problem in str(database.resolution.error)
    assert collected(database.resolution) == []


# DuckDB's own binder comes first here, since the fields are the type of the result.
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("", "Malformed JSON"),
        ("{", "Malformed JSON"),
        ("{}", "Empty object in JSON structure"),
        ("[1]", "invalid JSON structure"),
        ('{"a": "FOO"}', "FOO"),
        ('{"a": {}}', "Empty object in JSON structure"),
        ('{"a": "INTEGER(5)"}', "INTEGER"),
    ],
)
def test_fields_that_are_none_are_refused(database, fields, problem):
    with pytest.raises(duckdb.Error, match=problem):
        database.rows(f"explain select llm_extract(prompt, '{fields}') from t")
    assert collected(database.resolution) == []


@pytest.mark.parametrize(
    "call",
    [
        "llm_classify(prompt, [o.o])",
        "llm_classify(prompt, ['a'], instruction := o.o)",
        "llm_filter(prompt, o.o)",
        "llm_filter(prompt, '?', model := o.o)",
        "llm_extract(prompt, o.o)",
        'llm_extract(prompt, \'{"a": "VARCHAR"}\', instruction := o.o)',
        "llm_embed(prompt, model := o.o)",
    ],
)
def test_a_column_in_the_place_of_a_constant_is_refused(database, call):
    with pytest.raises(duckdb.Error, match="constant"):
        database.rows(f"select {call} from t, (select 'default' as o) as o")
    assert collected(database.resolution) == []


@pytest.mark.parametrize(
    "call",
    ["llm_classify('x')", "llm_filter('x')", "llm_extract('x')", "llm_embed('x', seed := 1)"],
)
def test_a_missing_or_unknown_argument_is_refused(database, call):
    with pytest.raises(duckdb.BinderException, match=call.partition("(")[0]):
        database.rows(f"select {call}")


@pytest.mark.parametrize(
    "name",
    [
        *("text", "labels", "instruction", "question", "fields", "model", "output", "embedding"),
        *("dbt_llm_s", "dbt_llm_prompt", "hit"),
    ],
)
def test_a_users_name_means_the_users_column_in_a_typed_function_too(database, name):
    database.keep({"p1": "good"}, **CLASSIFY)
    call = "llm_classify({}, ['good', 'bad'])"
    for query in (
        f"select {call.format(name)} from (select 'p1' as {name})",
        f"with {name} as (select 'p1' as p, 'z' as {name}) select {call.format('p')} from {name}",
    ):
        assert (query, database.rows(query)) == (query, [("good",)])
    database.keep({"p1": '{"a": "A"}'}, function="extract", fields='{"a": "VARCHAR"}')
    query = "select llm_extract({0}, '{{\"a\": \"VARCHAR\"}}') from (select 'p1' as {0})"
    assert database.rows(query.format(name)) == [({"a": "A"},)]
    assert collected(database.resolution) == []
