"""Writes part files: answers, completed to generations, by the workers into the store's folder.

A folder never shows half a part (see `storage.py`). Each part holds the generations of one call, so
that its statistics tell the calls apart.
"""

import contextlib
import threading
import time
import uuid
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dbt_llm.credentials import is_url
from dbt_llm.parts import Part, Provenance
from dbt_llm.schema import ANSWERS, GENERATIONS, ROW_GROUP_ROWS
from dbt_llm.storage import Folder
from dbt_llm.tally import tally_of

_FLUSH_ROWS = 200_000
_FLUSH_BYTES = 64 * 1024 * 1024
# A disk that is slower than the engine must not fill the memory.
_MOST_FLUSHES = 4
_CREATED_AT = GENERATIONS.field("created_at").type
# Columns that hardly ever repeat a value; to look for a dictionary only takes time.
_DISTINCT = {"prompt_hash", "prompt", "output", "embedding", "error", "latency_s"}


def read_part(folder: Folder, name: str) -> Part:
    """Describe a part file that some earlier run wrote, from its content.

    Raises:
        pyarrow.ArrowException, OSError: the file is no whole Parquet file of generations.
    """
    source = folder.source(name)
    table = pq.read_table(
        source,
        columns=[
            *("prompt_hash", "call_hash", "status", "error_code", "error"),
            *("prompt_tokens", "completion_tokens", "cost_usd"),
        ],
    )
    if table.num_rows == 0 or any(table[key].null_count for key in ("prompt_hash", "call_hash")):
        raise pa.ArrowInvalid("it has no rows, or rows without a key")
    size = folder.size(name)
    if size is None:
        raise FileNotFoundError(f"{folder.address(name)} is gone")
    return _describe(folder.address(name), size, table)


class PartWriter:
    """Buffers the generations of one call and writes them as parts, by rows, bytes or on demand."""

    def __init__(
        self, folder: Folder, call_hash: str, call: str, provenance: Provenance, engine_version: str
    ) -> None:
        self.folder = folder
        self._call_hash = call_hash
        self._call = call
        self._provenance = provenance
        self._engine_version = engine_version
        self._buffer: list[pa.Table] = []
        self._rows = 0
        self._bytes = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._written: list[Part] = []
        self._background: threading.Thread | None = None

    def add(self, answers: pa.Table, requests: pa.Table) -> None:
        """Complete answers (schema `ANSWERS`) with their requests and buffer them.

        The two are joined by prompt hash, whatever their order.
        """
        table = self._complete(answers.cast(ANSWERS), requests)
        with self._lock:
            self._buffer.append(table)
            self._rows += table.num_rows
            self._bytes += table.nbytes
            flushes = max(self._rows / _FLUSH_ROWS, self._bytes / _FLUSH_BYTES)
        if flushes >= _MOST_FLUSHES and not is_url(str(self.folder)):
            self._try_to_write()
        elif flushes >= 1:
            self._begin_to_write()

    def _try_to_write(self) -> None:
        # The engine that answers is not at fault; who asks for the parts will be told.
        with contextlib.suppress(OSError):
            self.write()

    def _begin_to_write(self) -> None:
        """Write in a thread of its own: the engine must not wait for a disk or an upload."""
        if self._background is None or not self._background.is_alive():
            self._background = threading.Thread(target=self._try_to_write, daemon=True)
            self._background.start()

    def flush(self) -> list[Part]:
        """Write what is buffered, and return all parts that were written since the last call."""
        self.write()
        return self.take()

    def take(self) -> list[Part]:
        """Return the parts that were written since the last call."""
        with self._lock:
            written, self._written = self._written, []
        return written

    def _complete(self, answers: pa.Table, requests: pa.Table) -> pa.Table:
        """Return all columns of generations but those that are the same for all."""
        provenance = self._provenance
        rows = pc.index_in(answers["prompt_hash"], requests["prompt_hash"])
        prompts = requests["prompt"].take(rows)
        if not provenance.keep_prompts:
            prompts = pa.nulls(len(rows), pa.string())
        prompt_tokens = pc.fill_null(answers["prompt_tokens"], 0)
        completion_tokens = pc.fill_null(answers["completion_tokens"], 0)
        cost = pc.add(
            pc.multiply(prompt_tokens, provenance.price_prompt / 1e6),
            pc.multiply(completion_tokens, provenance.price_completion / 1e6),
        )
        # A request that was refused before anything was generated costs nothing.
        cost = pc.if_else(answers["completion_tokens"].is_valid(), cost, 0.0)
        created_at = max(int(time.time() * 1_000_000), provenance.after_us)
        return (
            answers.append_column("prompt", prompts)
            .append_column("cost_usd", cost)
            .append_column("created_at", pa.repeat(pa.scalar(created_at, _CREATED_AT), len(rows)))
        )

    def _with_constants(self, table: pa.Table) -> pa.Table:
        """Return generations; what is the same for all of them is held once, as a dictionary."""
        provenance = self._provenance
        constants = {
            "call_hash": self._call_hash,
            "call": self._call,
            "llm": provenance.llm,
            "model": provenance.model,
            "engine": provenance.engine,
            "engine_version": self._engine_version,
            "pipeline_version": provenance.pipeline_version,
            "git_sha": provenance.git_sha,
            "node_id": provenance.node_id,
            "invocation_id": provenance.invocation_id,
            "run_id": provenance.run_id,
            "trace_id": provenance.trace_id,
        }
        columns = [
            _repeated(constants[name], table.num_rows) if name in constants else table[name]
            for name in GENERATIONS.names
        ]
        fields = [
            field.with_type(column.type) for field, column in zip(GENERATIONS, columns, strict=True)
        ]
        return pa.table(columns, schema=pa.schema(fields))

    def write(self) -> None:
        """Write what is buffered; when it returns, nothing that was added before is unwritten.

        Raises:
            OSError: the folder takes no file; what is buffered stays so.
        """
        # Who comes second waits for the first: it may be about to end the process.
        with self._writing:
            self._write()

    def _write(self) -> None:
        with self._lock:
            tables, self._buffer = self._buffer, []
            self._rows = self._bytes = 0
        if not tables:
            return
        try:
            self._write_part(self._with_constants(pa.concat_tables(tables)))
        except BaseException:
            # A full disk must not cost answers: what could not be written is tried again.
            with self._lock:
                self._buffer = tables + self._buffer
                self._rows = sum(table.num_rows for table in self._buffer)
                self._bytes = sum(table.nbytes for table in self._buffer)
            raise

    def _write_part(self, table: pa.Table) -> None:
        name = f"{time.time_ns():020d}-{self._provenance.run_id}-{uuid.uuid4().hex}"

        def write(file: Any) -> None:
            pq.write_table(
                table,
                file,
                row_group_size=ROW_GROUP_ROWS,
                compression="zstd",
                use_dictionary=[name for name in table.column_names if name not in _DISTINCT],
                # The Arrow schema would have readers make dictionaries, too.
                store_schema=False,
            )

        path = f"part-{name}.parquet"
        size = self.folder.put(path, write)
        with self._lock:
            self._written.append(_describe(self.folder.address(path), size, table))


def _repeated(value: str | None, rows: int) -> pa.Array:
    if value is None:
        return pa.nulls(rows, pa.string())
    first = pa.repeat(pa.scalar(0, pa.int8()), rows)
    return pa.DictionaryArray.from_arrays(first, pa.array([value]))


def _describe(address: str, size: int, table: pa.Table) -> Part:
    errors: dict[str, int] = {}
    hashes: dict[str, str] = {}
    examples: dict[str, str] = {}
    failed = table.filter(pc.equal(table["status"], "error"))
    codes = failed["error_code"].to_pylist()
    for row, code in enumerate(codes):
        if code not in errors:
            hashes[code] = failed["prompt_hash"][row].as_py()
            examples[code] = failed["error"][row].as_py() or ""
        errors[code] = errors.get(code, 0) + 1
    tally = tally_of(table)
    extremes = pc.min_max(table["prompt_hash"]).as_py()
    return Part(
        path=address,
        rows=tally.rows,
        size=size,
        call_hash=table["call_hash"][0].as_py(),
        min_hash=extremes["min"],
        max_hash=extremes["max"],
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        cost_usd=pc.sum(table["cost_usd"]).as_py() or 0.0,
        errors=errors,
        example_hashes=hashes,
        example_errors=examples,
    )
