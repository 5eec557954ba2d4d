"""Budgets: what a run of dbt may use, over all of its models, and what it has used.

A run is one invocation of dbt. Before a job asks anything it may claim what its requests are
expected to take. While it asks, requests in flight count with what is expected of them and answers
with what they took, so a limit is passed by no more than what the requests in flight take beyond
that.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dbt_llm.config import Budget

_KINDS = ("requests", "tokens", "cost_usd")
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

    def __mul__(self, factor: float) -> "Amount":
        return Amount(self.requests * factor, self.tokens * factor, self.cost_usd * factor)

    def at_least(self, other: "Amount") -> "Amount":
        """Return the larger of each kind."""
        return Amount(
            max(self.requests, other.requests),
            max(self.tokens, other.tokens),
            max(self.cost_usd, other.cost_usd),
        )


_NOTHING = Amount()


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
    """What one run of dbt has used; jobs of several threads share it, each with a `Meter`."""

    def __init__(self, of_run: Budget, of_llms: Mapping[str, Budget]) -> None:
        self._of_run = of_run
        self._of_llms = dict(of_llms)
        # What jobs that have ended took, by LLM.
        self._ended: dict[str, Amount] = {}
        self._meters: list[Meter] = []
        self.lock = threading.RLock()

    def open(
        self, expected: Mapping[str, tuple[Amount, int]], claim: bool
    ) -> "dict[str, Meter] | Limit":
        """Return a meter for each LLM of a model, or the limit over which they would go together.

        Args:
            expected: what one request is expected to take, and how many there are.
            claim: whether all of it must fit, beside what other jobs have claimed; it is then kept
                for this job, whatever the others do. Otherwise there is no limit to open one.
        """
        with self.lock:
            claims = {
                llm: each * rows if claim else _NOTHING for llm, (each, rows) in expected.items()
            }
            for llm, own in claims.items():
                total = sum(claims.values(), _NOTHING)
                for limit, allowed, spent, wanted in self._limits(llm, total, own):
                    if wanted and spent + wanted > allowed * (1 + _ROUNDING):
                        return limit
            meters = {
                llm: Meter(self, llm, each, claims[llm]) for llm, (each, _) in expected.items()
            }
            self._meters += meters.values()
            return meters

    def used_up(self, meter: "Meter") -> Limit | None:
        """Return a limit of which answers have left nothing for a job's next request, if any.

        What is in flight or claimed does not count: it may take less.
        """
        each = meter.expected
        with self.lock:
            for limit, allowed, spent, wanted in self._limits(meter.llm, each, each, used=True):
                if wanted and spent >= allowed * (1 - _ROUNDING):
                    return limit
            return None

    def room(self, meter: "Meter", most: int) -> int:
        """Return for how many of `most` requests of a job there is room beside all others.

        Where a limit is not reached yet there is room for one, so that nothing is left over only
        because one request takes more than the rest of the budget.
        """
        each = meter.expected
        with self.lock:
            for _, allowed, spent, wanted in self._limits(meter.llm, each, each, of=meter):
                if not wanted:
                    continue
                left = allowed - spent
                if left <= allowed * _ROUNDING:
                    return 0
                most = min(most, max(1, int(left / wanted * (1 + _ROUNDING))))
            return most

    def end(self, meter: "Meter", used: Amount) -> None:
        """Take a meter away; `used` is what its job took."""
        with self.lock:
            if meter in self._meters:
                self._meters.remove(meter)
                self._ended[meter.llm] = self._ended.get(meter.llm, _NOTHING) + used

    def _limits(
        self,
        llm: str,
        of_run: Amount,
        of_llm: Amount,
        *,
        of: "Meter | None" = None,
        used: bool = False,
    ) -> Iterator[tuple[Limit, float, float, float]]:
        """Yield each limit that holds for an LLM, what it allows, what is spent, what is wanted.

        What a job has claimed counts as spent, but not its own claim (`of`); with `used`, only
        what answers took.
        """

        def spent_by(meter: Meter) -> Amount:
            if used:
                return meter.used
            return meter.taken if meter is of else meter.claimed

        for key, budget, name, wanted in (
            ("budget", self._of_run, None, of_run),
            (f"llms.{llm}.budget", self._of_llms[llm], llm, of_llm),
        ):
            amounts = [amount for by, amount in self._ended.items() if name in {None, by}]
            amounts += [spent_by(meter) for meter in self._meters if name in {None, meter.llm}]
            spent = sum(amounts, _NOTHING)
            for unit in _KINDS:
                allowed = getattr(budget, f"max_{unit}")
                if allowed is not None:
                    found = float(getattr(spent, unit))
                    limit = Limit(f"{key}.max_{unit}", allowed, found)
                    yield limit, float(allowed), found, float(getattr(wanted, unit))


class Meter:
    """What one job may send, and what it has used of the account."""

    def __init__(self, account: Account, llm: str, first: Amount, claim: Amount) -> None:
        """`first` is what one request is expected to take; answers correct it."""
        self._account = account
        self.llm = llm
        self._first = first
        self._claim = claim
        self.used = Amount()
        """What the answers took that are known of."""
        self._flying = 0
        self._reserved = Amount()

    @property
    def taken(self) -> Amount:
        """What is used, and what is reserved for requests in flight."""
        return self.used + self._reserved

    @property
    def claimed(self) -> Amount:
        """What nobody else may claim."""
        return self.taken.at_least(self._claim)

    @property
    def expected(self) -> Amount:
        """What one request takes, as far as it is known."""
        mean = (self._first * _WEIGHT + self.used) * (1 / (_WEIGHT + self.used.requests))
        return Amount(1, mean.tokens, mean.cost_usd)

    def take(self, most: int) -> int:
        """Reserve up to `most` requests; return how many may be sent."""
        with self._account.lock:
            count = self._account.room(self, most)
            self._flying += count
            self._reserved += self.expected * count
            return count

    def give_back(self, count: int) -> None:
        """Free what was reserved for requests that are not in flight, and have no answer."""
        with self._account.lock:
            self._free(count)

    def answered(self, count: int, tokens: float, cost_usd: float) -> None:
        """Note what requests took that are in flight no more."""
        with self._account.lock:
            self._free(count)
            self.used += Amount(count, tokens, cost_usd)

    def lost(self, count: int | None = None) -> None:
        """Note that requests in flight got lost, as far as is known; None stands for all.

        They are asked again, and count once. Where requests cost something, these were sent.
        """
        with self._account.lock:
            count = self._flying if count is None else min(count, self._flying)
            if count > 0 and self._first.cost_usd:
                each = self._reserved * (1 / self._flying)
                self.used += Amount(0, each.tokens, each.cost_usd) * count
            self._free(count)

    def stored(self, count: int) -> None:
        """Note how many answers of the job are stored; others that were told of are asked again.

        What these took stays spent.
        """
        with self._account.lock:
            self.used = Amount(count, self.used.tokens, self.used.cost_usd)

    def used_up(self) -> Limit | None:
        """Return a limit that answers have reached, if any."""
        return self._account.used_up(self)

    def close(self, stored: Amount = _NOTHING) -> None:
        """End the job, of which these answers are stored. A second time does nothing."""
        with self._account.lock:
            # Answers that an engine told of and that were lost before they were stored are paid.
            self._account.end(self, self.used.at_least(stored))

    def _free(self, count: int) -> None:
        count = max(0, min(count, self._flying))
        if count:
            self._reserved *= (self._flying - count) / self._flying
            self._flying -= count
            # A sum of fractions need not come out even.
            self._reserved = Amount(self._flying, self._reserved.tokens, self._reserved.cost_usd)
