"""What past runs were for and what they cost, from the run log and the store; nothing is asked."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import duckdb

from dbt_llm.config import StoreConfig
from dbt_llm.lookup import read_table
from dbt_llm.run_log import all_runs
from dbt_llm.runner import node_name
from dbt_llm.schema import GENERATIONS, RUNS
from dbt_llm.store import open_store
from dbt_llm.text_table import text_table

_SHORT_SHA = 8
_CENT = 0.01

# The worst that happened to a model of it.
_STATUS = """
    case when bool_or(status = 'error') then 'error'
    when bool_or(status = 'cancelled') then 'cancelled'
    when bool_or(status = 'unfinished') then 'unfinished' else 'ok' end"""
# A run that was killed has no end; a model without a question took no time worth speaking of.
_SECONDS = """
    case when not bool_or(status = 'unfinished')
    then max(epoch_us(started_at) / 1e6 + total_s) - min(epoch_us(started_at) / 1e6) end"""
_SUMS = """
    coalesce(sum(asked), 0)::bigint as asked, coalesce(sum(failed), 0)::bigint as failed,
    coalesce(sum(prompt_tokens), 0)::bigint as prompt_tokens,
    coalesce(sum(completion_tokens), 0)::bigint as completion_tokens,
    coalesce(sum(cost_usd), 0.0)::double as cost_usd"""


@dataclass
class Sums:
    """What was asked, and what it took."""

    asked: int
    failed: int
    prompt_tokens: int
    """Of requests for which something was generated."""
    completion_tokens: int
    cost_usd: float

    @property
    def tokens(self) -> int:
        """Of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Invocation(Sums):
    """One run of dbt."""

    invocation_id: str
    started_at: datetime
    target: str | None
    git_sha: str | None
    status: str
    models: int
    """Those that call an LLM."""
    seconds: float | None
    """From the start of its first model with calls to the end of the last; None if unknown."""


@dataclass
class ModelTotal(Sums):
    """One model, over all runs."""

    node_id: str
    runs: int
    errors: dict[str, int] = field(default_factory=dict)
    """Failed rows by their code."""


@dataclass
class Report:
    """The newest runs of dbt, all models, and the sum of all."""

    invocations: list[Invocation]
    invocations_in_all: int
    models: list[ModelTotal]
    total: Sums
    stored: Sums
    """The same sums over the answers in the store."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, times as ISO 8601."""
        plain = asdict(self)
        for entry in plain["invocations"]:
            entry["started_at"] = entry["started_at"].isoformat()
        return plain


def make_report(store: StoreConfig, runs: int) -> Report:
    """Read a store; `runs` is how many runs of dbt are listed, the newest first.

    Raises:
        StoreError: the store cannot be read.
    """
    with duckdb.connect() as connection:
        generations = read_table(connection, open_store(store), GENERATIONS)
        logged = read_table(connection, open_store(store, "runs"), RUNS)
        connection.execute(
            f"create temp table logged as select * from {all_runs(logged, generations)}"
        )
        invocations = [
            Invocation(
                **{**row, "started_at": datetime.fromtimestamp(row["started_at"] / 1e6, UTC)}
            )
            for row in _rows(
                connection,
                f"""
                select invocation_id, min(epoch_us(started_at)) as started_at,
                    any_value(target) as target,
                    any_value(git_sha) as git_sha, {_STATUS} as status,
                    count(distinct node_id) as models, {_SECONDS} as seconds, {_SUMS}
                from logged group by invocation_id
                order by min(started_at) desc, invocation_id limit {runs:d}""",
            )
        ]
        models = [
            ModelTotal(**row)
            for row in _rows(
                connection,
                f"select node_id, count(*) as runs, {_SUMS} from logged group by node_id",
            )
        ]
        models.sort(key=lambda model: (-model.cost_usd, -model.tokens, model.node_id))
        codes: dict[str, Counter[str]] = {model.node_id: Counter() for model in models}
        for row in _rows(connection, "select node_id, errors from logged where failed > 0"):
            codes[row["node_id"]].update(json.loads(row["errors"] or "{}"))
        for model in models:
            model.errors = dict(sorted(codes[model.node_id].items()))
        (total,) = _rows(connection, f"select {_SUMS} from logged")
        (stored,) = _rows(
            connection,
            "select count(*) as asked, count(*) filter (status = 'error') as failed, "
            "coalesce(sum(prompt_tokens) filter (completion_tokens is not null), 0)::bigint "
            "as prompt_tokens, coalesce(sum(completion_tokens), 0)::bigint as completion_tokens, "
            f"coalesce(sum(cost_usd), 0.0)::double as cost_usd from {generations}",
        )
        (count,) = _rows(connection, "select count(distinct invocation_id) as n from logged")
    return Report(invocations, count["n"], models, Sums(**total), Sums(**stored))


def _rows(connection: Any, query: str) -> list[dict[str, Any]]:
    cursor = connection.execute(query)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def describe_report(report: Report) -> str:
    """Return it as people read it."""
    if not report.invocations:
        return "No run has called an LLM yet: the store has no answers and no run log."
    shown, in_all = len(report.invocations), report.invocations_in_all
    which = "All runs of dbt" if shown == in_all else f"The last {shown} of {in_all:,} runs of dbt"
    parts = [
        f"{which}, the newest first (UTC)\n",
        _invocations(report.invocations),
        "\nAll models of all runs, the most expensive first\n",
        _models(report),
    ]
    if abs(report.total.cost_usd - report.stored.cost_usd) >= _CENT / 2:
        parts.append(
            f"\nThe answers in the store cost {report.stored.cost_usd:,.4f} USD, and the runs "
            f"{report.total.cost_usd:,.4f}: answers were removed from the store, or its run log "
            "could not be written."
        )
    return "\n".join(parts)


def _invocations(invocations: list[Invocation]) -> str:
    head = ("when", "target", "commit", "status", "models", *_HEAD, "seconds")
    rows = [
        (
            f"{one.started_at:%Y-%m-%d %H:%M:%S}",
            one.target or "?",
            (one.git_sha or "")[:_SHORT_SHA],
            one.status,
            f"{one.models:,}",
            *_cells(one),
            "?" if one.seconds is None else f"{one.seconds:,.1f}",
        )
        for one in invocations
    ]
    return text_table(head, rows, left={"when", "target", "commit", "status"})


def _models(report: Report) -> str:
    head = ("model", "runs", *_HEAD, "of all", "failed with")
    rows = []
    for model in report.models:
        codes = ", ".join(f"{count:,} {code}" for code, count in model.errors.items())
        share = _share(model.cost_usd, report.total.cost_usd)
        name = node_name(model.node_id)
        rows.append((name, f"{model.runs:,}", *_cells(model), share, codes))
    rows.append(("total", "", *_cells(report.total), "", ""))
    return text_table(head, rows, left={"model", "failed with"})


_HEAD = ("asked", "failed", "tokens", "USD")


def _cells(sums: Sums) -> tuple[str, ...]:
    return (
        f"{sums.asked:,}",
        f"{sums.failed:,}",
        f"{sums.tokens:,}",
        f"{sums.cost_usd:,.4f}",
    )


def _share(cost: float, total: float) -> str:
    return f"{cost / total:.1%}" if total else ""
