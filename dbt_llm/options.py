"""The options of a call site, checked: one class per function.

Each says what stands around a prompt and what kind of answer is asked for.
"""

import json
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PositiveInt, field_validator, model_validator

from dbt_llm.fields import describe_fields, fields_schema


class Options(BaseModel):
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


class GenerateOptions(Options):
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


class ClassifyOptions(Options):
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


class FilterOptions(Options):
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


class ExtractOptions(Options):
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
        fields = describe_fields(fields_schema(self.fields))
        return {
            "before": f"{self.instruction}\nAnswer with a JSON object of these fields, "
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


OPTIONS_OF: dict[str, type[Options] | type[EmbedOptions]] = {
    "generate": GenerateOptions,
    "classify": ClassifyOptions,
    "filter": FilterOptions,
    "extract": ExtractOptions,
    "embed": EmbedOptions,
}
"""The options of each `function` (see `make_call`)."""


def _parse_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=_refuse)
    except ValueError:
        raise ValueError("is no valid JSON") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


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
        if key == "$id" and isinstance(value, str) and part is not schema:
            raise ValueError(f"has {value!r} as the $id of a part, and references would mean that")
        # A reference to elsewhere would be fetched from the network.
        if key in {"$ref", "$dynamicRef"} and isinstance(value, str):
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
