"""`dbt_llm.resolve`: LLM functions in Python models and notebooks.

In a Python model of dbt the plugin serves it, with the profile's LLMs and store. Elsewhere a
config like the profile's `config` is given, and the connection is prepared on first use.
"""

import logging
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dbt_llm.errors import ConfigError
from dbt_llm.resolve_loop import Build
from dbt_llm.status_lines import StatusLines, is_watched

_log = logging.getLogger("dbt_llm")
_status_lines = StatusLines()

Serve = Callable[[Any, Build, dict[str, Any]], None]
_served_by: list[Serve] = []
_sessions: dict[str, Any] = {}


def serve(by: Serve) -> None:
    """Let calls without a config be resolved by this function; dbt's newest plugin does it."""
    _served_by[:] = [by]


def resolve(
    connection: Any,
    query: str,
    *,
    config: Mapping[str, Any] | None = None,
    mode: str | None = None,
    node_id: str | None = None,
) -> Any:
    """Evaluate a query that may call LLM functions, and ask for the answers that it lacks.

    Args:
        connection: a DuckDB connection, or the `session` of a Python model.
        query: a SELECT statement.
        config: what a profile has under `config`; left out in a Python model.
        mode: `generate`, `cached` or `null`, as the dbt variable `llm_mode`.
        node_id: the name under which generations are stored.

    Returns:
        A DuckDB relation with the query's rows, over a temporary table of the connection.

    Raises:
        DbtLLMError: see `dbt_llm.errors`.
    """
    table = f"temp.main.dbt_llm_result_{uuid.uuid4().hex}"
    build = Build(
        query=query,
        # Its last line may be a comment.
        statement=f"create temp table {table} as (\n{query}\n)",
        table=table,
    )
    options = {"mode": mode, "node_id": node_id}
    if config is not None:
        _resolve_alone(connection, build, config, options)
    elif _served_by:
        _served_by[0](connection, build, options)
    else:
        raise ConfigError(
            "dbt_llm.resolve needs a config where no dbt plugin is at work, for example "
            "config={'llms': {'default': {'engine': 'vllm', 'model': '...'}}}."
        )
    return connection.sql(f"select * from {table}")


def _resolve_alone(
    connection: Any, build: Build, config: Mapping[str, Any], options: dict[str, Any]
) -> None:
    from dbt_llm.call import canonical_json
    from dbt_llm.collector import Mode
    from dbt_llm.config import load_config
    from dbt_llm.resolve_loop import Settings
    from dbt_llm.runner import Output, new_run
    from dbt_llm.session import Session

    key = canonical_json(dict(config))
    session = _sessions.get(key)
    if session is None:
        session = _sessions[key] = Session(load_config(config))
    session.prepare_database(connection)
    session.prepare_cursor(connection)
    run = new_run(options["node_id"] or "python", str(uuid.uuid4()), Path("target"))
    settings = Settings(
        run_id=run.run_id,
        spool_folder=run.spool_folder,
        unique_keys=run.unique_keys,
        mode=Mode(options["mode"] or "generate"),
        max_error_ratio=session.config.max_error_ratio,
    )
    output = Output(_log.info, _log.warning, _status_lines if is_watched(sys.stderr) else None)
    if session.resolve(connection, build, run, output, settings) is None:
        connection.execute(build.statement)
