import pytest
from hypothesis import settings

from dbt_llm import sql

# A busy machine is no failure.
settings.register_profile("unit", deadline=None, max_examples=60)
settings.load_profile("unit")


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
