"""A call: what is constant at one call site, and the keys that follow from it.

`call_hash = sha256(canonical JSON of the call)` and `prompt_hash = sha256(call_hash || prompt)`,
both as 64 lower-case hex digits over UTF-8 bytes. A prompt is hashed as it is: no trimming and
no Unicode normalization. `functions.py` computes the prompt hash in SQL; a test compares both.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from dbt_llm.config import LLMConfig, Sampling, VllmLLM
from dbt_llm.errors import CallError
from dbt_llm.fields import fields_schema

# Of vLLM's engine arguments these choose the weights or shape the prompt, so they are part of
# the key. All others (memory, parallelism, data types) only change speed or rounding.
_ANSWER_CHANGING_ENGINE_ARGS = (
    "chat_template",
    "convert",
    "hf_overrides",
    "pooler_config",
    "quantization",
    "revision",
    "tokenizer",
    "tokenizer_revision",
)


class _Options(BaseModel):
    """The options that all functions share; `None` means not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    system: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
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

    @field_validator("extra", mode="before")
    @classmethod
    def _parse_extra(cls, value: Any) -> Any:
        return _parse_json(value)

    def wrap(self) -> dict[str, str] | None:
        """Return what stands before and after a prompt in the user's turn."""
        return None

    def output(self) -> dict[str, Any]:
        """Return the kind of answer that is asked for."""
        return {"type": "text"}


class GenerateOptions(_Options):
    """The options of `llm_generate`, `llm_details` and `llm_prompt_hash`."""

    choices: list[str] | None = None
    json_schema: dict[str, Any] | None = None

    @field_validator("json_schema", mode="before")
    @classmethod
    def _parse_schema(cls, value: Any) -> Any:
        return _parse_json(value)

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            from jsonschema import Draft202012Validator, SchemaError

            try:
                Draft202012Validator.check_schema(schema)
            except SchemaError as error:
                raise ValueError(f"is no JSON schema: {error.message}") from None
            _check_references(schema, schema)
        return schema

    @field_validator("choices")
    @classmethod
    def _check_choices(cls, choices: list[str] | None) -> list[str] | None:
        return None if choices is None else _check_distinct(choices, "choice")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.choices is not None and self.json_schema is not None:
            raise ValueError("choices and json_schema are both given; give one")
        return self

    def output(self) -> dict[str, Any]:
        """Return the kind of answer that is asked for."""
        if self.choices is not None:
            return {"type": "choice", "choices": self.choices}
        if self.json_schema is not None:
            return {"type": "json", "schema": self.json_schema}
        return {"type": "text"}


class ClassifyOptions(_Options):
    """The options of `llm_classify`."""

    labels: list[str]
    instruction: str = "Classify the text."

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: list[str]) -> list[str]:
        return _check_distinct(labels, "label")

    def wrap(self) -> dict[str, str] | None:
        """Return what stands before and after a prompt in the user's turn."""
        labels = ", ".join(self.labels)
        return {
            "before": f"{self.instruction}\nAnswer with one of these labels: {labels}\n\nText:\n",
            "after": "\n\nLabel:",
        }

    def output(self) -> dict[str, Any]:
        """Return the kind of answer that is asked for."""
        return {"type": "choice", "choices": self.labels}


class FilterOptions(_Options):
    """The options of `llm_filter`."""

    question: str

    def wrap(self) -> dict[str, str] | None:
        """Return what stands before and after a prompt in the user's turn."""
        return {
            "before": f"Answer the question about the text with yes or no.\n\n"
            f"Question: {self.question}\n\nText:\n",
            "after": "\n\nAnswer:",
        }

    def output(self) -> dict[str, Any]:
        """Return the kind of answer that is asked for."""
        return {"type": "choice", "choices": ["yes", "no"]}


class ExtractOptions(_Options):
    """The options of `llm_extract`."""

    fields: dict[str, Any]
    instruction: str = "Extract the fields from the text."

    @field_validator("fields", mode="before")
    @classmethod
    def _parse_fields(cls, value: Any) -> Any:
        return _parse_json(value)

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields_schema(fields)
        return fields

    def wrap(self) -> dict[str, str] | None:
        """Return what stands before and after a prompt in the user's turn."""
        fields = json.dumps(self.fields, ensure_ascii=False)
        return {
            "before": f"{self.instruction}\nAnswer with a JSON object of these fields and types, "
            f"with null where the text does not say it: {fields}\n\nText:\n",
            "after": "\n\nJSON:",
        }

    def output(self) -> dict[str, Any]:
        """Return the kind of answer that is asked for."""
        return {"type": "json", "schema": fields_schema(self.fields)}


class EmbedOptions(BaseModel):
    """The options of `llm_embed`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str


_OPTIONS: dict[str, type[_Options] | type[EmbedOptions]] = {
    "generate": GenerateOptions,
    "classify": ClassifyOptions,
    "filter": FilterOptions,
    "extract": ExtractOptions,
    "embed": EmbedOptions,
}


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

    `options_json` is an object of the options, and of `function`: generate (where it is left
    out), classify, filter, extract or embed.

    Raises:
        CallError: an option is wrong, or the LLM is not in the profile.
    """
    raw = {key: value for key, value in json.loads(options_json).items() if value is not None}
    kind = _OPTIONS[raw.pop("function", "generate")]
    try:
        options = kind.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(_describe(problem) for problem in error.errors())
        raise CallError(f"A call of an LLM function has a wrong option: {problems}.") from None
    if options.model not in llms:
        raise CallError(
            f"A call of an LLM function names the model {options.model!r}, which is not among "
            f"the llms of the profile: {', '.join(sorted(llms))}."
        )
    config = llms[options.model]
    content: dict[str, Any] = {"model": config.model, "model_args": _answer_changing_args(config)}
    if isinstance(options, EmbedOptions):
        content["output"] = {"type": "embedding"}
    else:
        content["system"] = options.system if options.system is not None else config.system
        content["sampling"] = _sampling(options, config.sampling)
        content["wrap"] = options.wrap()
        content["output"] = options.output()
    text = canonical_json({key: value for key, value in content.items() if value is not None})
    return Call(llm=options.model, text=text, call_hash=sha256_hex(text))


def user_turn(call: dict[str, Any], prompt: str) -> str:
    """Return what an LLM is told in the user's turn: the call's words around the prompt."""
    wrap = call.get("wrap", {"before": "", "after": ""})
    return f"{wrap['before']}{prompt}{wrap['after']}"


def canonical_json(value: Any) -> str:
    """Return JSON that is equal for equal values: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(text: str) -> str:
    """Return the sha256 of the text's UTF-8 bytes, as DuckDB's `sha256(VARCHAR)` does."""
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_hash(call_hash: str, prompt: str) -> str:
    """Return the key of a generation."""
    return sha256_hex(call_hash + prompt)


def _describe(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    return f"{'.'.join(map(str, problem['loc']))}: {message} (got {problem['input']!r})"


def _parse_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except ValueError:
        raise ValueError("is no valid JSON") from None


def _check_references(part: Any, schema: dict[str, Any]) -> None:
    """Refuse what the check of an answer would only stumble over: bad patterns and references."""
    if isinstance(part, list):
        for item in part:
            _check_references(item, schema)
    if not isinstance(part, dict):
        return
    for key, value in part.items():
        if key == "pattern" and isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"has the pattern {value!r}, which is none: {error}") from None
        if key == "$ref" and isinstance(value, str):
            target: Any = schema
            for step in value.removeprefix("#").strip("/").split("/") if value != "#" else []:
                target = target.get(step) if isinstance(target, dict) else None
            if not value.startswith("#") or target is None:
                raise ValueError(f"has the reference {value!r}, which is not within the schema")
        _check_references(value, schema)


def _check_distinct(choices: list[str], noun: str) -> list[str]:
    if not choices:
        raise ValueError(f"is an empty list; give at least one {noun}")
    if len({choice.strip().casefold() for choice in choices}) < len(choices):
        raise ValueError(f"holds a {noun} twice, but for case and spaces")
    return choices


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _answer_changing_args(config: LLMConfig) -> dict[str, Any] | None:
    arguments: dict[str, Any] = {}
    if isinstance(config, VllmLLM):
        given = config.engine_args
        arguments = {name: given[name] for name in _ANSWER_CHANGING_ENGINE_ARGS if name in given}
    if config.on_long_prompt != "error":
        arguments["on_long_prompt"] = config.on_long_prompt
    if config.chat_template_options:
        arguments["chat_template_options"] = config.chat_template_options
    return arguments or None


def _sampling(options: _Options, defaults: Sampling) -> dict[str, Any]:
    given = options.model_dump(
        include={"temperature", "max_tokens", "top_p", "seed", "stop", "extra"}, exclude_none=True
    )
    try:
        merged = Sampling.model_validate({**defaults.model_dump(exclude_none=True), **given})
    except ValidationError as error:
        problem = _describe(error.errors()[0])
        raise CallError(f"A call of an LLM function has a wrong option: {problem}.") from None
    return merged.model_dump(mode="json", exclude_none=True)
