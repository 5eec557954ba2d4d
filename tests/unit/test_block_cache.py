"""DuckDB's blocks are dropped from memory, and its limit stays what it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dbt_llm import block_cache
from dbt_llm.block_cache import free_cached_blocks


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database whose table takes some 40 MB."""
    path = tmp_path_factory.mktemp("cached") / "cached.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "create table texts as select i, sha256(i::varchar) as body from range(500000) t(i)"
        )
    return path


@pytest.fixture
def connection(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[duckdb.DuckDBPyConnection]:
    """One that holds the table's blocks, with thresholds that are as small as the table."""
    monkeypatch.setattr(block_cache, "_WORTHWHILE_BYTES", 4 * 1024**2)
    monkeypatch.setattr(block_cache, "_SPARE_BYTES", 1024**2)
    with duckdb.connect(str(database)) as connection:
        scan(connection)
        yield connection


def scan(connection: Any) -> int:
    """Read the whole table."""
    (total,) = connection.execute("select sum(strlen(body)) from texts").fetchone()
    return int(total)


def cached(connection: Any) -> int:
    """Return the bytes of table blocks in memory."""
    (size,) = connection.execute(
        "select memory_usage_bytes from duckdb_memory() where tag = 'BASE_TABLE'"
    ).fetchone()
    return int(size)


def limit(connection: Any) -> str:
    """Return the memory limit as DuckDB shows it."""
    (shown,) = connection.execute("select current_setting('memory_limit')").fetchone()
    return str(shown)


def test_blocks_are_dropped_and_read_again(connection: duckdb.DuckDBPyConnection) -> None:
    before = cached(connection)
    free_cached_blocks(connection)
    assert before > 10 * 1024**2
    assert cached(connection) <= 1024**2
    assert scan(connection) == 64 * 500_000


def test_few_blocks_stay(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cached(connection)
    monkeypatch.setattr(block_cache, "_WORTHWHILE_BYTES", before + 1)
    free_cached_blocks(connection)
    assert cached(connection) == before


@pytest.mark.parametrize(
    "given", [None, "1GB", "953.6MiB", "2GiB", "1.5GB", "200MB", "3TB", "123456789B", "-1"]
)
def test_the_limit_stays_however_often(
    connection: duckdb.DuckDBPyConnection, given: str | None
) -> None:
    if given is not None:
        connection.execute(f"set memory_limit = '{given}'")
    shown = limit(connection)
    for _ in range(3):
        scan(connection)
        free_cached_blocks(connection)
        assert cached(connection) <= 1024**2
        assert limit(connection) == shown


def test_what_a_transaction_wrote_stays(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("begin")
    connection.execute("create table more as select i, body || '.' as body from texts")
    connection.execute("create temp table own as select i, body || '!' as body from texts")
    scan(connection)
    free_cached_blocks(connection)
    counts = connection.execute(
        "select count(distinct m.body), count(distinct o.body) "
        "from more as m inner join own as o using (i)"
    ).fetchone()
    connection.execute("commit")
    connection.execute("drop table more")
    assert counts == (500_000, 500_000)


def test_a_limit_that_cannot_be_lowered_stays(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "_WORTHWHILE_BYTES", 4 * 1024**2)
    # As if something came to use more just then.
    monkeypatch.setattr(block_cache, "_SPARE_BYTES", -(10**7))
    with duckdb.connect(str(database), config={"temp_directory": ""}) as connection:
        connection.execute("set memory_limit = '1GB'")
        scan(connection)
        connection.execute("create temp table own as select i, body from texts")
        shown = limit(connection)
        free_cached_blocks(connection)
        assert limit(connection) == shown
        assert scan(connection) == 64 * 500_000
