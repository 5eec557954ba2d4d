"""Spaces things out in time: at most so many a second, without bursts.

The generic cell rate algorithm (ITU-T I.371): one number, the time at which the next thing is due,
moves on with everything that passes.
"""


class Pacer:
    """Lets amounts pass at a rate; times are seconds on any one clock."""

    def __init__(self, per_second: float, late_s: float | None = None) -> None:
        """`late_s`: so much is made up for; by default more, the higher the rate is."""
        self.per_second = per_second
        self._late_s = late_s
        self._due = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long the next amount has to wait; 0 when it may pass now."""
        return max(0.0, self._due - now)

    def take(self, now: float, amount: float = 1.0) -> None:
        """Let an amount pass."""
        interval_s = amount / self.per_second
        # No timer is exact, so what came late is made up for; what came after a pause is not, for
        # some servers allow no burst at all.
        late_s = now - self._due
        made_up_s = min(late_s, self._tolerance_s) if late_s < self._pause_s else 0.0
        self._due = now - made_up_s + interval_s

    def correct(self, amount: float) -> None:
        """Count so much more (or less) of what has already passed."""
        self._due += amount / self.per_second

    def hold(self, until: float) -> None:
        """Let nothing pass before then; what comes after is not late."""
        self._due = max(self._due, until)

    @property
    def _tolerance_s(self) -> float:
        if self._late_s is not None:
            return self._late_s
        return min(0.02, max(0.002, self.per_second / 5000))

    @property
    def _pause_s(self) -> float:
        return max(0.05, 1 / self.per_second, self._tolerance_s)
