"""A profile at work: its collector, its store, and how a query is resolved with them.

The dbt plugin has one; `dbt_llm.resolve` in a notebook has one per config.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dbt_llm.budget import Account
from dbt_llm.collector import Collector, Mode
from dbt_llm.config import Config
from dbt_llm.errors import CancelledError, panics_as_errors
from dbt_llm.functions import register_functions, register_macros
from dbt_llm.in_flight import InFlight
from dbt_llm.lookup import newest_us, show_store
from dbt_llm.progress import summary_line
from dbt_llm.resolve_loop import Build, Settings, Summary, resolve
from dbt_llm.run_log import RunLog, run_row
from dbt_llm.runner import Output, Run, Runner
from dbt_llm.store import open_store
from dbt_llm.store_upkeep import tidy


class Session:
    """See the module's text."""

    def __init__(self, config: Config, outside: Callable[[int], None] | None = None) -> None:
        """Make the collector and the store; nothing is read yet.

        `outside` decides about missing prompts where no query is being resolved (see `Collector`).
        """
        self.config = config
        self.store = open_store(config.store)
        self.collector = Collector(config.llms, outside)
        self.run_log = RunLog(config.store)
        self._in_flight = InFlight()
        self._accounts: dict[str, Account] = {}
        self._lock = threading.Lock()

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
        account = self._account(run)
        runner = Runner(self.config, self.store, account, run, output, settings.cancelled)
        started = time.time()
        summary, failure = None, None
        try:
            summary = resolve(
                cursor, build, self.collector, self.store, self._in_flight, runner, settings
            )
        except BaseException as error:
            failure = error
            raise
        finally:
            if settings.mode is Mode.GENERATE and (summary is not None or runner.jobs):
                self._log(runner, output, started, summary, failure)
                # Who has stopped a run does not want to wait for it.
                if not isinstance(failure, CancelledError | KeyboardInterrupt):
                    self._tidy(output, ["generations", "runs"] if runner.jobs else ["runs"])
        if summary is not None:
            output.info(summary_line(run.name, summary))
        return summary

    def _account(self, run: Run) -> Account:
        """Return what the run of dbt, of which this is one model, has used of its budget."""
        with self._lock:
            known = self._accounts.get(run.invocation_id)
            if known is None:
                budgets = {name: entry.budget for name, entry in self.config.llms.items()}
                known = Account(self.config.budget.tightened(run.max_cost_usd), budgets)
                # No two invocations run at once in a process.
                self._accounts = {run.invocation_id: known}
            return known

    def _log(
        self,
        runner: Runner,
        output: Output,
        started: float,
        summary: Summary | None,
        failure: BaseException | None,
    ) -> None:
        try:
            with panics_as_errors():
                row = run_row(runner.origin(), runner.jobs, summary, started, failure)
                self.run_log.append(row)
        except Exception as error:
            # The answers are stored; a model does not fail for its log.
            output.warn(f"llm: {runner.origin()['node_id']}: {error}")

    def _tidy(self, output: Output, tables: list[str]) -> None:
        for table in tables:
            try:
                with panics_as_errors():
                    tidy(self.config.store, table)
            except Exception as error:
                # The next run tries again; what is stored is read all the same.
                output.warn(f"llm: the store's table {table} is left as it is: {error}")
