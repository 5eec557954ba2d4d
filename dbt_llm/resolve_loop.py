"""The resolve loop: evaluate a query, ask for what it lacks, evaluate again, until nothing lacks.

DuckDB itself says which prompts a query needs: where the store has no answer, the SQL functions
hand the prompt to the collector and yield NULL. The evaluation that collects nothing is the
result. This module knows DuckDB and the job, and nothing of dbt.
"""

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from dbt_llm import functions, sql
from dbt_llm.block_cache import free_cached_blocks
from dbt_llm.call import Call
from dbt_llm.collector import MAX_SEEN, Collector, Mode, Resolution
from dbt_llm.errors import (
    CallError,
    NotSettledError,
    SchemaChangeError,
    StoreError,
    TooManyErrorsError,
    UnresolvedError,
)
from dbt_llm.gaps import Gap, are_all_and_few, can_be_filled, close, count_missing, fill
from dbt_llm.in_flight import InFlight, wait_for
from dbt_llm.job_spec import JobResult
from dbt_llm.lookup import lasting, show_answers
from dbt_llm.unique_keys import UniqueKeys

if TYPE_CHECKING:
    from dbt_llm.spool import Prepared, RequestFile
    from dbt_llm.store import Store

# Counting the distinct prompts of a query costs a Python call per vector; a store of more rows
# than this is not worth it only to print a number.
_COUNT_UP_TO_ROWS = 250_000
_MAX_ROUNDS_OF_RECURSION = 100

RunJobs = Callable[["list[RequestFile]"], list[JobResult]]
"""Asks for the answers to request files, one job per LLM, and commits them."""


@dataclass(frozen=True)
class Build:
    """The statements that build one model."""

    query: str
    """The model's SELECT."""
    statement: str
    """What evaluates the query into its table."""
    table: str
    """That table, as SQL names it."""
    header: str = ""
    """Statements to run once, before everything else (dbt's `sql_header`)."""
    columns: list[str] | None = None
    """The columns that the query must have; None where it may have any."""
    keyed: "Build | None" = None
    """The same with key columns (see `key_columns.py`); None where the query allows none."""
    gapped: "Build | None" = None
    """The same for a table that is filled later (see `gaps.py`); of one with key columns only."""
    gaps: Sequence[Gap] = ()

    @property
    def undo(self) -> str:
        """What removes the table again."""
        return f"drop table {self.table}"

    def with_query(self, query: str) -> "Build | None":
        """Return the same for another text of the query; None where its place is not clear."""
        if self.statement.count(self.query) != 1:
            return None
        return replace(self, query=query, statement=self.statement.replace(self.query, query))


@dataclass
class Summary:
    """What a resolve did, for the line that people read."""

    calls: dict[str, Call]
    prompts: int | None = None
    """Distinct prompts of the query; None where counting them would cost too much."""
    jobs: list[JobResult] = field(default_factory=list)
    left_null: int = 0
    """Prompts without an answer, left NULL on purpose (`llm_mode: null`, `llm_limit`)."""

    def counts(self) -> dict[str, Any]:
        """Return what was done in numbers; `prompts` and `stored` are None where not counted."""
        answered = sum(job.answered for job in self.jobs)
        stored = None
        if self.prompts is not None:
            stored = max(0, self.prompts - answered - self.left_null)
        return {
            "prompts": self.prompts,
            "stored": stored,
            "generated": self.generated,
            "failed": self.failed,
            "left_null": self.left_null,
            "prompt_tokens": sum(job.prompt_tokens for job in self.jobs),
            "completion_tokens": sum(job.completion_tokens for job in self.jobs),
            "cost_usd": sum(job.cost_usd for job in self.jobs),
        }

    @property
    def generated(self) -> int:
        """Prompts that were answered just now."""
        return sum(job.answered - job.failed for job in self.jobs)

    @property
    def failed(self) -> int:
        """Prompts that failed just now."""
        return sum(job.failed for job in self.jobs)


@dataclass(frozen=True)
class Settings:
    """What a resolve is allowed to do."""

    run_id: str
    spool_folder: Path
    mode: Mode = Mode.GENERATE
    refresh: bool = False
    """Ask again for what is stored."""
    limit: int | None = None
    """The largest number of requests; the rest stays NULL."""
    max_error_ratio: float = 1.0
    """More failed prompts than this share are an error."""
    unique_keys: UniqueKeys | None = None
    """Knows which stores have every key once."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the user interrupts."""
    alone: Callable[[], bool] = lambda: False
    """Tells whether nothing else uses the database just now."""
    warn: Callable[[str], None] = lambda _: None
    """Takes what a person should know about the query."""


def resolve(
    cursor: Any,
    build: Build,
    collector: Collector,
    store: "Store",
    in_flight: InFlight,
    run_jobs: RunJobs,
    settings: Settings,
) -> Summary | None:
    """Build a model whose query may call LLM functions.

    Returns:
        What was done, or None when the query asks no LLM; then only the header ran.

    Raises:
        DbtLLMError: see `errors.py`. The statement's table is then in the cursor's transaction,
            which the caller rolls back.
    """
    planned = plan_query(
        cursor, collector, settings.mode, settings.spool_folder, build.header, build.query
    )
    with planned as resolution:
        if not resolution.asks:
            return None
        _check_columns(cursor, build, resolution)
        build = asked_after_limit(cursor, build, resolution, settings.warn)
        build = with_keyed(cursor, build, resolution)
        return _Loop(cursor, build, resolution, store, in_flight, run_jobs, settings).run()


@contextlib.contextmanager
def plan_query(
    cursor: Any, collector: Collector, mode: Mode, spool_folder: Path, header: str, query: str
) -> Iterator[Resolution]:
    """Run the header and plan a query under a resolution of its own; yield what it calls.

    Within the `with`, the cursor's LLM functions hand their missing prompts to that resolution.

    Raises:
        CallError: something is wrong with a call.
    """
    token, resolution = collector.open(mode, spool_folder)
    try:
        cursor.execute(f"set variable {functions.TOKEN_VARIABLE} = {sql.literal(token)}")
        if header:
            cursor.execute(header)
        _explain(cursor, query, resolution)
        yield resolution
    finally:
        collector.close(token)
        shutil.rmtree(spool_folder, ignore_errors=True)
        # After an error the transaction is aborted, and then the cursor is not used any more.
        with contextlib.suppress(duckdb.Error):
            cursor.execute(f"set variable {functions.TOKEN_VARIABLE} = null")


def _check_columns(cursor: Any, build: Build, resolution: Resolution) -> None:
    """Refuse other columns than those of the table before they are paid for."""
    if build.columns is None:
        return
    call_sites = resolution.call_sites
    query = [name for name, *_ in cursor.execute(f"describe {build.query}").fetchall()]
    # That planned the calls once more, and made no new ones.
    resolution.call_sites = call_sites
    known, found = ({name.lower() for name in names} for names in (build.columns, query))
    if known != found:
        raise SchemaChangeError(
            "on_schema_change is 'fail', and the query has other columns than its table. New: "
            f"{', '.join(sorted(found - known)) or 'none'}. Gone: "
            f"{', '.join(sorted(known - found)) or 'none'}. Nothing was asked. Run with "
            "--full-refresh, which asks only for what is missing, or set on_schema_change to "
            "append_new_columns or sync_all_columns."
        )


def asked_after_limit(
    cursor: Any, build: Build, resolution: Resolution, warn: Callable[[str], None]
) -> Build:
    """Let a query that cuts rows ask only for those that it keeps (see `limits.py`)."""
    from dbt_llm.limits import ask_after_limit, same_columns

    query, warnings = ask_after_limit(build.query)
    call_sites = resolution.call_sites
    if query != build.query:
        changed = build.with_query(query)
        if changed is not None and same_columns(cursor, build.query, query):
            build = changed
        else:
            warnings = [
                "a call may be asked for more rows than the query keeps: the query that asks later "
                "would have other columns. Give each column of the select list a name of its own."
            ]
    # Comparing plans the calls once more, and that makes no new ones.
    resolution.call_sites = call_sites
    for warning in warnings:
        warn(warning)
    return build


def with_keyed(cursor: Any, build: Build, resolution: Resolution) -> Build:
    """Return a build that has one with key columns beside it, if its query allows that."""
    from dbt_llm.key_columns import with_key_columns

    call_sites = resolution.call_sites
    variable = sql.literal(functions.TOKEN_VARIABLE)
    token = sql.scalar(cursor, f"select getvariable({variable})")
    with cursor.cursor() as other:
        functions.register_macros(other)
        other.execute(f"set variable {functions.TOKEN_VARIABLE} = {sql.literal(token)}")
        found = with_key_columns(other, build.query)
    # That planned the calls once more, and made no new ones.
    resolution.call_sites = call_sites
    keyed = None if found is None else build.with_query(found.query)
    if found is None or keyed is None:
        return build
    if found.gapped and can_be_filled(cursor, build.statement, build.query, build.table):
        gapped = keyed.with_query(found.gapped.query)
        if gapped is not None:
            keyed = replace(keyed, gapped=replace(gapped, gaps=found.gapped.gaps))
    return replace(build, keyed=keyed)


def fastest(cursor: Any, build: Build) -> Build:
    """Return the one with key columns where DuckDB can make use of them for the store as it is."""
    from dbt_llm.key_columns import rows_pass_by

    keyed = build.keyed
    return keyed if keyed is not None and rows_pass_by(cursor, keyed.query) else build


class _Loop:
    def __init__(
        self,
        cursor: Any,
        build: Build,
        resolution: Resolution,
        store: "Store",
        in_flight: InFlight,
        run_jobs: RunJobs,
        settings: Settings,
    ) -> None:
        self._cursor = cursor
        self._build = build
        self._resolution = resolution
        self._store = store
        self._in_flight = in_flight
        self._run_jobs = run_jobs
        self._settings = settings
        self._asked: list[RequestFile] = []
        self._history: tuple[str, ...] = ()
        self._all_new = self._counting = False
        self._to_fill: Build | None = None
        """What the table was built with, where it is there and waits for answers."""
        self._summary = Summary(calls=resolution.calls)
        self._mine = f"run_id = {sql.literal(settings.run_id)}"
        """The SQL condition for the answers of this run."""

    def run(self) -> Summary:
        if self._settings.mode is Mode.GENERATE:
            self._store.create()
            lost = self._store.forget_lost()
            if lost:
                self._settings.warn(
                    f"{lost:,} {'file' if lost == 1 else 'files'} of the generation store "
                    f"{self._store.files} were removed by somebody; what they held is asked again"
                )
            self._store.adopt()
        # A call within a call needs the inner answer first, so each nesting takes one round. No
        # query nests deeper than it has calls, unless it is recursive.
        recursive = re.search(r"\bwith\s+recursive\b", self._build.query, re.IGNORECASE)
        most = _MAX_ROUNDS_OF_RECURSION if recursive else self._resolution.call_sites
        rounds = 0
        refresh = self._settings.refresh
        while True:
            raw = self._evaluate(refresh)
            if raw is None and refresh and (self._summary.failed or self._resolution.missing):
                # What could not be asked anew keeps the answer that it had; a call around it may
                # then ask a prompt that is new.
                self._cursor.execute(self._build.undo)
                refresh, rounds = False, 0
                continue
            if raw is None:
                break
            if rounds == most:
                raise NotSettledError(
                    f"After {most} round(s) of questions the query still needs new answers, so its "
                    "prompts differ at every evaluation. Look for random(), uuid(), now(), an "
                    "unordered list() or string_agg(), or a LIMIT without ORDER BY, and compute "
                    "such values in an upstream model. The answers so far are stored."
                )
            rounds += self._ask(raw)
            if self._to_fill is not None and self._fill(self._to_fill):
                break
        self._finish()
        return self._summary

    def _evaluate(self, refresh: bool) -> Path | None:
        """Build the table; return what was missing.

        Then the table is gone again, or it is to be filled.
        """
        snapshot = show_answers(
            self._cursor,
            self._store,
            self._mine if refresh else f"{self._mine} or {lasting()}",
            self._resolution.calls,
            None if refresh else self._settings.unique_keys,
            look=bool(self._asked),
            there=self._settings.mode is not Mode.GENERATE,
        )
        self._history = snapshot.files
        self._counting = snapshot.rows is not None and snapshot.rows <= _COUNT_UP_TO_ROWS
        settings = self._settings
        if snapshot.rows == 0 and settings.mode is Mode.GENERATE and settings.limit is None:
            # All prompts are asked, and what is asked is counted in any case.
            self._all_new, self._counting = True, False
            self._summary.prompts = self._summary.prompts or 0
        self._resolution.seen.clear()
        self._resolution.missing.clear()
        self._cursor.execute(
            f"set variable {functions.COUNT_VARIABLE} = {'true' if self._counting else 'null'}"
        )
        build = fastest(self._cursor, self._build)
        mode = self._resolution.mode
        if build.gapped is not None and mode is Mode.GENERATE and not (refresh or self._all_new):
            build = build.gapped
        _execute(self._cursor, build.statement, self._resolution)
        seen = len(self._resolution.seen)
        # DuckDB may also have found another plan, in which the rows of the calls are not needed.
        if self._counting and not seen and self._asked and self._reads_arrow():
            raise NotSettledError(
                "The query asked for answers, and evaluated again it has no prompt at all, so its "
                "input can be read only once. Give it a table instead of a stream, for example "
                "to_arrow_table() instead of arrow(). The answers are stored."
            )
        if self._counting:
            # A call that depends on another's answer may be asked first and not needed then.
            most = max(seen, self._summary.prompts or 0)
            self._summary.prompts = most if most < MAX_SEEN else None
        elif not self._all_new:
            self._summary.prompts = None
        collected = self._resolution.spool.rows
        raw = self._resolution.spool.take()
        self._to_fill = None
        if raw is None:
            close(self._cursor, build.table, build.gaps)
        elif build.gaps and are_all_and_few(self._cursor, build.table, build.gaps, collected):
            self._to_fill = build
        else:
            self._cursor.execute(build.undo)
        return raw

    def _fill(self, build: Build) -> bool:
        """Put the answers of this run into the table; return whether none is missing then.

        Otherwise the table is gone.
        """
        if self._resolution.mode is Mode.GENERATE:
            show_answers(self._cursor, self._store, self._mine, self._resolution.calls, look=True)
            fill(self._cursor, build.table, build.gaps)
            if not count_missing(self._cursor, build.table, build.gaps):
                close(self._cursor, build.table, build.gaps)
                return True
        self._cursor.execute(build.undo)
        return False

    def _reads_arrow(self) -> bool:
        plan = self._cursor.execute(f"explain {self._build.query}").fetchall()
        return "ARROW_SCAN" in str(plan)

    def _ask(self, raw: Path) -> bool:
        """Ask for what is missing; return whether this run asked anything itself."""
        from dbt_llm.lengths import near_history
        from dbt_llm.spool import prepare_requests

        if self._settings.alone():
            free_cached_blocks(self._cursor)
        limit = self._settings.limit
        if limit is not None:
            limit = max(0, limit - sum(file.rows for file in self._asked))
        folder = self._settings.spool_folder / f"round-{len(self._asked)}"

        history = near_history(self._store.files, self._history, folder)

        def prepare(others: "list[RequestFile]") -> "Prepared":
            return prepare_requests(
                raw,
                self._resolution.calls,
                folder,
                asked=self._asked,
                others=others,
                limit=limit,
                history=history,
            )

        run_id = self._settings.run_id
        left_out = False
        prepared, waiting_for = self._in_flight.claim(run_id, prepare)
        if self._summary.prompts is not None and not self._counting:
            self._summary.prompts += prepared.rows + prepared.left_to_others
        try:
            if prepared.files:
                self._asked += prepared.files
                jobs = self._run_jobs(prepared.files)
                self._summary.jobs += jobs
                left_out = any(job.left_out for job in jobs)
        finally:
            self._in_flight.release(run_id)
        wait_for(waiting_for, self._settings.cancelled)
        if left_out or (limit is not None and prepared.rows >= limit):
            # The limit is used up: what is still missing in the next evaluation stays NULL.
            self._resolution.mode = Mode.NULL
        elif not prepared.files and not waiting_for:
            raise StoreError(
                "The query needs prompts that this run has asked and stored, and the store does "
                f"not give them back. Look at {self._store.files}: was it changed or removed?"
            )
        return bool(prepared.files)

    def _finish(self) -> None:
        self._check_failures()
        missing = self._resolution.missing
        if missing and self._settings.mode is Mode.CACHED:
            raise UnresolvedError(
                f"llm_mode is cached and {len(missing):,} prompt(s) have no stored answer, for "
                f"example {min(missing)}. Run once with llm_mode: generate, or point the profile "
                "at a store that has them."
            )
        self._summary.left_null = len(missing)

    def _check_failures(self) -> None:
        summary, allowed = self._summary, self._settings.max_error_ratio
        asked = sum(job.answered for job in summary.jobs)
        prompts = max(asked, summary.prompts or 0)
        if not summary.failed or summary.failed / prompts <= allowed:
            return
        codes: dict[str, int] = {}
        for job in summary.jobs:
            for code, rows in job.errors.items():
                codes[code] = codes.get(code, 0) + rows
        detail = ", ".join(f"{code}: {rows:,}" for code, rows in sorted(codes.items()))
        raise TooManyErrorsError(
            f"{summary.failed:,} of {prompts:,} prompts failed ({detail}), more than "
            f"max_error_ratio = {allowed:g} allows. All good answers are stored; a rerun asks "
            "only for failures that may pass. To accept failed rows as NULL, raise "
            "max_error_ratio in the profile."
        )


def _explain(cursor: Any, query: str, resolution: Resolution) -> None:
    """Plan a query, which shows its calls and refuses what is wrong with them."""
    try:
        _execute(cursor, f"explain {query}", resolution)
    except (duckdb.BinderException, duckdb.NotImplementedException) as error:
        if "llm_" not in query:
            raise
        raise CallError(f"{error}\n\n{_BINDER_HINT}") from None


_BINDER_HINT = """\
If this is about an LLM function: its options (all but the first argument) must be constants. Its
prompt must not contain a window function, or an aggregate without a column such as count(*);
compute these in a CTE or an upstream model, and use the column in the prompt."""


def _execute(cursor: Any, statement: str, resolution: Resolution) -> None:
    """Run a statement; what the Python functions raised in it is raised as it was.

    DuckDB wraps such an error in text of its own, and drops it where it only tried to fold a
    constant while it planned.
    """
    try:
        cursor.execute(statement).fetchall()
    except duckdb.Error:
        if resolution.error is None:
            raise
    if resolution.error is not None:
        raise resolution.error from None
