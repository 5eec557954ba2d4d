"""The declared Arrow schemas of what crosses a boundary: requests, answers and generations."""

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

REQUESTS = pa.schema(
    [
        pa.field("prompt_hash", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
    ]
)
"""One row per request. The call is constant per file and stands in the job's spec."""

ANSWERS = pa.schema(
    [
        pa.field("prompt_hash", pa.string(), nullable=False),
        pa.field("output", pa.string()),
        pa.field("embedding", pa.list_(pa.float32())),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error_code", pa.string()),
        pa.field("error", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
        pa.field("tokens_estimated", pa.bool_()),
        pa.field("latency_s", pa.float64()),
        pa.field("attempts", pa.int32()),
    ]
)
"""What an engine says to a request, in any order."""

GENERATIONS = pa.schema(
    [
        pa.field("prompt_hash", pa.string(), nullable=False),
        pa.field("call_hash", pa.string(), nullable=False),
        pa.field("call", pa.string(), nullable=False),
        pa.field("prompt", pa.string()),
        pa.field("output", pa.string()),
        pa.field("embedding", pa.list_(pa.float32())),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error_code", pa.string()),
        pa.field("error", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int64()),
        pa.field("completion_tokens", pa.int64()),
        pa.field("tokens_estimated", pa.bool_()),
        pa.field("cost_usd", pa.float64()),
        pa.field("latency_s", pa.float64()),
        pa.field("attempts", pa.int32()),
        pa.field("llm", pa.string()),
        pa.field("model", pa.string()),
        pa.field("engine", pa.string()),
        pa.field("engine_version", pa.string()),
        pa.field("pipeline_version", pa.string()),
        pa.field("git_sha", pa.string()),
        pa.field("node_id", pa.string()),
        pa.field("invocation_id", pa.string()),
        pa.field("run_id", pa.string()),
        pa.field("trace_id", pa.string()),
        pa.field("created_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The store: one row per stored answer or error."""

_COUNTS = [
    pa.field("asked", pa.int64()),
    pa.field("generated", pa.int64()),
    pa.field("failed", pa.int64()),
    pa.field("errors", pa.string()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("completion_tokens", pa.int64()),
    pa.field("cost_usd", pa.float64()),
    pa.field("engine_start_s", pa.float64()),
    pa.field("generating_s", pa.float64()),
    pa.field("committing_s", pa.float64()),
]
_LLM = [pa.field(name, pa.string()) for name in ("llm", "model", "engine", "engine_version")]

RUNS = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("node_id", pa.string(), nullable=False),
        pa.field("invocation_id", pa.string(), nullable=False),
        pa.field("trace_id", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("error", pa.string()),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("prompts", pa.int64()),
        pa.field("stored", pa.int64()),
        pa.field("left_null", pa.int64()),
        *_COUNTS,
        pa.field("total_s", pa.float64()),
        pa.field("tokens_per_s", pa.float64()),
        pa.field("rows_per_s", pa.float64()),
        *_LLM,
        pa.field("pipeline_version", pa.string()),
        pa.field("git_sha", pa.string()),
        pa.field("dbt_version", pa.string()),
        pa.field("target", pa.string()),
        pa.field("jobs", pa.list_(pa.struct([*_LLM, *_COUNTS]))),
    ]
)
"""The run log: one row per node and run. `errors` is JSON, rows per error code."""

LASTING_ERRORS = (
    "context_length",
    "content_filter",
    "invalid_request",
    "truncated",
    "invalid_output",
)
"""A row that failed so would fail again: it stays until the prompt, the call or `llm_refresh`."""

PASSING_ERRORS = (
    "auth",
    "rate_limited",
    "timeout",
    "connection",
    "server_error",
    "engine_died",
    "unknown",
)
"""A row that failed so is asked again by the next run."""

ERROR_CODES = LASTING_ERRORS + PASSING_ERRORS

ROW_GROUP_ROWS = 122_880
"""Of files that DuckDB reads: its own unit, so that each of its threads gets whole ones."""

MOST_TOKENS = 2**31
"""More than any request has; so the sum over a part stays within 64 bits."""


@dataclass(frozen=True)
class Answer:
    """One engine's answer to one request."""

    prompt_hash: str
    output: str | None = None
    error_code: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_estimated: bool = False
    """The tokens were counted here by a rule, since the server did not say."""
    latency_s: float | None = None
    attempts: int = 1
    embedding: list[float] | None = None

    @property
    def status(self) -> str:
        """`ok`, or `error` where there is an error code."""
        return "ok" if self.error_code is None else "error"


def answers_table(answers: list[Answer]) -> pa.Table:
    """Return the answers as a table of schema `ANSWERS`.

    An output that is no text, for it holds half of a surrogate pair, becomes an error.
    """
    columns: dict[str, list[Any]] = {
        name: [getattr(answer, name) for answer in answers] for name in ANSWERS.names
    }
    try:
        return pa.table(columns, schema=ANSWERS)
    except UnicodeEncodeError:
        return answers_table([_with_texts(answer) for answer in answers])


def _with_texts(answer: Answer) -> Answer:
    output, error, reason = map(_as_text, (answer.output, answer.error, answer.finish_reason))
    code = answer.error_code
    if output != answer.output and code is None:
        code, error = "invalid_output", "the answer holds half of a surrogate pair"
    return replace(answer, output=output, error=error, finish_reason=reason, error_code=code)


def _as_text(text: str | None) -> str | None:
    return None if text is None else text.encode(errors="replace").decode()
