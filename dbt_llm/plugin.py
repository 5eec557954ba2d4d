"""The dbt-duckdb plugin: the only module that knows dbt.

dbt-duckdb creates one `Plugin` per process and profile. The package's macros reach it through
`adapter.store_relation('dbt_llm', ...)`, with what they want in the location's format:

- `resolve`: build a table; the `statement` in the config is replaced by what is left to do.
- `check_view`: refuse a view that calls LLM functions.
- `record`: write the stored answers to a file.
- `check_lakehouse`: refuse a wrong config of a lakehouse model.
- `lakehouse_exists`: tell whether a lakehouse model has a table; `exists` in the config gets it.
- `lakehouse`: write a model's rows into its lakehouse table; `select` in the config gets what
  reads it.
"""

import logging
import math
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import duckdb
from dbt.adapters.contracts.connection import AdapterResponse
from dbt.adapters.duckdb.connections import DuckDBConnectionManager
from dbt.adapters.duckdb.plugins import BasePlugin
from dbt.adapters.duckdb.utils import TargetConfig
from dbt.adapters.factory import get_adapter_by_type
from dbt.events.types import JinjaLogInfo, JinjaLogWarning
from dbt.flags import get_flags
from dbt.version import __version__ as dbt_version
from dbt_common.events.base_types import EventLevel
from dbt_common.events.event_manager_client import get_event_manager
from dbt_common.events.functions import fire_event
from dbt_common.exceptions import DbtRuntimeError
from dbt_common.invocation import get_invocation_id

from dbt_llm import python_models, sql
from dbt_llm.collector import Mode
from dbt_llm.config import load_config
from dbt_llm.credentials import is_url
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import CallError, ConfigError, DbtLLMError, UnresolvedError, panics_as_errors
from dbt_llm.lookup import read_table
from dbt_llm.object_scan import make_readable
from dbt_llm.record import write_answers
from dbt_llm.resolve_loop import Build, Settings, Summary, plan_query
from dbt_llm.run_log import all_runs
from dbt_llm.runner import Output, Run, new_run
from dbt_llm.schema import GENERATIONS, RUNS
from dbt_llm.session import Session
from dbt_llm.status_lines import StatusLines, is_watched
from dbt_llm.storage import open_folder
from dbt_llm.version import __version__

if TYPE_CHECKING:
    from dbt_llm.lake_config import ModelConfig

_DISPATCH_BLOCK = """\
    dispatch:
      - macro_namespace: dbt
        search_order: ['{project}', 'dbt_llm', 'dbt']"""

_NO_IS_INCREMENTAL = """\
{node_id} is materialized as lakehouse and calls is_incremental(), which dbt lets be true only in
incremental models. Add this file to your project (dbt-llm init does so), have your own macro of
that name do the same, or call dbt_llm.is_incremental() in the model:

    -- macros/is_incremental.sql
    {{% macro is_incremental() %}}{{{{ return(dbt_llm.is_incremental()) }}}}{{% endmacro %}}"""

# A call of it as dbt resolves it, and not of a package's own.
_IS_INCREMENTAL = re.compile(r"(?<![\w.])is_incremental\s*\(")

# Commands that only look; a prompt without a stored answer is NULL there.
_LOOKING = {"show", "compile", "docs", "generate", "parse", "list", "ls", "clone"}


_thread = threading.local()
"""`counts`: what the model that this thread builds has asked."""


@dataclass
class CountedResponse(AdapterResponse):  # type: ignore[misc]
    """What dbt writes into run_results.json as a model's `adapter_response`."""

    llm: dict[str, Any] = field(default_factory=dict)


def _count_in_responses() -> None:
    """Have dbt-duckdb's responses carry the counts; it has no hook for that."""
    plain = DuckDBConnectionManager.get_response
    if getattr(plain, "counts", False):
        return

    def get_response(cursor: Any) -> AdapterResponse:
        response = plain(cursor)
        counts = getattr(_thread, "counts", None)
        return response if counts is None else CountedResponse(str(response), llm=counts)

    get_response.counts = True  # type: ignore[attr-defined]
    DuckDBConnectionManager.get_response = staticmethod(get_response)


class Plugin(BasePlugin):  # type: ignore[misc]
    """See the module's text."""

    newest: ClassVar["Plugin | None"] = None
    """The one of the database that dbt opened last in this process."""

    def initialize(self, plugin_config: dict[str, Any]) -> None:
        """Check the config and make the collector and the store; nothing is read yet."""
        with _as_dbt_error():
            # dbt-duckdb merges the profile's settings into every plugin's config.
            settings = (self.creds.settings if self.creds else None) or {}
            config = load_config(plugin_config, settings, secrets_of(self.creds))
            self._session = Session(config, _missing_outside)
        self._lock = threading.Lock()
        self._views_are_open = False
        Plugin.newest = self
        python_models.serve(self._resolve_python)
        _count_in_responses()

    @property
    def session(self) -> Session:
        """The profile at work."""
        return self._session

    def configure_connection(self, conn: Any) -> None:
        """Prepare a DuckDB database."""
        self._session.prepare_database(conn)
        self._views_are_open = False

    def configure_cursor(self, cursor: Any) -> None:
        """Prepare one connection to it, as dbt opens one per node."""
        # dbt opens one for each node.
        _thread.counts = None
        with _as_dbt_error():
            self._open_views(cursor)
            self._session.prepare_cursor(cursor)

    def _open_views(self, cursor: Any) -> None:
        """Load the Delta extension where a view needs it, also in a run that does not write it."""
        with self._lock:
            # Now all databases are attached.
            if not self._views_are_open:
                lakehouse = self._session.config.lakehouse
                if is_url(lakehouse.path):
                    make_readable(cursor, open_folder(lakehouse.path, lakehouse.options()))
                query = "select bool_or(contains(sql, 'delta_scan(')) from duckdb_views()"
                if sql.scalar(cursor, f"{query} where not internal"):
                    load_delta_extension(cursor)
                self._views_are_open = True

    def store(self, target_config: TargetConfig) -> None:
        """Do what a macro of the package asks for."""
        request: dict[str, Any] = target_config.config
        with _as_dbt_error():
            _check_version(request["package_version"])
            assert target_config.location is not None
            match target_config.location.format:
                case "resolve":
                    self._resolve(request)
                case "check_view":
                    self._check_view(request)
                case "record":
                    self._record(request)
                case "relation":
                    self._relation(request)
                case "check_lakehouse":
                    self._check_lakehouse(request)
                case "lakehouse_exists":
                    self._lakehouse_exists(request)
                case "lakehouse":
                    self._lakehouse(request)

    def _resolve(self, request: dict[str, Any]) -> None:
        header = request["header"]
        statement = request["statement"].replace(header, "", 1) if header else request["statement"]
        cursor = _thread_cursor()
        summary = self._build(
            cursor,
            Build(request["query"], statement, request["table"], header, request["columns"]),
            node_id=request["node_id"],
            mode=_mode(request["mode"]),
            refresh=_is_true(request["refresh"]),
            limit=_limit(request["limit"]),
            max_cost_usd=_max_cost(request["max_cost_usd"]),
        )
        request["statement"] = statement if summary is None else "select 1"

    def _resolve_python(self, cursor: Any, build: Build, options: dict[str, Any]) -> None:
        with _as_dbt_error():
            variables = read_variables()
            mode = _mode(options["mode"]) if options["mode"] else variables.mode
            summary = self._build(
                cursor,
                build,
                node_id=options["node_id"] or "python model",
                mode=Mode.NULL if get_flags().EMPTY else mode,
                refresh=variables.refresh,
                limit=variables.limit,
                max_cost_usd=variables.max_cost_usd,
            )
        if summary is None:
            cursor.execute(build.statement)

    def _build(
        self,
        cursor: Any,
        build: Build,
        *,
        node_id: str,
        mode: Mode,
        refresh: bool,
        limit: int | None,
        max_cost_usd: float | None,
    ) -> Summary | None:
        run = replace(self._new_run(node_id), max_cost_usd=max_cost_usd)
        config = self._session.config
        cancelled = threading.Event()
        settings = Settings(
            run_id=run.run_id,
            spool_folder=run.spool_folder,
            unique_keys=run.unique_keys,
            mode=mode,
            refresh=refresh,
            limit=config.limit if limit is None else limit,
            max_error_ratio=config.max_error_ratio,
            cancelled=cancelled,
            alone=_is_alone,
        )
        with _interrupt_sets(cursor, cancelled):
            summary = self._session.resolve(cursor, build, run, _output(), settings)
        if summary is not None:
            _thread.counts = {"run_id": run.run_id, **summary.counts()}
        return summary

    def _new_run(self, node_id: str) -> Run:
        config = get_adapter_by_type("duckdb").config
        run = new_run(node_id, get_invocation_id(), Path(config.project_target_path))
        return replace(run, dbt_version=dbt_version, target=config.target_name)

    def _check_view(self, request: dict[str, Any]) -> None:
        cursor = _thread_cursor()
        run = self._new_run(request["node_id"])
        with plan_query(
            cursor,
            self._session.collector,
            Mode.NULL,
            run.spool_folder,
            request["header"],
            request["query"],
        ) as resolution:
            calls = resolution.calls
        if calls:
            raise CallError(
                f"{request['node_id']} calls an LLM function and is a view. The functions exist "
                "only in dbt's own connections, so nobody else could read it. Materialize it as "
                "table, incremental or external."
            )

    def _relation(self, request: dict[str, Any]) -> None:
        """Tell a macro how SQL reads a table of the store."""
        cursor = _thread_cursor()
        relation = read_table(cursor, self._session.store, GENERATIONS)
        if request["table"] == "runs":
            runs = read_table(cursor, self._session.run_log.table, RUNS)
            relation = all_runs(runs, relation)
        request["relation"] = relation

    def _check_lakehouse(self, request: dict[str, Any]) -> None:
        from dbt_llm.lakehouse import check_place

        _, location = self._lakehouse_at(request)
        check_place(location, self._session.config.lakehouse.options())
        if request["is_incremental"] and _asks_another_is_incremental(request["macros"]):
            raise ConfigError(_NO_IS_INCREMENTAL.format(node_id=request["node_id"]))

    def _lakehouse(self, request: dict[str, Any]) -> None:
        from dbt_llm.lake_table import Docs
        from dbt_llm.lakehouse import Model, write_model

        config, location = self._lakehouse_at(request)
        request["select"] = write_model(
            _thread_cursor(),
            Model(
                request["node_id"],
                request["rows"],
                config,
                location,
                request["is_incremental"],
                request["full_refresh"],
                Docs(request["description"] or None, request["comments"]),
                tuple(request["names"]),
                self._session.config.lakehouse.options(),
            ),
        )

    def _lakehouse_exists(self, request: dict[str, Any]) -> None:
        from dbt_llm.lakehouse import table_exists

        config, location = self._lakehouse_at(request)
        options = self._session.config.lakehouse.options()
        # What overwrites wants all rows, whatever is there.
        request["exists"] = config.strategy != "overwrite" and table_exists(
            config, location, options
        )

    def _lakehouse_at(self, request: dict[str, Any]) -> "tuple[ModelConfig, str]":
        from dbt_llm.lake_config import load_model_config, location_of

        config = load_model_config(request["node_id"], request["config"])
        root = self._session.config.lakehouse.path
        return config, location_of(config, root, *request["names"])

    def _record(self, request: dict[str, Any]) -> None:
        path = Path(str(request["path"]))
        answers = write_answers(_thread_cursor(), self._session.store, path)
        _info(f"llm: {answers:,} {'answer' if answers == 1 else 'answers'} recorded in {path}")


def secrets_of(credentials: Any) -> list[dict[str, Any]]:
    """Return the secrets that a profile has for DuckDB, as they stand there."""
    # dbt-duckdb takes type and name out of the profile's own list.
    return [
        {"type": secret.type, "scope": secret.scope, **(secret.secret_kwargs or {})}
        for secret in getattr(credentials, "_secrets", None) or []
    ]


def _missing_outside(rows: int) -> None:
    """Decide what happens to prompts without an answer where no model is being built."""
    flags = get_flags()
    if flags.WHICH in _LOOKING:
        _warn(f"llm: {rows:,} prompt(s) have no stored answer and are NULL here; dbt run asks them")
        return
    block = _DISPATCH_BLOCK.format(project="my_project")
    raise UnresolvedError(
        f"An LLM function met {rows:,} prompt(s) without a stored answer where none can be asked.\n"
        "In a model, or in the test llm_judge, this means that dbt_project.yml lacks the block "
        f"that lets dbt-llm build tables; add it, with your project's name:\n\n{block}\n\n"
        "In a data test, a hook or a query of a macro, run the model that asks these prompts "
        "first. In a unit test, or in a Python model, LLM functions only find what is stored."
    )


@contextmanager
def _as_dbt_error() -> Iterator[None]:
    """dbt shows the text of its own errors; others it shows as a traceback."""
    try:
        with panics_as_errors():
            yield
    except (DbtLLMError, duckdb.Error) as error:
        raise DbtRuntimeError(str(error)) from error


@contextmanager
def _interrupt_sets(cursor: Any, cancelled: threading.Event) -> Iterator[None]:
    """Let Ctrl-C reach a job.

    dbt cancels a node by `interrupt()` on its cursor, which only ends a query that DuckDB runs
    just then. While the job runs there is none, so the method also sets the job's flag.
    """
    interrupt = cursor.interrupt

    def both() -> None:
        cancelled.set()
        interrupt()

    cursor.interrupt = both
    try:
        yield
    finally:
        del cursor.interrupt


def _thread_cursor() -> Any:
    return get_adapter_by_type("duckdb").connections.get_thread_connection().handle.cursor()


def _is_alone() -> bool:
    """Tell whether this thread's connection is the only one that is open."""
    return getattr(DuckDBConnectionManager.env(), "handle_count", None) == 1


def _asks_another_is_incremental(names: Iterable[str]) -> bool:
    """Tell whether macros come to an is_incremental() that knows nothing of lakehouse models."""
    adapter = get_adapter_by_type("duckdb")
    macros = adapter.get_macro_resolver().macros
    root = macros.get(f"macro.{adapter.config.project_name}.is_incremental")
    if root is not None and "dbt_llm.is_incremental" in root.macro_sql:
        return False
    waiting, seen = list(names), {"macro.dbt_llm.is_incremental"}
    while waiting:
        name = waiting.pop()
        if name in seen or name not in macros:
            continue
        seen.add(name)
        if name.endswith(".is_incremental"):
            return True
        if name.split(".")[1] in {"dbt", "dbt_duckdb", "dbt_llm"}:
            continue
        if _IS_INCREMENTAL.search(macros[name].macro_sql):
            return True
        waiting += macros[name].depends_on.macros
    return False


def _check_version(package_version: str) -> None:
    if package_version != __version__:
        raise ConfigError(
            f"The dbt package dbt_llm has version {package_version}, the Python package dbt-llm "
            f"{__version__}. Install the same version of both, then run dbt deps."
        )


@dataclass(frozen=True)
class Variables:
    """The dbt variables of the package, checked."""

    mode: Mode
    refresh: bool
    limit: int | None
    max_cost_usd: float | None


def read_variables() -> Variables:
    """Read them outside of Jinja: of the command line, else of dbt_project.yml.

    Raises:
        ConfigError: one has a wrong value.
    """
    runtime = get_adapter_by_type("duckdb").config
    of_project = runtime.vars.to_dict()
    own = of_project.get(runtime.project_name)
    found = {**of_project, **(own if isinstance(own, dict) else {}), **(get_flags().VARS or {})}
    return Variables(
        mode=_mode(found.get("llm_mode", "generate")),
        refresh=_is_true(found.get("llm_refresh", False)),
        limit=_limit(found.get("llm_limit")),
        max_cost_usd=_max_cost(found.get("llm_max_cost_usd")),
    )


def _mode(value: Any) -> Mode:
    try:
        # In YAML, llm_mode: null is no text but nothing.
        return Mode.NULL if value is None else Mode(str(value))
    except ValueError:
        allowed = ", ".join(mode.value for mode in Mode)
        raise ConfigError(
            f"The dbt variable llm_mode is {value!r}; use one of {allowed}."
        ) from None


def _is_true(value: Any) -> bool:
    text = str(value).lower()
    if text not in {"true", "false"}:
        raise ConfigError(f"The dbt variable llm_refresh is {value!r}; use true or false.")
    return text == "true"


def _limit(value: Any) -> int | None:
    if value is None:
        return None
    if not str(value).isdecimal():
        raise ConfigError(f"The dbt variable llm_limit is {value!r}; use a whole number.")
    return int(value)


def _max_cost(value: Any) -> float | None:
    if value is None:
        return None
    try:
        cost = float(value)
    except (TypeError, ValueError):
        cost = math.nan
    if not 0 <= cost < math.inf:
        raise ConfigError(
            f"The dbt variable llm_max_cost_usd is {value!r}; use a number of dollars."
        )
    return cost


def _output() -> Output:
    flags = get_flags()
    # With --empty, which dbt test does not know, no model says that it asked nothing.
    info = _silent if getattr(flags, "EMPTY", False) else _info
    return Output(info, _warn, _status_lines if _watched() else None)


def _log_handlers() -> list[logging.Handler]:
    loggers = [getattr(one, "_python_logger", None) for one in get_event_manager().loggers]
    return [handler for logger in loggers if logger is not None for handler in logger.handlers]


_status_lines = StatusLines(_log_handlers)


def _watched() -> bool:
    """Tell whether a person sees what is printed as it comes."""
    flags = get_flags()
    quiet = flags.QUIET or flags.LOG_FORMAT == "json" or flags.LOG_LEVEL == "none"
    return not quiet and is_watched(sys.stderr)


def _silent(text: str) -> None:
    pass


def _info(text: str) -> None:
    fire_event(JinjaLogInfo(msg=text))


def _warn(text: str) -> None:
    fire_event(JinjaLogWarning(msg=text), level=EventLevel.WARN)
