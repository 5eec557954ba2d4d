"""Sends one request until it is answered, or until trying again is of no use."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dbt_llm.openai_failure import Failure, Retry
from dbt_llm.throttle import Dismissed, Throttle, Ticket

T = TypeVar("T")

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_SHORTEST_S = 0.1


@dataclass(frozen=True)
class Patience:
    """How long and how often a request is tried."""

    attempt_s: float
    """One attempt."""
    request_s: float
    """All attempts and the waits between them, from the first one on."""
    tries: int
    """Attempts; those that were too early (429) do not count."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What came of a request: a value, or the last failure."""

    value: T | None
    failure: Failure | None
    attempts: int
    latency_s: float
    """Of the last attempt."""
    first_sent: float
    """On the monotonic clock."""


async def persist(
    once: Callable[[], Awaitable[T | Failure]],
    throttle: Throttle,
    tokens: float,
    patience: Patience,
    is_stopped: Callable[[], bool],
    used_tokens: Callable[[T], int],
    first: bool = False,
    group: object = None,
) -> Outcome[T] | None:
    """Make attempts, each when the throttle says so; return None when stopped before the first.

    `tokens` are expected to be used, `used_tokens` says how many were. `first`: before all others.
    `group` is what the throttle may be told to dismiss.
    """
    attempts = tries = 0
    first_sent: float | None = None
    latency_s = 0.0
    failure: Failure | None = None
    while not is_stopped():
        left_s = None if first_sent is None else _left_s(patience, first_sent)
        if left_s is not None and left_s < _SHORTEST_S:
            break
        try:
            async with asyncio.timeout(left_s):
                ticket = await throttle.enter(tokens, first or attempts > 0, group)
        except (TimeoutError, Dismissed):
            break
        if is_stopped():
            throttle.give_back(ticket)
            break
        sent = time.monotonic()
        first_sent = sent if first_sent is None else first_sent
        attempts += 1
        allowed_s = max(_SHORTEST_S, min(patience.attempt_s, _left_s(patience, first_sent)))
        result = await _attempt(once, ticket, throttle, allowed_s)
        latency_s = time.monotonic() - sent
        if not isinstance(result, Failure):
            throttle.succeeded(ticket, latency_s, used_tokens(result))
            return Outcome(result, None, attempts, latency_s, first_sent)
        failure = result
        _tell(throttle, ticket, failure, first_try=tries == 0)
        if failure.retry is Retry.NEVER:
            break
        if failure.retry is not Retry.SLOWER:
            tries += 1
            if tries >= patience.tries:
                break
            wait_s = max(_backoff_s(tries), failure.retry_after_s or 0.0)
            await asyncio.sleep(min(wait_s, _left_s(patience, first_sent)))
    if first_sent is None:
        return None
    return Outcome(None, failure, attempts, latency_s, first_sent)


async def _attempt(
    once: Callable[[], Awaitable[T | Failure]],
    ticket: Ticket,
    throttle: Throttle,
    timeout_s: float,
) -> T | Failure:
    try:
        async with asyncio.timeout(timeout_s):
            return await once()
    except TimeoutError:
        return Failure("timeout", f"no answer within {timeout_s:.3g} s", Retry.FEWER)
    except BaseException:
        throttle.failed(ticket)
        raise


def _tell(throttle: Throttle, ticket: Ticket, failure: Failure, first_try: bool) -> None:
    if failure.retry is Retry.SLOWER:
        throttle.refused(ticket, failure.retry_after_s)
    elif failure.retry is not Retry.NEVER and not first_try:
        # What fails again may be the fault of the request; the first failure has been told.
        throttle.leave(ticket)
    elif failure.retry is Retry.FEWER:
        throttle.overloaded(ticket, failure.retry_after_s)
    elif failure.retry is Retry.LATER:
        throttle.stumbled(ticket)
    else:
        throttle.failed(ticket)


def _left_s(patience: Patience, first_sent: float) -> float:
    return max(0.0, first_sent + patience.request_s - time.monotonic())


def _backoff_s(tries: int) -> float:
    longest = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (tries - 1))
    return longest * random.uniform(0.5, 1.0)
