"""How many requests a server is given to work on at the same time, found by trying.

As in TCP's congestion control (RFC 5681): doubled per round trip until the first refusal, then
raised by one at a time. Unlike there, a refusal tells how many others the server did accept, so
the window falls back to just that; it is halved when that was still too many.
"""

_FIRST = 4
_PROBE_S = 10.0
# A refusal of too high a rate need not mean that there were too many at the same time.
_PROBE_AFTER_RATE_S = 1.0
_LONGEST_PROBE_S = 120.0


class Window:
    """The number of requests under way, and how many there may be."""

    def __init__(self, most: int, slow_s: float = float("inf")) -> None:
        """`slow_s`: a server that takes longer to answer is given no more than it has."""
        self._most = most
        self._slow_s = slow_s
        self._size = float(min(_FIRST, most))
        # What the server was last seen to refuse to go beyond, and when to try it again.
        self._ceiling: float | None = None
        self._probe_at = 0.0
        self._probe_s = 0.0
        self.in_flight = 0

    @property
    def size(self) -> int:
        """How many requests may be under way."""
        return int(self._size)

    @property
    def full(self) -> bool:
        """Whether no other request may be sent."""
        return self.in_flight >= self.size

    def grow(self, now: float, latency_s: float, filled: bool) -> None:
        """Note an answer; `filled`: the window was full with its request."""
        if latency_s > self._slow_s or not (filled or self.full):
            return
        if self._ceiling is None:
            self._size += 1
        elif self._size < self._ceiling:
            self._size = min(self._ceiling, self._size + 1 / self._size)
        elif now >= self._probe_at:
            self._size += 1 / self._size
            if self._size >= self._ceiling + max(2, 0.2 * self._ceiling):
                self._ceiling = None
        self._size = min(self._size, float(self._most))

    def shrink(self, now: float, again: bool, rate: bool) -> None:
        """Note a refusal.

        `again`: nothing was accepted since the last one. `rate`: it was for too many in a time.
        """
        others = max(1.0, self.in_flight - 1)
        size = max(1.0, self._size / 2) if again else min(self._size, others)
        as_before = self._ceiling is not None and size >= 0.9 * self._ceiling
        first = _PROBE_AFTER_RATE_S if rate else _PROBE_S
        self._probe_s = min(_LONGEST_PROBE_S, max(first, 2 * self._probe_s if as_before else 0))
        self._ceiling = min(self._size, others)
        self._probe_at = now + self._probe_s
        self._size = size
