"""Gives back the memory of the table blocks that DuckDB keeps to read them again.

DuckDB fills its memory limit with them, by default four fifths of the machine, and gives them up
only when it needs the memory itself. While a job runs, the engine and the prompts need it.
"""

import contextlib
from typing import Any

import duckdb

from dbt_llm import sql

# Less than that is not worth reading it again.
_WORTHWHILE_BYTES = 128 * 1024**2
# For what other connections allocate just then.
_SPARE_BYTES = 64 * 1024**2
# In this unit DuckDB shows that there is no limit, and does not read it.
_NO_LIMIT = "PiB"


def free_cached_blocks(cursor: Any) -> None:
    """Have a DuckDB drop the blocks of tables that lie in its file and are not in use.

    The memory limit is lowered for a moment, which drops them before it would write anything to
    the disk. A query that runs meanwhile could run into it, so nothing else should.
    """
    used, cached = cursor.execute(
        "select sum(memory_usage_bytes), sum(if(tag in ('BASE_TABLE', 'EXTERNAL_FILE_CACHE'), "
        "memory_usage_bytes, 0)) from duckdb_memory()"
    ).fetchone()
    if cached < _WORTHWHILE_BYTES:
        return
    limit = _memory_limit(cursor)
    try:
        # What cannot be dropped is in use.
        with contextlib.suppress(duckdb.OutOfMemoryException):
            _set_memory_limit(cursor, f"{used - cached + _SPARE_BYTES}B")
    finally:
        _restore_memory_limit(cursor, limit)


def _memory_limit(cursor: Any) -> str:
    return str(sql.scalar(cursor, "select current_setting('memory_limit')"))


def _restore_memory_limit(cursor: Any, limit: str) -> None:
    # It is shown with one digit, the others cut off; half of one keeps it from becoming less each
    # time. (RESET changes what is shown and not the limit itself.)
    number, unit = limit.split()
    value = "-1" if unit == _NO_LIMIT else f"{float(number) + 0.05:.2f}{unit}"
    _set_memory_limit(cursor, value)


def _set_memory_limit(cursor: Any, value: str) -> None:
    cursor.execute(f"set memory_limit = {sql.literal(value)}")
