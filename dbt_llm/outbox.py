"""Hands answers on in small lots: one table for each of thousands a second would cost too much."""

import asyncio

from dbt_llm.engine import Emit
from dbt_llm.schema import Answer, answers_table

_MOST = 64
_LONGEST_S = 0.2


class Outbox:
    """Collects answers for a moment, no longer."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._answers: list[Answer] = []
        self._timer: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None

    def add(self, answer: Answer) -> None:
        """Take an answer; it is handed on within a fifth of a second."""
        self._answers.append(answer)
        if len(self._answers) >= _MOST:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LONGEST_S, self._flush_late)

    def flush(self) -> None:
        """Hand on what there is.

        Raises what `emit` raises, also where it was called in the meantime.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        answers, self._answers = self._answers, []
        if answers:
            self._emit(answers_table(answers))

    def _flush_late(self) -> None:
        # A timer has nobody to raise to.
        try:
            self.flush()
        except Exception as failure:
            self._failure = failure
