"""Holds an engine to what `Engine.answer` promises: every request answered once, in its form."""

import pyarrow as pa
import pyarrow.compute as pc

from dbt_llm.errors import EngineError
from dbt_llm.schema import ANSWERS, ERROR_CODES, MOST_TOKENS

_COUNTS = ("prompt_tokens", "completion_tokens", "attempts")


class Ledger:
    """The requests of one unit that are not answered yet."""

    def __init__(self, requests: pa.Table) -> None:
        self._asked = set(requests["prompt_hash"].to_pylist())
        self._open = set(self._asked)
        self._closed = False
        self.breach: EngineError | None = None
        """The first promise that the engine broke; it may have caught the error that says so."""

    def take(self, answers: pa.Table) -> pa.Table:
        """Return answers as a table of schema `ANSWERS`; they are taken as a whole or not at all.

        Raises:
            EngineError: an answer is not one to an open request, or has not the declared form.
        """
        try:
            return self._take(answers)
        except EngineError as error:
            self.breach = self.breach or error
            raise

    def close(self) -> list[str]:
        """End the unit; return the keys of the requests that got no answer."""
        self._closed = True
        return sorted(self._open)

    def _take(self, answers: pa.Table) -> pa.Table:
        if self._closed:
            raise EngineError("The engine answered a prompt after it had ended the unit.")
        answers = _in_form(answers)
        hashes = answers["prompt_hash"].to_pylist()
        given = set(hashes)
        if not given <= self._asked:
            raise EngineError("The engine answered a prompt that it was not asked.")
        if len(given) < len(hashes) or not given <= self._open:
            raise EngineError("The engine answered a prompt twice.")
        self._open -= given
        return answers


def _in_form(answers: pa.Table) -> pa.Table:
    try:
        answers = answers.select(ANSWERS.names).cast(ANSWERS)
        answers.validate(full=True)
    except (ValueError, pa.ArrowException, KeyError, AttributeError, TypeError) as error:
        raise EngineError(f"The engine's answers have not the declared columns: {error}") from error
    failed = answers["error_code"].is_valid()
    known = pc.is_in(answers["error_code"], pa.array([None, *ERROR_CODES], pa.string()))
    right = pc.equal(answers["status"], pc.if_else(failed, "error", "ok"))
    if not (_all(known) and _all(right)):
        raise EngineError("The engine gave an answer whose status and error_code do not fit.")
    for name in _COUNTS:
        count = answers[name]
        if not _all(pc.and_(pc.greater_equal(count, 0), pc.less(count, MOST_TOKENS))):
            raise EngineError(f"The engine gave an answer whose {name} is no count.")
    return answers


def _all(truths: pa.ChunkedArray) -> bool:
    # Of no rows, or of NULLs alone, it is NULL.
    return pc.all(truths).as_py() is not False
