"""One pass of a job: feeds units to the engine actors and commits the parts that they write."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dbt_llm.arrange import largest_row_bytes
from dbt_llm.budget import Meter
from dbt_llm.errors import CancelledError, DbtLLMError, EndpointError, EngineError
from dbt_llm.feeder import Feeder, roomy_unit_rows
from dbt_llm.job_spec import JobResult, JobSpec
from dbt_llm.parts import Part
from dbt_llm.pool import Pool, Replica
from dbt_llm.process_watch import this_process
from dbt_llm.ray_session import first_line
from dbt_llm.spool import RequestFile, mark_in_use
from dbt_llm.store import Store
from dbt_llm.tally import Tally
from dbt_llm.units import Units

_UNIT_BYTES = 32 * 1024 * 1024
_POLL_S = 0.2
# Engines that start later than the first one keep their share of the requests for so long.
_LATE_START_S = 2.0
_LATE_START_SHARE = 0.1
# Engines that may die in a row with no unit finished in between; of units of one row, more may.
_MOST_DEATHS = 3
_MOST_LONE_DEATHS = 12
# An engine actor does nothing that keeps it from responding for so long.
_HUNG_S = 300.0
_FLUSH_TIMEOUT_S = 60.0
_ABANDON_TIMEOUT_S = 3.0
_REPORT_S = 1.0


class Pass:
    """Feeds every unit to the pool once.

    With `unit_rows` given it is careful: one unit at a time on an engine, and what is answered is
    written before the next, so that an engine's death tells which unit it was.
    """

    def __init__(
        self,
        spec: JobSpec,
        store: Store,
        pool: Pool,
        files: list[RequestFile],
        result: JobResult,
        cancelled: threading.Event,
        report: Callable[[JobResult], None],
        unit_rows: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._spec = spec
        self._store = store
        self._pool = pool
        self._result = result
        self._cancelled = cancelled
        self._report = report
        self._files = files
        self._careful = unit_rows is not None
        self.unit_rows = unit_rows or self._roomy_unit_rows()
        self._units = Units([])
        self._feeder = Feeder(sum(file.rows for file in files), self.unit_rows, self._careful)
        self._job = {
            "folder": spec.store_folder,
            "storage_options": dict(store.files.options),
            "provenance": asdict(spec.provenance),
        }
        self._run_id = spec.provenance.run_id
        # Every reference that the driver waits for: what it is, and whose.
        self._pending: dict[Any, _Waiting] = {}
        self._last_flush = time.monotonic()
        self._last_report = 0.0
        self._refusal: EndpointError | None = None
        self._meter = meter
        self._handed: dict[Replica, int] = {}
        self._written: dict[Replica, int] = {}
        self._tallies: dict[Replica, Tally] = {}
        # What a lost engine had told of is asked again.
        result.told = Tally()
        self._before = result.heard
        self.budget_spent = False
        """Whether requests are left over for want of budget."""

    def run(self) -> None:
        """Run the pass to its end; raises as `run_job` does, and what Ray raises."""
        from ray.exceptions import RayError

        try:
            cancelled = self._ask_all()
        except BaseException:
            # What failed first is what a person has to know of.
            with contextlib.suppress(DbtLLMError, RayError):
                self._end(early=True)
            raise
        self._end(early=cancelled or self._refusal is not None)
        self._report(self._result)
        if cancelled:
            raise CancelledError(
                f"Interrupted after {self._result.answered:,} of {self._result.asked:,} "
                "answers; these are stored, and the next run asks only for the rest."
            )
        if self._refusal is not None:
            raise self._refusal

    def _end(self, early: bool) -> None:
        """Commit what is answered; `early`: have the engines drop the rest first."""
        if early:
            self._stop_asking()
        # Ray Data reads ahead; left to the garbage collector it would end after Ray has.
        self._units.close()
        try:
            self._flush_all()
        finally:
            if self._meter is not None:
                self._meter.lost()
            since = self._result.generating_since
            if since is not None:
                self._result.generating_s = time.monotonic() - since

    def _ask_all(self) -> bool:
        """Feed the units until all are done or none may be fed; tell whether the user stopped."""
        self._units = Units(self._files)
        started = idle_since = time.monotonic()
        first_ready: float | None = None
        while True:
            self._start_new()
            ready = self._ready()
            if ready:
                now = time.monotonic()
                first_ready = first_ready or now
                self._feeder.awaited = self._late(started, first_ready, now)
            self._feed(ready)
            if self._result.generating_since is None and self._feeder.under_way:
                self._result.engine_version = ready[0].version
                self._result.engine_start_s = time.monotonic() - started
                self._result.generating_since = time.monotonic()
            if not self._may_feed and not self._feeder.under_way:
                return False
            for reference in self._done():
                waiting = self._pending.pop(reference, None)
                # One of a replica that was lost is not waited for any more.
                if waiting is not None:
                    self._settle(waiting, reference)
            if self._cancelled.is_set():
                return True
            if self._ready():
                idle_since = time.monotonic()
            self._check_start(time.monotonic() - idle_since)
            self._flush_when_due()
            self._report_when_due()

    def _roomy_unit_rows(self) -> int:
        rows = sum(file.rows for file in self._files)
        roomy = roomy_unit_rows(rows, self._spec.replicas)
        # What an engine has in its hands at a time is bounded in bytes, too.
        largest_bytes = max(largest_row_bytes(file.path) for file in self._files)
        return min(roomy, max(1, _UNIT_BYTES // max(1, largest_bytes)))

    def _ready(self) -> list[Replica]:
        return [r for r in self._pool.replicas if r.concurrency is not None and not r.dead]

    def _late(self, started: float, first_ready: float, now: float) -> int:
        """Return how many engines are still to come, for as long as it is worth waiting."""
        patience_s = max(_LATE_START_S, _LATE_START_SHARE * (first_ready - started))
        if now - first_ready > patience_s:
            return 0
        return sum(r.concurrency is None and not r.dead for r in self._pool.replicas)

    def _done(self) -> list[Any]:
        import ray

        if not self._pending:
            # All engines are ready, and the budget is reserved by other models.
            time.sleep(_POLL_S)
            return []
        done, others = ray.wait(list(self._pending), num_returns=1, timeout=_POLL_S)
        if done and others:
            more, _ = ray.wait(others, num_returns=len(others), timeout=0)
            done += more
        return list(done)

    def _start_new(self) -> None:
        waiting = {id(own.replica) for own in self._pending.values() if own.kind == "start"}
        for replica in self._pool.alive(_MOST_LONE_DEATHS if self.unit_rows == 1 else _MOST_DEATHS):
            if replica.concurrency is None and id(replica) not in waiting:
                started = replica.actor.start.remote(self._pool.secrets, this_process())
                self._pending[started] = _Waiting("start", replica)

    def _check_start(self, waited_s: float) -> None:
        import ray

        allowed_s = self._spec.engine["start_timeout_s"]
        if waited_s > allowed_s:
            raise EngineError(
                f"No engine of LLM {self._spec.llm!r} started within start_timeout_s = "
                f"{allowed_s:g}. Ray has {ray.cluster_resources()} in all and "
                f"{ray.available_resources()} free; the log is "
                f"{self._pool.replicas[0].log_path}."
            )

    def _feed(self, ready: list[Replica]) -> None:
        for replica in ready:
            assert replica.concurrency is not None
            self._feeder.add(replica, replica.concurrency)
        listening = {own.replica for own in self._pending.values() if own.kind == "answered"}
        for replica in ready:
            while self._may_feed and (rows := self._affordable(self._feeder.rows_for(replica))):
                unit = self._units.cut(rows)
                if self._meter is not None:
                    self._meter.give_back(rows - (unit.rows if unit is not None else 0))
                if unit is None:
                    self._feeder.left = 0
                    break
                call = unit.file.call
                reference = replica.actor.answer.remote(
                    unit.block, unit.offset, unit.rows, call.call_hash, call.content, self._job
                )
                self._pending[reference] = _Waiting("answer", replica, unit.rows)
                self._feeder.handed(replica, unit.rows, time.monotonic())
                self._handed[replica] = self._handed.get(replica, 0) + unit.rows
            if self._may_feed and replica not in listening:
                at_least = self._feeder.report_at(replica)
                if at_least is not None:
                    report = replica.actor.answered.remote(self._run_id, at_least)
                    self._pending[report] = _Waiting("answered", replica)

    @property
    def _may_feed(self) -> bool:
        return self._feeder.left > 0 and self._refusal is None and not self.budget_spent

    def _affordable(self, rows: int) -> int:
        """Return how many of `rows` requests the budget has room for; they are then reserved."""
        if self._meter is None or not rows:
            return rows
        granted = self._meter.take(rows)
        if not granted and not self._feeder.under_way:
            # What is in flight, here or of other models, may take less than is reserved for it.
            self.budget_spent = self._meter.used_up() is not None
        return granted

    def _settle(self, waiting: "_Waiting", reference: Any) -> None:
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        kind, replica = waiting.kind, waiting.replica
        try:
            value = ray.get(reference)
        except RayActorError as error:
            self._lose(replica, first_line(error))
            return
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if kind == "answer" and isinstance(cause, EngineError):
                # The engine within the actor is gone; the actor still has its answers.
                self._collect_flush(replica)
                self._lose(replica, str(cause))
                return
            if isinstance(cause, EndpointError):
                # Other units find out as well; what they have under way is paid and waited for.
                self._refusal = self._refusal or EndpointError(str(cause))
                self._feeder.lost(replica, waiting.rows)
                return
            raise self._failure(replica, error) from None
        except RayError as error:
            if kind == "answer":
                # Its block was lost with a machine, say: the next pass asks what is missing.
                self._feeder.lost(replica, waiting.rows)
                return
            raise self._failure(replica, error) from None
        if kind == "start":
            replica.concurrency, replica.version = value["concurrency"], value["version"]
        elif kind == "answered":
            self._note(replica, value)
        elif kind == "answer":
            self._note(replica, value)
            self._feeder.returned(replica, waiting.rows, time.monotonic())
            self._pool.deaths = 0
            if self._careful:
                self._collect_flush(replica)
        else:
            self._commit(replica, value)

    def _note(self, replica: Replica, tally: Tally) -> None:
        """Note what an engine has answered since the pass began."""
        self._feeder.answered(replica, tally.rows, time.monotonic())
        before = self._tallies.get(replica, Tally())
        # Reports may overtake each other.
        if tally.rows <= before.rows:
            return
        self._tallies[replica] = tally
        self._result.told = sum(self._tallies.values(), self._before)
        if self._meter is not None:
            prompt_tokens = tally.prompt_tokens - before.prompt_tokens
            completion_tokens = tally.completion_tokens - before.completion_tokens
            self._meter.answered(
                tally.rows - before.rows,
                prompt_tokens + completion_tokens,
                self._spec.provenance.cost_usd(prompt_tokens, completion_tokens),
            )

    def _failure(self, replica: Replica, error: Any) -> DbtLLMError:
        cause = getattr(error, "cause", None)
        if isinstance(cause, DbtLLMError):
            return type(cause)(str(cause))
        return EngineError(
            f"The engine of LLM {self._spec.llm!r} failed: {cause or error}. "
            f"Its log is {replica.log_path}."
        )

    def _lose(self, replica: Replica, reason: str) -> None:
        self._result.engine_deaths += 1
        self._pool.bury(replica, reason)
        self._feeder.remove(replica)
        if self._meter is not None:
            told = self._tallies.get(replica, Tally()).rows
            self._meter.lost(self._handed.get(replica, 0) - told)
            # What it told of and did not write is asked again.
            unwritten = max(0, told - self._written.get(replica, 0))
            self._meter.stored(int(self._meter.used.requests) - unwritten)
        self._pending = {
            ref: own for ref, own in self._pending.items() if own.replica is not replica
        }

    def _flush_when_due(self) -> None:
        if time.monotonic() - self._last_flush < self._spec.commit_interval_s:
            return
        self._last_flush = now = time.monotonic()
        mark_in_use(Path(self._spec.work_folder))
        flushing = {own.replica for own in self._pending.values() if own.kind == "flush"}
        for replica in list(self._pool.replicas):
            if replica.dead or not replica.concurrency:
                continue
            if replica not in flushing:
                replica.flush_sent = now
                flush = replica.actor.flush.remote(self._run_id)
                self._pending[flush] = _Waiting("flush", replica)
            elif now - replica.flush_sent > _HUNG_S:
                self._lose(replica, f"it did not respond for {_HUNG_S:g} s")

    def _stop_asking(self) -> None:
        """Have the engines drop what is under way; what is answered stays."""
        import ray
        from ray.exceptions import RayError

        alive = [replica for replica in self._pool.replicas if not replica.dead]
        started = [replica for replica in alive if replica.concurrency]
        stopping = {replica.actor.abandon.remote(self._run_id): replica for replica in started}
        if stopping:
            done, late = ray.wait(
                list(stopping), num_returns=len(stopping), timeout=_ABANDON_TIMEOUT_S
            )
            with contextlib.suppress(RayError):
                ray.get(done)
            if self._cancelled.is_set():
                # What does not even stop does not write either; a person waits.
                for reference in late:
                    self._lose(stopping[reference], "it did not stop when it was told to")
        self._forget_units()

    def _forget_units(self) -> None:
        """Take what has become of the units; Ray prints the errors that nobody takes."""
        import ray
        from ray.exceptions import RayError

        units = [reference for reference, own in self._pending.items() if own.kind == "answer"]
        if units:
            done, _ = ray.wait(units, num_returns=len(units), timeout=_POLL_S)
            for reference in done:
                with contextlib.suppress(RayError):
                    ray.get(reference)

    def _flush_all(self) -> None:
        failure: DbtLLMError | None = None
        for replica in list(self._pool.replicas):
            if not replica.dead and replica.concurrency:
                try:
                    self._collect_flush(replica)
                except DbtLLMError as error:
                    # The other engines have answers too.
                    failure = failure or error
                replica.actor.finish.remote(self._run_id)
        if failure is not None:
            raise failure

    def _collect_flush(self, replica: Replica) -> None:
        under_way = [
            ref
            for ref, own in self._pending.items()
            if own.kind == "flush" and own.replica is replica
        ]
        for reference in under_way:
            del self._pending[reference]
            self._fetch_parts(replica, reference)
            if replica.dead:
                return
        self._fetch_parts(replica, replica.actor.flush.remote(self._run_id))

    def _fetch_parts(self, replica: Replica, reference: Any) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        patience_s = _FLUSH_TIMEOUT_S if self._cancelled.is_set() else _HUNG_S
        try:
            parts = ray.get(reference, timeout=patience_s)
        except (RayActorError, GetTimeoutError) as error:
            self._lose(replica, first_line(error))
            return
        except RayTaskError as error:
            raise self._failure(replica, error) from None
        self._commit(replica, parts)

    def _commit(self, replica: Replica, written: list[dict[str, Any]]) -> None:
        if not written:
            return
        started = time.monotonic()
        parts = [Part(**part) for part in written]
        rows = sum(part.rows for part in parts)
        self._written[replica] = self._written.get(replica, 0) + rows
        self._store.commit(parts)
        self._result.parts += parts
        self._result.committing_s += time.monotonic() - started

    def _report_when_due(self) -> None:
        if time.monotonic() - self._last_report >= _REPORT_S:
            self._last_report = time.monotonic()
            self._report(self._result)


@dataclass(frozen=True)
class _Waiting:
    """What the driver waits for: a call of an actor's method."""

    kind: str
    """start, answer, answered or flush."""
    replica: Replica
    rows: int = 0
    """Of the unit that is to be answered."""
