"""The job: one Ray Data run that turns requests into committed generations.

It takes a `JobSpec`, which is plain data, and knows nothing of dbt or DuckDB. The driver, which is
this code, moves references and metadata only: Ray Data reads the request files into units, the
engine actors fetch a unit, answer it and write part files, and the driver commits the parts.

A job is a loop of passes. A pass feeds all units to the pool; units that an engine's death took
away are asked again in the next pass, less what was written before it died. There the units are an
eighth as large, one at a time, so a request that kills every engine is soon alone, and is given up.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from dbt_llm.budget import Meter
from dbt_llm.errors import EngineError
from dbt_llm.job_pass import Pass
from dbt_llm.job_spec import JobResult, JobSpec
from dbt_llm.part_writer import PartWriter, read_part
from dbt_llm.parts import parts_of_run
from dbt_llm.pool import get_pool
from dbt_llm.ray_session import as_engine_error, connect
from dbt_llm.schema import REQUESTS, Answer, answers_table
from dbt_llm.spool import RequestFile, missing_requests
from dbt_llm.store import Store, file_of

_NARROW = 8
# So often an engine must die of a request that it had alone before the request is given up.
_LONE_DEATHS = 2


def run_job(
    spec: JobSpec,
    secrets: dict[str, Any],
    store: Store,
    cancelled: threading.Event,
    report: Callable[[JobResult], None],
    result: JobResult,
    meter: Meter | None = None,
) -> None:
    """Run a job to its end; `report` hears of its progress about once a second.

    `secrets` go to the engine's memory and nowhere else; the spec, which is written down, has none.
    What is done goes into `result`, also where the job fails later. `meter` says how much may be
    asked; what it has no room for is left out.

    Raises:
        EngineError: no engine starts, or engines keep dying.
        EndpointError: an endpoint refuses every request, or is not there.
        CancelledError: `cancelled` was set; what was answered is committed.
        StoreError: a commit failed.
    """
    connect(spec.ray_address)
    pool = get_pool(spec.engine, secrets, spec.replicas, spec.log_folder)
    # Whatever killed its engines before, this job may try.
    pool.deaths = 0
    # Another job of the same run wrote these: for an inner call, or on another LLM.
    earlier = set(parts_of_run(store.files, spec.provenance.run_id))
    files = spec.requests
    unit_rows: int | None = None
    number = lone_deaths = 0
    while files:
        answered, deaths = result.answered, result.engine_deaths
        one_pass = Pass(spec, store, pool, files, result, cancelled, report, unit_rows, meter)
        with as_engine_error():
            one_pass.run()
        number += 1
        died = result.engine_deaths > deaths
        if died:
            _take_in_lost_parts(spec, store, result, earlier)
            if meter is not None:
                meter.stored(result.answered)
        # What a dying engine wrote at the last moment may be there twice.
        if result.answered >= result.asked and not result.engine_deaths:
            break
        work_folder = Path(spec.work_folder) / f"pass-{number}"
        parts = [part.path for part in result.parts]
        parts = store.files.fetch(parts, work_folder / "parts", ["prompt_hash"])
        files = missing_requests(files, parts, work_folder)
        rows = sum(file.rows for file in files)
        if one_pass.budget_spent:
            result.left_out = rows
            break
        if rows and result.answered == answered and not died:
            raise EngineError(
                f"{rows} requests got no answer and no error. "
                f"The engine's logs are in {spec.log_folder}."
            )
        if unit_rows == 1 and died:
            lone_deaths += 1
            if lone_deaths == _LONE_DEATHS:
                _write_off(spec, store, files, result)
                break
        if died:
            unit_rows = max(1, min(one_pass.unit_rows, rows) // _NARROW)


def _take_in_lost_parts(spec: JobSpec, store: Store, result: JobResult, earlier: set[str]) -> None:
    """Commit the parts that a dead engine had written and could not tell of."""
    known = {file_of(part.path) for part in result.parts} | earlier
    names = parts_of_run(store.files, spec.provenance.run_id)
    lost = [read_part(store.files, name) for name in names if name not in known]
    store.commit(lost)
    result.parts += lost


def _write_off(spec: JobSpec, store: Store, files: list[RequestFile], result: JobResult) -> None:
    """Code the requests on which engines die, so that they are failed rows like any other."""
    for file in files:
        requests = pq.read_table(file.path, schema=REQUESTS)
        writer = PartWriter(store.files, file.call.call_hash, file.call.text, spec.provenance, "")
        failed = [
            Answer(
                prompt_hash,
                error_code="engine_died",
                error=f"the engine died {_LONE_DEATHS} times while it had this request alone; "
                f"its logs are in {spec.log_folder}",
                attempts=_LONE_DEATHS,
            )
            for prompt_hash in requests["prompt_hash"].to_pylist()
        ]
        writer.add(answers_table(failed), requests)
        parts = writer.flush()
        store.commit(parts)
        result.parts += parts
