"""What a run would ask and cost, found without asking anything.

Each model's query is evaluated as a run would do it, in a transaction that is rolled back. What the
collector then holds is what the run would ask.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb

from dbt_llm import functions, sql
from dbt_llm.call import Call
from dbt_llm.collector import Mode, Resolution
from dbt_llm.errors import DbtLLMError
from dbt_llm.lengths import near_history
from dbt_llm.lookup import lasting, read_table, show_answers
from dbt_llm.resolve_loop import Build, asked_after_limit, fastest, plan_query, with_keyed
from dbt_llm.runner import node_name
from dbt_llm.schema import GENERATIONS, RUNS
from dbt_llm.select_text import may_call
from dbt_llm.session import Session
from dbt_llm.spool import RequestFile, prepare_requests
from dbt_llm.text_table import text_table
from dbt_llm.token_count import TokenCounter, token_counter

_TABLE = "temp.main.dbt_llm_planned"
_FAR_LONGER = 20
_LONG_BYTES = 8_000


@dataclass(frozen=True)
class Model:
    """A model as dbt compiled it."""

    node_id: str
    query: str
    header: str = ""
    """Its `sql_header`."""
    unknown: str | None = None
    """Why nothing can be said of it."""
    upstream: tuple[str, ...] = ()
    """The node ids of the models that it reads."""

    @property
    def name(self) -> str:
        """Its name without the project."""
        return node_name(self.node_id)


@dataclass
class CallPlan:
    """What one call of a model would ask."""

    llm: str
    model: str
    kind: str
    """text, choice, json or embedding."""
    stored: int = 0
    """Distinct prompts that have an answer."""
    to_ask: int = 0
    prompt_tokens: float = 0.0
    """Expected, of all that is asked."""
    completion_tokens: float = 0.0
    cost_usd: float = 0.0
    seconds: float | None = None
    """At the rate of the last run that asked this LLM; None where there was none."""


@dataclass
class ModelPlan:
    """What one model would ask."""

    node_id: str
    rows: int | None = None
    """Of its query, as far as the stored answers tell; None where it is not known."""
    calls: list[CallPlan] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown: str | None = None

    @property
    def to_ask(self) -> int:
        """Requests of all its calls."""
        return sum(call.to_ask for call in self.calls)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def plan_models(
    session: Session,
    cursor: Any,
    models: Iterable[Model],
    folder: Path,
    limit: int | None = None,
    mode: Mode = Mode.GENERATE,
    refresh: bool = False,
) -> list[ModelPlan]:
    """Plan models in the order of a run; those that call no LLM are left out.

    `folder` takes the requests while they are counted; the others are the dbt variables.
    """
    planner = _Planner(session, cursor, folder, limit, mode, refresh)
    plans = [planner.plan(model) for model in models]
    return [plan for plan in plans if plan is not None]


class _Planner:
    def __init__(
        self,
        session: Session,
        cursor: Any,
        folder: Path,
        limit: int | None,
        mode: Mode,
        refresh: bool,
    ) -> None:
        self._session = session
        self._cursor = cursor
        self._folder = folder
        self._limit = limit
        self._mode = mode
        self._refresh = refresh
        self._asked: list[RequestFile] = []
        self._changing: set[str] = set()
        self._generations = read_table(cursor, session.store, GENERATIONS)
        self._rates = self._last_rates()
        self._counters: dict[str, TokenCounter | None] = {}
        self._too_long: set[str] = set()
        """The request files of which a warning says that some do not fit."""

    def plan(self, model: Model) -> ModelPlan | None:
        plan = ModelPlan(model.node_id)
        if model.unknown is not None:
            plan.unknown = model.unknown
            return plan
        self._cursor.execute("begin transaction")
        try:
            counted = self._count(model, plan)
        except duckdb.CatalogException as error:
            # Whatever it reads is not there; a run would build it first.
            plan.unknown = f"what it reads is not built yet ({_first_line(error)})"
            return plan if may_call(model.query) else None
        except (duckdb.Error, DbtLLMError) as error:
            plan.unknown = _first_line(error)
            return plan
        finally:
            self._cursor.execute("rollback")
        if not counted:
            return None
        for node_id in sorted(self._changing.intersection(model.upstream)):
            plan.warnings.append(
                f"it reads {node_name(node_id)}, whose answers the run asks first; what these "
                "make of its prompts is not known"
            )
        if plan.to_ask:
            self._changing.add(model.node_id)
        return plan

    def _count(self, model: Model, plan: ModelPlan) -> bool:
        """Fill the plan of a model; return whether it calls an LLM."""
        folder = self._folder / f"plan-{len(self._asked)}-{model.name}"
        cursor, session = self._cursor, self._session
        planned = plan_query(
            cursor, session.collector, Mode.GENERATE, folder / "raw", model.header, model.query
        )
        with planned as resolution:
            if not resolution.asks:
                return False
            build = Build(
                model.query,
                f"create temp table {_TABLE} as (\n{model.query}\n)",
                _TABLE,
            )
            build = asked_after_limit(cursor, build, resolution, plan.warnings.append)
            build = with_keyed(cursor, build, resolution)
            snapshot = show_answers(
                cursor,
                session.store,
                "false" if self._refresh else lasting(),
                resolution.calls,
                # A run asks again for what somebody removed.
                there=True,
            )
            cursor.execute(f"set variable {functions.COUNT_VARIABLE} = true")
            cursor.execute(fastest(cursor, build).statement).fetchall()
            if resolution.error is not None:
                raise resolution.error
            plan.rows = sql.scalar(cursor, f"select count(*) from {_TABLE}")
            raw = resolution.spool.take()
            files: list[RequestFile] = []
            if raw is not None:
                files = prepare_requests(
                    raw,
                    resolution.calls,
                    folder,
                    asked=self._asked,
                    others=[],
                    limit=self._limit,
                    history=near_history(session.store.files, snapshot.files, folder),
                ).files
            files = [self._counted(file, plan) for file in files]
            plan.calls = self._calls(resolution, files)
            self._asked += files
            self._warn(model, plan, files)
            return True

    def _calls(self, resolution: Resolution, files: list[RequestFile]) -> list[CallPlan]:
        plans = {
            call_hash: CallPlan(
                call.llm, call.content["model"], call.content["output"]["type"], stored=stored
            )
            for call_hash, call, stored in self._stored(resolution)
        }
        for file in files:
            plan = plans[file.call.call_hash]
            plan.to_ask += file.rows
            plan.prompt_tokens += file.rows * file.prompt_tokens
            plan.completion_tokens += file.rows * file.completion_tokens
        for plan in plans.values():
            price = self._session.config.llms[plan.llm].price
            plan.cost_usd = price.of(plan.prompt_tokens, plan.completion_tokens)
            rate = self._rates.get(plan.llm)
            plan.seconds = plan.to_ask / rate if rate else None
        return list(plans.values())

    def _counted(self, file: RequestFile, plan: ModelPlan) -> RequestFile:
        """Count the prompt tokens of a file with the LLM's own tokenizer, where it is at hand."""
        llm = file.call.llm
        if llm not in self._counters:
            self._counters[llm] = token_counter(self._session.config.llms[llm])
        counter = self._counters[llm]
        if counter is None:
            return file
        cut = self._session.config.llms[llm].on_long_prompt == "truncate"
        counted = counter.count_file(self._cursor, file, cut)
        if counted.too_long and not cut:
            self._too_long.add(file.path)
            plan.warnings.append(
                f"{'' if counted.exact else 'about '}{counted.too_long:,} of its prompts do not "
                f"fit into the {counter.most:,} tokens of {llm} (the longest has "
                f"{counted.longest:,}), and fail with context_length"
            )
        return replace(file, prompt_tokens=counted.mean)

    def _stored(self, resolution: Resolution) -> list[tuple[str, Call, int]]:
        """Count, for each call, the distinct prompts of the query that have an answer."""
        keys = resolution.seen.keys()
        self._cursor.register("dbt_llm_seen", keys)
        try:
            found = dict(
                self._cursor.execute(
                    "select call_hash, count(distinct prompt_hash) "
                    "from temp.main.dbt_llm_generations semi join dbt_llm_seen using (prompt_hash) "
                    "group by call_hash"
                ).fetchall()
            )
        finally:
            self._cursor.unregister("dbt_llm_seen")
        return [
            (call_hash, call, found.get(call_hash, 0))
            for call_hash, call in resolution.calls.items()
        ]

    def _warn(self, model: Model, plan: ModelPlan, files: list[RequestFile]) -> None:
        if plan.to_ask and self._mode is not Mode.GENERATE:
            then = "fails" if self._mode is Mode.CACHED else "has NULL for them"
            plan.warnings.append(
                f"llm_mode is {self._mode.value}: a run asks none of these prompts, and {then}"
            )
        for call in plan.calls:
            if plan.to_ask and not call.stored and not call.to_ask:
                plan.warnings.append(
                    f"a call of {call.llm} ({call.kind}) has no prompts yet; where they depend on "
                    "the answers to another call, the run asks for them later, beyond this plan"
                )
            if call.stored or not call.to_ask or self._refresh:
                continue
            before = sql.scalar(
                self._cursor,
                f"select count(*) from {self._generations} where status = 'ok' "
                f"and node_id = {sql.literal(model.node_id)} and llm = {sql.literal(call.llm)}",
            )
            if before:
                plan.warnings.append(
                    f"it asks {call.llm} everything anew: none of its prompts has an answer, "
                    f"although the store has {before:,} of this model. Was the instruction or the "
                    "LLM changed, or does a prompt hold a date or a time?"
                )
        for file in files:
            if file.path in self._too_long:
                continue
            longest, mean = self._cursor.execute(
                f"select max(strlen(prompt)), avg(strlen(prompt)) from {sql.parquet([file.path])}"
            ).fetchall()[0]
            if longest > max(_LONG_BYTES, _FAR_LONGER * mean):
                plan.warnings.append(
                    f"its longest prompt has {longest:,} bytes, and the mean is {mean:,.0f}"
                )

    def _last_rates(self) -> dict[str, float]:
        """Return the requests per second of each LLM when it was last asked."""
        runs = read_table(self._cursor, self._session.run_log.table, RUNS)
        return dict(
            self._cursor.execute(
                "select job.llm, "
                "arg_max((job.generated + job.failed) / job.generating_s, started_at) "
                f"from (select unnest(jobs) as job, started_at from {runs}) "
                "where job.generating_s > 0 and job.generated + job.failed > 0 group by job.llm"
            ).fetchall()
        )


def describe(plans: list[ModelPlan]) -> str:
    """Return the plans as people read them."""
    head = ("model", "call", "rows", "stored", "to ask", "tokens", "USD", "time")
    lines: list[tuple[str, ...]] = []
    for plan in plans:
        name = node_name(plan.node_id)
        rows = "?" if plan.rows is None else f"{plan.rows:,}"
        for call in plan.calls:
            tokens = call.prompt_tokens + call.completion_tokens
            lines.append(
                (
                    name,
                    f"{call.llm} ({call.kind})",
                    rows,
                    f"{call.stored:,}",
                    f"{call.to_ask:,}",
                    f"~{tokens:,.0f}" if call.to_ask else "0",
                    f"~{call.cost_usd:,.4f}" if call.to_ask else "0",
                    _duration(call.seconds) if call.to_ask else "",
                )
            )
        if plan.unknown is not None:
            lines.append((name, "", "?", "?", "?", "?", "?", ""))
    total = [call for plan in plans for call in plan.calls]
    tokens = sum(call.prompt_tokens + call.completion_tokens for call in total)
    cost = sum(call.cost_usd for call in total)
    asked = sum(call.to_ask for call in total)
    lines.append(("total", "", "", "", f"{asked:,}", f"~{tokens:,.0f}", f"~{cost:,.4f}", ""))
    text = text_table(head, lines, left={"model", "call"})
    notes = []
    for plan in plans:
        name = node_name(plan.node_id)
        notes += [f"{name}: {warning}" for warning in plan.warnings]
        if plan.unknown is not None:
            notes.append(f"{name}: not known, {plan.unknown}")
    return "\n".join([text, *(["", *notes] if notes else [])])


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"~{max(1, round(seconds))} s"
    return f"~{seconds / 60:.0f} min" if seconds < 5400 else f"~{seconds / 3600:.1f} h"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
