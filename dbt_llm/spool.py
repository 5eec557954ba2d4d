"""Requests on their way to a job, in Parquet files: collected raw, then distinct and in order.

Prompts can be many and large, so they pass through files and never lie in memory as a whole.
"""

import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dbt_llm import sql
from dbt_llm.arrange import write_in_order
from dbt_llm.call import Call
from dbt_llm.errors import SpoolError
from dbt_llm.files import is_abandoned, private_folder
from dbt_llm.lengths import prompt_tokens
from dbt_llm.shares import FRESH, Share, share_out

_RAW = pa.schema(
    [("prompt_hash", pa.string()), ("call_hash", pa.string()), ("prompt", pa.string())]
)
_FLUSH_ROWS = 100_000
_FLUSH_BYTES = 32 * 1024 * 1024
_MEMORY_BYTES = 384 * 1024**2
_RESTING_BYTES = 16 * 1024**2
_SORTED_BYTES = 128 * 1024**2
# Prompts that begin alike share their beginning in the engine's prefix cache.
_PREFIX_LENGTH = 64


@dataclass(frozen=True)
class RequestFile:
    """Requests of one call, for one job."""

    path: str
    rows: int
    call: Call
    prompt_tokens: float = 0.0
    """The mean that is expected."""
    completion_tokens: float = 0.0
    """The mean that is expected."""


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
            with _writing_to(self._folder):
                self._writer.close()
            path = self._path()
            self._writer = None
            self._files += 1
            self.rows = 0
            return path

    def _path(self) -> Path:
        return self._folder / f"raw-{self._files}.parquet"

    def _flush(self) -> None:
        table = pa.Table.from_batches([batch.cast(_RAW) for batch in self._batches], _RAW)
        with _writing_to(self._folder):
            if self._writer is None:
                private_folder(self._folder)
                # It is read once and soon: what compresses more would take longer.
                self._writer = pq.ParquetWriter(
                    self._path(), _RAW, compression="lz4", use_dictionary=["call_hash"]
                )
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
    history: Sequence[str] = (),
) -> Prepared:
    """Turn a raw spool into files of one call each: distinct, in order, less what is asked already.

    The longest answers are asked first, so that none is left over at the end: by what the store
    teaches of their length (see `lengths.py`), in classes of a power of two. In a class prompts
    that begin alike lie together, for the engine's prefix cache, and the groups with the longest
    prompts come first.

    Args:
        raw: the spool; it is removed.
        calls: the calls of the query by their hash.
        folder: where the files go.
        asked: what earlier rounds asked.
        others: what other models ask just now.
        limit: the largest number of requests in all (the dbt variable `llm_limit`).
        history: the part files of the store.
    """
    with _writing_to(folder), _database(folder) as connection:
        source = f"select *, file_row_number as row from {_source(raw)} as raw {_without(asked)}"
        left_to_others = 0
        if others:
            left_to_others = sql.scalar(
                connection,
                f"select count(distinct prompt_hash) from ({source}) as r "
                f"semi join {_union(others)} using (prompt_hash)",
            )
        known = ", ".join(sql.literal(call_hash) for call_hash in sorted(calls))
        connection.execute(f"create type known_call as enum ({known})")
        # Some bytes per row, since there may be very many: texts would have to lie in memory.
        connection.execute(f"""
            create temp table {FRESH} as
            select
                any_value(cast(call_hash as known_call)) as call_hash,
                min(cast(row as uinteger)) as row,
                any_value(hash(left(prompt, {_PREFIX_LENGTH}))) as beginning,
                any_value(cast(strlen(prompt) as uinteger)) as length
            from ({source}) as r {_without(others)}
            group by prompt_hash
            {f"order by call_hash, row limit {limit:d}" if limit is not None else ""}""")
        files = []
        for number, share in enumerate(share_out(connection, calls, history)):
            path = folder / f"requests-{number}.parquet"
            files.append(_write_share(connection, raw, share, path))
        raw.unlink()
        return Prepared(files, left_to_others)


@contextmanager
def _database(folder: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a database that puts what is over the limit on the disk, into a folder of requests."""
    private_folder(folder)
    connection = duckdb.connect(config={"temp_directory": str(folder / "tmp")})
    try:
        connection.execute(f"set memory_limit = '{_MEMORY_BYTES}B'")
        yield connection
    finally:
        connection.close()
        # Arrow would keep hundreds of megabytes for later, through the whole job.
        pa.default_memory_pool().release_unused()


@contextmanager
def _little_memory(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Put the tables of a database on the disk while others need the memory."""
    with suppress(duckdb.OutOfMemoryException):
        connection.execute(f"set memory_limit = '{_RESTING_BYTES}B'")
    try:
        yield
    finally:
        connection.execute(f"set memory_limit = '{_MEMORY_BYTES}B'")


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, duckdb.IOException, duckdb.OutOfMemoryException) as error:
        raise SpoolError(
            f"Requests cannot be written to {folder}: {error}. Nothing of them was asked. Free "
            "space on the disk of dbt's target folder, or set another one (target-path, or the "
            "variable DBT_TARGET_PATH)."
        ) from error


def _source(raw: Path) -> str:
    return sql.parquet([str(raw)])


def _without(files: list[RequestFile]) -> str:
    return f"anti join {_union(files)} using (prompt_hash)" if files else ""


def _union(files: list[RequestFile]) -> str:
    return sql.parquet([file.path for file in files])


def _write_share(
    connection: duckdb.DuckDBPyConnection, raw: Path, share: Share, path: Path
) -> RequestFile:
    connection.execute(f"""
        create temp table chosen as
        select *, max(length) over (partition by class, beginning) as longest
        from {share.requests} as requests""")
    # As much of each prompt as there is memory to sort, or no text at all.
    length = _SORTED_BYTES // max(1, share.rows)
    texts = f"inner join {_source(raw)} as raw on raw.file_row_number = chosen.row"
    begins = f"left(prompt, {length:d})"
    if length < _PREFIX_LENGTH:
        texts, begins = "", "beginning"
    order = connection.execute(
        f"select row, length from chosen {texts} order by class desc, longest desc, {begins}"
    ).fetchnumpy()
    connection.execute("drop table chosen")
    with _little_memory(connection):
        rows = write_in_order(raw, order["row"], order["length"], path)
    tokens = prompt_tokens(connection, share.call, float(order["length"].mean()))
    return RequestFile(str(path), rows, share.call, tokens, share.tokens)


def missing_requests(
    files: list[RequestFile], answered: list[str], folder: Path
) -> list[RequestFile]:
    """Return files with the requests of `files` that have no row in the `answered` part files."""
    # What somebody removed in the meantime is asked again.
    answered = [path for path in answered if Path(path).exists()]
    if not answered:
        return files
    with _writing_to(folder), _database(folder) as connection:
        left = []
        for number, file in enumerate(files):
            path = folder / f"requests-{number}.parquet"
            found = connection.execute(f"""
                select r.file_row_number as row, strlen(r.prompt) as length
                from {sql.parquet([file.path])} as r
                anti join {sql.parquet(answered)} as a using (prompt_hash)
                order by row""").fetchnumpy()
            rows = write_in_order(Path(file.path), found["row"], found["length"], path)
            if rows:
                left.append(replace(file, path=str(path), rows=rows))
        return left


def mark_in_use(folder: Path) -> None:
    """Keep other runs from taking a spool for abandoned, however long its run takes."""
    with suppress(FileNotFoundError):
        os.utime(folder)


def remove_abandoned(root: Path) -> None:
    """Remove the spools of runs that were killed more than a day ago."""
    if not root.is_dir():
        return
    for folder in root.iterdir():
        try:
            if is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            continue
