"""Rewrites small files of a table as few large ones: which ones, and their new content.

No row is dropped, not even one that a newer answer stands for: it tells what a run cost. The files
of one call become one file, or several of a good size, so that their statistics still tell the
calls apart. Nothing here decides what counts: `store_upkeep.py` does.
"""

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dbt_llm.replaced import Record, write_record
from dbt_llm.schema import GENERATIONS, ROW_GROUP_ROWS, RUNS
from dbt_llm.storage import Folder

SMALL_BYTES = 8 * 1024 * 1024
"""A file below this is worth merging."""
_TARGET_BYTES = 32 * 1024 * 1024
_MOST_UNPACKED_BYTES = 128 * 1024 * 1024
# Of its own accord a merge takes files of about one size: a file is then rewritten a few times in
# its life, and not by every merge.
_TIER = 4
_LEAST_BYTES = 64 * 1024
_LEAST_FILES = 4


@dataclass(frozen=True)
class Layout:
    """How the rows of a table lie in its files."""

    schema: pa.Schema
    order: tuple[str, ...]
    group: str | None = None
    """The column that has one value in a file."""
    repeated: tuple[str, ...] = ()
    """The columns that have few values in a file."""


LAYOUTS = {
    "generations": Layout(
        GENERATIONS,
        ("prompt_hash", "created_at"),
        "call_hash",
        (
            *("call_hash", "call", "status", "error_code", "finish_reason", "llm", "model"),
            *("engine", "engine_version", "pipeline_version", "git_sha", "node_id"),
            *("invocation_id", "run_id", "trace_id"),
        ),
    ),
    "runs": Layout(RUNS, ("started_at", "run_id")),
}
"""By the name of the table."""


@dataclass(frozen=True)
class SmallFile:
    """A file of a table that may be merged with others."""

    name: str
    size: int
    group: str | None = None


@dataclass(frozen=True)
class Merged:
    """A file that a merge wrote."""

    name: str
    size: int
    rows: int
    stats: str
    """As Delta's log keeps them, JSON."""
    replaced: tuple[SmallFile, ...] = field(repr=False)
    record: Record = field(repr=False)


def plan_merges(files: Iterable[SmallFile], *, thorough: bool) -> list[list[SmallFile]]:
    """Return which files become one file each, at least two of them.

    Args:
        files: those below `SMALL_BYTES`.
        thorough: merge all of them, as a person asks for; else only what is due.
    """
    groups: dict[str | None, list[SmallFile]] = {}
    for file in sorted(files, key=lambda file: (file.size, file.name)):
        groups.setdefault(file.group, []).append(file)
    least = 2 if thorough else _LEAST_FILES
    tiers = [
        tier
        for group in groups.values()
        for tier in ([group] if thorough else _tiers(group))
        if len(tier) >= least
    ]
    return [merge for tier in tiers for merge in _cut(tier) if len(merge) >= 2]


def _tiers(files: list[SmallFile]) -> Iterator[list[SmallFile]]:
    """Cut files, the smallest first, where one is much larger than all before it together."""
    tier: list[SmallFile] = []
    total = 0
    for file in files:
        if tier and file.size > max(_LEAST_BYTES, _TIER * total):
            yield tier
            tier, total = [], 0
        tier.append(file)
        total += file.size
    yield tier


def _cut(files: list[SmallFile]) -> Iterator[list[SmallFile]]:
    """Cut files into those that make one file of a good size."""
    merge: list[SmallFile] = []
    total = 0
    for file in files:
        if merge and total + file.size > _TARGET_BYTES:
            yield merge
            merge, total = [], 0
        merge.append(file)
        total += file.size
    yield merge


def saved_files(merges: Iterable[list[SmallFile]]) -> int:
    """Return how many files fewer there are after some merges."""
    return sum(len(merge) - 1 for merge in merges)


def group_of(files: Folder, name: str, layout: Layout) -> str | None:
    """Return the one value that a file has of its layout's group, from its footer; else None.

    Raises:
        pyarrow.ArrowException, OSError: the file is no Parquet file, or gone.
    """
    metadata = pq.read_metadata(files.source(name))
    if layout.group is None or layout.group not in metadata.schema.names:
        return None
    column = metadata.schema.names.index(layout.group)
    values: set[str] = set()
    for number in range(metadata.num_row_groups):
        found = metadata.row_group(number).column(column).statistics
        if found is None or not found.has_min_max:
            return None
        values |= {found.min, found.max}
    return values.pop() if len(values) == 1 else None


def merge_files(
    folder: Folder, files: Iterable[SmallFile], layout: Layout, table: str | None
) -> Iterator[Merged]:
    """Write what files hold into one new file; more where they would fill the memory.

    Each is there as a whole when it is yielded, beside those that it replaces and the record of
    this. Files with other columns are left alone.

    Raises:
        pyarrow.ArrowException, OSError: a file cannot be read, or the folder takes none.
    """
    for merge in _within_memory(folder, files, layout):
        tables = [_read(folder, file.name, layout) for file in merge]
        content = pa.concat_tables(tables).unify_dictionaries()
        content = content.sort_by([(name, "ascending") for name in layout.order])
        yield _write(folder, content, merge, layout, table)


def discard(folder: Folder, merged: Merged) -> None:
    """Remove a file that does not count and never will."""
    # Without its record it would pass for the part of a run.
    folder.delete(merged.name)
    merged.record.remove()


def _within_memory(
    folder: Folder, files: Iterable[SmallFile], layout: Layout
) -> Iterator[list[SmallFile]]:
    names = set(layout.schema.names)
    merge: list[SmallFile] = []
    total = 0
    for file in files:
        with pq.ParquetFile(folder.source(file.name)) as reader:
            if not set(reader.schema_arrow.names) <= names:
                continue
            metadata = reader.metadata
        groups = range(metadata.num_row_groups)
        unpacked = sum(metadata.row_group(number).total_byte_size for number in groups)
        if merge and total + unpacked > _MOST_UNPACKED_BYTES:
            if len(merge) >= 2:
                yield merge
            merge, total = [], 0
        merge.append(file)
        total += unpacked
    if len(merge) >= 2:
        yield merge


def _read(folder: Folder, name: str, layout: Layout) -> pa.Table:
    source = folder.source(name)
    with pq.ParquetFile(source, read_dictionary=list(layout.repeated)) as reader:
        table = reader.read()
    columns, fields = [], []
    for one in layout.schema:
        type_ = one.type
        if one.name in layout.repeated:
            type_ = pa.dictionary(pa.int32(), one.type)
        if one.name in table.column_names:
            columns.append(table[one.name].cast(type_))
        else:
            columns.append(pa.chunked_array([pa.nulls(table.num_rows, type_)]))
        fields.append(one.with_type(type_))
    return pa.table(columns, schema=pa.schema(fields))


def _write(
    folder: Folder, content: pa.Table, merge: list[SmallFile], layout: Layout, table: str | None
) -> Merged:
    name = f"part-{time.time_ns():020d}-compacted-{uuid.uuid4().hex}.parquet"
    record = write_record(folder, name, table, (file.name for file in merge))
    try:
        size = folder.put(
            name,
            lambda file: pq.write_table(
                content,
                file,
                compression="zstd",
                row_group_size=ROW_GROUP_ROWS,
                use_dictionary=list(layout.repeated) or True,
                store_schema=False,
            ),
        )
    except BaseException:
        # It may be there all the same, and then the record has to be there, too.
        with suppress(OSError):
            folder.delete(name)
            record.remove()
        raise
    return Merged(name, size, content.num_rows, _stats(content, layout), tuple(merge), record)


def _stats(content: pa.Table, layout: Layout) -> str:
    """Return the statistics that lookups and merges use, as part files have them in the log."""
    stats: dict[str, object] = {"numRecords": content.num_rows}
    if layout.group is not None:
        columns = ("prompt_hash", layout.group)
        ends = {name: pc.min_max(content[name].cast(pa.string())).as_py() for name in columns}
        stats["minValues"] = {name: ends[name]["min"] for name in columns}
        stats["maxValues"] = {name: ends[name]["max"] for name in columns}
        stats["nullCount"] = dict.fromkeys(columns, 0)
    return json.dumps(stats)
