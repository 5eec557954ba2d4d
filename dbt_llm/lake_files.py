"""Writes the data files of a lakehouse table: a query's rows, as Arrow batches, to Parquet.

A file is written under its final name, for it counts only once a log names it. Rows that come
sorted by partition are cut where the partition changes.
"""

import contextlib
import json
import math
import os
import re
import sys
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dbt_llm.errors import LakehouseError
from dbt_llm.lake_table import DataFile
from dbt_llm.lake_types import Column, file_schema
from dbt_llm.schema import ROW_GROUP_ROWS

TARGET_BYTES = 8 * 1024 * 1024
"""Of a file. A smaller one makes a change of few rows cheaper, and a large table's log longer."""
_BATCH_ROWS = 8192
"""Of a row group, as DuckDB has it; it may also end by its bytes."""
_MOST_STATS = 32
_LONGEST_STAT = 64
_LONGEST_FOLDER_BYTES = 255
_NULL = "__HIVE_DEFAULT_PARTITION__"


class FileWriter:
    """Writes files into one table's folder, and knows what it wrote."""

    def __init__(self, location: str, columns: list[Column], partition_by: tuple[str, ...]) -> None:
        self.written: list[DataFile] = []
        self._folder = Path(location)
        self._partition_by = partition_by
        self._dates = {one.name for one in columns if one.sql_type == "DATE"}
        inside = [column for column in columns if column.name not in partition_by]
        self._schema = file_schema(inside)
        self._writer: pq.ParquetWriter | None = None
        self._file: Any = None
        self._path = ""
        self._partition: tuple[str | None, ...] = ()
        self._rows = 0
        self._seen = _Seen()
        self._group: list[pa.RecordBatch] = []

    def write(self, cursor: Any, query: str) -> list[DataFile]:
        """Write the rows of a query: the columns, with partition columns cast to text.

        Returns:
            the files, none where the query has no rows.

        Raises:
            LakehouseError: the folder takes no file.
        """
        try:
            for batch in _batches(cursor, query):
                for partition, rows in self._cut(batch):
                    self._add(partition, rows)
            self._end_file()
        except OSError as error:
            self.discard()
            raise LakehouseError(
                f"The lakehouse table {self._folder} cannot be written: {error}. Nothing of this "
                "run is visible in it. Check permissions and the space on its disk."
            ) from error
        except BaseException:
            self.discard()
            raise
        return self.written

    def discard(self) -> None:
        """Remove what was written: it was not committed."""
        if self._file is not None:
            with contextlib.suppress(pa.ArrowException, OSError, ValueError):
                if self._writer is not None:
                    self._writer.close()
            self._file.close()
            Path(self._folder / self._path).unlink(missing_ok=True)
            self._file = self._writer = None
            self._group = []
        for file in self.written:
            Path(file.address).unlink(missing_ok=True)
        self.written = []

    def _cut(self, batch: pa.RecordBatch) -> Iterator[tuple[tuple[str | None, ...], Any]]:
        inside = pa.RecordBatch.from_arrays(
            [
                _as(batch.column(batch.schema.get_field_index(one.name)), one.type)
                for one in self._schema
            ],
            schema=self._schema,
        )
        if not self._partition_by:
            yield (), inside
            return
        texts = [batch.column(batch.schema.get_field_index(one)) for one in self._partition_by]
        changes = np.zeros(max(batch.num_rows - 1, 0), dtype=bool)
        for text in texts:
            codes = text.dictionary_encode(null_encoding="encode").indices.to_numpy()
            changes |= codes[1:] != codes[:-1]
        starts = [0, *(int(at) + 1 for at in np.flatnonzero(changes))]
        for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
            yield tuple(text[start].as_py() for text in texts), inside.slice(start, end - start)

    def _add(self, partition: tuple[str | None, ...], rows: pa.RecordBatch) -> None:
        if self._writer is not None and partition != self._partition:
            self._end_file()
        if self._writer is None:
            self._begin_file(partition)
        self._group.append(rows)
        self._rows += rows.num_rows
        self._seen.add(rows)
        full = sum(one.num_rows for one in self._group) >= ROW_GROUP_ROWS
        if full or sum(one.nbytes for one in self._group) >= TARGET_BYTES:
            self._end_group()
            if self._file.tell() >= TARGET_BYTES:
                self._end_file()

    def _end_group(self) -> None:
        if self._group and self._writer is not None:
            rows = pa.Table.from_batches(self._group, self._schema)
            self._writer.write_table(rows, row_group_size=rows.num_rows)
        self._group = []

    def _begin_file(self, partition: tuple[str | None, ...]) -> None:
        for name, value in zip(self._partition_by, partition, strict=True):
            if name in self._dates and value and not re.fullmatch(r"\d{4}-\d\d-\d\d", value):
                raise LakehouseError(
                    f"The partition column {name} holds the date {value}, which no reader takes. "
                    "Use dates of the years 1 to 9999, or NULL."
                )
        folder = _partition_folder(self._partition_by, partition)
        self._path = f"{folder}part-{uuid.uuid4().hex}.parquet"
        self._partition, self._rows, self._seen = partition, 0, _Seen()
        path = self._folder / self._path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        # The Arrow schema would be one more truth beside the table's own.
        self._writer = pq.ParquetWriter(
            self._file, self._schema, compression="zstd", store_schema=False
        )

    def _end_file(self) -> None:
        if self._writer is None:
            return
        self._end_group()
        self._writer.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = self._writer = None
        path = self._folder / self._path
        self.written.append(
            DataFile(
                self._path,
                str(path),
                path.stat().st_size,
                self._rows,
                self._partition,
                _stats(pq.read_metadata(path), self._schema, self._seen),
            )
        )


def _batches(cursor: Any, query: str) -> Iterator[pa.RecordBatch]:
    reader = cursor.sql(query).to_arrow_reader(_BATCH_ROWS)
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except OSError as error:
            # So an error of DuckDB comes through Arrow; it has nothing to do with files.
            raise LakehouseError(f"The rows cannot be written as they are: {error}") from error
        if batch.num_rows:
            yield batch


def _as(array: pa.Array, type_: pa.DataType) -> pa.Array:
    return array if array.type == type_ else array.cast(type_)


def _partition_folder(names: tuple[str, ...], values: tuple[str | None, ...]) -> str:
    """Return where files of a partition lie: `name=value/`, escaped as delta-rs does.

    The log says what they hold, but Polars takes it from here.

    Raises:
        LakehouseError: a value cannot be told from NULL there, or is too long for a folder.
    """
    folders = []
    for name, value in zip(names, values, strict=True):
        if value in {"", _NULL}:
            raise LakehouseError(
                f"The partition column {name} holds {value!r}, which readers cannot tell from "
                "NULL. Give these rows another value, or NULL."
            )
        folder = f"{name}={_NULL if value is None else quote(value, safe='')}"
        if len(folder.encode()) > _LONGEST_FOLDER_BYTES:
            raise LakehouseError(
                f"The partition column {name} holds a text of {len(value or '')} characters, too "
                "many for the name of a folder. Partition by a column of few short values."
            )
        folders.append(f"{folder}/")
    return "".join(folders)


class _Seen:
    """What a file's footer does not tell: NaN, and the least and the greatest of long texts."""

    def __init__(self) -> None:
        self.has_nan = False
        self.texts: dict[str, list[str]] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        for one, column in zip(rows.schema, rows.columns, strict=True):
            if pa.types.is_floating(one.type):
                self.has_nan = self.has_nan or bool(pc.any(pc.is_nan(column)).as_py())
            elif pa.types.is_large_string(one.type) and column.null_count < len(column):
                both = [*self.texts.get(one.name, []), *pc.min_max(column).as_py().values()]
                self.texts[one.name] = [min(both), max(both)]


def _stats(metadata: Any, schema: pa.Schema, seen: _Seen) -> str:
    """Return Delta's statistics of a file, from its footer: plain columns, the first 32.

    A file of which one column has no bounds gets none for any: delta-rs would take a bound that is
    missing beside others for one that no value meets (`to_pyarrow_dataset`, 1.6).
    """
    paths = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
    places = {path: at for at, path in enumerate(paths)}
    bounds: dict[str, tuple[str, str] | None] = {}
    nulls: dict[str, int] = {}
    for one in list(schema)[:_MOST_STATS]:
        if pa.types.is_nested(one.type) or one.name not in places:
            continue
        if paths.count(one.name) > 1:
            # A column "a.b" beside a field b of a.
            bounds[one.name] = None
            continue
        groups = [
            metadata.row_group(number).column(places[one.name]).statistics
            for number in range(metadata.num_row_groups)
        ]
        if all(group is not None and group.has_null_count for group in groups):
            nulls[one.name] = sum(group.null_count for group in groups)
        if not pa.types.is_large_binary(one.type) and nulls.get(one.name) != metadata.num_rows:
            texts = seen.texts.get(one.name)
            bounds[one.name] = _bounds(groups) if texts is None else _text_bounds(*texts)
    stats = [f'"numRecords": {metadata.num_rows}', f'"nullCount": {json.dumps(nulls)}']
    known = {name: pair for name, pair in bounds.items() if pair is not None}
    if len(known) == len(bounds) and not seen.has_nan:
        for at, key in enumerate(("minValues", "maxValues")):
            values = ", ".join(f"{json.dumps(name)}: {pair[at]}" for name, pair in known.items())
            stats.append(f'"{key}": {{{values}}}')
    return f"{{{', '.join(stats)}}}"


def _bounds(groups: list[Any]) -> tuple[str, str] | None:
    """Return the least and the greatest value of a column as JSON; None where JSON has none."""
    # A row group of NULLs has no extremes, and hides none.
    full = [group for group in groups if group is None or group.num_values]
    if any(group is None or not group.has_min_max for group in full):
        return None
    try:
        low, high = min(group.min for group in full), max(group.max for group in full)
    except (OverflowError, ValueError):
        # Python has no such date: infinity, one before Christ or after the year 9999.
        return None
    if isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high)):
        return None
    return _json(low), _json(high)


def _text_bounds(low: str, high: str) -> tuple[str, str] | None:
    """Return short texts between which all lie."""
    start = _json(low[:_LONGEST_STAT])
    if len(high) <= _LONGEST_STAT:
        return start, _json(high)
    for at in reversed(range(_LONGEST_STAT)):
        if ord(high[at]) < sys.maxunicode:
            following = ord(high[at]) + 1
            # Surrogates are no characters.
            end = high[:at] + chr(0xE000 if following == 0xD800 else following)
            return start, _json(end)
    return None


def _json(value: Any) -> str:
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return json.dumps(value.isoformat(timespec="microseconds"))
        plain = value.astimezone(UTC).replace(tzinfo=None)
        return json.dumps(plain.isoformat(timespec="microseconds") + "Z")
    return json.dumps(value.isoformat() if isinstance(value, date) else value)
