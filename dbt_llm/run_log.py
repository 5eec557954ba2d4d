"""The run log: a row per node and run that called an LLM, in a table beside the generations."""

import json
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dbt_llm.config import StoreConfig
from dbt_llm.credentials import without_secrets
from dbt_llm.errors import CancelledError, StoreError
from dbt_llm.storage import reason
from dbt_llm.store import open_store

if TYPE_CHECKING:
    from dbt_llm.job_spec import JobResult
    from dbt_llm.parts import Provenance
    from dbt_llm.resolve_loop import Summary

_TRIES = 20
_MOST_RETRIES = 100


# Runs that were killed have answers and no row; so have those that are under way. Where a run could
# not commit some of its answers, a later one took them in.
_UNFINISHED = """
    select
        stored.* replace (
            stored.asked - coalesce(logged.asked, 0) as asked,
            stored.generated - coalesce(logged.generated, 0) as generated,
            stored.failed - coalesce(logged.failed, 0) as failed,
            case when logged.run_id is null then stored.errors else '{{}}' end as errors,
            stored.prompt_tokens - coalesce(logged.prompt_tokens, 0) as prompt_tokens,
            stored.completion_tokens - coalesce(logged.completion_tokens, 0) as completion_tokens,
            stored.cost_usd - coalesce(logged.cost_usd, 0) as cost_usd
        )
    from (
        select
            run_id, any_value(node_id) as node_id, any_value(invocation_id) as invocation_id,
            any_value(trace_id) as trace_id, 'unfinished' as status, min(created_at) as started_at,
            count(*) as asked, count(*) filter (status = 'ok') as generated,
            count(*) filter (status = 'error') as failed,
            coalesce(to_json(histogram(error_code) filter (status = 'error')), '{{}}')::varchar
                as errors,
            coalesce(sum(prompt_tokens) filter (completion_tokens is not null), 0)::bigint
                as prompt_tokens,
            coalesce(sum(completion_tokens), 0)::bigint as completion_tokens,
            sum(cost_usd) as cost_usd, string_agg(distinct llm, ', ' order by llm) as llm,
            string_agg(distinct model, ', ' order by model) as model,
            string_agg(distinct engine, ', ' order by engine) as engine,
            string_agg(distinct engine_version, ', ' order by engine_version) as engine_version,
            any_value(pipeline_version) as pipeline_version, any_value(git_sha) as git_sha
        from {generations}
        group by run_id
    ) as stored
    left join (
        select
            run_id, sum(generated + failed)::bigint as asked, sum(generated)::bigint as generated,
            sum(failed)::bigint as failed, sum(prompt_tokens)::bigint as prompt_tokens,
            sum(completion_tokens)::bigint as completion_tokens, sum(cost_usd) as cost_usd
        from {runs}
        group by run_id
    ) as logged using (run_id)
    where stored.asked > coalesce(logged.asked, 0)"""


def all_runs(runs: str, generations: str) -> str:
    """Return what reads the log, and with it the runs that wrote answers and did not end.

    Both are SQL expressions for FROM, and so is the result.
    """
    unfinished = _UNFINISHED.format(runs=runs, generations=generations)
    return f"(from {runs} union all by name {unfinished})"


class RunLog:
    """The table `runs` of a store, in the store's format."""

    def __init__(self, config: StoreConfig) -> None:
        """Name the table; nothing is read or written yet."""
        self.table = open_store(config, "runs")
        self._delta = config.format == "delta"

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, which has columns of `RUNS`; those that are missing are NULL.

        Raises:
            StoreError: it cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq
        from deltalake.exceptions import DeltaError

        from dbt_llm.schema import RUNS

        rows = pa.Table.from_pylist([row], RUNS)
        try:
            files = self.table.files
            files.make_folder()
            name = f"part-{time.time_ns():020d}-{uuid.uuid4().hex}.parquet"
            size = files.put(name, lambda file: pq.write_table(rows, file))
            if self._delta:
                self._commit(name, size)
        except (DeltaError, OSError) as error:
            words = without_secrets(reason(str(error)), self.table.files.options)
            raise StoreError(
                f"The run log {self.table.files} cannot be written: {words}"
            ) from error

    def _commit(self, name: str, size: int) -> None:
        """Add a file to the table; to add it twice changes nothing."""
        from deltalake import DeltaTable, PostCommitHookProperties
        from deltalake.exceptions import CommitFailedError
        from deltalake.transaction import AddAction, CommitProperties

        from dbt_llm.schema import RUNS

        # write_deltalake() panics where the folder has some odd name.
        files = self.table.files
        folder, options = str(files), dict(files.options) or None
        if not files.is_table():
            DeltaTable.create(
                folder,
                RUNS,
                mode="ignore",
                name="runs",
                description="What runs of dbt-llm asked, one row per node and run.",
                storage_options=options,
            )
        table = DeltaTable(folder, storage_options=options)
        now = int(time.time() * 1000)
        action = AddAction(name, size, {}, now, True, json.dumps({"numRecords": 1}))
        for attempt in range(_TRIES):
            try:
                table.create_write_transaction(
                    [action],
                    "append",
                    RUNS,
                    commit_properties=CommitProperties(max_commit_retries=_MOST_RETRIES),
                    # store_upkeep.py looks for old commits, less often.
                    post_commithook_properties=PostCommitHookProperties(
                        create_checkpoint=True, cleanup_expired_logs=False
                    ),
                )
            except CommitFailedError:
                if attempt == _TRIES - 1:
                    raise
                time.sleep(min(0.01 * 2**attempt, 0.5))
                table.update_incremental()
            else:
                return


def run_row(
    origin: dict[str, Any],
    jobs: "list[tuple[Provenance, JobResult]]",
    summary: "Summary | None",
    started: float,
    failure: BaseException | None,
) -> dict[str, Any]:
    """Return what the log says of a run: its counts, over all of its jobs, and each job's own.

    Args:
        origin: the columns that say whose run it is (see `Runner.origin`).
        jobs: all of its jobs, those that failed included.
        summary: None where the run failed.
        started: when, in seconds since 1970.
        failure: what the run ended with. Its text is left out: it may quote a value of a row.
    """
    results = [result for _, result in jobs]
    counts = _counts(results)
    answered = counts["generated"] + counts["failed"]
    seconds = counts["generating_s"]
    tokens = counts["prompt_tokens"] + counts["completion_tokens"]
    own = [
        {
            "llm": provenance.llm,
            "model": provenance.model,
            "engine": provenance.engine,
            "engine_version": result.engine_version,
            **_counts([result]),
        }
        for provenance, result in jobs
    ]
    return {
        **origin,
        "status": _status(failure),
        "error": None if failure is None else type(failure).__name__,
        "started_at": datetime.fromtimestamp(started, UTC),
        **_of_query(summary),
        **counts,
        "total_s": max(0.0, time.time() - started),
        "tokens_per_s": tokens / seconds if seconds else None,
        "rows_per_s": answered / seconds if seconds else None,
        **_llms(own, summary),
        "jobs": own,
    }


def _of_query(summary: "Summary | None") -> dict[str, int | None]:
    counts = summary.counts() if summary is not None else {}
    return {name: counts.get(name) for name in ("prompts", "stored", "left_null")}


def _llms(jobs: list[dict[str, Any]], summary: "Summary | None") -> dict[str, str | None]:
    """Name the LLMs that were asked; those of the query where none was."""
    if not jobs and summary is not None:
        jobs = [
            {"llm": call.llm, "model": call.content["model"]} for call in summary.calls.values()
        ]
    names = {}
    for column in ("llm", "model", "engine", "engine_version"):
        found = {str(job[column]) for job in jobs if job.get(column) is not None}
        names[column] = ", ".join(sorted(found)) or None
    return names


def _status(failure: BaseException | None) -> str:
    if failure is None:
        return "ok"
    stopped = isinstance(failure, CancelledError | KeyboardInterrupt)
    return "cancelled" if stopped else "error"


def _counts(results: "list[JobResult]") -> dict[str, Any]:
    errors: dict[str, int] = {}
    for result in results:
        for code, rows in result.errors.items():
            errors[code] = errors.get(code, 0) + rows
    return {
        "asked": sum(result.asked - result.left_out for result in results),
        "generated": sum(result.answered - result.failed for result in results),
        "failed": sum(result.failed for result in results),
        "errors": json.dumps(errors, sort_keys=True),
        "prompt_tokens": sum(result.prompt_tokens for result in results),
        "completion_tokens": sum(result.completion_tokens for result in results),
        "cost_usd": sum(result.cost_usd for result in results),
        "engine_start_s": sum(result.engine_start_s for result in results),
        "generating_s": sum(result.generating_s for result in results),
        "committing_s": sum(result.committing_s for result in results),
    }
