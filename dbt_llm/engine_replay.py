"""The `replay` engine: recorded, scripted or made-up answers; for tests, CI and trying things.

A made-up answer is `replay ` and the first 12 hex digits of the prompt's sha256 (or one of the
call's choices), so it depends on the prompt alone, and SQL can compute what it must be. Answers
come back in shuffled order, so that a mistake in matching them shows.
"""

import asyncio
import hashlib
import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dbt_llm.config import ReplayRule
from dbt_llm.engine import Emit
from dbt_llm.errors import EngineError
from dbt_llm.record import call_key
from dbt_llm.schema import ANSWERS, ERROR_CODES, Answer, answers_table

_CHARACTERS_PER_TOKEN = 4
_A_LONG_TIME_S = 24 * 3600.0


class ReplayEngine:
    """See the module's text."""

    version = "1"

    def __init__(self, config: dict[str, Any]) -> None:
        self.concurrency: int = config["concurrency"]
        self._latency_s: float = config["latency_s"]
        self._otherwise: str = config["otherwise"]
        rules = [ReplayRule.model_validate(rule) for rule in config["rules"]]
        if config["answers"] is not None:
            rules += _read_rules(Path(config["answers"]))
        for rule in rules:
            if rule.error_code is not None and rule.error_code not in ERROR_CODES:
                raise EngineError(
                    f"A replay rule has the error code {rule.error_code!r}; "
                    f"use one of {', '.join(ERROR_CODES)}."
                )
        self._by_prompt: dict[tuple[str | None, str], ReplayRule] = {}
        for rule in reversed(rules):
            if rule.prompt is not None:
                of_call = None if rule.call is None else call_key(rule.call)
                self._by_prompt[of_call, rule.prompt] = rule
        self._by_part = [rule for rule in rules if rule.prompt is None]
        self._scripted = bool(rules) or self._otherwise == "error" or self._latency_s > 0
        self._slots = asyncio.Semaphore(self.concurrency)
        self._random = np.random.default_rng(0)

    async def answer(self, requests: pa.Table, call: dict[str, Any], emit: Emit) -> None:
        """Answer every request; all at once where nothing is scripted."""
        kind, of_call = call["output"], call_key(call)
        requests = requests.take(self._random.permutation(requests.num_rows))
        if not self._scripted:
            emit(_make_up(requests, kind))
            return
        hashes, prompts = (requests[name].to_pylist() for name in ("prompt_hash", "prompt"))

        async def one(prompt_hash: str, prompt: str) -> None:
            async with self._slots:
                started = time.monotonic()
                rule = self._rule(of_call, prompt)
                if rule is not None and rule.death is not None:
                    _die(rule.death)
                await asyncio.sleep(self._latency_s + (rule.delay_s if rule else 0.0))
                answer = self._scripted_answer(prompt_hash, prompt, rule, kind)
                emit(answers_table([replace(answer, latency_s=time.monotonic() - started)]))

        await asyncio.gather(*map(one, hashes, prompts))

    async def close(self) -> None:
        """Do nothing; there is nothing to free."""

    def _rule(self, of_call: str, prompt: str) -> ReplayRule | None:
        for key in ((of_call, prompt), (None, prompt)):
            if key in self._by_prompt:
                return self._by_prompt[key]
        for rule in self._by_part:
            if rule.contains is None or rule.contains in prompt:
                return rule
        return None

    def _scripted_answer(
        self, prompt_hash: str, prompt: str, rule: ReplayRule | None, kind: dict[str, Any]
    ) -> Answer:
        tokens = _tokens(prompt)
        if rule is None and self._otherwise == "error":
            return Answer(
                prompt_hash,
                error_code="invalid_request",
                error="no recorded answer fits this prompt",
                prompt_tokens=tokens,
            )
        if rule is not None and rule.error_code is not None:
            return Answer(
                prompt_hash,
                error_code=rule.error_code,
                error=rule.error or f"scripted error {rule.error_code}",
                output=rule.output,
                prompt_tokens=tokens,
            )
        rule = rule or ReplayRule()
        output, embedding = rule.output, None
        if kind["type"] == "embedding":
            embedding = list(rule.embedding or made_up_embedding(prompt))
        elif output is None:
            output = made_up_answer(prompt, kind)
        counted = rule.completion_tokens
        return Answer(
            prompt_hash,
            output=output,
            embedding=embedding,
            finish_reason=rule.finish_reason,
            prompt_tokens=tokens if rule.prompt_tokens is None else rule.prompt_tokens,
            completion_tokens=_tokens(output or "") if counted is None else counted,
        )


def _die(how: str) -> None:
    if how == "engine":
        raise EngineError("the replay engine died, as a rule told it to")
    if how == "process":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_A_LONG_TIME_S)


def made_up_answer(prompt: str, kind: dict[str, Any] | None = None) -> str:
    """Return the answer to a prompt that no rule covers; `kind` is the call's output."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    if kind is not None and kind["type"] == "choice":
        choices: list[str] = kind["choices"]
        return choices[int(digest[:8], 16) % len(choices)]
    if kind is not None and kind["type"] == "json":
        return json.dumps(_made_up_value(kind["schema"], digest))
    return f"replay {digest[:12]}"


def made_up_embedding(prompt: str) -> list[float]:
    """Return eight numbers between -1 and 1 that depend on the prompt."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return [byte / 127.5 - 1 for byte in digest[:8]]


def _made_up_value(schema: dict[str, Any], digest: str) -> Any:
    if "anyOf" in schema:
        return _made_up_value(schema["anyOf"][0], digest)
    if "enum" in schema:
        return schema["enum"][int(digest[:8], 16) % len(schema["enum"])]
    kind = schema.get("type", "string")
    if kind == "object":
        return {
            name: _made_up_value(value, hashlib.sha256((digest + name).encode()).hexdigest())
            for name, value in schema.get("properties", {}).items()
        }
    if kind == "array":
        return [_made_up_value(schema.get("items", {}), digest)]
    if kind == "integer":
        return int(digest[:2], 16) // 2
    if kind == "number":
        return int(digest[:2], 16) / 4
    if kind == "boolean":
        return int(digest[:2], 16) % 2 == 0
    if "pattern" in schema:
        return next(text for text in _DATES if re.match(schema["pattern"], text))
    return f"replay {digest[:12]}"[: schema.get("maxLength")]


_DATES = ("2026-01-02", "2026-01-02 03:04:05", "03:04:05")


def _make_up(requests: pa.Table, kind: dict[str, Any]) -> pa.Table:
    prompts, rows = requests["prompt"].to_pylist(), requests.num_rows
    columns: dict[str, Any] = {"prompt_hash": requests["prompt_hash"]}
    if kind["type"] == "embedding":
        columns["embedding"] = [made_up_embedding(prompt) for prompt in prompts]
        completion_tokens = pa.repeat(1, rows)
    else:
        outputs = [made_up_answer(prompt, kind) for prompt in prompts]
        columns["output"] = pa.array(outputs, pa.string())
        completion_tokens = _tokens_of_each(columns["output"])
    columns |= {
        "status": pa.repeat("ok", rows),
        "tokens_estimated": pa.repeat(False, rows),
        "finish_reason": pa.repeat("stop", rows),
        "prompt_tokens": _tokens_of_each(requests["prompt"]),
        "completion_tokens": completion_tokens,
        "latency_s": pa.repeat(0.0, rows),
        "attempts": pa.repeat(pa.scalar(1, pa.int32()), rows),
    }
    for field in ANSWERS:
        if field.name not in columns:
            columns[field.name] = pa.nulls(rows, field.type)
    return pa.table({name: columns[name] for name in ANSWERS.names}, schema=ANSWERS)


def _tokens(text: str) -> int:
    return 1 + len(text) // _CHARACTERS_PER_TOKEN


def _tokens_of_each(texts: Any) -> Any:
    """Return what `_tokens` says of each text of an Arrow array."""
    lengths = pc.cast(pc.utf8_length(texts), pa.int64())
    return pc.add(pc.divide(lengths, _CHARACTERS_PER_TOKEN), 1)


def _read_rules(path: Path) -> list[ReplayRule]:
    try:
        # Not splitlines(): a prompt may hold other line breaks, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise EngineError(f"The replay answers {path} cannot be read: {error.strerror}.") from error
    rules = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rules.append(ReplayRule.model_validate(json.loads(line)))
        except ValueError as error:
            raise EngineError(
                f"The replay answers {path}, line {number}, are no rule: {error}"
            ) from None
    return rules
