"""What people read while a job runs, and the line that says what a model did."""

import time
from collections.abc import Callable

from dbt_llm.job_spec import JobResult
from dbt_llm.resolve_loop import Summary
from dbt_llm.status_lines import StatusLines

_LOG_AFTER_S = (15.0, 45.0)
_LOG_EVERY_S = 60.0
# The longest prompts come first, so an early rate is no ground for a forecast.
_FORECAST_AFTER_SHARE = 0.25


class Progress:
    """Shows one job: a line that moves on a terminal, a plain line now and then in a log."""

    def __init__(
        self, name: str, log: Callable[[str], None], terminal: StatusLines | None = None
    ) -> None:
        self._name = name
        self._log = log
        self._terminal = terminal
        self._started = time.monotonic()
        self._lines = 0

    def __call__(self, result: JobResult) -> None:
        """Show the state of the job."""
        if self._terminal is not None:
            try:
                done = result.heard.rows
                self._terminal.show(self, self._name, _words(result), done, result.asked)
            except Exception as error:
                # A terminal that is gone is no reason to stop.
                self._give_up(error)
        elif time.monotonic() - self._started >= self._next_line_s():
            self._lines += 1
            self._log(f"llm: {self._name}: {_words(result)}")

    def close(self) -> None:
        """Take the line away."""
        if self._terminal is not None:
            try:
                self._terminal.remove(self)
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._terminal = None
        self._log(f"llm: {self._name}: the terminal takes no lines that move ({error})")

    def _next_line_s(self) -> float:
        if self._lines < len(_LOG_AFTER_S):
            return _LOG_AFTER_S[self._lines]
        return _LOG_AFTER_S[-1] + _LOG_EVERY_S * (self._lines - len(_LOG_AFTER_S) + 1)


def summary_line(name: str, summary: Summary) -> str:
    """Return what a model's resolve did, in one line.

    For example `llm: tickets: 1,000 prompts, 812 stored, 185 generated, 3 failed, 41k tokens,
    34 rows/s`.
    """
    counts = summary.counts()
    asked = summary.generated + summary.failed
    parts = []
    if summary.prompts is None:
        parts.append("all other prompts stored" if asked else "all prompts stored")
    else:
        parts.append(f"{summary.prompts:,} {'prompt' if summary.prompts == 1 else 'prompts'}")
        parts.append(f"{counts['stored']:,} stored")
    parts.append(f"{summary.generated:,} generated")
    if summary.failed:
        parts.append(f"{summary.failed:,} failed")
    if summary.left_null:
        parts.append(f"{summary.left_null:,} left NULL")
    if asked:
        seconds = sum(job.generating_s for job in summary.jobs)
        parts.append(f"{_short(counts['prompt_tokens'] + counts['completion_tokens'])} tokens")
        parts.append(f"{_rate(asked / max(seconds, 0.001))} rows/s")
        if counts["cost_usd"]:
            parts.append(f"{counts['cost_usd']:,.4f} USD")
    return f"llm: {name}: {', '.join(parts)}"


def failure_lines(name: str, job: JobResult) -> list[str]:
    """Return one line per error code: how many rows, one prompt hash, one message; no prompt."""
    lines = []
    for code, rows in sorted(job.errors.items()):
        part = next(part for part in job.parts if code in part.errors)
        lines.append(
            f"llm: {name}: {rows:,} {'row' if rows == 1 else 'rows'} failed with {code}, "
            f"for example prompt_hash {part.example_hashes[code]}: {part.example_errors[code]}"
        )
    return lines


def _words(result: JobResult) -> str:
    if result.generating_since is None:
        return f"starting the engine, {result.asked:,} to ask"
    elapsed_s = max(time.monotonic() - result.generating_since, 0.001)
    heard = result.heard
    parts = [f"{heard.rows:,}/{result.asked:,}"]
    if result.failed:
        parts.append(f"{result.failed:,} failed")
    if heard.rows:
        parts.append(f"{_rate(heard.rows / elapsed_s)} rows/s")
    if heard.tokens:
        parts.append(f"{_short(heard.tokens / elapsed_s)} tokens/s")
    if heard.rows and heard.rows >= _FORECAST_AFTER_SHARE * result.asked:
        left_s = (result.asked - heard.rows) * elapsed_s / heard.rows
        parts.append(f"{_duration(left_s)} left")
    if result.cost_usd:
        parts.append(f"{result.cost_usd:,.4f} USD")
    return ", ".join(parts)


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
