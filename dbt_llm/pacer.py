"""Spaces things out in time: at most so many a second, without bursts.

The generic cell rate algorithm (ITU-T I.371): one number, the time at which the next thing is due,
moves on with everything that passes.
"""


class Pacer:
    """Lets amounts pass at a rate; times are seconds on any one clock."""

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self._due = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long the next amount has to wait; 0 when it may pass now."""
        return max(0.0, self._due - now - self._tolerance_s)

    def take(self, now: float, amount: float = 1.0) -> None:
        """Let an amount pass."""
        self._due = max(self._due, now - self._tolerance_s) + amount / self.per_second

    def correct(self, amount: float) -> None:
        """Count so much more (or less) of what has already passed."""
        self._due += amount / self.per_second

    @property
    def _tolerance_s(self) -> float:
        # No timer is exact: what is due within a moment may pass, and what came late is made up
        # for. At low rates the moment is short, for some servers allow no burst at all.
        return min(0.02, max(0.002, self.per_second / 5000))
