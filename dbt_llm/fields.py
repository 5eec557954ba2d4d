"""The fields of `llm_extract`: DuckDB types, and the JSON schema that an answer must fit.

A value of the fields is what DuckDB's `from_json` takes: a type name, a list of one type, or an
object of fields. Every field may be null, for a text need not say it.
"""

import re
from datetime import datetime, time
from typing import Any

_BITS = {"TINYINT": 8, "SMALLINT": 16, "INTEGER": 32, "INT": 32, "BIGINT": 64, "HUGEINT": 128}
_INTEGERS = {
    **{name: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for name, bits in _BITS.items()},
    **{f"U{name}": (0, 2**bits - 1) for name, bits in _BITS.items() if name != "INT"},
}
_NUMBERS = {"FLOAT", "REAL", "DOUBLE", "DECIMAL", "NUMERIC"}
_STRINGS = {"VARCHAR", "TEXT", "STRING", "CHAR"}
_FORMATS = {
    "DATE": r"^\d{4}-\d{2}-\d{2}$",
    "TIME": r"^\d{2}:\d{2}:\d{2}$",
    "TIMESTAMP": r"^\d{4}-\d{2}-\d{2} \d{2}:\d{2}:\d{2}$",
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
        return {"type": "number", "$comment": f"DECIMAL {precision - scale}"}
    if base in _NUMBERS:
        return {"type": "number"}
    if base in {"BOOLEAN", "BOOL"}:
        return {"type": "boolean"}
    if base in _FORMATS:
        return {"type": "string", "pattern": _FORMATS[base], "$comment": base}
    known = sorted(_STRINGS | set(_INTEGERS) | _NUMBERS | {"BOOLEAN"} | set(_FORMATS))
    raise ValueError(
        f"the type {type_!r} of {name!r} is unknown; use {', '.join(known)}, a list such as "
        "VARCHAR[], or an object of fields"
    )


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def find_misfit(value: Any, schema: dict[str, Any]) -> Any:
    """Return a value within `value` that its DuckDB type cannot hold, or None.

    A schema of `fields_schema` names the type in `$comment`: decoders do not know ranges and
    calendars, so they cannot keep to them.
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
        return None if _holds(schema.get("$comment"), value) else value
    found = (find_misfit(item, own) for item, own in pairs if isinstance(own, dict))
    return next((misfit for misfit in found if misfit is not None), None)


def _holds(type_: str | None, value: Any) -> bool:
    if type_ in _INTEGERS:
        least, most = _INTEGERS[type_]
        return bool(least <= value <= most)
    if type_ is not None and type_.startswith("DECIMAL "):
        return bool(abs(value) < 10 ** int(type_.split()[1]))
    if type_ in _FORMATS:
        try:
            (time if type_ == "TIME" else datetime).fromisoformat(value)
        except ValueError:
            return False
    return True
