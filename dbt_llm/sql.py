"""The one place where a value becomes SQL text, and where one comes back."""

import re
from typing import Any


def literal(value: str) -> str:
    """Return `value` as SQL text: a string literal, or an expression where it holds a NUL.

    DuckDB 1.5 ends a statement at a NUL, so there `chr(0)` stands for it.
    """
    parts = ["'" + part.replace("'", "''") + "'" for part in value.split("\0")]
    return parts[0] if len(parts) == 1 else f"({' || chr(0) || '.join(parts)})"


def literal_list(values: list[str]) -> str:
    """Return `values` as a SQL list of string literals."""
    return "[" + ", ".join(literal(value) for value in values) + "]"


def parquet(files: list[str]) -> str:
    """Return an expression for FROM that reads exactly these files, and what lies in them alone.

    DuckDB would take `*`, `?` and `[` in a path for a pattern, and a folder named `a=b` for a
    column `a`.
    """
    paths = literal_list([re.sub(r"[*?[]", r"[\g<0>]", file) for file in files])
    return f"read_parquet({paths}, hive_partitioning = false)"


def scalar(connection: Any, query: str) -> Any:
    """Run a query and return its first value.

    It fetches all rows: DuckDB 2.0 refuses other work on a connection with an unfinished result.
    """
    return connection.execute(query).fetchall()[0][0]


def identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
