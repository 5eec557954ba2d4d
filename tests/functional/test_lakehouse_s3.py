"""Lakehouse tables in an object store: a real S3 server on this machine."""

from collections.abc import Iterator
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from dbt_llm.delta_extension import load_delta_extension, load_extension
from tests.project import Project
from tests.s3_server import S3Server

ITEMS = """
select i as id, 'item ' || (i + {{ var('more', 0) }} * (i < 3)::int) as name, i % 2 as half
from range(10) t(i)"""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def lake(project: Project, server: S3Server, request: pytest.FixtureRequest) -> Project:
    with duckdb.connect() as connection:
        if not (load_extension(connection, "httpfs") and load_delta_extension(connection)):
            pytest.skip("this DuckDB has no httpfs or no delta extension")
    prefix = request.node.name.replace("[", "-").rstrip("]")
    project.config["lakehouse"] = {
        "path": f"s3://{server.bucket}/{prefix}",
        "storage_options": server.options,
    }
    return project


def table_of(lake: Project, server: S3Server, name: str) -> DeltaTable:
    url = f"{lake.config['lakehouse']['path']}/dev/main/{name}"
    return DeltaTable(url, storage_options=server.options)


def rows_of(table: DeltaTable) -> list[tuple[Any, ...]]:
    rows = table.to_pyarrow_table().select(["id", "name", "half"]).to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def expected(more: int = 0) -> list[tuple[Any, ...]]:
    return [(i, f"item {i + more * (i < 3)}", i % 2) for i in range(10)]


@pytest.mark.parametrize("partition_by", [None, "half"])
def test_only_what_changed_is_written(
    lake: Project, server: S3Server, partition_by: str | None
) -> None:
    options = {} if partition_by is None else {"partition_by": partition_by}
    lake.model("items", ITEMS, materialized="lakehouse", unique_key="id", **options)
    lake.model("counted", "select count(*) as n, max(name) as most from {{ ref('items') }}")
    outcome = lake.dbt("run")
    assert outcome.success, outcome.log
    table = table_of(lake, server, "items")
    assert (rows_of(table), table.version()) == (expected(), 0)
    # The view is read by another process of dbt.
    assert lake.dbt_process("run", "--select", "counted").success
    assert lake.query("select n, most from counted") == [(10, "item 9")]
    assert lake.dbt("run", "--select", "items").success
    assert table_of(lake, server, "items").version() == 0
    assert lake.dbt("run", "--select", "items", more=100).success
    table = table_of(lake, server, "items")
    assert (rows_of(table), table.version()) == (expected(100), 1)
    assert lake.dbt("run", "--full-refresh").success
    assert rows_of(table_of(lake, server, "items")) == expected()


def test_a_stranger_reads_it_with_a_secret_of_his_own(lake: Project, server: S3Server) -> None:
    lake.model("items", ITEMS, materialized="lakehouse")
    assert lake.dbt("run").success
    url = f"{lake.config['lakehouse']['path']}/dev/main/items"
    with duckdb.connect() as connection:
        load_extension(connection, "httpfs")
        load_delta_extension(connection)
        given = ", ".join(f"{key} '{value}'" for key, value in server.duckdb_secret.items())
        connection.execute(f"create secret ({given})")
        found = connection.execute(f"from delta_scan('{url}') order by id").fetchall()
    assert found == expected()


def test_a_wrong_place_is_told_before_anything_is_asked(lake: Project, server: S3Server) -> None:
    wrong = {**server.options, "AWS_SECRET_ACCESS_KEY": "wrong-secret"}
    lake.config["lakehouse"]["storage_options"] = wrong
    lake.model("answers", "select llm_generate('Hello') as a", materialized="lakehouse")
    outcome = lake.dbt("run")
    assert not outcome.success
    assert "SignatureDoesNotMatch" in outcome.log
    assert "wrong-secret" not in outcome.log
    assert not list((lake.folder / "target").glob("llm/*.json"))


def test_what_cannot_be_there_is_refused(lake: Project) -> None:
    lake.model("one", "select 1 as a", materialized="lakehouse", format="parquet")
    lake.model("two", "select 1 as a", materialized="lakehouse", location="s3://other/two")
    outcome = lake.dbt("run")
    assert outcome.statuses == {"one": "error", "two": "error"}
    assert "has the format delta" in outcome.log
    assert "does not lie below lakehouse.path" in outcome.log
