"""The short form of the kill campaign; `make faults` is the long one."""

from pathlib import Path

import pytest

from tests.faults.campaign import (
    COMMIT_INTERVAL_S,
    CONCURRENCY,
    LATENCY_S,
    Fault,
    Recovery,
    break_and_recover,
    still_running,
)

FAULTS = [
    Fault("dbt", "collect"),
    Fault("dbt", "spool", format="parquet"),
    Fault("dbt", "engine start"),
    Fault("dbt", "half a part file", 2, materialized="incremental"),
    Fault("dbt", "part file", format="parquet"),
    Fault("dbt", "before commit"),
    Fault("dbt", "after commit", 2),
    Fault("dbt", "materialization"),
    Fault("engine", "first answer"),
    Fault("engine", "half a part file", format="parquet"),
    Fault("raylet", "after commit"),
]
_recoveries: list[Recovery] = []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.target}-{fault.step}")
def test_after_a_kill_and_a_rerun_nothing_is_lost_doubled_or_misplaced(
    tmp_path: Path, fault: Fault
) -> None:
    recovery = break_and_recover(tmp_path, fault)
    _recoveries.append(recovery)
    assert recovery.wrong == []
    # What was in flight, and what was answered since the last commit; on a busy machine commits
    # come late, so this is generous. The campaign measures it.
    per_interval = CONCURRENCY * COMMIT_INTERVAL_S / LATENCY_S
    assert recovery.asked_twice <= CONCURRENCY + 3 * per_interval
    if fault.target == "engine":
        assert recovery.survived


def test_no_process_is_left_behind() -> None:
    assert _recoveries
    assert still_running(_recoveries) == []
