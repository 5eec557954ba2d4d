"""The column types of lakehouse tables: which Delta can hold, and what becomes of the others.

A table's columns are kept as Arrow types. What has one obvious lossless form is cast to it (an ENUM
to its text); what would lose its meaning is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dbt_llm import sql
from dbt_llm.errors import ConfigError

_UTC = pa.timestamp("us", tz="UTC")
_NAIVE = pa.timestamp("us")

_TYPES = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    # Delta has no unsigned integers: each takes the next larger type.
    "utinyint": pa.int16(),
    "usmallint": pa.int32(),
    "uinteger": pa.int64(),
    "ubigint": pa.decimal128(20, 0),
    # The sum of integers is a HUGEINT. DuckDB refuses the few numbers that do not fit.
    "hugeint": pa.decimal128(38, 0),
    "uhugeint": pa.decimal128(38, 0),
    # What DuckDB 1.5 makes of an untyped NULL; 2.0 leaves it as it is.
    "null": pa.int32(),
    "float": pa.float32(),
    "double": pa.float64(),
    "varchar": pa.string(),
    "uuid": pa.string(),
    "enum": pa.string(),
    "blob": pa.binary(),
    "date": pa.date32(),
    "timestamp": _NAIVE,
    "timestamp_s": _NAIVE,
    "timestamp_ms": _NAIVE,
    "timestamp with time zone": _UTC,
}

_ADVICE = {
    "timestamp_ns": "cast it to TIMESTAMP, which drops the nanoseconds, or to VARCHAR",
    "time": "cast it to VARCHAR",
    "time with time zone": "cast it to VARCHAR",
    "interval": "cast it to VARCHAR, or store a number of seconds: epoch(...)",
    "bit": "cast it to VARCHAR",
    "bignum": "cast it to VARCHAR, or to DECIMAL(38, 0)",
    "union": "store its members as columns of their own, or cast it to JSON",
}

_SQL = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.large_string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.large_binary(): "BLOB",
    pa.date32(): "DATE",
    _NAIVE: "TIMESTAMP",
    _UTC: "TIMESTAMP WITH TIME ZONE",
}


class _RefusedError(Exception):
    """A type that no table can hold; the text says what to do."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    type: Any
    """The Arrow type."""

    @property
    def quoted(self) -> str:
        """The name as SQL."""
        return sql.identifier(self.name)

    @property
    def sql_type(self) -> str:
        """The type as DuckDB writes it."""
        return sql_type(self.type)


def columns_of(cursor: Any, query: str) -> list[Column]:
    """Return the columns of a query as a table holds them.

    Raises:
        ConfigError: a table cannot hold some of them; all are named.
    """
    relation = cursor.sql(f"select * from ({query}) limit 0")
    found, problems = [], []
    for name, type_ in zip(relation.columns, relation.types, strict=True):
        try:
            found.append(Column(name, _arrow_type(type_)))
        except _RefusedError as refusal:
            problems.append(f"  - {name} ({type_}): {refusal}")
    if problems:
        raise ConfigError(
            "A lakehouse table cannot hold these columns:\n" + "\n".join(problems) + "\n"
            "See docs/lakehouse.md for the types that it can hold."
        )
    return found


def sql_type(type_: Any) -> str:
    """Return the DuckDB type of an Arrow type that a table holds.

    Raises:
        ConfigError: another program has given the table a type that is not known here.
    """
    if type_ in _SQL:
        return _SQL[type_]
    if pa.types.is_decimal(type_):
        return f"DECIMAL({type_.precision}, {type_.scale})"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return sql_type(type_.value_type) + "[]"
    if pa.types.is_map(type_):
        return f"MAP({sql_type(type_.key_type)}, {sql_type(type_.item_type)})"
    if pa.types.is_struct(type_):
        fields = [type_.field(number) for number in range(type_.num_fields)]
        inner = ", ".join(f"{sql.identifier(one.name)} {sql_type(one.type)}" for one in fields)
        return f"STRUCT({inner})"
    raise ConfigError(f"The table has a column of type {type_}, which dbt-llm does not know.")


def plain(type_: Any) -> Any:
    """Return a type as it is written here: small strings and lists, children with usual names.

    Two programs' types can then be compared.
    """
    return _rebuilt(type_, lambda leaf: _SMALL.get(leaf, leaf))


def _rebuilt(type_: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Return a type with other leaves, within lists, maps and structs as well."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(_rebuilt(type_.value_type, of_leaf))
    if pa.types.is_map(type_):
        return pa.map_(_rebuilt(type_.key_type, of_leaf), _rebuilt(type_.item_type, of_leaf))
    if pa.types.is_struct(type_):
        fields = [type_.field(number) for number in range(type_.num_fields)]
        return pa.struct([pa.field(one.name, _rebuilt(one.type, of_leaf)) for one in fields])
    return of_leaf(type_)


_SMALL = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
_LARGE = {small: large for large, small in _SMALL.items()}


def arrow_schema(columns: list[Column]) -> pa.Schema:
    """Return the schema of a table."""
    return pa.schema([pa.field(column.name, column.type) for column in columns])


def file_schema(columns: list[Column]) -> pa.Schema:
    """Return the schema of the data files: the same in Parquet, with room for 2 GiB at a time."""
    return pa.schema(
        [
            pa.field(column.name, _rebuilt(column.type, lambda leaf: _LARGE.get(leaf, leaf)))
            for column in columns
        ]
    )


def _arrow_type(type_: Any) -> pa.DataType:
    if type_.id in _TYPES:
        return _TYPES[type_.id]
    children = dict(type_.children) if type_.id in {"decimal", "list", "array", "map"} else {}
    match type_.id:
        case "decimal":
            return pa.decimal128(children["precision"], children["scale"])
        case "list" | "array":
            return pa.list_(_arrow_type(children["child"]))
        case "map":
            return pa.map_(_arrow_type(children["key"]), _arrow_type(children["value"]))
        case "struct":
            return pa.struct([pa.field(name, _arrow_type(child)) for name, child in type_.children])
    raise _RefusedError(_ADVICE.get(type_.id, "cast it to VARCHAR"))
