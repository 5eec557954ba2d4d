import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm import sql

# DuckDB 1.5 cannot parse a NUL byte in a name; no name may be empty.
IN_NAMES = st.characters(codec="utf-8", exclude_characters="\0")


@pytest.fixture(scope="module")
def connection():
    with duckdb.connect() as connection:
        yield connection


@given(value=st.text())
def test_literal_gives_the_text_back(connection, value):
    assert connection.execute(f"select {sql.literal(value)}").fetchall() == [(value,)]


@pytest.mark.parametrize(
    "value", ["", "'", "''", "it's", '"', "\\", "\n", "$$", "--", "\0", "\0'", "'\0\0'; --"]
)
def test_literal_of_a_special_text_gives_it_back(connection, value):
    assert connection.execute(f"select {sql.literal(value)}").fetchall() == [(value,)]


@given(values=st.lists(st.text()))
def test_literal_list_gives_the_list_back(connection, values):
    (row,) = connection.execute(f"select {sql.literal_list(values)}::varchar[]").fetchall()
    assert row == (values,)


@given(name=st.text(IN_NAMES, min_size=1))
def test_identifier_names_exactly_that_column(connection, name):
    result = connection.execute(f"select 7 as {sql.identifier(name)}")
    assert [column[0] for column in result.description] == [name]
    assert result.fetchall() == [(7,)]


@pytest.mark.parametrize("name", ["select", "a b", 'say "hi"', "a.b", "Ä", "it's", ";", "--x"])
def test_identifier_quotes_what_is_no_plain_name(connection, name):
    connection.execute(f"create or replace temp table {sql.identifier(name)} as select 1 as x")
    tables = connection.execute(
        "select table_name from duckdb_tables() where temporary and table_name = ?", [name]
    ).fetchall()
    assert tables == [(name,)]
    connection.execute(f"drop table {sql.identifier(name)}")


def test_scalar_gives_the_one_value_and_leaves_no_open_result(connection):
    assert sql.scalar(connection, "select 7 as x") == 7
    # DuckDB 2 refuses this beside a result that was not read to its end.
    connection.create_function("after_scalar", lambda x: x, ["BIGINT"], "BIGINT")
    assert sql.scalar(connection, "select after_scalar(8)") == 8
