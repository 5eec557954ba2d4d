"""The Ray actor around one engine: it answers units of requests and writes the part files."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dbt_llm.call import canonical_json
from dbt_llm.check import OutputCheck
from dbt_llm.engine import Engine, start_engine
from dbt_llm.errors import CancelledError, DbtLLMError, EngineError
from dbt_llm.parts import Part, PartWriter, Provenance
from dbt_llm.schema import REQUESTS, Answer, answers_table


class EngineActor:
    """Holds one engine for as long as the process that started it lives.

    All methods but `__init__` run on one event loop; several units are under way at a time, so
    the engine stays full between them.
    """

    def __init__(self, config: dict[str, Any], log_path: str) -> None:
        self._config = config
        self._log_path = log_path
        self._engine: Engine | None = None
        self._failure: DbtLLMError | None = None
        self._starting = asyncio.Lock()
        self._secrets: dict[str, Any] = {}
        self._units: dict[str, set[asyncio.Task[Any]]] = {}
        self._abandoned: set[str] = set()
        self._writers: dict[tuple[str, str], PartWriter] = {}

    async def start(self, secrets: dict[str, Any]) -> dict[str, Any]:
        """Start the engine, once; return its version, concurrency and process id.

        Secrets come here and not to `__init__`, whose arguments Ray's control service keeps.

        Raises:
            EngineError: with the last lines of the engine's log.
        """
        self._secrets = secrets
        engine = await self._started()
        return {"version": engine.version, "concurrency": engine.concurrency, "pid": os.getpid()}

    async def answer(
        self,
        block: pa.Table,
        offset: int,
        length: int | None,
        call_hash: str,
        call: dict[str, Any],
        job: dict[str, Any],
    ) -> int:
        """Answer the requests of one unit into the buffer; return how many there were.

        The unit is `length` rows of `block` (schema `REQUESTS`) from `offset` on; `call` is the
        call's content; `job` holds `folder`, where parts go, and `provenance`.
        """
        engine = await self._started()
        requests = block.slice(offset, length).cast(REQUESTS)
        provenance = Provenance(**job["provenance"])
        writer = self._writer(job["folder"], call_hash, call, provenance, engine.version)
        check = OutputCheck(call)
        answered: list[pa.ChunkedArray] = []

        def emit(answers: pa.Table) -> None:
            if pc.any(pc.invert(pc.is_in(answers["prompt_hash"], requests["prompt_hash"]))).as_py():
                raise EngineError("The engine answered a prompt that it was not asked.")
            answered.append(answers["prompt_hash"])
            writer.add(check.apply(answers), requests)

        await self._until_abandoned(provenance.run_id, engine.answer(requests, call, emit))
        missing = _without(requests["prompt_hash"], answered)
        if missing:
            emit(answers_table([_silent(prompt_hash) for prompt_hash in missing]))
        return int(requests.num_rows)

    async def flush(self, run_id: str) -> list[dict[str, Any]]:
        """Write what the run has in the buffer; return its parts since the last call."""
        writers = [writer for (run, _), writer in self._writers.items() if run == run_id]
        parts: list[Part] = []
        for writer in writers:
            parts += await asyncio.to_thread(writer.flush)
        return [part.as_dict() for part in parts]

    async def abandon(self, run_id: str) -> None:
        """Stop working on a run's units; answers in the buffer stay there."""
        # A unit that Ray hands over later, when its block has come, must not begin either.
        self._abandoned.add(run_id)
        units = self._units.get(run_id, set())
        for unit in units:
            unit.cancel()
        await asyncio.gather(*units, return_exceptions=True)

    async def finish(self, run_id: str) -> None:
        """Forget a run whose parts have all been fetched."""
        for key in [key for key in self._writers if key[0] == run_id]:
            del self._writers[key]
        self._units.pop(run_id, None)

    async def _until_abandoned(self, run_id: str, work: Coroutine[Any, Any, None]) -> None:
        if run_id in self._abandoned:
            work.close()
            raise CancelledError("The run was abandoned.")
        unit = asyncio.ensure_future(work)
        self._units.setdefault(run_id, set()).add(unit)
        try:
            await asyncio.wait([unit])
        finally:
            unit.cancel()
            self._units[run_id].discard(unit)
        if unit.cancelled():
            raise CancelledError("The run was abandoned.")
        unit.result()

    async def _started(self) -> Engine:
        async with self._starting:
            if self._failure is not None:
                raise self._failure
            if self._engine is None:
                _redirect_output(self._log_path)
                try:
                    self._engine = start_engine(self._config, self._secrets)
                except DbtLLMError as error:
                    self._failure = error
                    raise
                except Exception as error:
                    self._failure = EngineError(
                        f"The engine of {self._config['model']} did not start: {error}\n"
                        f"{_tail(self._log_path)}"
                    )
                    raise self._failure from None
            return self._engine

    def _writer(
        self,
        folder: str,
        call_hash: str,
        call: dict[str, Any],
        provenance: Provenance,
        engine_version: str,
    ) -> PartWriter:
        key = (provenance.run_id, call_hash)
        if key not in self._writers:
            self._writers[key] = PartWriter(
                folder, call_hash, canonical_json(call), provenance, engine_version
            )
        return self._writers[key]


def _without(asked: pa.ChunkedArray, answered: list[pa.ChunkedArray]) -> list[str]:
    chunks = [chunk for array in answered for chunk in array.chunks]
    flat = pa.chunked_array(chunks, pa.string())
    if len(flat) != len(pc.unique(flat)):
        raise EngineError("The engine answered a prompt twice.")
    missing: list[str] = asked.filter(pc.invert(pc.is_in(asked, flat))).to_pylist()
    return missing


def _silent(prompt_hash: str) -> Answer:
    return Answer(prompt_hash, error_code="unknown", error="the engine gave no answer")


def _redirect_output(log_path: str) -> None:
    """Send all that this process and its children print to the log file."""
    path = Path(log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _tail(log_path: str, lines: int = 15) -> str:
    text = Path(log_path).read_text(errors="replace") if Path(log_path).exists() else ""
    last = "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
    return f"The last lines of its log {log_path}:\n{last}"
