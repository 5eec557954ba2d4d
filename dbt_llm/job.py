"""The job: one Ray Data run that turns requests into committed generations.

It takes a `JobSpec`, which is plain data, and knows nothing of dbt or DuckDB. The driver, which is
this code, moves references and metadata only: Ray Data reads the request files into units, the
engine actors fetch a unit, answer it and write part files, and the driver commits the parts.

A job is a loop of passes. A pass feeds all units to the pool; units that an engine's death took
away are asked again in the next pass, less what was written before it died.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbt_llm.errors import EngineError
from dbt_llm.job_pass import Pass
from dbt_llm.job_spec import JobResult, JobSpec
from dbt_llm.parts import parts_of_run, read_part
from dbt_llm.pool import get_pool
from dbt_llm.ray_session import connect
from dbt_llm.spool import missing_requests
from dbt_llm.store import Store


def run_job(
    spec: JobSpec,
    secrets: dict[str, Any],
    store: Store,
    cancelled: threading.Event,
    report: Callable[[JobResult], None],
) -> JobResult:
    """Run a job to its end; `report` hears of its progress about once a second.

    `secrets` go to the engine's memory and nowhere else; the spec, which is written down, has none.

    Raises:
        EngineError: no engine starts, or engines keep dying.
        EndpointError: an endpoint refuses every request, or is not there.
        CancelledError: `cancelled` was set; what was answered is committed.
        StoreError: a commit failed.
    """
    result = JobResult(asked=spec.rows)
    connect(spec.ray_address)
    pool = get_pool(spec.engine, secrets, spec.replicas, spec.log_folder)
    files = spec.requests
    number = 0
    while files:
        before = result.answered
        Pass(spec, store, pool, files, result, cancelled, report).run()
        number += 1
        if result.engine_deaths:
            _take_in_lost_parts(spec, store, result)
        if result.answered >= result.asked:
            break
        files = missing_requests(
            files, [part.path for part in result.parts], Path(spec.work_folder) / f"pass-{number}"
        )
        if files and result.answered == before and result.engine_deaths == 0:
            raise EngineError(
                f"{sum(file.rows for file in files)} requests got no answer and no error. "
                f"The engine's logs are in {spec.log_folder}."
            )
    return result


def _take_in_lost_parts(spec: JobSpec, store: Store, result: JobResult) -> None:
    """Commit the parts that a dead engine had written and could not tell of."""
    known = {part.path for part in result.parts}
    paths = parts_of_run(Path(spec.store_folder), spec.provenance.run_id)
    lost = [read_part(path) for path in paths if str(path) not in known]
    store.commit(lost)
    result.parts += lost
