"""Simulated engines that the real feeder keeps busy, in virtual time.

Each engine has slots, and a request keeps one for as long as its answer takes. What driver and
engine tell each other takes its way, as it does through Ray.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dbt_llm.feeder import Feeder


@dataclass
class _Engine:
    queue: deque[tuple[float, int]] = field(default_factory=deque)
    """Requests that wait for a slot: their seconds and their unit."""
    busy: int = 0
    answered: int = 0
    rows_of: dict[int, int] = field(default_factory=dict)
    """Requests of each unit."""
    left_of: dict[int, int] = field(default_factory=dict)
    """Those that are not answered."""
    report_at: int | None = None
    listening: bool = False
    """Whether the driver waits for a report."""


class VirtualEngines:
    """Engines that get the requests of one pass from a feeder; `seconds` has the requests' times.

    `units` has the engine and the rows of every unit afterwards, and `dry_s` the slot-seconds that
    were idle while the driver had requests left.
    """

    def __init__(
        self, seconds: list[float], replicas: int, slots: int, unit_rows: int, way_s: float = 0.005
    ) -> None:
        self.units: list[tuple[int, int]] = []
        self.dry_s = 0.0
        self._seconds = seconds
        self._slots = slots
        self._way_s = way_s
        self._at = self._busy = 0
        self._feeder = Feeder(len(seconds), unit_rows)
        self._engines = [_Engine() for _ in range(replicas)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[int, ...]]] = []
        self._numbers = itertools.count()
        self._now = self._end = 0.0

    def run(self, starts: list[float] | None = None) -> float:
        """Return when the last answer is there; `starts` says when each engine is ready."""
        for number, start in enumerate(starts or [0.0] * len(self._engines)):
            self._after(start, self._start, number)
        while self._events:
            before = self._now
            self._now, _, happen, values = heapq.heappop(self._events)
            if self._at < len(self._seconds):
                idle = self._slots * len(self._engines) - self._busy
                self.dry_s += idle * (self._now - before)
            happen(*values)
        assert sum(engine.answered for engine in self._engines) == len(self._seconds)
        return self._end

    def _after(self, delay_s: float, what: Callable[..., None], *values: int) -> None:
        event = (self._now + delay_s, next(self._numbers), what, values)
        heapq.heappush(self._events, event)

    # What the driver does.

    def _start(self, number: int) -> None:
        self._feeder.add(number, self._slots)
        self._feed()

    def _feed(self) -> None:
        for number, engine in enumerate(self._engines):
            if not self._feeder.knows(number):
                continue
            while rows := self._feeder.rows_for(number):
                self.units.append((number, rows))
                self._feeder.handed(number, rows, self._now)
                self._after(self._way_s, self._take_unit, number, self._at, rows)
                self._at += rows
            at_least = self._feeder.report_at(number)
            if at_least is not None and not engine.listening:
                engine.listening = True
                self._after(self._way_s, self._listen, number, at_least)

    def _hear_answered(self, number: int, answered: int) -> None:
        self._engines[number].listening = False
        self._feeder.answered(number, answered, self._now)
        self._feed()

    def _hear_unit(self, number: int, rows: int) -> None:
        self._feeder.returned(number, rows, self._now)
        self._feed()

    # What an engine does.

    def _take_unit(self, number: int, at: int, rows: int) -> None:
        engine = self._engines[number]
        engine.rows_of[at] = engine.left_of[at] = rows
        engine.queue.extend((seconds, at) for seconds in self._seconds[at : at + rows])
        self._fill_slots(number)

    def _fill_slots(self, number: int) -> None:
        engine = self._engines[number]
        while engine.queue and engine.busy < self._slots:
            seconds, unit = engine.queue.popleft()
            engine.busy += 1
            self._busy += 1
            self._after(seconds, self._answer, number, unit)

    def _answer(self, number: int, unit: int) -> None:
        engine = self._engines[number]
        engine.busy -= 1
        self._busy -= 1
        engine.answered += 1
        self._end = self._now
        engine.left_of[unit] -= 1
        self._fill_slots(number)
        self._report(number)
        if not engine.left_of[unit]:
            self._after(self._way_s, self._hear_unit, number, engine.rows_of[unit])

    def _listen(self, number: int, at_least: int) -> None:
        self._engines[number].report_at = at_least
        self._report(number)

    def _report(self, number: int) -> None:
        engine = self._engines[number]
        if engine.report_at is not None and engine.answered >= engine.report_at:
            engine.report_at = None
            self._after(self._way_s, self._hear_answered, number, engine.answered)
