"""Writes rows of a Parquet file of requests in another order, with little of it in memory.

DuckDB's sort keeps long texts in memory, whatever its limit is. So it only sorts what is short, and
the rows go where they belong in two passes: into buckets on the disk, then each bucket in order.
A small file is put in order in memory.

Of each row a few numbers are in memory all the time, of 4 bytes where the rows are fewer than 2^31.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dbt_llm.schema import REQUESTS

_BATCH_BYTES = 16 * 1024 * 1024
_IN_MEMORY_BYTES = 256 * 1024 * 1024
_BUCKET_BYTES = 32 * 1024 * 1024
# Each batch is cut into so many pieces; but a bucket's texts must fit into one Arrow array.
_MOST_BUCKETS = 512
_LARGEST_BUCKET_BYTES = 1024 * 1024 * 1024
_ROW_GROUP_ROWS = 4096
_MOST_BATCH_ROWS = 65_536
# A prompt hash, and what Arrow adds.
_KEY_BYTES = 80
_PLACE = "place"
_PLACED = REQUESTS.append(pa.field(_PLACE, pa.int64()))


def write_in_order(source: Path, rows: Any, lengths: Any, target: Path) -> int:
    """Write the requests of `source` whose row numbers are `rows`, in that order; return how many.

    `rows` is a NumPy array of whole numbers, each at most once; `lengths` has the bytes of their
    prompts.
    """
    if not len(rows):
        return 0
    with pq.ParquetFile(source) as file, _parquet_writer(target) as writer:
        if _unpacked_bytes(file) <= _IN_MEMORY_BYTES:
            tables = iter([file.read(REQUESTS.names).take(pa.array(rows))])
        else:
            tables = _through_buckets(file, rows, lengths, target)
        done = 0
        for table in tables:
            for start, stop in _groups(lengths[done : done + table.num_rows]):
                writer.write_table(table.slice(start, stop - start).cast(REQUESTS))
            done += table.num_rows
    return len(rows)


def largest_row_bytes(path: str) -> int:
    """Return the mean size of a request in that row group of a file where it is largest."""
    groups = _row_groups(pq.read_metadata(path))
    return max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)


def _unpacked_bytes(file: pq.ParquetFile) -> int:
    return sum(group.total_byte_size for group in _row_groups(file.metadata))


def _row_groups(metadata: Any) -> list[Any]:
    return [metadata.row_group(number) for number in range(metadata.num_row_groups)]


def _through_buckets(file: Any, rows: Any, lengths: Any, target: Path) -> Iterator[pa.Table]:
    """Yield the requests in order; only one bucket of them is in memory."""
    ends = _ends(lengths)
    total = int(ends[-1])
    bucket_of = _bucket_numbers(
        ends, min(max(_BUCKET_BYTES, total // _MOST_BUCKETS), _LARGEST_BUCKET_BYTES)
    )
    del ends
    count = file.metadata.num_rows
    places = np.full(count, -1, np.int32 if count < 2**31 else np.int64)
    places[rows] = np.arange(len(rows), dtype=places.dtype)
    batch_rows = max(1, min(_MOST_BATCH_ROWS, _BATCH_BYTES * len(rows) // total))
    pieces = _pieces(file, places, bucket_of, batch_rows)
    buckets = target.with_name(f"{target.name}.buckets")
    for gathered in _gather(pieces, int(bucket_of[-1]) + 1, buckets):
        placed = gathered.take(np.argsort(gathered[_PLACE].to_numpy()))
        del gathered
        yield placed.select(REQUESTS.names)


def _ends(lengths: Any) -> Any:
    """Return for each of some requests the bytes of all up to it."""
    return np.cumsum(lengths + lengths.dtype.type(_KEY_BYTES), dtype=np.int64)


def _bucket_numbers(ends: Any, size: int) -> Any:
    """Return the bucket of each row, in two bytes, since there may be very many rows."""
    # Where the first row lies of each that begins another multiple of the size.
    marks = np.searchsorted(ends, np.arange(size, int(ends[-1]), size), "left") + 1
    starts = np.zeros(len(ends), np.uint16)
    starts[np.unique(marks[marks < len(ends)])] = 1
    return np.cumsum(starts, dtype=np.uint16)


def _groups(lengths: Any) -> Iterator[tuple[int, int]]:
    """Yield the first row of each row group and the one after its last."""
    ends = _ends(lengths)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        fitting = int(np.searchsorted(ends, before + _BATCH_BYTES, "right"))
        stop = max(start + 1, min(fitting, start + _ROW_GROUP_ROWS))
        yield start, stop
        start = stop


def _pieces(
    file: Any, places: Any, bucket_of: Any, batch_rows: int
) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows that have a place, with their place and by bucket."""
    start = 0
    for batch in file.iter_batches(batch_rows, columns=REQUESTS.names):
        here = places[start : start + batch.num_rows]
        start += batch.num_rows
        table = pa.table([*batch.select(REQUESTS.names).columns, here], schema=_PLACED)
        placed = np.flatnonzero(here >= 0)
        numbers = bucket_of[here[placed]]
        order = np.argsort(numbers, kind="stable")
        by_bucket = table.take(placed[order])
        found, first, counts = np.unique(numbers[order], return_index=True, return_counts=True)
        for number, begin, count in zip(found, first, counts, strict=True):
            yield int(number), by_bucket.slice(begin, count)


def _gather(pieces: Iterator[tuple[int, pa.Table]], buckets: int, path: Path) -> Iterator[pa.Table]:
    """Yield what belongs into each bucket."""
    if buckets == 1:
        yield pa.concat_tables([piece for _, piece in pieces])
        return
    # One file holds all, since there may be more of them than files that may be open.
    batches_of: list[list[int]] = [[] for _ in range(buckets)]
    try:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(str(path), _PLACED, options=options) as writer:
            count = 0
            for number, piece in pieces:
                for batch in piece.to_batches():
                    writer.write_batch(batch)
                    batches_of[number].append(count)
                    count += 1
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            for numbers in batches_of:
                yield pa.Table.from_batches([reader.get_batch(number) for number in numbers])
    finally:
        path.unlink(missing_ok=True)


def _parquet_writer(path: Path) -> pq.ParquetWriter:
    # It is read once, soon and as a whole: what compresses more or describes it would take longer.
    return pq.ParquetWriter(
        path, REQUESTS, compression="lz4", use_dictionary=False, write_statistics=False
    )
