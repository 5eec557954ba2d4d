"""A profile at work: its collector, its store, and how a query is resolved with them.

The dbt plugin has one; `dbt_llm.resolve` in a notebook has one per config.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dbt_llm.collector import Collector
from dbt_llm.config import Config
from dbt_llm.functions import register_functions, register_macros
from dbt_llm.in_flight import InFlight
from dbt_llm.lookup import newest_us, show_store
from dbt_llm.progress import summary_line
from dbt_llm.resolve_loop import Build, Settings, Summary, resolve
from dbt_llm.runner import Output, Run, Runner
from dbt_llm.store import open_store


class Session:
    """See the module's text."""

    def __init__(self, config: Config, outside: Callable[[int], None] | None = None) -> None:
        """Make the collector and the store; nothing is read yet.

        `outside` decides about missing prompts where no query is being resolved (see `Collector`).
        """
        self.config = config
        self.store = open_store(config.store)
        self.collector = Collector(config.llms, outside)
        self._in_flight = InFlight()

    def prepare_database(self, connection: Any) -> None:
        """Register the Python functions on a DuckDB database."""
        register_functions(connection, self.collector)
        # DuckDB hands over 2,048 rows at a time: of prompts of a megabyte, more than 2 GiB.
        connection.execute("set arrow_large_buffer_size = true")

    def prepare_cursor(self, cursor: Any) -> None:
        """Create the SQL functions on a connection, over the newest state of the store."""
        register_macros(cursor)
        show_store(cursor, self.store)

    def resolve(
        self, cursor: Any, build: Build, run: Run, output: Output, settings: Settings
    ) -> Summary | None:
        """Build a table whose query may call LLM functions; see `resolve_loop.resolve`."""
        if run.spool_folder.parent.is_dir():
            from dbt_llm.spool import remove_abandoned

            remove_abandoned(run.spool_folder.parent)
        settings = replace(settings, warn=lambda text: output.warn(f"llm: {run.name}: {text}"))
        if settings.refresh:
            # Whatever the clock says now, the new answers are newer than those they replace.
            run = replace(run, after_us=newest_us(cursor, self.store) + 1)
        runner = Runner(self.config, self.store, run, output, settings.cancelled)
        summary = resolve(
            cursor, build, self.collector, self.store, self._in_flight, runner, settings
        )
        if summary is not None:
            output.info(summary_line(run.name, summary))
        return summary
