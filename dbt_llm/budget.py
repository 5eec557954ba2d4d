"""Budgets: what a run of dbt may use, over all of its models, and what it has used.

A run is one invocation of dbt. Before a job asks anything, its requests are compared with what is
left. While it asks, requests in flight count with what is expected of them and answers with what
they took, so a limit is passed by no more than what the requests in flight take beyond that.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from dbt_llm.config import Budget

_KINDS = 3
_ROUNDING = 1e-9
# So many answers weigh as much as what was expected before the first.
_WEIGHT = 10


@dataclass(frozen=True)
class Amount:
    """Requests, their tokens and their cost."""

    requests: float = 0
    tokens: float = 0
    cost_usd: float = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.cost_usd + other.cost_usd,
        )

    def __sub__(self, other: "Amount") -> "Amount":
        return self + other * -1

    def __mul__(self, factor: float) -> "Amount":
        return Amount(self.requests * factor, self.tokens * factor, self.cost_usd * factor)


@dataclass(frozen=True)
class Limit:
    """One number of a budget that is in the way."""

    key: str
    """As it is written in the profile, for example `llms.hosted.budget.max_tokens`."""
    allowed: float
    used: float

    def __str__(self) -> str:
        unit = {"max_requests": "requests", "max_tokens": "tokens", "max_cost_usd": "USD"}
        kind = unit[self.key.rsplit(".", 1)[-1]]
        return f"{self.key} = {self.allowed:,.10g} {kind}, of which {self.used:,.10g} are used"


class Account:
    """What one run of dbt has used; jobs of several threads share it."""

    def __init__(self, of_run: Budget, of_llms: Mapping[str, Budget]) -> None:
        self._budgets: dict[str, list[tuple[str, Budget, str]]] = {
            llm: [("budget", of_run, ""), (f"llms.{llm}.budget", budget, llm)]
            for llm, budget in of_llms.items()
        }
        self._used: dict[str, Amount] = {}
        self._lock = threading.Lock()

    def exceeded(self, amounts: Mapping[str, Amount]) -> Limit | None:
        """Return the limit that the amounts of some LLMs would exceed together, if any."""
        total = sum(amounts.values(), Amount())
        with self._lock:
            for llm, amount in amounts.items():
                of_run, of_llm = self._limits(llm, total), self._limits(llm, amount)
                for limit, allowed, used, wanted in of_run[:_KINDS] + of_llm[_KINDS:]:
                    if used + wanted > allowed * (1 + _ROUNDING):
                        return limit
        return None

    def reached(self, llm: str) -> Limit | None:
        """Return a limit of which nothing is left, if any."""
        with self._lock:
            return next(
                (
                    limit
                    for limit, allowed, used, _ in self._limits(llm, Amount())
                    if used >= allowed
                ),
                None,
            )

    def take(self, llm: str, each: Amount, most: int) -> int:
        """Reserve as many of `most` equal amounts as there is room for; return how many.

        Where a limit is not reached yet there is room for one, so that nothing is left over only
        because one amount is larger than the rest of the budget.
        """
        with self._lock:
            count = float(most)
            for _, allowed, used, wanted in self._limits(llm, each):
                left = allowed - used
                if left <= 0:
                    return 0
                if wanted > 0 and left < math.inf:
                    count = min(count, max(1, math.floor(left / wanted * (1 + _ROUNDING))))
            self._add(llm, each * int(count))
            return int(count)

    def settle(self, llm: str, reserved: Amount, used: Amount) -> None:
        """Replace what was reserved by what was used."""
        with self._lock:
            self._add(llm, used - reserved)

    def _add(self, llm: str, amount: Amount) -> None:
        for name in ("", llm):
            self._used[name] = self._used.get(name, Amount()) + amount

    def _limits(self, llm: str, amount: Amount) -> list[tuple[Limit, float, float, float]]:
        found = []
        for key, budget, name in self._budgets[llm]:
            used = self._used.get(name, Amount())
            for allowed, kind in (
                (budget.max_requests, "requests"),
                (budget.max_tokens, "tokens"),
                (budget.max_cost_usd, "cost_usd"),
            ):
                spent: float = getattr(used, kind)
                most = math.inf if allowed is None else float(allowed)
                limit = Limit(f"{key}.max_{kind}", most, spent)
                found.append((limit, most, spent, float(getattr(amount, kind))))
        return found


class Meter:
    """What one job may send, and what it has used of the account."""

    def __init__(self, account: Account, llm: str, expected: Amount) -> None:
        """`expected` is what one request is expected to take; answers correct it."""
        self._account = account
        self._llm = llm
        self._first = expected
        self._used = Amount()
        self._reserved = Amount()

    @property
    def expected(self) -> Amount:
        """What one request takes, as far as it is known."""
        mean = (self._first * _WEIGHT + self._used) * (1 / (_WEIGHT + self._used.requests))
        return Amount(1, mean.tokens, mean.cost_usd)

    def take(self, most: int) -> int:
        """Reserve up to `most` requests; return how many may be sent."""
        count = self._account.take(self._llm, self.expected, most)
        self._reserved += self.expected * count
        return count

    def give_back(self, count: int) -> None:
        """Free what was reserved for requests that are not sent after all."""
        self._settle(count, Amount())

    def answered(self, count: int, tokens: float, cost_usd: float) -> None:
        """Note what requests took that are in flight no more."""
        used = Amount(count, tokens, cost_usd)
        self._settle(count, used)
        self._used += used

    def close(self, tokens: float, cost_usd: float) -> None:
        """End the job: what it took in all is known now."""
        rest = Amount(0, tokens - self._used.tokens, cost_usd - self._used.cost_usd)
        # Requests that were lost on their way were sent, so they count.
        reserved = Amount(0, self._reserved.tokens, self._reserved.cost_usd)
        self._account.settle(self._llm, reserved, rest)

    def _settle(self, count: int, used: Amount) -> None:
        flying = self._reserved.requests
        reserved = self._reserved * (min(count, flying) / flying if flying else 0)
        self._reserved -= reserved
        self._account.settle(self._llm, reserved, used)
