"""The one place where a value becomes SQL text, and where one comes back."""

from typing import Any


def literal(value: str) -> str:
    """Return `value` as a single-quoted SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def literal_list(values: list[str]) -> str:
    """Return `values` as a SQL list of string literals."""
    return "[" + ", ".join(literal(value) for value in values) + "]"


def scalar(connection: Any, query: str) -> Any:
    """Run a query and return its first value.

    It fetches all rows: DuckDB 2.0 refuses other work on a connection with an unfinished result.
    """
    return connection.execute(query).fetchall()[0][0]


def identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
