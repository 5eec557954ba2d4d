"""Takes the prompts that a query needs and the store does not have.

DuckDB calls the collector from all of its threads, for all models that are built at the same
time. A token, fresh for each evaluation of a model, keeps them apart: the SQL functions carry it
as an argument. Nothing about a resolve lives in the database, where a rollback could undo it.
"""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from dbt_llm.call import Call, make_call
from dbt_llm.config import LLMConfig
from dbt_llm.errors import DbtLLMError, SpoolError, UnresolvedError

if TYPE_CHECKING:
    from dbt_llm.spool import RawSpool

MAX_SEEN = 1_000_000
"""Keys that are kept to count a query's distinct prompts; beyond, the number is not known."""
_REPEATED_ROWS = 250_000

_PIECE_BYTES = 32 * 1024 * 1024


class Mode(Enum):
    """What happens to a prompt that has no stored answer (the dbt variable `llm_mode`)."""

    GENERATE = "generate"
    CACHED = "cached"
    NULL = "null"


class SeenKeys:
    """Distinct keys, up to `MAX_SEEN` of them and some more; they stay in Arrow, which is quick."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            # pa.array([]) imports pandas, which takes a third of a second.
            self._distinct = pa.nulls(0, pa.string())
            self._more: list[pa.Array] = []
            self._more_rows = 0

    def add(self, keys: pa.Array) -> None:
        """Note keys, which may be known or NULL."""
        with self._lock:
            if len(self._distinct) >= MAX_SEEN:
                return
            self._more.append(keys.cast(pa.string()))
            self._more_rows += len(keys)
            if self._more_rows >= max(_REPEATED_ROWS, len(self._distinct)):
                self._merge()

    def __len__(self) -> int:
        """Return how many there are."""
        with self._lock:
            self._merge()
            return len(self._distinct)

    def keys(self) -> pa.Table:
        """Return them as a table with the column prompt_hash."""
        with self._lock:
            self._merge()
            return pa.table({"prompt_hash": self._distinct})

    def _merge(self) -> None:
        keys = pa.chunked_array([self._distinct, *self._more], pa.string())
        self._distinct = keys.drop_null().unique()
        self._more, self._more_rows = [], 0


class Resolution:
    """What one evaluation of a model's query has shown so far."""

    def __init__(self, mode: Mode, spool_folder: Path):
        self.mode = mode
        self.calls: dict[str, Call] = {}
        self.call_sites = 0
        self.asks = False
        """Whether one of the calls wants answers, and not only their keys."""
        self.error: DbtLLMError | None = None
        self.missing: set[str] = set()
        self.seen = SeenKeys()
        self._spool_folder = spool_folder
        self._spooling = threading.Lock()
        self._spool: RawSpool | None = None

    @property
    def spool(self) -> "RawSpool":
        """Where the prompts go."""
        from dbt_llm.spool import RawSpool

        with self._spooling:
            if self._spool is None:
                self._spool = RawSpool(self._spool_folder)
            return self._spool


class Collector:
    """The Python side of the SQL functions; one per DuckDB database."""

    def __init__(
        self, llms: Mapping[str, LLMConfig], outside: Callable[[int], None] | None = None
    ) -> None:
        """Create a collector.

        `outside` is told how many prompts were missing where no resolve is under way; it raises
        or returns, and then the function yields NULL.
        """
        self._llms = llms
        self._outside = outside
        self._open: dict[str, Resolution] = {}
        self._lock = threading.Lock()
        self._calls_by_options: dict[str, Call] = {}

    def open(self, mode: Mode, spool_folder: Path) -> tuple[str, Resolution]:
        """Begin a resolve; the token goes into the session variable `dbt_llm_token`."""
        token = uuid.uuid4().hex
        resolution = Resolution(mode, spool_folder)
        with self._lock:
            self._open[token] = resolution
        return token, resolution

    def close(self, token: str) -> None:
        """End a resolve; a function that still carries the token raises from now on."""
        with self._lock:
            self._open.pop(token, None)

    def call_hash(self, token: str, options_json: str) -> str:
        """Return the hash of the call with these options, and note that the query asks it.

        Raises:
            CallError: an option is wrong.
        """
        resolution = self._resolution(token)
        if resolution is not None:
            resolution.asks = True
        return self.key_call_hash(token, options_json)

    def key_call_hash(self, token: str, options_json: str) -> str:
        """Return the hash of such a call, and note that the query has it.

        Raises:
            CallError: an option is wrong.
        """
        resolution = self._resolution(token)
        call = self._call(resolution, options_json)
        if resolution is not None:
            with self._lock:
                resolution.calls[call.call_hash] = call
                resolution.call_sites += 1
        return call.call_hash

    def known_call_hash(self, token: str, options_json: str) -> str:
        """Return the hash of such a call, for the second mention of it in a macro.

        Raises:
            CallError: an option is wrong.
        """
        return self._call(self._resolution(token), options_json).call_hash

    def _call(self, resolution: Resolution | None, options_json: str) -> Call:
        try:
            call = self._calls_by_options.get(options_json)
            if call is None:
                call = make_call(options_json, self._llms)
                self._calls_by_options[options_json] = call
        except DbtLLMError as error:
            if resolution is not None:
                resolution.error = error
            raise
        return call

    def collect(
        self, token: str, call_hashes: pa.Array, prompt_hashes: pa.Array, prompts: pa.Array
    ) -> None:
        """Take prompts that have no stored answer; NULL prompts are dropped.

        Raises:
            UnresolvedError: no resolve is under way and none may be missing.
        """
        batch = pa.record_batch(
            [prompt_hashes, call_hashes, prompts], names=["prompt_hash", "call_hash", "prompt"]
        )
        rows = len(prompts) - prompts.null_count
        if rows == 0:
            return
        resolution = self._resolution(token)
        if resolution is None:
            if self._outside is not None:
                self._outside(rows)
        elif resolution.mode is Mode.GENERATE:
            try:
                for piece in _pieces(batch):
                    resolution.spool.add(piece.filter(piece.column("prompt").is_valid()))
            except SpoolError as error:
                resolution.error = error
                raise
        else:
            batch = batch.filter(prompts.is_valid())
            with self._lock:
                resolution.missing.update(batch.column("prompt_hash").to_pylist())

    def count(self, token: str, prompt_hashes: pa.Array) -> None:
        """Note the keys that a query looks up, for the summary line."""
        resolution = self._resolution(token)
        if resolution is not None:
            resolution.seen.add(prompt_hashes)

    def _resolution(self, token: str) -> Resolution | None:
        if not token:
            return None
        resolution = self._open.get(token)
        if resolution is None:
            raise UnresolvedError(
                "An LLM function ran after the model it belongs to was finished. "
                "Call LLM functions only in the SQL of a model."
            )
        return resolution


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch of large prompts, so that what is copied at a time is small."""
    rows = max(1, batch.num_rows * _PIECE_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
