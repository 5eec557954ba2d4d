"""DuckDB's Delta extension: loaded where it is at hand, never downloaded."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb

from dbt_llm import sql


def load_delta_extension(connection: Any) -> bool:
    """Load the extension if it is installed, or shipped by the package duckdb-extension-delta.

    Without it the store is read through its file list, which gives the same rows.
    """
    candidates = ["delta", *map(str, _shipped(connection))]
    # On the connection itself a failure would abort the transaction that is under way.
    with connection.cursor() as other:
        for candidate in candidates:
            name = candidate if candidate == "delta" else sql.literal(candidate)
            try:
                other.execute(f"load {name}")
                return True
            except duckdb.Error:
                continue
    return False


def _shipped(connection: Any) -> list[Path]:
    spec = find_spec("duckdb_extension_delta")
    if spec is None or spec.origin is None:
        return []
    version = sql.scalar(connection, "select library_version from pragma_version()")
    return sorted(Path(spec.origin).parent.glob(f"extensions/{version}/*.duckdb_extension"))
