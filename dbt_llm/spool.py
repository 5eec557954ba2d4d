"""Requests on their way to a job, in Parquet files: collected raw, then distinct and in order.

Prompts can be many and large, so they pass through files and never lie in memory as a whole.
"""

import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dbt_llm import sql
from dbt_llm.call import Call

_RAW = pa.schema(
    [("prompt_hash", pa.string()), ("call_hash", pa.string()), ("prompt", pa.string())]
)
_FLUSH_ROWS = 100_000
_FLUSH_BYTES = 32 * 1024 * 1024
_ABANDONED_AFTER_S = 24 * 3600
# Prompts that begin alike share their beginning in the engine's prefix cache.
_PREFIX_LENGTH = 64


@dataclass(frozen=True)
class RequestFile:
    """The requests of one call, for one job."""

    path: str
    rows: int
    call: Call


class RawSpool:
    """Takes batches from many threads into one Parquet file; rows may repeat."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._batches: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._buffered_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._files = 0
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append a batch with the columns prompt_hash, call_hash and prompt."""
        with self._lock:
            self._batches.append(batch)
            self.rows += batch.num_rows
            self._buffered_rows += batch.num_rows
            self._buffered_bytes += batch.nbytes
            if self._buffered_rows >= _FLUSH_ROWS or self._buffered_bytes >= _FLUSH_BYTES:
                self._flush()

    def take(self) -> Path | None:
        """Close the file and return its path, or None when nothing came; then begin anew."""
        with self._lock:
            if self.rows == 0:
                return None
            self._flush()
            assert self._writer is not None
            self._writer.close()
            path = self._path()
            self._writer = None
            self._files += 1
            self.rows = 0
            return path

    def _path(self) -> Path:
        return self._folder / f"raw-{self._files}.parquet"

    def _flush(self) -> None:
        if self._writer is None:
            private_folder(self._folder)
            self._writer = pq.ParquetWriter(self._path(), _RAW, compression="zstd")
        table = pa.Table.from_batches([batch.cast(_RAW) for batch in self._batches], _RAW)
        self._writer.write_table(table)
        self._batches.clear()
        self._buffered_rows = self._buffered_bytes = 0


@dataclass(frozen=True)
class Prepared:
    """What a round of questions is to ask."""

    files: list[RequestFile]
    left_to_others: int = 0
    """Requests that another model asks just now."""

    @property
    def rows(self) -> int:
        """Requests in all files."""
        return sum(file.rows for file in self.files)


def prepare_requests(
    raw: Path,
    calls: Mapping[str, Call],
    folder: Path,
    *,
    asked: list[RequestFile],
    others: list[RequestFile],
    limit: int | None,
) -> Prepared:
    """Turn a raw spool into one file per call: distinct, in order, without what is asked already.

    Prompts that begin alike lie together, for the engine's prefix cache, and the groups with the
    longest prompts come first, so that no long request is left over at the end.

    Args:
        raw: the spool; it is removed.
        calls: the calls of the query by their hash.
        folder: where the files go.
        asked: what earlier rounds asked.
        others: what other models ask just now.
        limit: the largest number of requests in all (the dbt variable `llm_limit`).
    """
    folder = private_folder(folder)
    connection = duckdb.connect(config={"temp_directory": str(folder / "tmp")})
    try:
        source = f"select * from read_parquet({sql.literal(str(raw))}) as raw {_without(asked)}"
        left_to_others = 0
        if others:
            left_to_others = sql.scalar(
                connection,
                f"select count(distinct prompt_hash) from ({source}) as r "
                f"semi join {_union(others)} using (prompt_hash)",
            )
        connection.execute(f"""
            create temp view fresh as
            select prompt_hash, any_value(call_hash) as call_hash, any_value(prompt) as prompt
            from ({source}) as r {_without(others)} group by prompt_hash""")
        files = []
        for number, (call_hash, call) in enumerate(sorted(calls.items())):
            path = folder / f"requests-{number}.parquet"
            rows = _write_in_order(connection, call_hash, path, limit)
            if rows:
                files.append(RequestFile(path=str(path), rows=rows, call=call))
            if limit is not None:
                limit -= rows
        return Prepared(files, left_to_others)
    finally:
        connection.close()
        raw.unlink()


def _without(files: list[RequestFile]) -> str:
    return f"anti join {_union(files)} using (prompt_hash)" if files else ""


def _union(files: list[RequestFile]) -> str:
    return f"read_parquet({sql.literal_list([file.path for file in files])})"


def _write_in_order(
    connection: duckdb.DuckDBPyConnection, call_hash: str, path: Path, limit: int | None
) -> int:
    copy = f"""
        copy (
            select prompt_hash, prompt
            from (select * from fresh where call_hash = {sql.literal(call_hash)}
                  {f"limit {limit:d}" if limit is not None else ""})
            order by
                max(strlen(prompt)) over (partition by left(prompt, {_PREFIX_LENGTH})) desc, prompt
        ) to {sql.literal(str(path))} (format parquet, compression zstd, row_group_size 4096)"""
    return int(sql.scalar(connection, copy))


def missing_requests(
    files: list[RequestFile], answered: list[str], folder: Path
) -> list[RequestFile]:
    """Return files with the requests of `files` that have no row in the `answered` part files."""
    if not answered:
        return files
    private_folder(folder)
    connection = duckdb.connect(config={"temp_directory": str(folder / "tmp")})
    try:
        left = []
        for number, file in enumerate(files):
            path = folder / f"requests-{number}.parquet"
            copy = f"""
                copy (
                    select r.prompt_hash, r.prompt from read_parquet({sql.literal(file.path)}) as r
                    anti join read_parquet({sql.literal_list(answered)}) as a using (prompt_hash)
                ) to {sql.literal(str(path))} (format parquet, compression zstd)"""
            rows = int(sql.scalar(connection, copy))
            if rows:
                left.append(RequestFile(path=str(path), rows=rows, call=file.call))
        return left
    finally:
        connection.close()


def private_folder(folder: Path) -> Path:
    """Create a folder that only its owner can read, for it holds prompts."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def remove_abandoned(root: Path) -> None:
    """Remove the spools of runs that were killed more than a day ago."""
    if not root.is_dir():
        return
    for folder in root.iterdir():
        try:
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue
