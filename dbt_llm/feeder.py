"""How many requests go to which engine next: never too few, near the end no more than its share.

An engine is held full: as many requests as it works on at a time, and a reserve of what it answers
in half a second, so that it never waits for the driver. What an engine holds cannot go to another
one that has become idle. So the less is left, the smaller the portions are (guided self-scheduling,
Polychronopoulos and Kuck 1987), and what fits into the free slots of all engines is spread evenly.
"""

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

_RESERVE_S = 0.5
_LEAST_RESERVE_ROWS = 2
_RESERVE_UNITS = 2
# A portion that is answered faster than this is not worth the driver's time.
_LEAST_PORTION_S = 0.01
_RATE_OVER_S = 2.0
# Each unit is a call that the engine actor has open, and it needs room for others.
_MOST_UNITS = 800

_UNIT_ROWS = (64, 4000)
_UNITS_PER_ENGINE = 8


def roomy_unit_rows(rows: int, engines: int) -> int:
    """Return how large a unit may be: every engine gets several, and none is hardly worth it."""
    smallest, largest = _UNIT_ROWS
    return max(smallest, min(largest, rows // (engines * _UNITS_PER_ENGINE)))


@dataclass
class _Held:
    """What one engine has in its hands."""

    concurrency: int
    handed: int = 0
    answered: int = 0
    returned: int = 0
    """Requests of the units that came back; all of them are answered."""
    units: int = 0
    marks: deque[tuple[float, int]] = field(default_factory=deque)
    """When how many were answered, over the last seconds."""

    @property
    def open(self) -> int:
        return self.handed - self.answered

    @property
    def free(self) -> int:
        return max(0, self.concurrency - self.open)

    @property
    def rows_per_s(self) -> float:
        if len(self.marks) < 2:
            return 0.0
        (since, before), (now, answered) = self.marks[0], self.marks[-1]
        return (answered - before) / max(now - since, 1e-6)

    def note(self, answered: int, now: float) -> None:
        self.answered = max(self.answered, answered)
        self.marks.append((now, self.answered))
        while len(self.marks) > 2 and self.marks[1][0] <= now - _RATE_OVER_S:
            self.marks.popleft()


class Feeder:
    """Shares out the requests of one pass; it counts them and knows nothing of what they are.

    Times are seconds on any clock that does not go back. A `careful` feeder hands an engine one
    unit at a time.
    """

    def __init__(self, rows: int, unit_rows: int, careful: bool = False) -> None:
        self.left = rows
        """Requests that no engine has been given."""
        self.awaited = 0
        """Engines that are about to come and shall have their share."""
        self._unit_rows = unit_rows
        self._careful = careful
        self._engines: dict[Hashable, _Held] = {}

    def add(self, engine: Hashable, concurrency: int) -> None:
        """Take an engine that has started; one that is known stays as it is."""
        if engine not in self._engines:
            self._engines[engine] = _Held(concurrency)

    def knows(self, engine: Hashable) -> bool:
        """Return whether an engine takes part."""
        return engine in self._engines

    def remove(self, engine: Hashable) -> None:
        """Forget an engine that died, with what it held."""
        self._engines.pop(engine, None)

    @property
    def under_way(self) -> bool:
        """Whether any unit has not come back."""
        return any(held.units for held in self._engines.values())

    def rows_for(self, engine: Hashable) -> int:
        """Return the size of the next unit for an engine; 0 where it has enough for now."""
        held = self._engines[engine]
        if not self.left or held.units >= (1 if self._careful else _MOST_UNITS):
            return 0
        rows = self._unit_rows if self._careful else self._wanted(held)
        return max(0, min(rows, self._unit_rows, self.left))

    def handed(self, engine: Hashable, rows: int, now: float) -> None:
        """Note that a unit of so many requests went to an engine."""
        held = self._engines[engine]
        if not held.marks:
            held.marks.append((now, 0))
        held.handed += rows
        held.units += 1
        self.left -= rows

    def answered(self, engine: Hashable, rows: int, now: float) -> None:
        """Note how many requests an engine has answered since the pass began."""
        if engine in self._engines:
            self._engines[engine].note(rows, now)

    def returned(self, engine: Hashable, rows: int, now: float) -> None:
        """Note that a unit of so many requests came back."""
        if engine in self._engines:
            held = self._engines[engine]
            held.units -= 1
            held.returned += rows
            held.note(held.returned, now)

    def lost(self, engine: Hashable, rows: int) -> None:
        """Note that a unit came to nothing; another pass will ask its requests."""
        if engine in self._engines:
            self._engines[engine].units -= 1
            self._engines[engine].handed -= rows

    def report_at(self, engine: Hashable) -> int | None:
        """Return at how many answers an engine should say so; None where that is of no use."""
        held = self._engines[engine]
        if self._careful or not self.left or not held.open:
            return None
        soon = held.answered + max(1, self._least_portion(held))
        enough = held.handed - held.concurrency - self._reserve(held) // 2
        return min(max(soon, enough), held.handed)

    def _wanted(self, held: _Held) -> int:
        slots = self._free_slots()
        if self.left <= slots:
            return self._even_share(held)
        if held.free:
            reserve = min(self._reserve(held), self._portion(held, self.left - slots))
            return held.free + reserve
        missing = held.concurrency + self._reserve(held) - held.open
        if 2 * missing < self._reserve(held):
            return 0
        return min(missing, self._portion(held, self.left))

    def _even_share(self, held: _Held) -> int:
        """Fill the engines to the same part of their slots."""
        engines = self._engines.values()
        mean = sum(other.concurrency for other in engines) / len(engines)
        slots = mean * (len(engines) + self.awaited)
        total = self.left + sum(other.open for other in engines)
        lacking = {
            id(other): max(0.0, total * other.concurrency / slots - other.open) for other in engines
        }
        of_awaited = total * mean / slots
        others = [*lacking.values(), *([of_awaited] * self.awaited)]
        mine = lacking[id(held)]
        # Not even a whole request: the engines that lack more come first.
        if mine < 1 <= max(others):
            return 0
        return math.ceil(self.left * mine / sum(others) - 1e-9)

    def _free_slots(self) -> float:
        free = sum(held.free for held in self._engines.values())
        slots = sum(held.concurrency for held in self._engines.values())
        return free + self.awaited * slots / len(self._engines)

    def _portion(self, held: _Held, left: float) -> int:
        engines = len(self._engines) + self.awaited
        if engines == 1:
            return math.ceil(left)
        return max(math.ceil(left / (2 * engines)), self._least_portion(held))

    def _reserve(self, held: _Held) -> int:
        rows = math.ceil(held.rows_per_s * _RESERVE_S)
        return max(_LEAST_RESERVE_ROWS, min(rows, _RESERVE_UNITS * self._unit_rows))

    def _least_portion(self, held: _Held) -> int:
        return min(math.ceil(held.rows_per_s * _LEAST_PORTION_S), self._unit_rows)
