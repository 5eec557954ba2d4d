import duckdb
import pytest

from dbt_llm.delta_extension import load_delta_extension


@pytest.fixture
def connection(tmp_path):
    with duckdb.connect(config={"extension_directory": str(tmp_path)}) as connection:
        yield connection


def test_one_that_does_not_load_leaves_the_transaction_alone(connection, monkeypatch, tmp_path):
    broken = tmp_path / "broken.duckdb_extension"
    broken.write_bytes(b"no extension")
    monkeypatch.setattr("dbt_llm.delta_extension._shipped", lambda *_: [broken])
    connection.execute("begin transaction")
    connection.execute("create temp table t as select 1 as i")
    assert not load_delta_extension(connection)
    assert connection.execute("from t").fetchall() == [(1,)]
