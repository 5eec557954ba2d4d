import json

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dbt_llm import sql
from dbt_llm.engine_replay import made_up_answer
from dbt_llm.fields import describe_fields, fields_schema, find_misfit, with_ranges

DATE = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$", "$comment": "DATE"}
TYPES = {
    **dict.fromkeys(["VARCHAR", "TEXT", "STRING", "CHAR"], "string"),
    **dict.fromkeys(["TINYINT", "SMALLINT", "INTEGER", "INT", "BIGINT", "HUGEINT"], "integer"),
    **dict.fromkeys(["UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT"], "integer"),
    **dict.fromkeys(["FLOAT", "REAL", "DOUBLE", "DECIMAL", "NUMERIC"], "number"),
    **dict.fromkeys(["DECIMAL(9,2)", "decimal( 9 , 2 )", "NUMERIC(9)"], "number"),
    **dict.fromkeys(["BOOLEAN", "BOOL"], "boolean"),
    **dict.fromkeys(["DATE", "TIME", "TIMESTAMP"], "string"),
}

LEAVES = st.sampled_from([*TYPES, "VARCHAR(40)", "varchar ( 3 )", "VARCHAR[]", "DATE[][]"])
# DuckDB takes no empty name, no name twice but for case, and Python no half of a character.
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


def objects(children):
    return st.dictionaries(NAMES, children, min_size=1, max_size=4).filter(
        lambda fields: len({name.lower() for name in fields}) == len(fields)
    )


FIELDS = objects(
    st.recursive(
        LEAVES,
        lambda children: children.map(lambda child: [child]) | objects(children),
        max_leaves=6,
    )
)


@pytest.fixture(scope="module")
def connection():
    with duckdb.connect() as connection:
        yield connection


def schema_of(type_):
    """Return the schema of one field, which may always be null as well."""
    schema, null = fields_schema({"f": type_})["properties"]["f"]["anyOf"]
    assert null == {"type": "null"}
    return schema


@pytest.mark.parametrize(("type_", "expected"), TYPES.items())
def test_every_type_has_the_json_type_of_its_kind(type_, expected):
    for written in (type_, type_.lower(), f"  {type_} "):
        assert schema_of(written)["type"] == expected


@pytest.mark.parametrize(
    ("type_", "good", "bad"),
    [
        ("DATE", "2026-12-31", "31.12.2026"),
        ("TIME", "23:59:59", "11 pm"),
        ("TIMESTAMP", "2026-12-31 23:59:59", "2026-12-31"),
    ],
)
def test_dates_and_times_are_text_of_one_form(type_, good, bad):
    validator = Draft202012Validator(schema_of(type_))
    assert validator.is_valid(good)
    assert not validator.is_valid(bad)


def test_an_object_of_fields_needs_all_and_allows_no_other():
    assert fields_schema({"name": "VARCHAR", "born": "DATE"}) == {
        "type": "object",
        "properties": {
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "born": {"anyOf": [DATE, {"type": "null"}]},
        },
        "required": ["name", "born"],
        "additionalProperties": False,
    }


def test_fields_may_be_nested():
    assert schema_of({"city": "VARCHAR"}) == fields_schema({"city": "VARCHAR"})
    assert schema_of([{"city": "VARCHAR"}]) == {
        "type": "array",
        "items": fields_schema({"city": "VARCHAR"}),
    }


def test_fields_are_described_in_words():
    fields = {
        "größe": "VARCHAR(40)",
        'a "b"': ["DATE"],
        "home": {"city": "TEXT", "since": "TIMESTAMP"},
        "at": "TIME",
        "n": "UTINYINT[]",
        "price": "DECIMAL(9,2)",
        "paid": "BOOL",
    }
    assert describe_fields(fields_schema(fields)) == (
        '"größe" (text of at most 40 characters), "a \\"b\\"" (list of date as YYYY-MM-DD), '
        '"home" (object of "city" (text), "since" (date and time as YYYY-MM-DD HH:MM:SS)), '
        '"at" (time as HH:MM:SS), "n" (list of whole number), "price" (number), '
        '"paid" (true or false)'
    )


@given(fields=FIELDS)
def test_all_fields_can_be_described(fields):
    described = describe_fields(fields_schema(fields))
    assert all(f"{json.dumps(name, ensure_ascii=False)} (" in described for name in fields)


@pytest.mark.parametrize("type_", ["DATE[]", ["DATE"], "date[]", " DATE [] "])
def test_a_list_is_written_in_two_ways(type_):
    assert schema_of(type_) == {"type": "array", "items": DATE}


@pytest.mark.parametrize("type_", ["INTEGER[][]", ["INTEGER[]"], [["INTEGER"]]])
def test_lists_may_be_nested(type_):
    items = schema_of("INTEGER")
    assert schema_of(type_) == {"type": "array", "items": {"type": "array", "items": items}}


@pytest.mark.parametrize("type_", ["VARCHAR(40)", "varchar( 40 )", "TEXT(40)", "CHAR(40)"])
def test_a_length_is_the_longest_text(type_):
    assert schema_of(type_) == {"type": "string", "maxLength": 40}


def test_a_length_within_a_list_counts_for_each_element():
    assert schema_of("VARCHAR(40)[]") == {
        "type": "array",
        "items": {"type": "string", "maxLength": 40},
    }


@pytest.mark.parametrize(
    "type_",
    ["BLOB", "INTERVAL", "TIMESTAMPTZ", "VARCHAR[3]", "VARCHAR(x)", "MAP(INT, INT)", "", "INT INT"],
)
@pytest.mark.parametrize("within", [lambda t: t, lambda t: [t], lambda t: {"f": t}])
def test_an_unknown_type_is_named_with_its_field_and_what_is_known(type_, within):
    with pytest.raises(ValueError) as raised:
        fields_schema({"ok": "VARCHAR", "f": within(type_)})
    assert str(raised.value) == (
        f"the type {type_!r} of 'f' is unknown; use BIGINT, BOOLEAN, CHAR, DATE, DECIMAL, DOUBLE, "
        "FLOAT, HUGEINT, INT, INTEGER, NUMERIC, REAL, SMALLINT, STRING, TEXT, TIME, TIMESTAMP, "
        "TINYINT, UBIGINT, UHUGEINT, UINTEGER, USMALLINT, UTINYINT, VARCHAR, a list such as "
        "VARCHAR[], or an object of fields"
    )


@pytest.mark.parametrize(
    "fields", [{}, [], ["VARCHAR"], "VARCHAR", None, 5, {"a": {}}, {"a": [{}]}]
)
def test_no_fields_or_no_object_is_refused(fields):
    with pytest.raises(ValueError) as raised:
        fields_schema(fields)
    assert str(raised.value) == (
        'is no JSON object of fields and types, such as {"name": "VARCHAR"}'
    )


@pytest.mark.parametrize("type_", [[], ["VARCHAR", "DATE"]])
def test_a_list_of_no_or_several_types_is_refused(type_):
    with pytest.raises(ValueError, match="the list type of 'f' must hold one type"):
        fields_schema({"f": type_})


@pytest.mark.parametrize("type_", [5, None, True, 1.5])
def test_a_type_that_is_no_text_is_refused(type_):
    with pytest.raises(
        ValueError, match="the type of 'f' must be a type name, a list or an object"
    ):
        fields_schema({"f": type_})


@given(fields=FIELDS, prompt=st.text())
def test_a_made_up_value_fits_the_schema_and_duckdb_takes_it(connection, fields, prompt):
    schema = fields_schema(fields)
    Draft202012Validator.check_schema(schema)
    text = made_up_answer(prompt, {"type": "json", "schema": schema})
    assert list(Draft202012Validator(schema).iter_errors(json.loads(text))) == []
    query = f"select from_json(?::varchar, {sql.literal(json.dumps(fields))})"
    ((value,),) = connection.execute(query, [text]).fetchall()
    assert value is not None
    assert list(value) == list(fields)


@given(fields=FIELDS)
def test_an_answer_of_nulls_fits_the_schema_and_duckdb_takes_it(connection, fields):
    value = dict.fromkeys(fields)
    assert Draft202012Validator(fields_schema(fields)).is_valid(value)
    query = f"select from_json(?::varchar, {sql.literal(json.dumps(fields))})"
    assert connection.execute(query, [json.dumps(value)]).fetchall() == [(value,)]


@pytest.mark.parametrize("type_", sorted(set(TYPES) - {"TINYINT"}))
@given(prompt=st.text())
def test_a_made_up_value_of_a_type_is_a_value_of_it_in_duckdb(connection, type_, prompt):
    schema = fields_schema({"f": type_})
    text = made_up_answer(prompt, {"type": "json", "schema": schema})
    query = f"select from_json(?::varchar, {sql.literal(json.dumps({'f': type_}))}).f is null"
    assert connection.execute(query, [text]).fetchall() == [(False,)]


def test_a_made_up_value_of_the_smallest_type_is_a_value_of_it(connection):
    schema = fields_schema({"f": "TINYINT"})
    texts = [made_up_answer(str(i), {"type": "json", "schema": schema}) for i in range(20)]
    query = """select count(from_json(x, '{"f": "TINYINT"}').f) from unnest(?::varchar[]) t(x)"""
    assert connection.execute(query, [texts]).fetchall() == [(20,)]


@pytest.mark.parametrize(
    ("type_", "holds", "too_much"),
    [
        ("TINYINT", [-128, 127, None], [128, -129]),
        ("UTINYINT", [0, 255], [-1, 256]),
        ("INTEGER", [2**31 - 1], [3_000_000_000]),
        ("BIGINT", [2**63 - 1], [2**63]),
        ("DECIMAL(5,2)", [999.99, -999, 999.994], [1000, 12345.6, 999.995, -999.999, 1e400]),
        ("DECIMAL(5,5)", [0.99999, -0.5, 1e-400], [1, 0.999996]),
        ("DECIMAL(38)", [10**38 - 1, -(10**20)], [10**38, 1e38]),
        ("DECIMAL", [123456789012345.5, 0.0001], [10**15, 1e15]),
        ("NUMERIC(4)", [9999, 9999.4], [9999.5, 10**4]),
        ("FLOAT", [3.4028235e38, 3.40282356e38, -1e-50, 7], [1e39, -3.4028236e38]),
        ("REAL", [0.1], [1e39]),
        ("DATE", ["2024-02-29"], ["2026-13-45", "2025-02-29"]),
        ("TIME", ["23:59:59"], ["24:00:01"]),
        ("TIMESTAMP", ["2026-12-31 23:59:59"], ["2026-12-31 25:00:00"]),
    ],
)
def test_what_a_type_cannot_hold_is_found(connection, type_, holds, too_much):
    fields = {"a": {"b": [type_]}}
    schema = fields_schema(fields)
    query = f"select from_json(?, '{json.dumps(fields)}').a.b[1]"
    for value in holds:
        assert find_misfit({"a": {"b": [value]}}, schema) is None
        (found,) = connection.execute(query, [json.dumps({"a": {"b": [value]}})]).fetchone()
        assert (found is None) is (value is None)
    for value in too_much:
        assert find_misfit({"a": {"b": [None, value]}}, schema) == value
        (found,) = connection.execute(query, [json.dumps({"a": {"b": [value]}})]).fetchone()
        assert found is None


@pytest.mark.parametrize("type_", ["FLOAT", "REAL", "DOUBLE"])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400])
def test_a_number_beyond_all_numbers_is_found_where_duckdb_makes_it_infinite(type_, number):
    value = json.loads(f'{{"f": {number}}}')
    assert find_misfit(value, fields_schema({"f": type_})) == value["f"]


def test_a_whole_number_may_be_too_large_for_a_float():
    assert find_misfit({"f": 10**39}, fields_schema({"f": "FLOAT"})) == 10**39
    assert find_misfit({"f": 10**39}, fields_schema({"f": "DOUBLE"})) is None


@given(
    value=st.integers(-(10**6), 10**6) | st.decimals(-1000, 1000, places=8).map(float),
    type_=st.sampled_from([(5, 2), (3, 0), (4, 3), (6, 5)]),
)
def test_a_decimal_fits_where_duckdb_takes_it(connection, value, type_):
    fields = {"f": "DECIMAL({},{})".format(*type_)}
    query = f"select from_json(?::varchar, {sql.literal(json.dumps(fields))}).f is null"
    ((is_null,),) = connection.execute(query, [json.dumps({"f": value})]).fetchall()
    assert (find_misfit({"f": value}, fields_schema(fields)) is not None) is is_null


@pytest.mark.parametrize("type_", ["DECIMAL(39)", "DECIMAL(2,3)", "NUMERIC(0)", "DECIMAL(99, 2)"])
def test_a_decimal_that_duckdb_does_not_have_is_refused(type_):
    with pytest.raises(ValueError, match="must have 1 to 38 digits, and no more of them after"):
        fields_schema({"f": type_})


@pytest.mark.parametrize(
    ("type_", "least", "most"),
    [
        ("TINYINT", -128, 127),
        ("USMALLINT", 0, 65535),
        ("BIGINT", -(2**63), 2**63 - 1),
        ("DECIMAL(5,2)", -999.99, 999.99),
        ("DECIMAL(5,5)", -0.99999, 0.99999),
        ("DECIMAL", -1e15, 1e15),
    ],
)
def test_a_decoder_is_told_the_range_of_a_number(type_, least, most):
    schema = fields_schema({"a": [{"f": type_}]})
    number = schema["properties"]["a"]["anyOf"][0]["items"]["properties"]["f"]["anyOf"][0]
    assert "minimum" not in number
    ranged = with_ranges(schema)
    number.update(minimum=least, maximum=most)
    assert ranged == schema


@pytest.mark.parametrize(
    "type_", ["UBIGINT", "HUGEINT", "FLOAT", "DOUBLE", "DECIMAL(38,2)", "DECIMAL(9,7)", "DATE"]
)
def test_a_decoder_is_told_no_range_that_it_does_not_know(type_):
    schema = fields_schema({"f": type_})
    assert with_ranges(schema) == schema


def test_comments_of_a_schema_of_the_users_own_are_no_types():
    schema = {
        "type": "object",
        "properties": {
            "seconds": {"type": "number", "$comment": "TIME"},
            "price": {"type": "number", "$comment": "DECIMAL amounts"},
            "day": {"type": ["string", "integer"], "$comment": "DATE"},
            "$comment": {"type": "integer"},
        },
    }
    assert with_ranges(schema) == schema
    assert find_misfit({"seconds": 1.5, "price": 1e9, "day": 3, "$comment": 3}, schema) is None
