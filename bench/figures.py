"""What a measure yields, and how two things are timed in turn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    label: str
    ours: float
    """Median over the runs, in `unit`."""
    baseline: float
    unit: str = "s"
    target: str = ""
    """What the ratio of the two, or their difference, is to be."""

    def row(self) -> str:
        """Return the line in Markdown."""
        ratio = self.ours / self.baseline if self.baseline else float("nan")
        return (
            f"| {self.label} | {self.ours:,.2f} {self.unit} | {self.baseline:,.2f} {self.unit} | "
            f"{ratio:.2f} | {self.target} |"
        )


HEAD = "| measure | dbt-llm | baseline | ratio | target |\n|---|---|---|---|---|"


def alternate(
    runs: int, ours: Callable[[], float], baseline: Callable[[], float], warm_up: bool = True
) -> tuple[float, float]:
    """Return the medians of both, measured in turn, after one warm-up of each."""
    if warm_up:
        ours(), baseline()
    pairs = [(ours(), baseline()) for _ in range(runs)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
