"""The fields of `llm_extract`: DuckDB types, and the JSON schema that an answer must fit.

A value of the fields is what DuckDB's `from_json` takes: a type name, a list of one type, or an
object of fields. Every field may be null, for a text need not say it.
"""

import json
import math
import re
import struct
from datetime import datetime, time
from typing import Any

_BITS = {"TINYINT": 8, "SMALLINT": 16, "INTEGER": 32, "INT": 32, "BIGINT": 64, "HUGEINT": 128}
_INTEGERS = {
    **{name: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for name, bits in _BITS.items()},
    **{f"U{name}": (0, 2**bits - 1) for name, bits in _BITS.items() if name != "INT"},
}
_NUMBERS = {"FLOAT", "REAL", "DOUBLE", "DECIMAL", "NUMERIC"}
_STRINGS = {"VARCHAR", "TEXT", "STRING", "CHAR"}
_DECIMAL_DIGITS = 38
# What xgrammar can say of a number: so many digits, and so many of them after the point.
_DECODED_DIGITS, _DECODED_SCALE = 18, 6
_FORMATS = {
    "DATE": r"^\d{4}-\d{2}-\d{2}$",
    "TIME": r"^\d{2}:\d{2}:\d{2}$",
    "TIMESTAMP": r"^\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}$",
}

_FORMAT_WORDS = {
    "DATE": "date as YYYY-MM-DD",
    "TIME": "time as HH:MM:SS",
    "TIMESTAMP": "date and time as YYYY-MM-DD HH:MM:SS",
}
_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
}


def fields_schema(fields: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with these fields.

    Raises:
        ValueError: there are no fields, or a type is unknown; the text names it.
    """
    if not isinstance(fields, dict) or not fields:
        raise ValueError('is no JSON object of fields and types, such as {"name": "VARCHAR"}')
    return {
        "type": "object",
        "properties": {name: _nullable(_schema(name, type_)) for name, type_ in fields.items()},
        "required": list(fields),
        "additionalProperties": False,
    }


def _schema(name: str, type_: Any) -> dict[str, Any]:
    if isinstance(type_, dict):
        return fields_schema(type_)
    if isinstance(type_, list):
        if len(type_) != 1:
            raise ValueError(f"the list type of {name!r} must hold one type")
        return {"type": "array", "items": _schema(name, type_[0])}
    if not isinstance(type_, str):
        raise ValueError(f"the type of {name!r} must be a type name, a list or an object")
    text = type_.strip().upper()
    if text.endswith("[]"):
        return {"type": "array", "items": _schema(name, text[:-2])}
    match = re.fullmatch(r"(\w+)\s*(?:\(\s*(\d+)(?:\s*,\s*(\d+))?\s*\))?", text)
    base = match[1] if match else text
    if base in _STRINGS:
        limit = {"maxLength": int(match[2])} if match and match[2] else {}
        return {"type": "string", **limit}
    if base in _INTEGERS:
        return {"type": "integer", "$comment": base}
    if base in {"DECIMAL", "NUMERIC"}:
        precision, scale = (int(match[2]), int(match[3] or 0)) if match and match[2] else (18, 3)
        if not max(scale, 1) <= precision <= _DECIMAL_DIGITS:
            raise ValueError(
                f"the type {type_!r} of {name!r} must have 1 to {_DECIMAL_DIGITS} digits, and "
                "no more of them after the point"
            )
        return {"type": "number", "$comment": f"DECIMAL {precision} {scale}"}
    if base in _NUMBERS:
        return {"type": "number", "$comment": "DOUBLE" if base == "DOUBLE" else "FLOAT"}
    if base in {"BOOLEAN", "BOOL"}:
        return {"type": "boolean"}
    if base in _FORMATS:
        return {"type": "string", "pattern": _FORMATS[base], "$comment": base}
    known = sorted(_STRINGS | set(_INTEGERS) | _NUMBERS | {"BOOLEAN"} | set(_FORMATS))
    raise ValueError(
        f"the type {type_!r} of {name!r} is unknown; use {', '.join(known)}, a list such as "
        "VARCHAR[], or an object of fields"
    )


def _noted(schema: dict[str, Any]) -> str | None:
    """Return the DuckDB type in `$comment`; a schema of the user's own has other comments."""
    type_, kind = schema.get("$comment"), schema.get("type")
    if not isinstance(type_, str):
        return None
    known = (
        (kind == "integer" and type_ in _INTEGERS)
        or (kind == "number" and re.fullmatch(r"FLOAT|DOUBLE|DECIMAL \d+ \d+", type_))
        or (kind == "string" and type_ in _FORMATS)
    )
    return type_ if known else None


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def describe_fields(schema: dict[str, Any]) -> str:
    """Return what an LLM is told of a schema of `fields_schema`: `"name" (text), "age" (...)`.

    Words, not the names of the types: a small model takes `VARCHAR(40)` for the answer.
    """
    return ", ".join(
        f"{json.dumps(name, ensure_ascii=False)} ({_describe(own)})"
        for name, own in schema["properties"].items()
    )


def _describe(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return _describe(schema["anyOf"][0])
    if schema["type"] == "object":
        return f"object of {describe_fields(schema)}"
    if schema["type"] == "array":
        return f"list of {_describe(schema['items'])}"
    if "maxLength" in schema:
        return f"text of at most {schema['maxLength']} characters"
    if "pattern" in schema:
        return _FORMAT_WORDS[str(_noted(schema))]
    return _WORDS[schema["type"]]


def find_misfit(value: Any, schema: dict[str, Any]) -> Any:
    """Return a value within `value` that its DuckDB type cannot hold, or None.

    A schema of `fields_schema` names the type in `$comment`: decoders do not know all ranges, and
    no calendar, so they cannot keep to them.
    """
    if value is None:
        return None
    if "anyOf" in schema:
        return find_misfit(value, schema["anyOf"][0])
    if isinstance(value, dict):
        pairs = [
            (value[name], own)
            for name, own in schema.get("properties", {}).items()
            if name in value
        ]
    elif isinstance(value, list):
        pairs = [(item, schema.get("items", {})) for item in value]
    else:
        return None if _holds(_noted(schema), value) else value
    found = (find_misfit(item, own) for item, own in pairs if isinstance(own, dict))
    return next((misfit for misfit in found if misfit is not None), None)


def with_ranges(schema: Any) -> Any:
    """Return a schema of `fields_schema` with the ranges of its numbers, for decoders.

    Without a range a small model may write digits until `max_tokens` cuts the number. Decoders
    know ranges of 64 bits and six digits after the point, so wider types have none. Only
    what is sent to a decoder has them: the call, and so its key, does not.
    """
    if isinstance(schema, list):
        return [with_ranges(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    type_ = _noted(schema)
    if type_ in _INTEGERS:
        least, most = _INTEGERS[type_]
        if most < 2**63:
            return {**schema, "minimum": least, "maximum": most}
    if type_ is not None and type_.startswith("DECIMAL "):
        precision, scale = map(int, type_.split()[1:])
        if scale <= _DECODED_SCALE and precision <= _DECODED_DIGITS:
            largest = (10**precision - 1) / 10**scale
            return {**schema, "minimum": -largest, "maximum": largest}
    return {key: with_ranges(value) for key, value in schema.items()}


def _holds(type_: str | None, value: Any) -> bool:
    if type_ in _INTEGERS:
        least, most = _INTEGERS[type_]
        return bool(least <= value <= most)
    if type_ in {"FLOAT", "DOUBLE"}:
        return _is_finite(value, "<f" if type_ == "FLOAT" else "<d")
    if type_ is not None and type_.startswith("DECIMAL "):
        precision, scale = map(int, type_.split()[1:])
        return _fits_decimal(value, precision, scale)
    if type_ in _FORMATS:
        try:
            (time if type_ == "TIME" else datetime).fromisoformat(value)
        except ValueError:
            return False
    return True


def _is_finite(value: float, format_: str) -> bool:
    """Whether a number is one of 32 (`<f`) or 64 bits (`<d`), and not infinite there."""
    try:
        number = float(value)
        struct.pack(format_, number)
    except OverflowError:
        return False
    return math.isfinite(number)


def _fits_decimal(value: float, precision: int, scale: int) -> bool:
    """Whether a number fits, once it is rounded to the digits after the point as DuckDB does it."""
    if isinstance(value, int):
        return bool(abs(value) < 10 ** (precision - scale))
    shifted = abs(value) * 10.0**scale
    return math.isfinite(shifted) and float(math.floor(shifted + 0.5)) < 10.0**precision
