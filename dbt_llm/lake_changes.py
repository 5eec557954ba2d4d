"""What differs between a query's rows and a lakehouse table: SQL, run by DuckDB.

The keys of all rows that must go, since they changed or are gone, stand in a temporary table with
the files that hold them; a key without a file is new. NULL is a key like any other.
"""

from collections.abc import Iterable
from typing import Any

from dbt_llm import sql
from dbt_llm.errors import LakehouseError, SchemaChangeError
from dbt_llm.lake_table import FILE
from dbt_llm.lake_types import Column

GONE = "temp.main.dbt_llm_lake_gone"
_RANGED = ("VARCHAR", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "DATE")


def select_new(relation: str, columns: list[Column], given: set[str]) -> str:
    """Return a SELECT of the query's rows with a table's columns; those not `given` are NULL."""
    return "select {} from {}".format(
        ", ".join(
            f"{one.quoted if one.name.lower() in given else 'null'}::{one.sql_type} as {one.quoted}"
            for one in columns
        ),
        relation,
    )


def for_files(rows: str, columns: list[Column], partition_by: tuple[str, ...]) -> str:
    """Return rows as the files take them: sorted by partition, its columns as text."""
    if not partition_by:
        return rows
    texts = ", ".join(
        f"{one.quoted}::varchar as {one.quoted}" if one.name in partition_by else one.quoted
        for one in columns
    )
    order = ", ".join(sql.identifier(name) for name in partition_by)
    return f"select {texts} from ({rows}) order by {order}"


def with_old_values(
    new: str, old: str, keys: list[Column], columns: list[Column], missing: list[Column]
) -> str:
    """Return new rows with the old values of columns that the query does not have any more."""
    names = {one.name for one in missing}
    picked = ", ".join(
        f"dbt_llm_o.{one.quoted}" if one.name in names else f"dbt_llm_n.{one.quoted}"
        for one in columns
    )
    firsts = ", ".join(f"first({one.quoted}) as {one.quoted}" for one in missing)
    grouped = f"select {_list(keys)}, {firsts} from ({old}) group by {_list(keys)}"
    return (
        f"select {picked} from ({new}) dbt_llm_n left join ({grouped}) dbt_llm_o "
        f"on {_same(keys, 'dbt_llm_n', 'dbt_llm_o')}"
    )


def check_unique(cursor: Any, new: str, keys: list[Column]) -> None:
    """Refuse new rows of which two have the same key.

    Raises:
        LakehouseError: it names one.
    """
    found = cursor.execute(
        f"select count(*), {', '.join(f'{one.quoted}::varchar' for one in keys)} from ({new}) "
        f"group by {_list(keys)} having count(*) > 1 order by all limit 1"
    ).fetchall()
    if found:
        count, *values = found[0]
        key = ", ".join(
            f"{one.name} = {'NULL' if value is None else value}"
            for one, value in zip(keys, values, strict=True)
        )
        raise LakehouseError(
            f"The query has {count} rows with the same unique_key: {key}. Make its rows unique, "
            "for example by `qualify row_number() over (partition by ...) = 1`, or choose another "
            "unique_key. Nothing was written."
        )


def in_range(cursor: Any, new: str, old: str, key: Column) -> str:
    """Return the old rows less those whose key lies outside of the new ones; DuckDB skips files."""
    if key.sql_type not in _RANGED:
        return old
    low, high, nulls = cursor.execute(
        f"select min({key.quoted})::varchar, max({key.quoted})::varchar, "
        f"count(*) - count({key.quoted}) from ({new})"
    ).fetchall()[0]
    if low is None or nulls:
        return old
    bounds = f"{sql.literal(low)}::{key.sql_type} and {sql.literal(high)}::{key.sql_type}"
    return f"select * from ({old}) where {key.quoted} between {bounds}"


def find_changed_rows(
    cursor: Any, new: str, old: str, keys: list[Column], columns: list[Column], *, delete: bool
) -> None:
    """Fill `GONE` where keys are unique; `delete`: with those of old rows that are not new."""
    differs = " or ".join(
        f"dbt_llm_n.{one.quoted} is distinct from dbt_llm_o.{one.quoted}"
        for one in columns
        if one not in keys
    )
    deleted = f"""
        union all
        select {_as_keys(keys, "dbt_llm_o")}, dbt_llm_o.{FILE} as {FILE}
        from ({old}) dbt_llm_o anti join ({new}) dbt_llm_n
        on {_same(keys, "dbt_llm_o", "dbt_llm_n")}"""
    cursor.execute(f"""
        create or replace temp table dbt_llm_lake_gone as
        select {_as_keys(keys, "dbt_llm_n")}, dbt_llm_o.{FILE} as {FILE}
        from ({new}) dbt_llm_n left join ({old}) dbt_llm_o
        on {_same(keys, "dbt_llm_n", "dbt_llm_o")}
        where dbt_llm_o.{FILE} is null{f" or {differs}" if differs else ""}
        {deleted if delete else ""}""")


def find_changed_groups(
    cursor: Any, new: str, old: str, keys: list[Column], columns: list[Column]
) -> None:
    """Fill `GONE` where a key may have several rows: with keys whose rows are not the same."""
    digest = f"hash({_list(columns)})"
    # Count, sum and exclusive or together tell two bags of rows apart, whatever their order.
    sums = f"(count(*), sum({digest}::hugeint), bit_xor({digest})) as dbt_llm_rows"
    cursor.execute(f"""
        create or replace temp table dbt_llm_lake_gone as
        with dbt_llm_n as (select {_list(keys)}, {sums} from ({new}) group by {_list(keys)}),
        dbt_llm_o as (select {_list(keys)}, {sums} from ({old}) group by {_list(keys)}),
        dbt_llm_c as (
            select dbt_llm_n.* from dbt_llm_n left join dbt_llm_o
            on {_same(keys, "dbt_llm_n", "dbt_llm_o")}
            where dbt_llm_n.dbt_llm_rows is distinct from dbt_llm_o.dbt_llm_rows
        ),
        dbt_llm_f as (select distinct {_list(keys)}, {FILE} from ({old}))
        select {_as_keys(keys, "dbt_llm_c")}, dbt_llm_f.{FILE} as {FILE}
        from dbt_llm_c left join dbt_llm_f on {_same(keys, "dbt_llm_c", "dbt_llm_f")}""")


def changes(cursor: Any) -> tuple[int, set[str]]:
    """Return how many entries `GONE` has, and the files that it names."""
    rows = sql.scalar(cursor, f"select count(*) from {GONE}")
    files = cursor.execute(f"select distinct {FILE} from {GONE} where {FILE} is not null")
    return int(rows), {name for (name,) in files.fetchall()}


def changed_content(new: str, old: str, keys: list[Column], columns: list[Column]) -> str:
    """Return what replaces the `old` rows: those that stay, and the new ones in `GONE`."""
    on = " and ".join(
        f"dbt_llm_r.{one.quoted} is not distinct from dbt_llm_g.dbt_llm_key_{number}"
        for number, one in enumerate(keys)
    )
    wanted = ", ".join(f"dbt_llm_r.{one.quoted}" for one in columns)
    return (
        f"select {wanted} from ({old}) dbt_llm_r anti join {GONE} dbt_llm_g on {on} "
        f"union all select {wanted} from ({new}) dbt_llm_r semi join {GONE} dbt_llm_g on {on}"
    )


def all_content(new: str, old: str, keys: list[Column], columns: list[Column]) -> str:
    """Return all rows of a table that is written anew: the new ones, and the old of other keys."""
    wanted = ", ".join(f"dbt_llm_o.{one.quoted}" for one in columns)
    kept = f"select {wanted} from ({old}) dbt_llm_o"
    if keys:
        kept += f" anti join ({new}) dbt_llm_n on {_same(keys, 'dbt_llm_o', 'dbt_llm_n')}"
    return f"{kept} union all {new}"


def new_columns(
    node_id: str, old: tuple[Column, ...], new: list[Column], on_schema_change: str
) -> tuple[list[Column], bool]:
    """Return the columns that the table gets, and whether all of it has to be rewritten for them.

    Raises:
        SchemaChangeError: `on_schema_change` does not allow the change.
    """
    theirs = {one.name.lower(): one for one in new}
    ours = {one.name.lower(): one for one in old}
    added = [one for name, one in theirs.items() if name not in ours]
    gone = [one for name, one in ours.items() if name not in theirs]
    retyped = [one for name, one in theirs.items() if name in ours and ours[name].type != one.type]
    if on_schema_change == "sync_all_columns" and (gone or retyped):
        kept = [Column(one.name, theirs[one.name.lower()].type) for one in old if one not in gone]
        return [*kept, *added], True
    if on_schema_change in {"append_new_columns", "sync_all_columns"}:
        return [*old, *added], False
    if (on_schema_change == "fail" and (added or gone or retyped)) or gone:
        raise SchemaChangeError(
            f"{node_id} has other columns than its table: new {_names(added)}; gone "
            f"{_names(gone)}; of another type {_names(retyped)}. Set on_schema_change to "
            "append_new_columns or sync_all_columns, or run with --full-refresh. Nothing was "
            "written."
        )
    return list(old), False


def _names(columns: Iterable[Column]) -> str:
    return ", ".join(f"{one.name} ({one.sql_type})" for one in columns) or "none"


def _list(columns: list[Column]) -> str:
    return ", ".join(one.quoted for one in columns)


def _as_keys(keys: list[Column], alias: str) -> str:
    return ", ".join(
        f"{alias}.{one.quoted} as dbt_llm_key_{number}" for number, one in enumerate(keys)
    )


def _same(keys: list[Column], left: str, right: str) -> str:
    return " and ".join(
        f"{left}.{one.quoted} is not distinct from {right}.{one.quoted}" for one in keys
    )
