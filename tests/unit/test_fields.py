import json

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dbt_llm import sql
from dbt_llm.engine_replay import made_up_answer
from dbt_llm.fields import fields_schema, find_misfit

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
        ("DECIMAL(5,2)", [999.99, -999], [1000, 12345.6]),
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
