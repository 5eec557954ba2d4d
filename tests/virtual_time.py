"""An event loop whose clock jumps to the next timer, so that minutes take milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    clock: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("Nothing is left that could ever happen.")
        self.clock.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for no timer; sockets and threads do not go together with it."""

    def __init__(self, start: float = 1000.0) -> None:
        selector = _Selector()
        super().__init__(selector)
        selector.clock = self
        self.now = start

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
