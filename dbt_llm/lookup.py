"""The generations view: what a query finds of the store.

The SQL functions look an answer up in `dbt_llm_generations`, a view of the connection. This module
points it at a state of the store, with one row for each key.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import duckdb

from dbt_llm import functions, sql
from dbt_llm.credentials import is_url
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.object_scan import make_readable, reads_itself
from dbt_llm.schema import LASTING_ERRORS
from dbt_llm.store import Snapshot, Store, file_of

if TYPE_CHECKING:
    from dbt_llm.unique_keys import UniqueKeys

_FEW_FILES = 16
"""So many are read by their names: to load the Delta extension takes a fifth of a second."""

# Of several generations of one key, a good one counts before a failed one, then the newest.
BEST_FIRST = "partition by call_hash, prompt_hash order by status = 'ok' desc, created_at desc"
"""The window in which the first row of a key is the one that counts."""


def show_store(cursor: Any, store: Store) -> None:
    """Point a cursor's generations view at the newest state of the store.

    It shows good rows and errors that last. Nothing is read until the view is used. Files that the
    log names and somebody removed are left out where a query could not be planned over them: the
    next build says that they are gone and asks for what they held, and has to come that far.
    """
    # Every connection comes here, and few use the view. To bind a scan of a Delta table reads its
    # log, of an object store request by request; the list of its files is known already.
    local = not is_url(str(store.files))
    try:
        _show_store(cursor, store, scan=local, there=local)
    except duckdb.Error:
        # DuckDB looks for the first object of a list.
        _show_store(cursor, store, scan=False, there=True)


def _show_store(cursor: Any, store: Store, scan: bool, there: bool) -> None:
    _, select = _select_answers(cursor, store, lasting(), scan, there)
    if select is not None:
        select = f"{select} qualify row_number() over ({BEST_FIRST}) = 1"
    _create_view(cursor, select)


def show_answers(
    cursor: Any,
    store: Store,
    visible: str,
    calls: Collection[str],
    unique_keys: "UniqueKeys | None" = None,
    look: bool = False,
    there: bool = False,
) -> Snapshot:
    """Do the same for a build: with rows that `visible` (a SQL condition) lets through, and fast.

    Grouping a whole store by key would take longer than the lookups, so only the keys that occur
    more than once are grouped, and as a rule there are none. `calls` has the hashes of the build's
    calls; the other calls of the store are not looked at. `unique_keys` knows of stores that were
    looked at before; `visible` must let through all lasting rows, and where it shows others that
    are in the store, `look` must be true. `there`: do without files that somebody removed.
    """
    snapshot, select = _select_answers(cursor, store, visible, not there, there)
    known = unique_keys is not None and not look and unique_keys.hold(snapshot.files, calls)
    if select is not None and not known:
        own = f"call_hash in ({', '.join(map(sql.literal, calls))})"
        repeats = sql.scalar(
            cursor,
            f"select count(*) > count(distinct hash(prompt_hash)) from ({select}) where {own}",
        )
        if repeats:
            select = _without_repeats(cursor, select, own)
        elif unique_keys is not None:
            unique_keys.note(snapshot.files, calls)
    _create_view(cursor, select)
    return snapshot


def newest_us(cursor: Any, store: Store) -> int:
    """Return when the newest generation of the store was made, in µs since 1970; 0 for none."""
    _, relation = read_newest(cursor, store, scan=False, there=True)
    if relation is None:
        return 0
    return int(sql.scalar(cursor, f"select epoch_us(max(created_at)) from {relation}") or 0)


def read_table(cursor: Any, table: Store, schema: Any) -> str:
    """Return a SQL expression for FROM that reads a table as it is now; `schema` is Arrow's.

    It does without files that somebody removed.
    """
    _, relation = read_newest(cursor, table, scan=False, there=True)
    if relation is None:
        empty = cursor.from_arrow(schema.empty_table())
        types = zip(empty.columns, empty.types, strict=True)
        columns = ", ".join(f"null::{type_} as {sql.identifier(name)}" for name, type_ in types)
        return f"(select {columns} where false)"
    return f"(select * from {relation})"


def _select_answers(
    cursor: Any, store: Store, visible: str, scan: bool = True, there: bool = False
) -> tuple[Snapshot, str | None]:
    snapshot, relation = read_newest(cursor, store, scan, there)
    if relation is None:
        return snapshot, None
    # What a failed row holds is kept in the store, but it is no answer.
    columns = ", ".join(
        f"case when status = 'ok' then {name} end as {name}"
        if name in {"output", "embedding"}
        else name
        for name in functions.COLUMNS
    )
    return snapshot, f"select {columns} from {relation} where ({visible})"


def read_newest(
    cursor: Any, store: Store, scan: bool = True, there: bool = False
) -> tuple[Snapshot, str | None]:
    """Return the newest state of the store, and what reads it; None while it is empty.

    `scan`: by the Delta extension, where that is at hand and there are many files. `there`: of
    files that are read by their names, only those that are there.
    """
    snapshot = store.snapshot()
    root, itself = None, True
    if is_url(str(store.files)):
        # Also of an empty one: it may be read in the transaction that begins next.
        root = make_readable(cursor, store.files)
        itself = reads_itself(root)
    is_delta = snapshot.version is not None
    many = len(snapshot.files) > _FEW_FILES
    by_extension = is_delta and scan and many and itself and load_delta_extension(cursor)
    # What a Parquet store names has just been listed.
    if is_delta and there and not by_extension:
        snapshot = _only_there(store, snapshot)
    return snapshot, store.relation(snapshot, by_extension, root)


def _only_there(store: Store, snapshot: Snapshot) -> Snapshot:
    lost = set(store.files.missing(map(file_of, snapshot.files)))
    files = tuple(file for file in snapshot.files if file_of(file) not in lost)
    return replace(snapshot, files=files, rows=None) if lost else snapshot


def _create_view(cursor: Any, select: str | None) -> None:
    cursor.execute(
        "create or replace temp view dbt_llm_generations as " + (select or functions.NO_GENERATIONS)
    )


def lasting() -> str:
    """Return the SQL condition for rows that stay: good ones, and errors that last."""
    codes = ", ".join(sql.literal(code) for code in LASTING_ERRORS)
    return f"status = 'ok' or error_code in ({codes})"


def _without_repeats(cursor: Any, select: str, own: str) -> str:
    # Only the few repeated keys are grouped; the others keep a plain scan.
    cursor.execute(f"""
        create or replace temp table dbt_llm_repeated as
        select * from ({select})
        where {own} and prompt_hash in (
            select prompt_hash from ({select}) where {own}
            group by prompt_hash having count(*) > 1
        )
        qualify row_number() over ({BEST_FIRST}) = 1""")
    return f"""
        select * from ({select})
        where prompt_hash not in (select prompt_hash from temp.main.dbt_llm_repeated)
        union all by name select * from temp.main.dbt_llm_repeated"""
