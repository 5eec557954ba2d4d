"""Checks what an engine answered against what the call asked for, whatever engine it was.

Reasoning (a `<think>` block) is removed. A choice may come with spaces, quotes, another case or a
full stop around it; JSON may come in a code fence. What does not fit is an error of the row,
`truncated` where it was cut, else `invalid_output`; the store keeps what was said.
"""

import contextlib
import json
import math
import re
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dbt_llm.fields import find_misfit
from dbt_llm.schema import ANSWERS, Answer, answers_table

_AROUND_A_CHOICE = " \t\r\n\"'`*.,;:!"
_FENCE = re.compile(r"^\s*```[A-Za-z]*\s*\n(.*?)\n?\s*```\s*$", re.DOTALL)


class OutputCheck:
    """The check for one call (its content, as in `call.py`)."""

    def __init__(self, call: dict[str, Any]) -> None:
        self._output = call["output"]
        self._validator: Any = None
        self._dimensions = 0
        if self._output["type"] == "choice":
            self._choices = _by_spelling(self._output["choices"])
        elif self._output["type"] == "json":
            from jsonschema import Draft202012Validator

            self._validator = Draft202012Validator(self._output["schema"])

    def apply(self, answers: pa.Table) -> pa.Table:
        """Return the answers (schema `ANSWERS`) with outputs and errors put right."""
        kind = self._output["type"]
        if kind == "embedding" and self._are_vectors(answers):
            return answers
        if kind == "text" and not _may_reason(answers) and not _lacks_output(answers):
            return answers
        check = self._check_embedding if kind == "embedding" else self._check
        return answers_table([check(Answer(**_fields(row))) for row in answers.to_pylist()])

    def _are_vectors(self, answers: pa.Table) -> bool:
        """Tell whether all good answers pass `_check_embedding`, without looking at each."""
        vectors = answers.filter(pc.equal(answers["status"], "ok"))["embedding"]
        lengths = pc.unique(pc.list_value_length(vectors)).to_pylist()
        if not lengths:
            return True
        numbers = pc.list_flatten(vectors)
        if len(lengths) > 1 or not lengths[0] or self._dimensions not in {0, lengths[0]}:
            return False
        if numbers.null_count or not pc.all(pc.is_finite(numbers)).as_py():
            return False
        self._dimensions = lengths[0]
        return True

    def _check_embedding(self, answer: Answer) -> Answer:
        if answer.error_code is not None:
            return answer
        numbers = answer.embedding
        if not numbers:
            return _failed(answer, "invalid_output", "the embedding has no numbers")
        if not all(number is not None and math.isfinite(number) for number in numbers):
            return _failed(
                answer, "invalid_output", "the embedding has numbers that are not finite"
            )
        self._dimensions = self._dimensions or len(numbers)
        if len(numbers) != self._dimensions:
            # It passes: it is not the text that decides how many numbers there are.
            return _failed(
                answer,
                "server_error",
                f"the embedding has {len(numbers)} numbers, the first of this run "
                f"{self._dimensions}",
            )
        return answer

    def _check(self, answer: Answer) -> Answer:
        if answer.error_code is not None:
            return answer
        if answer.output is None:
            return _failed(answer, "invalid_output", "the answer has no text")
        text = without_reasoning(answer.output)
        if text is None:
            return _failed(answer, "truncated", "the answer ended within its reasoning")
        if self._output["type"] == "choice":
            return self._check_choice(answer, text)
        if self._output["type"] == "json":
            return self._check_json(answer, text)
        return _with_output(answer, text)

    def _check_choice(self, answer: Answer, text: str) -> Answer:
        if text.startswith('"') and text.endswith('"'):
            # Choices with a line break are decoded as JSON strings.
            with contextlib.suppress(ValueError):
                text = json.loads(text)
        for spelling in _spellings(text):
            if spelling in self._choices:
                return _with_output(answer, self._choices[spelling])
        if answer.finish_reason == "length":
            return _failed(answer, "truncated", "max_tokens was reached before a choice was made")
        return _failed(answer, "invalid_output", "the answer is none of the choices")

    def _check_json(self, answer: Answer, text: str) -> Answer:
        fenced = _FENCE.match(text)
        text = fenced[1] if fenced else text.strip()
        try:
            value = json.loads(text, parse_constant=_refuse)
            # Half of a surrogate pair is JSON, but no text that could be stored.
            json.dumps(value, ensure_ascii=False).encode()
            problem = next(self._validator.iter_errors(value), None)
        except RecursionError:
            return _failed(answer, "invalid_output", "the answer is nested too deeply")
        except ValueError as error:
            if answer.finish_reason == "length":
                return _failed(
                    answer, "truncated", "max_tokens was reached before the JSON was complete"
                )
            return _failed(answer, "invalid_output", f"the answer is no JSON: {error}")
        if problem is not None:
            where = "/".join(map(str, problem.absolute_path)) or "the answer"
            return _failed(
                answer, "invalid_output", f"{where} does not fit the schema ({problem.validator})"
            )
        misfit = find_misfit(value, self._output["schema"])
        if misfit is not None:
            return _failed(answer, "invalid_output", f"{misfit!r} does not fit its type")
        return _with_output(answer, text)


def without_reasoning(text: str) -> str | None:
    """Return what follows a reasoning block, or None when the block has no end.

    Some chat templates open the block themselves, and then only its end is in the answer.
    """
    if "</think>" in text:
        return text.rpartition("</think>")[2].lstrip()
    if text.lstrip().startswith("<think>"):
        return None
    return text


def _spellings(text: str) -> list[str]:
    """Return a text as it is, then without what often stands around a choice, in one case."""
    stripped = text.strip().casefold()
    return [text, stripped, stripped.strip(_AROUND_A_CHOICE)]


def _by_spelling(choices: list[str]) -> dict[str, str]:
    """Return every spelling that stands for one choice alone."""
    found: dict[str, set[str]] = {}
    for choice in choices:
        for spelling in _spellings(choice):
            found.setdefault(spelling, set()).add(choice)
    unique = {spelling: next(iter(of)) for spelling, of in found.items() if len(of) == 1}
    return {**unique, **{choice: choice for choice in choices}}


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON value")


def _lacks_output(answers: pa.Table) -> bool:
    good = pc.equal(answers["status"], "ok")
    return bool(pc.any(pc.and_(good, answers["output"].is_null())).as_py())


def _may_reason(answers: pa.Table) -> bool:
    return bool(pc.any(pc.match_substring(answers["output"], "think>")).as_py())


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ANSWERS.names if name != "status"}


def _with_output(answer: Answer, output: str) -> Answer:
    return replace(answer, output=output)


def _failed(answer: Answer, code: str, message: str) -> Answer:
    # What was said stays in the store; numbers that are none help nobody there.
    return replace(answer, error_code=code, error=message, embedding=None)
