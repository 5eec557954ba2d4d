"""DuckDB's extensions `delta` and `httpfs`: loaded where they are at hand, never downloaded."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import duckdb

from dbt_llm import sql


def load_delta_extension(connection: Any) -> bool:
    """Load the extension if it is installed, or shipped by the package duckdb-extension-delta.

    Without it the store is read through its file list, which gives the same rows.
    """
    return load_extension(connection, "delta")


def load_extension(connection: Any, name: str) -> bool:
    """Load an extension if it is installed, or shipped by the package duckdb-extension-NAME."""
    # On the connection itself a failure would abort the transaction that is under way.
    with connection.cursor() as other:
        loaded, installed = other.execute(
            "select coalesce(bool_or(loaded), false), coalesce(bool_or(installed), false) "
            f"from duckdb_extensions() where extension_name = {sql.literal(name)}"
        ).fetchall()[0]
        if loaded:
            return True
        # DuckDB would try to download one that is not installed.
        candidates = [*([name] if installed else []), *map(_literal, _shipped(other, name))]
        for candidate in candidates:
            try:
                other.execute(f"load {candidate}")
                return True
            except duckdb.Error:
                continue
    return False


def _literal(path: Path) -> str:
    return sql.literal(str(path))


def _shipped(connection: Any, name: str) -> list[Path]:
    spec = find_spec(f"duckdb_extension_{name}")
    if spec is None or spec.origin is None:
        return []
    version = sql.scalar(connection, "select library_version from pragma_version()")
    return sorted(Path(spec.origin).parent.glob(f"extensions/{version}/*.duckdb_extension"))
