import duckdb
import pytest
from hypothesis import settings

from dbt_llm import sql
from dbt_llm.collector import Collector
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.functions import register_functions
from tests.unit.generations import LLMS

# A busy machine is no failure.
settings.register_profile("unit", deadline=None, max_examples=60)
settings.load_profile("unit")


@pytest.fixture(scope="module")
def database():
    """A database with the SQL functions, and the collector that takes what they lack."""
    with duckdb.connect() as connection:
        collector = Collector(LLMS)
        register_functions(connection, collector)
        load_delta_extension(connection)
        yield connection, collector


@pytest.fixture
def looked(monkeypatch):
    """The queries that looked for keys which occur twice in a store."""
    queries = []
    real = sql.scalar

    def scalar(cursor, query):
        if "count(distinct" in query:
            queries.append(query)
        return real(cursor, query)

    monkeypatch.setattr("dbt_llm.lookup.sql.scalar", scalar)
    return queries
