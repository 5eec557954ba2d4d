"""Upkeep of a store in an object store: a real S3 server on this machine."""

from collections.abc import Iterator
from typing import Any

import duckdb
import pytest

from dbt_llm.config import StoreConfig
from dbt_llm.lookup import lasting, show_answers
from dbt_llm.parts import PART_PATTERN
from dbt_llm.replaced import read_records
from dbt_llm.store import Store, open_store
from dbt_llm.store_stats import store_stats
from dbt_llm.store_upkeep import commits_since_checkpoint, compact, tidy, vacuum
from tests.s3_server import S3Server
from tests.unit.generations import call_of, good, key, write_part

GENERATIONS = "generations"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(params=["delta", "parquet"])
def config(request: pytest.FixtureRequest, server: S3Server) -> StoreConfig:
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return StoreConfig(
        path=f"s3://{server.bucket}/{name}", format=request.param, storage_options=server.options
    )


def filled(config: StoreConfig, parts: int = 12) -> Store:
    store = open_store(config)
    store.create()
    for number in range(parts):
        prompts = [f"p{number}-{row}" for row in range(3)]
        store.commit([write_part(store.files, prompts, good)])
    return store


def answers(store: Store) -> dict[str, Any]:
    with duckdb.connect() as connection:
        show_answers(connection, store, lasting(), [call_of().call_hash])
        rows = connection.execute("select prompt_hash, output from dbt_llm_generations").fetchall()
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def expected(parts: int = 12) -> dict[str, str]:
    prompts = [f"p{number}-{row}" for number in range(parts) for row in range(3)]
    return {key(prompt): f"<{prompt}>" for prompt in prompts}


def test_small_files_become_one_and_a_vacuum_removes_them(config: StoreConfig) -> None:
    store = filled(config)
    write_part(store.files, ["uncommitted"], good)
    done = compact(config, GENERATIONS)
    more = int(config.format == "parquet")
    assert (done.files, done.into_files) == (12 + more, 1)
    assert answers(store) == expected() | ({key("uncommitted"): "<uncommitted>"} if more else {})
    # What was replaced stays for those who read it, and does not come back.
    assert len(store.files.names(PART_PATTERN)) == 14
    assert vacuum(config, GENERATIONS, 1, dry_run=False).files == 0
    assert open_store(config).adopt() == 1 - more
    gone = vacuum(config, GENERATIONS, 0, dry_run=False)
    assert gone.files == 12 + more
    assert len(store.files.names(PART_PATTERN)) == 2 - more
    assert answers(open_store(config)) == expected() | {key("uncommitted"): "<uncommitted>"}
    # The record of it stays until nobody can have listed the files any more.
    assert len(read_records(store.files)) == 1
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert read_records(store.files) == []


def test_a_run_does_what_is_due(config: StoreConfig) -> None:
    store = filled(config)
    tidy(config, GENERATIONS)
    assert len(store.snapshot().files) == 1
    if config.format == "delta":
        assert commits_since_checkpoint(store.files) == 0
    assert answers(open_store(config)) == expected()


def test_stats_count_what_lies_there(config: StoreConfig) -> None:
    store = filled(config)
    compact(config, GENERATIONS)
    stats = store_stats(config)
    (table,) = (one for one in stats.tables if one.table == GENERATIONS)
    assert (stats.answers, table.rows, table.files, table.replaced_files) == (36, 36, 1, 12)
    assert table.bytes == sum(store.files.sizes("*-compacted-*").values()) > 0
