"""The Ray actor around one engine: it answers units of requests and writes the part files."""

import asyncio
import contextlib
import errno
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pyarrow as pa

from dbt_llm.call import canonical_json
from dbt_llm.check import OutputCheck
from dbt_llm.credentials import is_url
from dbt_llm.engine import Engine, start_engine
from dbt_llm.errors import CancelledError, DbtLLMError, EngineError, StoreError
from dbt_llm.ledger import Ledger
from dbt_llm.part_writer import PartWriter
from dbt_llm.parts import Part, Provenance
from dbt_llm.process_watch import ProcessId, call_when_gone
from dbt_llm.schema import REQUESTS, Answer, answers_table
from dbt_llm.storage import open_folder
from dbt_llm.tally import Tally, tally_of

_ABANDON_S = 0.5


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
        self._watching = False
        self._units: dict[str, set[asyncio.Task[Any]]] = {}
        self._abandoned: set[str] = set()
        self._writers: dict[tuple[str, str], PartWriter] = {}
        self._checks: dict[tuple[str, str], OutputCheck] = {}
        self._tallies: dict[str, Tally] = {}
        self._waiting: dict[str, tuple[int, asyncio.Future[None]]] = {}

    async def start(self, secrets: dict[str, Any], driver: ProcessId) -> dict[str, Any]:
        """Start the engine, once; return its version, concurrency and process id.

        Secrets come here and not to `__init__`, whose arguments Ray's control service keeps. When
        the driver dies, what is answered is written and nothing more is asked.

        Raises:
            EngineError: with the last lines of the engine's log.
        """
        self._secrets = secrets
        if not self._watching:
            self._watching = True
            call_when_gone(driver, self._leave)
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
    ) -> Tally:
        """Answer the requests of one unit into the buffer; return what the run has in all.

        The unit is `length` rows of `block` (schema `REQUESTS`) from `offset` on; `call` is the
        call's content; `job` holds `folder`, where parts go, `storage_options` and `provenance`.
        """
        engine = await self._started()
        requests = block.slice(offset, length).cast(REQUESTS)
        provenance = Provenance(**job["provenance"])
        writer = await self._writer(job, call_hash, call, provenance, engine.version)
        check = self._check(provenance.run_id, call_hash, call)
        ledger = Ledger(requests)

        def emit(answers: pa.Table) -> None:
            taken = ledger.take(answers)
            writer.add(check.apply(taken), requests)
            self._count(provenance.run_id, taken)

        try:
            await self._until_abandoned(provenance.run_id, engine.answer(requests, call, emit))
        finally:
            missing = ledger.close()
        if ledger.breach is not None:
            raise ledger.breach
        if missing:
            silent = answers_table([_silent(prompt_hash) for prompt_hash in missing])
            writer.add(silent, requests)
            self._count(provenance.run_id, silent)
        return self._tally(provenance.run_id)

    async def answered(self, run_id: str, at_least: int) -> Tally:
        """Return what is answered of a run, once that are so many requests or it ends.

        A unit comes back with its slowest request; this tells earlier that there is room for more.
        """
        if self._tally(run_id).rows < at_least:
            enough = asyncio.get_running_loop().create_future()
            self._waiting[run_id] = (at_least, enough)
            await enough
        return self._tally(run_id)

    async def flush(self, run_id: str) -> list[dict[str, Any]]:
        """Write what the run has in the buffer; return its parts since the last call.

        Raises:
            StoreError: the store's folder takes no files; what is buffered stays so.
        """
        writers = [writer for (run, _), writer in self._writers.items() if run == run_id]
        for writer in writers:
            try:
                await asyncio.to_thread(writer.write)
            except OSError as error:
                raise StoreError(
                    f"Answers cannot be written to the generation store {writer.folder}: "
                    f"{error.strerror or error}. {_advice(error)} What was committed before "
                    "stays; the rest is asked again by the next run."
                ) from error
        parts: list[Part] = []
        for writer in writers:
            parts += writer.take()
        return [part.as_dict() for part in parts]

    async def abandon(self, run_id: str) -> None:
        """Stop working on a run's units; answers in the buffer stay there."""
        # A unit that Ray hands over later, when its block has come, must not begin either.
        self._abandoned.add(run_id)
        self._wake(run_id)
        units = self._units.get(run_id, set())
        for unit in units:
            unit.cancel()
        await asyncio.gather(*units, return_exceptions=True)

    async def finish(self, run_id: str) -> None:
        """Forget a run whose parts have all been fetched."""
        for key in [key for key in self._writers if key[0] == run_id]:
            del self._writers[key]
            self._checks.pop(key, None)
        self._units.pop(run_id, None)
        self._wake(run_id)
        self._tallies.pop(run_id, None)

    def _tally(self, run_id: str) -> Tally:
        return self._tallies.get(run_id, Tally())

    def _count(self, run_id: str, answers: pa.Table) -> None:
        self._tallies[run_id] = tally = self._tally(run_id) + tally_of(answers)
        if run_id in self._waiting and tally.rows >= self._waiting[run_id][0]:
            self._wake(run_id)

    def _wake(self, run_id: str) -> None:
        _, waiting = self._waiting.pop(run_id, (0, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _leave(self) -> None:
        # The task must be held, or the garbage collector may take it.
        self._leaving = asyncio.ensure_future(self._write_and_exit())

    async def _write_and_exit(self) -> None:
        try:
            for run_id in list(self._units):
                # Ray ends this process soon; an engine that does not stop must not keep it.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.abandon(run_id), _ABANDON_S)
            for writer in list(self._writers.values()):
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(writer.write)
        finally:
            os._exit(1)

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
        if run_id in self._abandoned:
            raise CancelledError("The run was abandoned.")
        if unit.cancelled():
            raise EngineError("The engine broke off its own work.")
        error = unit.exception()
        if error is None or isinstance(error, DbtLLMError):
            unit.result()
        else:
            # It says nothing about the other requests, so it is a death like any other.
            words = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise EngineError(f"The engine failed with {words}") from None

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

    def _check(self, run_id: str, call_hash: str, call: dict[str, Any]) -> OutputCheck:
        key = (run_id, call_hash)
        if key not in self._checks:
            self._checks[key] = OutputCheck(call)
        return self._checks[key]

    async def _writer(
        self,
        job: dict[str, Any],
        call_hash: str,
        call: dict[str, Any],
        provenance: Provenance,
        engine_version: str,
    ) -> PartWriter:
        key = (provenance.run_id, call_hash)
        if key not in self._writers:
            folder = open_folder(job["folder"], job["storage_options"])
            if is_url(job["folder"]):
                # This machine may have other rights or another network than the one of dbt.
                await asyncio.to_thread(folder.make_writable, False)
        # Another unit may have been here while this one waited.
        if key not in self._writers:
            self._writers[key] = PartWriter(
                folder, call_hash, canonical_json(call), provenance, engine_version
            )
        return self._writers[key]


def _advice(error: OSError) -> str:
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "Raise the limit of open files (ulimit -n), or lower max_concurrency of the LLM."
    return "Free space there, or look whether the folder was removed."


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
