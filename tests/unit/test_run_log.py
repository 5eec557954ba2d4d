"""The runs that `all_runs` adds to the log, so that its sums are those of the store."""

from datetime import UTC, datetime

import duckdb
import pyarrow as pa
import pytest

from dbt_llm.config import StoreConfig
from dbt_llm.errors import DbtLLMError, panics_as_errors
from dbt_llm.lookup import read_table
from dbt_llm.run_log import RunLog, all_runs
from dbt_llm.schema import GENERATIONS, RUNS

NOW = datetime(2026, 11, 1, tzinfo=UTC)
SUMS = "run_id, status, asked, generated, failed, prompt_tokens, completion_tokens, cost_usd"


def rows_of(schema, rows):
    return pa.Table.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in rows], schema
    )


def answers(run_id, good, failed=0):
    whose = {"run_id": run_id, "node_id": "n", "llm": "l", "model": "m", "created_at": NOW}
    used = {"prompt_tokens": 10, "completion_tokens": 2, "cost_usd": 0.25}
    return [{**whose, **used, "status": "ok"}] * good + [
        {**whose, "status": "error", "error_code": "timeout", "cost_usd": 0.0}
    ] * failed


def logged(run_id, good, failed=0):
    return {
        "run_id": run_id,
        "status": "error",
        "asked": 9,
        "generated": good,
        "failed": failed,
        "prompt_tokens": 10 * good,
        "completion_tokens": 2 * good,
        "cost_usd": 0.25 * good,
        "started_at": NOW,
    }


@pytest.fixture
def listed():
    def select(generations, runs, columns=SUMS):
        connection = duckdb.connect()
        connection.register("g", rows_of(GENERATIONS, generations))
        connection.register("r", rows_of(RUNS, runs))
        return connection.execute(
            f"select {columns} from {all_runs('r', 'g')} order by run_id, status"
        ).fetchall()

    return select


def test_a_run_that_was_killed_is_added(listed):
    assert listed(answers("a", 3, 1), []) == [("a", "unfinished", 4, 3, 1, 30, 6, 0.75)]
    assert listed(answers("a", 1, 2), [], "errors") == [('{"timeout":2}',)]


def test_a_run_that_is_logged_is_not_added(listed):
    assert listed(answers("a", 3, 1), [logged("a", 3, 1)]) == [("a", "error", 9, 3, 1, 30, 6, 0.75)]


def test_answers_that_a_later_run_took_in_are_added_once(listed):
    found = listed(answers("a", 5, 2) + answers("b", 1), [logged("a", 3, 1), logged("b", 1)])
    assert found == [
        ("a", "error", 9, 3, 1, 30, 6, 0.75),
        ("a", "unfinished", 3, 2, 1, 20, 4, 0.5),
        ("b", "error", 9, 1, 0, 10, 2, 0.25),
    ]


@pytest.mark.parametrize("format_", ["delta", "parquet"])
def test_the_log_lies_in_a_folder_of_any_name(tmp_path, format_):
    # delta-rs's own writer panics at some of these.
    folder = tmp_path / 'o\'hara "x" [1]*?{y} ;-- $HOME #1 a=b ~ é \u202e' / "a?c"
    log = RunLog(StoreConfig(path=str(folder), format=format_))
    whose = dict.fromkeys(("node_id", "invocation_id", "trace_id", "pipeline_version"), "x")
    for run_id in ("a", "b"):
        log.append({**logged(run_id, 1), **whose, "total_s": 1.0})
    with duckdb.connect() as connection:
        found = connection.execute(
            f"select run_id, generated from {read_table(connection, log.table, RUNS)} order by all"
        ).fetchall()
    assert found == [("a", 1), ("b", 1)]


def test_a_panic_of_a_library_is_an_error():
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    with pytest.raises(DbtLLMError, match="a fault of its own: out of luck"), panics_as_errors():
        raise panic("out of luck")
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt
