"""Writes rows of a Parquet file of requests in another order, with little of it in memory.

DuckDB's sort keeps long texts in memory, whatever its limit is. So it only sorts what is short, and
the rows go where they belong in two passes: into buckets on the disk, then each bucket in order.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dbt_llm.schema import REQUESTS

_BATCH_BYTES = 32 * 1024 * 1024
_BUCKET_BYTES = 128 * 1024 * 1024
# Every bucket is an open file; and a bucket's texts must fit into one Arrow array.
_MOST_BUCKETS = 64
_LARGEST_BUCKET_BYTES = 1024 * 1024 * 1024
_ROW_GROUP_ROWS = 4096
_PLACE = "place"


def write_in_order(source: Path, rows: Any, target: Path) -> int:
    """Write the requests of `source` whose row numbers are `rows`, in that order; return how many.

    `rows` is a NumPy array of whole numbers, each at most once.
    """
    if not len(rows):
        return 0
    with pq.ParquetFile(source) as file:
        total = max(1, file.metadata.num_rows)
        row_bytes = max(1, bytes_of(file.metadata) // total)
        places = np.full(total, -1, np.int64)
        places[rows] = np.arange(len(rows))
        share = row_bytes * len(rows)
        size = min(max(_BUCKET_BYTES, share // _MOST_BUCKETS), _LARGEST_BUCKET_BYTES)
        per_bucket = max(1, size // row_bytes)
        buckets = [
            target.with_name(f"{target.name}.{number}")
            for number in range(0, len(rows), per_bucket)
        ]
        _distribute(file, places, per_bucket, buckets, max(1, _BATCH_BYTES // row_bytes))
    group_rows = max(1, min(_ROW_GROUP_ROWS, _BATCH_BYTES // row_bytes))
    with pq.ParquetWriter(target, REQUESTS, compression="zstd") as writer:
        for bucket in buckets:
            table = pq.read_table(bucket, partitioning=None)
            bucket.unlink()
            table = table.take(np.argsort(table[_PLACE].to_numpy()))
            writer.write_table(table.select(REQUESTS.names).cast(REQUESTS), group_rows)
    return len(rows)


def bytes_of(metadata: Any) -> int:
    """Return the size of a Parquet file's content before compression."""
    groups = range(metadata.num_row_groups)
    return sum(int(metadata.row_group(group).total_byte_size) for group in groups)


def _distribute(
    file: Any, places: Any, per_bucket: int, buckets: list[Path], batch_rows: int
) -> None:
    schema = REQUESTS.append(pa.field(_PLACE, pa.int64()))
    writers = [pq.ParquetWriter(bucket, schema, compression="zstd") for bucket in buckets]
    try:
        start = 0
        for batch in file.iter_batches(batch_rows, columns=REQUESTS.names):
            here = places[start : start + batch.num_rows]
            start += batch.num_rows
            table = pa.table([*batch.select(REQUESTS.names).columns, here], schema=schema)
            numbers = np.where(here < 0, -1, here // per_bucket)
            for number in np.unique(numbers[numbers >= 0]):
                writers[number].write_table(table.take(np.flatnonzero(numbers == number)))
    finally:
        for writer in writers:
            writer.close()
