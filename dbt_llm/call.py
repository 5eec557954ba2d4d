"""A call: what is constant at one call site, and the keys that follow from it.

`call_hash = sha256(canonical JSON of the call)` and `prompt_hash = sha256(call_hash || prompt)`,
both as 64 lower-case hex digits over UTF-8 bytes. A prompt is hashed as it is: no trimming and
no Unicode normalization. `functions.py` computes the prompt hash in SQL; a test compares both.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, field_validator

from dbt_llm.config import LLMConfig, Sampling, VllmLLM
from dbt_llm.errors import CallError

# Of vLLM's engine arguments these choose the weights or shape the prompt, so they are part of
# the key. All others (memory, parallelism, data types) only change speed or rounding.
_ANSWER_CHANGING_ENGINE_ARGS = (
    "chat_template",
    "hf_overrides",
    "quantization",
    "revision",
    "tokenizer",
    "tokenizer_revision",
)


class CallOptions(BaseModel):
    """The options of `llm_generate` as SQL gives them; `None` means not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    system: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    choices: list[str] | None = None
    json_schema: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: list[str] | None) -> list[str] | None:
        if stop is not None and not stop:
            raise ValueError("is an empty list; leave it out")
        return stop

    @field_validator("json_schema", "extra", mode="before")
    @classmethod
    def _parse_json(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value, parse_constant=_refuse)
        except ValueError:
            raise ValueError("is no valid JSON") from None

    @field_validator("choices")
    @classmethod
    def _check_choices(cls, choices: list[str] | None) -> list[str] | None:
        if choices is not None and not choices:
            raise ValueError("is an empty list; give at least one choice")
        if choices is not None and len(set(choices)) < len(choices):
            raise ValueError("holds a choice twice")
        return choices


@dataclass(frozen=True)
class Call:
    """One call site, resolved against the profile."""

    llm: str
    """The alias in the profile. Not part of the key: a renamed alias keeps its answers."""
    text: str
    """The canonical JSON, of which `call_hash` is the sha256."""
    call_hash: str

    @property
    def content(self) -> dict[str, Any]:
        """The call as a dictionary: model, model_args, system, sampling, output."""
        content: dict[str, Any] = json.loads(self.text)
        return content


def make_call(options_json: str, llms: Mapping[str, LLMConfig]) -> Call:
    """Resolve the options of a call site against the LLMs of the profile.

    Raises:
        CallError: an option is wrong, or the LLM is not in the profile.
    """
    raw = {key: value for key, value in json.loads(options_json).items() if value is not None}
    try:
        options = CallOptions.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, p['loc']))}: {p['msg'].removeprefix('Value error, ')}"
            f" (got {p['input']!r})"
            for p in error.errors()
        )
        raise CallError(f"A call of an LLM function has a wrong option: {problems}.") from None
    if options.model not in llms:
        raise CallError(
            f"A call of an LLM function names the model {options.model!r}, which is not among "
            f"the llms of the profile: {', '.join(sorted(llms))}."
        )
    if options.choices is not None and options.json_schema is not None:
        raise CallError("A call of an LLM function gives both choices and json_schema; give one.")
    config = llms[options.model]
    content = {
        "model": config.model,
        "model_args": _answer_changing_args(config),
        "system": options.system if options.system is not None else config.system,
        "sampling": _sampling(options, config.sampling),
        "output": _output(options),
    }
    text = canonical_json({key: value for key, value in content.items() if value is not None})
    return Call(llm=options.model, text=text, call_hash=sha256_hex(text))


def canonical_json(value: Any) -> str:
    """Return JSON that is equal for equal values: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(text: str) -> str:
    """Return the sha256 of the text's UTF-8 bytes, as DuckDB's `sha256(VARCHAR)` does."""
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_hash(call_hash: str, prompt: str) -> str:
    """Return the key of a generation."""
    return sha256_hex(call_hash + prompt)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _answer_changing_args(config: LLMConfig) -> dict[str, Any] | None:
    if not isinstance(config, VllmLLM):
        return None
    return {
        k: config.engine_args[k] for k in _ANSWER_CHANGING_ENGINE_ARGS if k in config.engine_args
    } or None


def _sampling(options: CallOptions, defaults: Sampling) -> dict[str, Any]:
    given = options.model_dump(
        include={"temperature", "max_tokens", "top_p", "seed", "stop", "extra"}, exclude_none=True
    )
    try:
        merged = Sampling.model_validate({**defaults.model_dump(exclude_none=True), **given})
    except ValidationError as error:
        problem = error.errors()[0]
        raise CallError(
            f"A call of an LLM function has a wrong option: {problem['loc'][0]}: "
            f"{problem['msg']} (got {problem['input']!r})."
        ) from None
    return merged.model_dump(mode="json", exclude_none=True)


def _output(options: CallOptions) -> dict[str, Any]:
    if options.choices is not None:
        return {"type": "choice", "choices": options.choices}
    if options.json_schema is not None:
        return {"type": "json", "schema": options.json_schema}
    return {"type": "text"}
