"""Decides when an endpoint may be sent the next request.

Three things hold a request back: the limits that the profile gives; how many requests the server
was seen to work on at the same time (`Window`); and the rate at which it was seen to accept them
(`LearnedRate`). The last two are found by trying: raise while it goes well, step back at a
refusal. After a refusal nothing at all is sent for a while, for as long as the server asks if it
does.
"""

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from dbt_llm.learned_rate import Cycle, LearnedRate
from dbt_llm.pacer import Pacer
from dbt_llm.window import Window

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_TICK_S = 0.001
_KNOWN_S = 0.1
_MANY_STUMBLES = 5
# Tokens that were expected and not used may be given to others for so long.
_TOKENS_LATE_S = 1.0


@dataclass
class Ticket:
    """The right to send one request, to be handed back with what came of it."""

    cycle: Cycle
    sent_at: float
    epoch: Cycle
    """Requests sent since the last refusal of any kind."""
    tokens: float
    """Reserved for it."""
    filled: bool
    """Whether the window was full with it."""
    probe: bool = False


class Dismissed(Exception):
    """A request that waited is no longer wanted."""


@dataclass(eq=False)
class _Waiting:
    tokens: float
    group: object
    passed: asyncio.Future[Ticket] = field(default_factory=asyncio.Future)


class Throttle:
    """The one gate of an LLM; all requests of all jobs pass through it, in order."""

    def __init__(
        self,
        max_concurrency: int,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        slow_s: float = float("inf"),
    ) -> None:
        """`slow_s`: with answers that take longer, concurrency is not raised."""
        self._loop = asyncio.get_running_loop()
        self._requests = Pacer(requests_per_minute / 60) if requests_per_minute else None
        self._tokens = Pacer(tokens_per_minute / 60, _TOKENS_LATE_S) if tokens_per_minute else None
        self._rate = LearnedRate(self._loop.time())
        self.window = Window(max_concurrency, slow_s)
        self._waiting: deque[_Waiting] = deque()
        self._closed_until = 0.0
        self._epoch = Cycle(self._loop.time())
        # Refusals in a row, each after a pause, with nothing accepted in between.
        self._refusals = 0
        self._stumbles = 0
        self._held: list[object] = []
        # Whether the last refusal was for too many at the same time.
        self._too_many = False
        self._probing = False
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, tokens: float = 0.0, first: bool = False, group: object = None) -> Ticket:
        """Wait for the turn of a request; `first`: before all others that wait.

        Raises:
            Dismissed: by `dismiss`, which names the group.
        """
        waiting = _Waiting(tokens, group)
        if first:
            self._waiting.appendleft(waiting)
        else:
            self._waiting.append(waiting)
        self._let_pass()
        try:
            return await waiting.passed
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.passed.cancelled() and waiting.passed.exception() is None:
                self.give_back(waiting.passed.result())
            raise

    def dismiss(self, group: object) -> None:
        """Turn away all requests of a group that wait."""
        kept: deque[_Waiting] = deque()
        for waiting in self._waiting:
            if waiting.group is not group:
                kept.append(waiting)
            elif not waiting.passed.done():
                waiting.passed.set_exception(Dismissed())
        self._waiting = kept
        self._let_pass()

    @contextlib.contextmanager
    def hold(self, group: object) -> Iterator[None]:
        """Let no request of a group pass for a while."""
        self._held.append(group)
        try:
            yield
        finally:
            self._held.remove(group)
            self._let_pass()

    def give_back(self, ticket: Ticket) -> None:
        """Note that the request was not sent after all."""
        ticket.cycle.sent -= 1
        ticket.epoch.sent -= 1
        if self._requests is not None:
            self._requests.correct(-1)
        if self._tokens is not None:
            self._tokens.correct(-ticket.tokens)
        self.leave(ticket)

    def succeeded(self, ticket: Ticket, latency_s: float, tokens: float | None = None) -> None:
        """Note an answer, and how many tokens it took."""
        now = self._loop.time()
        self._stumbles = 0
        if self._too_many:
            # Whenever it was sent: the server is there, and works.
            self._refusals = 0
            self._probing = False
        self._accepted(ticket)
        self.window.grow(now, latency_s, ticket.filled and ticket.epoch is self._epoch)
        if self._tokens is not None and tokens is not None:
            # One request cannot take more than a minute allows, whatever the server says.
            self._tokens.correct(min(tokens, self._tokens.per_second * 60) - ticket.tokens)
        self.leave(ticket)

    def failed(self, ticket: Ticket) -> None:
        """Note a failure that says nothing about the server's load."""
        self._accepted(ticket)
        self.leave(ticket)

    def stumbled(self, ticket: Ticket) -> None:
        """Note an error of the server's; many in a row and nothing else are an overload."""
        self._stumbles += 1
        if self._stumbles < _MANY_STUMBLES:
            self.failed(ticket)
        else:
            self.overloaded(ticket)

    def refused(self, ticket: Ticket, retry_after_s: float | None = None) -> None:
        """Note that the server wants fewer requests (429)."""
        self._step_back(ticket, retry_after_s, rate=True)

    def overloaded(self, ticket: Ticket, retry_after_s: float | None = None) -> None:
        """Note that the server could not cope (503, a reset, a timeout)."""
        self._step_back(ticket, retry_after_s, rate=False)

    def _step_back(self, ticket: Ticket, retry_after_s: float | None, rate: bool) -> None:
        now = self._loop.time()
        known_s = max(_KNOWN_S, 3 * (now - ticket.sent_at))
        if ticket.epoch.accepted > 1 and ticket.sent_at - ticket.epoch.start > known_s:
            # What was sent so long before it and is still under way, the server has taken.
            self._accepted(ticket)
        ticket.cycle.refused += 1
        ticket.epoch.refused += 1
        if retry_after_s is not None:
            self._closed_until = max(self._closed_until, now + retry_after_s)
        # Others that were under way at the same time tell of the same refusal.
        if ticket.epoch is self._epoch:
            again = self._refusals > 0
            self._refusals += 1
            self._epoch = Cycle(now)
            self._too_many = not rate
            if not retry_after_s and (rate or again):
                self._closed_until = max(self._closed_until, now + self._pause_s())
            # Once there is a rate to keep to, a 429 speaks of that.
            if not rate or self._rate.per_second is None:
                self.window.shrink(now, again, rate)
            if rate:
                self._rate.refused(now, max(now, self._closed_until))
        self.leave(ticket)

    def _pause_s(self) -> float:
        first = _FIRST_PAUSE_S
        if self._rate.per_second is not None:
            # The rate is about right already: the next request is not far from being due.
            first = min(first, max(0.05, 1 / self._rate.per_second))
        longest = max(_LONGEST_PAUSE_S, first)
        doubled = first * 2.0 ** (self._refusals - 1)
        return min(longest, doubled) * random.uniform(0.8, 1.2)

    def _accepted(self, ticket: Ticket) -> None:
        if ticket.epoch is self._epoch:
            self._rate.accepted(ticket.cycle)
            self._refusals = 0

    def leave(self, ticket: Ticket) -> None:
        """Note that a request came back, which says nothing about the server."""
        self.window.in_flight -= 1
        if ticket.probe:
            self._probing = False
        self._let_pass()

    def _let_pass(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            if self._waiting[0].passed.cancelled():
                self._waiting.popleft()
                continue
            now = self._loop.time()
            wait_s = self._wait_s(now)
            if wait_s is None:  # Until something comes back.
                return
            if wait_s > 0:
                self._timer = self._loop.call_later(max(wait_s, _TICK_S), self._let_pass)
                return
            waiting = self._next_waiting()
            if waiting is None:
                return
            self._waiting.remove(waiting)
            waiting.passed.set_result(self._ticket(now, waiting.tokens))

    def _next_waiting(self) -> _Waiting | None:
        if not self._held:
            return self._waiting[0]
        return next((one for one in self._waiting if one.group not in self._held), None)

    def _wait_s(self, now: float) -> float | None:
        if self.window.full or self._probing:
            return None
        wait_s = max(0.0, self._closed_until - now, self._rate.wait_s(now))
        for pacer in (self._requests, self._tokens):
            if pacer is not None:
                wait_s = max(wait_s, pacer.wait_s(now))
        return wait_s

    def _ticket(self, now: float, tokens: float) -> Ticket:
        self.window.in_flight += 1
        if self._requests is not None:
            self._requests.take(now)
        if self._tokens is not None:
            self._tokens.take(now, tokens)
        # Refused twice in a row: one request at a time finds out whether the server is back.
        self._probing = self._refusals > 1
        cycle, epoch = self._rate.send(now), self._epoch
        if epoch.sent == 0:
            epoch.start = now
        epoch.sent += 1
        return Ticket(cycle, now, epoch, tokens, self.window.full, self._probing)
