"""The rate at which a server accepts requests, learned from its refusals.

A cycle lasts from the moment at which the server takes requests again to the next such moment, so
it holds one refusal and the pause after it. Whatever way the server counts (a bucket of tokens, a
sliding or a fixed window), its allowance is used up at both ends of a cycle. What it accepted in
between, by the cycle's length, is its rate, or less where the pause was longer than it had to be;
and the speed at which it refused is its rate or more. The truth is searched for between the two:
begun at their geometric mean, and raised slowly where they are near to each other, else fast; but
no faster than pauses allow, since in a short cycle a long pause hides most of the rate.

A server that allows no burst at all refuses what comes a moment too early. Where its requests are
as close together as the network's jitter, less than its rate is reached: with 100 a second and
2 ms of jitter 0.8 of it, and 0.65 where it also asks for whole seconds of pause.
"""

import math
from collections import deque
from dataclasses import dataclass

from dbt_llm.pacer import Pacer

_ENOUGH_REQUESTS = 40
_RECENT = 20
_FEWEST = 5
_FIRST_SPAN = 10.0
_FIRST_NOISE = 10.0
_SAME = 0.015
# After so long a pause the server's allowance was used up beyond doubt.
_LONG_PAUSE_S = 3.0
_DOUBT, _MEMORY = 0.25, 0.8
_START_AT = 0.99
# The finest search: by so much in one step, of so many requests and so long. A refusal costs about
# one request, so this is how few of them there are in the end.
_FINEST = 0.02
_STEP_REQUESTS = 200
_STEP_S = 30.0
# A step takes so many times as long as the last pause, or pauses would hide what was accepted.
_PAUSES = 4


@dataclass
class Cycle:
    """Requests sent between two moments at which the server took requests again."""

    start: float
    end: float | None = None
    sent: int = 0
    refused: int = 0

    @property
    def accepted(self) -> int:
        """Those not refused; what is under way counts."""
        return self.sent - self.refused


class LearnedRate:
    """How fast requests may be sent; as fast as one likes until the first refusal."""

    def __init__(self, now: float) -> None:
        self._cycle = Cycle(now)
        self._first = self._cycle
        self._closed: deque[Cycle] = deque(maxlen=64)
        # After a refusal: the cycle that begins if the server accepts one of its requests.
        self._next: Cycle | None = None
        self._pacer: Pacer | None = None
        self._base = self._memory = 0.0
        self._span = _FINEST
        self._sent: deque[float] = deque(maxlen=_RECENT)
        self._paused_at = now
        self._refused_at = self._refused_before = math.inf
        self._shortest_step_s = 0.0

    @property
    def per_second(self) -> float | None:
        """Requests a second; None where nothing was refused yet."""
        return self._pacer.per_second if self._pacer is not None else None

    def wait_s(self, now: float) -> float:
        """Return how long the next request has to wait."""
        if self._pacer is None:
            return 0.0
        # How far the search has gone on, in steps; each raises by twice as much as the one before.
        steps = 0.0
        if self._next is None:
            share = (_FINEST / self._span) ** 0.8
            requests = self._cycle.sent / (_STEP_REQUESTS * share)
            step_s = max(_STEP_S * share, self._shortest_step_s)
            steps = min(requests, (now - self._cycle.start) / step_s, 16)
        self._pacer.per_second = self._base * (_START_AT + self._span * (2**steps - 1))
        return self._pacer.wait_s(now)

    def send(self, now: float) -> Cycle:
        """Count a request that is sent; return its cycle."""
        if self._pacer is not None:
            self._pacer.take(now)
        self._sent.append(now)
        cycle = self._next or self._cycle
        if cycle is self._next and cycle.sent == 0:
            cycle.start = now
        cycle.sent += 1
        return cycle

    def accepted(self, cycle: Cycle) -> None:
        """Note that the server accepted a request; cycles begin with the first one."""
        if cycle is not self._next:
            return
        self._cycle.end = cycle.start
        self._closed.append(self._cycle)
        paused_s = cycle.start - self._paused_at
        waited = paused_s > max(_LONG_PAUSE_S, 0.3 * (cycle.start - self._cycle.start))
        self._cycle, self._next = cycle, None
        least, requests = self._estimate()
        most = least if waited else max(least, self._refused_at)
        if self._refused_at > (1 - _SAME) * self._refused_before:
            # Twice at the same speed: the pauses were longer than they had to be.
            least = max(least, (1 - 2 * _SAME) * self._refused_before)
        self._refused_before = self._refused_at
        self._shortest_step_s = _PAUSES * min(paused_s, _LONG_PAUSE_S)
        self._base = min(math.sqrt(least * most), self._refused_at)
        # A great fall is more likely a passing shortage: a sliding window that opens, say, gives
        # back at first what the first seconds took.
        fallen = 0.0 if waited else _DOUBT * (self._memory / self._base - 1)
        self._memory = _MEMORY * self._memory + (1 - _MEMORY) * self._base
        if self._closed[-1].accepted >= _ENOUGH_REQUESTS:
            self._memory = max(self._memory, self._base)
        # What few requests say is hardly to be relied on, least of all at the beginning.
        unsure = len(self._closed) == 1 and requests < _ENOUGH_REQUESTS
        noise = (_FIRST_NOISE if unsure else 1.0) / requests
        self._span = min(1.0, max(_FINEST, most / self._base - 1, noise, fallen))

    def refused(self, now: float, until: float) -> None:
        """Note a refusal, after which nothing is sent `until` then."""
        if self._next is None:
            self._paused_at = now
            guess = max(self._cycle.accepted, 1) / max(until - self._cycle.start, 1e-3)
            self._refused_at = max(guess, self._speed(guess))
            if self._pacer is None:
                self._pacer = Pacer(guess)
            self._base = min(guess, self._refused_at)
        assert self._pacer is not None
        self._pacer.hold(until)
        self._next = Cycle(until)

    def _speed(self, guess: float) -> float:
        """Return how many requests a second were sent last."""
        if self._pacer is not None:
            return self._pacer.per_second
        if len(self._sent) < _FEWEST:
            return _FIRST_SPAN * guess
        return (len(self._sent) - 1) / max(self._sent[-1] - self._sent[0], 1e-3)

    def _estimate(self) -> tuple[float, int]:
        """Return the rate of the last cycles, as many as it takes to tell, and their requests."""
        accepted, length_s = 0, 0.0
        for cycle in reversed(self._closed):
            if cycle is self._first and length_s:
                break
            assert cycle.end is not None
            accepted += cycle.accepted
            length_s += cycle.end - cycle.start
            if accepted >= _ENOUGH_REQUESTS:
                break
        accepted = max(accepted, 1)
        return accepted / max(length_s, 1e-3), accepted
