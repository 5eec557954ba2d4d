"""Part files: answers, completed to generations, written by the workers into the store's folder.

A part is written under a hidden name and renamed when it is whole, so a folder never shows half a
part. Each part holds the generations of one call, so that its statistics tell the calls apart.
"""

import contextlib
import json
import os
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dbt_llm.files import is_abandoned
from dbt_llm.schema import ANSWERS, GENERATIONS

PART_PATTERN = "part-*.parquet"
"""All parts; their names are part-TIME-RUN-RANDOM.parquet."""
_HALF_PATTERN = ".*.tmp"
_FLUSH_ROWS = 50_000
_FLUSH_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Provenance:
    """Where a generation comes from; the same for all generations of a job."""

    llm: str
    model: str
    engine: str
    pipeline_version: str
    node_id: str
    invocation_id: str
    run_id: str
    trace_id: str
    git_sha: str | None = None
    price_prompt: float = 0.0
    """USD per million prompt tokens."""
    price_completion: float = 0.0
    keep_prompts: bool = True
    after_us: int = 0
    """No generation is dated earlier, in µs since 1970: the newest one of a key has to win."""


@dataclass(frozen=True)
class Part:
    """What the driver knows of a part file: enough to commit and to count, no rows."""

    path: str
    rows: int
    size: int
    call_hash: str
    min_hash: str
    max_hash: str
    prompt_tokens: int = 0
    """Of the rows for which something was generated."""
    completion_tokens: int = 0
    cost_usd: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    """Rows per error code."""
    example_hashes: dict[str, str] = field(default_factory=dict)
    """One prompt hash per error code, to look the row up."""
    example_errors: dict[str, str] = field(default_factory=dict)

    def stats(self) -> str:
        """Return the file statistics as Delta's log keeps them."""
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {"prompt_hash": self.min_hash, "call_hash": self.call_hash},
                "maxValues": {"prompt_hash": self.max_hash, "call_hash": self.call_hash},
                "nullCount": {"prompt_hash": 0, "call_hash": 0},
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the part as plain data."""
        return asdict(self)


def remove_half_parts(folder: Path) -> None:
    """Remove what processes that were killed more than a day ago had begun to write."""
    for path in folder.glob(_HALF_PATTERN):
        with contextlib.suppress(OSError):
            if is_abandoned(path):
                path.unlink()


def parts_of_run(folder: Path, run_id: str) -> list[Path]:
    """Return the part files that a run wrote, committed or not."""
    return sorted(folder.glob(f"part-*-{run_id}-*.parquet"))


def read_part(path: Path) -> Part:
    """Describe a part file that some earlier run wrote, from its content.

    Raises:
        pyarrow.ArrowException, OSError: the file is no whole Parquet file of generations.
    """
    table = pq.read_table(
        path,
        columns=[
            *("prompt_hash", "call_hash", "status", "error_code", "error"),
            *("prompt_tokens", "completion_tokens", "cost_usd"),
        ],
    )
    if table.num_rows == 0 or any(table[key].null_count for key in ("prompt_hash", "call_hash")):
        raise pa.ArrowInvalid("it has no rows, or rows without a key")
    return _describe(path, table)


class PartWriter:
    """Buffers the generations of one call and writes them as parts, by rows, bytes or on demand."""

    def __init__(
        self, folder: str, call_hash: str, call: str, provenance: Provenance, engine_version: str
    ) -> None:
        self.folder = Path(folder)
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

    def add(self, answers: pa.Table, requests: pa.Table) -> None:
        """Complete answers (schema `ANSWERS`) with their requests and buffer them.

        The two are joined by prompt hash, whatever their order.
        """
        table = self._complete(answers.cast(ANSWERS), requests)
        with self._lock:
            self._buffer.append(table)
            self._rows += table.num_rows
            self._bytes += table.nbytes
            full = self._rows >= _FLUSH_ROWS or self._bytes >= _FLUSH_BYTES
        if full:
            # The engine that answers is not at fault; who asks for the parts will be told.
            with contextlib.suppress(OSError):
                self.write()

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
        rows = pc.index_in(answers["prompt_hash"], requests["prompt_hash"])
        price = self._provenance
        prompt_tokens = pc.fill_null(answers["prompt_tokens"], 0)
        completion_tokens = pc.fill_null(answers["completion_tokens"], 0)
        cost = pc.add(
            pc.multiply(prompt_tokens, price.price_prompt / 1e6),
            pc.multiply(completion_tokens, price.price_completion / 1e6),
        )
        # A request that was refused before anything was generated costs nothing.
        cost = pc.if_else(answers["completion_tokens"].is_valid(), cost, 0.0)
        constants: dict[str, Any] = {
            "call_hash": self._call_hash,
            "call": self._call,
            "llm": price.llm,
            "model": price.model,
            "engine": price.engine,
            "engine_version": self._engine_version,
            "pipeline_version": price.pipeline_version,
            "git_sha": price.git_sha,
            "node_id": price.node_id,
            "invocation_id": price.invocation_id,
            "run_id": price.run_id,
            "trace_id": price.trace_id,
            "created_at": max(int(time.time() * 1_000_000), price.after_us),
        }
        columns = []
        for schema_field in GENERATIONS:
            name, type_ = schema_field.name, schema_field.type
            if name == "prompt":
                column = (
                    requests["prompt"].take(rows)
                    if price.keep_prompts
                    else pa.nulls(len(rows), pa.string())
                )
            elif name == "cost_usd":
                column = cost
            elif name in constants:
                column = pa.repeat(pa.scalar(constants[name], type_), len(rows))
            else:
                column = answers[name]
            columns.append(column)
        return pa.table(columns, schema=GENERATIONS)

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
            self._write_part(pa.concat_tables(tables))
        except BaseException:
            # A full disk must not cost answers: what could not be written is tried again.
            with self._lock:
                self._buffer = tables + self._buffer
                self._rows = sum(table.num_rows for table in self._buffer)
                self._bytes = sum(table.nbytes for table in self._buffer)
            raise

    def _write_part(self, table: pa.Table) -> None:
        name = f"{time.time_ns():020d}-{self._provenance.run_id}-{uuid.uuid4().hex}"
        hidden = self.folder / f".{name}.tmp"
        path = self.folder / f"part-{name}.parquet"
        try:
            with hidden.open("wb") as file:
                pq.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            hidden.rename(path)
        finally:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
        with self._lock:
            self._written.append(_describe(path, table))


def _describe(path: Path, table: pa.Table) -> Part:
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
    used = table.filter(table["completion_tokens"].is_valid())
    extremes = pc.min_max(table["prompt_hash"]).as_py()
    return Part(
        path=str(path),
        rows=table.num_rows,
        size=path.stat().st_size,
        call_hash=table["call_hash"][0].as_py(),
        min_hash=extremes["min"],
        max_hash=extremes["max"],
        prompt_tokens=pc.sum(used["prompt_tokens"]).as_py() or 0,
        completion_tokens=pc.sum(used["completion_tokens"]).as_py() or 0,
        cost_usd=pc.sum(table["cost_usd"]).as_py() or 0.0,
        errors=errors,
        example_hashes=hashes,
        example_errors=examples,
    )
