"""What a store holds: its answers, the files that they lie in, and what upkeep has to do."""

from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from dbt_llm.config import StoreConfig
from dbt_llm.errors import StoreError
from dbt_llm.lookup import read_table
from dbt_llm.parts import PART_PATTERN
from dbt_llm.schema import GENERATIONS, RUNS
from dbt_llm.store import DeltaStore, file_of, open_store
from dbt_llm.store_upkeep import TABLES, commits_since_checkpoint
from dbt_llm.text_table import text_table

_SCHEMAS = {"generations": GENERATIONS, "runs": RUNS}


@dataclass(frozen=True)
class TableStats:
    """The files of a table."""

    table: str
    rows: int
    files: int
    bytes: int
    small_files: int
    """Those that a compaction would merge."""
    replaced_files: int
    """Those that do not count any more and wait for a vacuum."""
    replaced_bytes: int
    uncommitted_files: int
    """Parts that a run wrote and has not committed; the next run takes them in."""
    version: int | None
    """None for a Parquet table, as the next one."""
    commits_since_checkpoint: int | None
    """None also in an object store, where delta-rs looks after it."""


@dataclass(frozen=True)
class LLMStats:
    """The rows of one LLM."""

    llm: str | None
    model: str | None
    calls: int
    rows: int
    failed: int


@dataclass(frozen=True)
class StoreStats:
    """See the module's text."""

    path: str
    format: str
    answers: int
    """Keys with a row, failed ones included."""
    superseded_rows: int
    """Rows of a key beside the one that counts."""
    tables: list[TableStats]
    llms: list[LLMStats]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def store_stats(config: StoreConfig) -> StoreStats:
    """Look at a store; it is created by nobody who looks.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        with duckdb.connect() as connection:
            generations, runs = (
                read_table(connection, open_store(config, table), _SCHEMAS[table])
                for table in TABLES
            )
            # The hash of a prompt covers its call.
            ((rows, keys),) = connection.execute(
                f"select count(*), count(distinct hash(prompt_hash)) from {generations}"
            ).fetchall()
            ((logged,),) = connection.execute(f"select count(*) from {runs}").fetchall()
            llms = connection.execute(
                "select llm, model, count(distinct call_hash), count(*), "
                f"count(*) filter (status = 'error') from {generations} "
                "group by all order by count(*) desc, llm, model"
            ).fetchall()
        tables = [_table_stats(config, "generations", rows), _table_stats(config, "runs", logged)]
    except (duckdb.Error, OSError) as error:
        raise StoreError(f"The store {config.path} cannot be read: {error}") from error
    return StoreStats(
        config.path, config.format, keys, rows - keys, tables, [LLMStats(*row) for row in llms]
    )


def _table_stats(config: StoreConfig, table: str, rows: int) -> TableStats:
    from dbt_llm.compaction import SMALL_BYTES

    store = open_store(config, table)
    # Older than the state, so that a file which comes meanwhile is not taken for a replaced one.
    there = store.files.sizes(PART_PATTERN)
    uncommitted = store.uncommitted() if isinstance(store, DeltaStore) else []
    snapshot = store.snapshot()
    counting = {file_of(file) for file in snapshot.files}
    # A file that was committed since it was listed.
    sizes = [there[name] if name in there else store.files.size(name) or 0 for name in counting]
    replaced = there.keys() - counting - set(uncommitted)
    return TableStats(
        table,
        rows,
        len(sizes),
        sum(sizes),
        sum(size < SMALL_BYTES for size in sizes),
        len(replaced),
        sum(there[name] for name in replaced),
        len(uncommitted),
        snapshot.version,
        None if snapshot.version is None else commits_since_checkpoint(store.files),
    )


def describe_stats(stats: StoreStats) -> str:
    """Return it as people read it."""
    if not any(one.files or one.uncommitted_files for one in stats.tables):
        return f"The store {stats.path} ({stats.format}) holds no answers yet."
    is_delta = any(one.version is not None for one in stats.tables)
    head = ["table", "rows", "files", "size", "small", "replaced", "size of these"]
    if is_delta:
        head += ["uncommitted", "version", "since checkpoint"]
    rows = []
    for one in stats.tables:
        cells = [one.table, *_counts(one.rows, one.files), size_text(one.bytes)]
        cells += [*_counts(one.small_files, one.replaced_files), size_text(one.replaced_bytes)]
        if is_delta:
            cells += _counts(one.uncommitted_files, one.version, one.commits_since_checkpoint)
        rows.append(cells)
    llms = [
        (one.llm or "?", one.model or "?", *_counts(one.calls, one.rows, one.failed))
        for one in stats.llms
    ]
    again = stats.superseded_rows
    return "\n".join(
        [
            f"The store {stats.path} ({stats.format}) holds {stats.answers:,} "
            f"{'answer' if stats.answers == 1 else 'answers'}, and {again:,} "
            f"{'row' if again == 1 else 'rows'} that a later answer stands for\n",
            text_table(head, rows, left={"table"}),
            "",
            text_table(("LLM", "model", "calls", "rows", "failed"), llms, left={"LLM", "model"}),
        ]
    )


def _counts(*counts: int | None) -> list[str]:
    return ["" if count is None else f"{count:,}" for count in counts]


def size_text(size: int) -> str:
    """Return bytes as people read them."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{size:,} B" if unit == "B" else f"{value:,.1f} {unit}"
