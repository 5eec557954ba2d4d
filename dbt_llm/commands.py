"""What each command of `dbt-llm` does and prints; each returns its exit code."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

INTERRUPTED = "dbt-llm: interrupted"
INTERRUPTED_CODE = 130


def plan(arguments: list[str], as_json: bool) -> int:
    """Print what a run would ask."""
    from dbt_llm.dbt_project import compiled_models, connected
    from dbt_llm.plan import describe, plan_models
    from dbt_llm.plugin import read_variables

    with tempfile.TemporaryDirectory() as folder, _ending_at_interrupt(folder):
        models = compiled_models(arguments)
        variables = read_variables()
        with connected() as (session, cursor):
            limit = session.config.limit if variables.limit is None else variables.limit
            plans = plan_models(
                session, cursor, models, Path(folder), limit, variables.mode, variables.refresh
            )
    if as_json:
        print(json.dumps([plan.as_dict() for plan in plans], indent=2))
    elif plans:
        print(describe(plans))
    else:
        print("None of the selected models calls an LLM.")
    return 0


@contextmanager
def _ending_at_interrupt(folder: str) -> Iterator[None]:
    """End the process at Ctrl-C, less a folder; nothing else of it has to be kept.

    DuckDB does not let Python notice a signal before a query is over, so a thread hears of it.
    """
    # dbt's semaphores are then left to Python's own process for that, which would say so.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    hears, tells = os.pipe()
    os.set_blocking(tells, False)

    def watch() -> None:
        # Each signal is a byte; nothing comes any more once the other end is closed.
        while signals := os.read(hears, 1):
            if signals[0] == signal.SIGINT:
                print(INTERRUPTED, file=sys.stderr, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(INTERRUPTED_CODE)
        os.close(hears)

    before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(tells)


def report(arguments: list[str], runs: int, as_json: bool) -> int:
    """Print what past runs asked and cost."""
    from dbt_llm.dbt_project import parsed_project
    from dbt_llm.report import describe_report, make_report

    made = make_report(parsed_project(arguments).config().store, runs)
    print(json.dumps(made.as_dict(), indent=2) if as_json else describe_report(made))
    return 0


def store_stats(arguments: list[str], as_json: bool) -> int:
    """Print what the store holds."""
    from dbt_llm.dbt_project import parsed_project
    from dbt_llm.store_stats import describe_stats, store_stats

    stats = store_stats(parsed_project(arguments).config().store)
    print(json.dumps(stats.as_dict(), indent=2) if as_json else describe_stats(stats))
    return 0


def store_compact(arguments: list[str], as_json: bool) -> int:
    """Merge the small files of the store."""
    from dbt_llm.dbt_project import parsed_project
    from dbt_llm.store_stats import size_text
    from dbt_llm.store_upkeep import TABLES, compact

    store = parsed_project(arguments).config().store
    done = {table: compact(store, table) for table in TABLES}
    if as_json:
        print(json.dumps({table: asdict(one) for table, one in done.items()}, indent=2))
        return 0
    for table, one in done.items():
        print(
            f"{table}: {one.files:,} files of {size_text(one.bytes)} became {one.into_files:,} of "
            f"{size_text(one.into_bytes)}"
            if one.files
            else f"{table}: nothing to merge"
        )
    return 0


def store_vacuum(
    arguments: list[str], retention_hours: int | None, dry_run: bool, as_json: bool
) -> int:
    """Remove what was replaced long ago."""
    from dbt_llm.dbt_project import parsed_project
    from dbt_llm.store_stats import size_text
    from dbt_llm.store_upkeep import RETENTION_HOURS, TABLES, vacuum

    store = parsed_project(arguments).config().store
    hours = RETENTION_HOURS if retention_hours is None else retention_hours
    done = {table: vacuum(store, table, hours, dry_run=dry_run) for table in TABLES}
    if as_json:
        print(json.dumps({table: asdict(one) for table, one in done.items()}, indent=2))
        return 0
    would = "would be " if dry_run else ""
    for table, one in done.items():
        files = "1 file" if one.files == 1 else f"{one.files:,} files"
        print(f"{table}: {files} of {size_text(one.bytes)} {would}removed")
    return 0


def doctor(arguments: list[str], with_ray: bool) -> int:
    """Print what is there and what is to be done; 1 where something is."""
    from dbt_llm.doctor import checks, wants_colour
    from dbt_llm.finding import State

    found = checks(arguments, with_ray)
    width, colour = max(len(check.name) for check in found), wants_colour()
    problems = 0
    for check in found:
        finding = check.finding()
        print(finding.text(width, colour), flush=True)
        problems += finding.state is State.FAIL
    if not problems:
        print("\nAll that a run needs is there.")
        return 0
    print(f"\n{problems} {'problem' if problems == 1 else 'problems'}: see what FAIL says above.")
    return 1


def init(project: Path, dry_run: bool) -> int:
    """Set a dbt project up."""
    from dbt_llm.project_setup import set_up, write

    own = Path(__file__).parent
    # The wheel has the macros in a folder of its own; a checkout has them beside this one.
    package = own / "include" if (own / "include").is_dir() else own.parent
    changes, profile = set_up(project, package)
    if not dry_run:
        write(changes)
    for change in changes:
        print(f"{change.path}: {change.words}")
    print(f"\nNext: run dbt deps, and put this into profiles.yml:\n\n{profile}")
    print(
        "Then `dbt-llm doctor` says whether all is there, and `dbt-llm plan` what a run would ask."
    )
    return 0
