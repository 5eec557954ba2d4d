"""What a call is on the wire: the body of a chat completion, and what its answer says.

The names are those of the OpenAI API reference, which compatible servers share.
"""

import json
from dataclasses import replace
from typing import Any

from dbt_llm.call import user_turn
from dbt_llm.openai_failure import Clean, Failure, Retry, failure_of_status
from dbt_llm.schema import MOST_TOKENS, Answer

_BYTES_PER_TOKEN = 4
# Keywords that steer our own check or that few servers' decoders know; the check applies them.
_NOT_SENT = {"$comment", "maxLength"}
# Their keys are names of the user's, not keywords.
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"enum", "const", "default", "examples"}
# What OpenAI's strict mode knows ("Structured model outputs", supported schemas).
_STRICT_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "items", "anyOf", "enum", "const"),
    *("$ref", "$defs", "definitions", "title", "description", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems"),
}
_SAYS_WHAT = {"type", "anyOf", "enum", "const", "$ref"}
# What servers write for an answer that they gave up.
_BROKEN_OFF = ("error", "abort")


def chat_messages(call: dict[str, Any], prompt: str) -> list[dict[str, str]]:
    """Return the messages for one prompt."""
    system = call.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user_turn(call, prompt)}]


def chat_options(call: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the other arguments of `chat.completions.create`, which all prompts share."""
    sampling = dict(call["sampling"])
    extra = sampling.pop("extra", {})
    body: dict[str, Any] = {"model": config["model"]}
    body[config["max_tokens_parameter"]] = sampling.pop("max_tokens")
    body |= sampling
    shape = _response_format(call["output"], config["structured_outputs"])
    if shape is not None:
        body["response_format"] = shape
    if config["chat_template_options"]:
        extra = {"chat_template_kwargs": config["chat_template_options"], **extra}
    if extra:
        body["extra_body"] = extra
    return body


def read_completion(
    prompt_hash: str, completion: Any, sent_text: str, wrapped: bool, clean: Clean
) -> Answer | Failure:
    """Return what a chat completion answers; a reply that is none is a failure.

    `wrapped`: choices were asked for as an object (see `_response_format`).
    """
    choices = getattr(completion, "choices", None)
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = getattr(choice, "message", None)
    if message is None:
        return _no_answer(completion, clean)
    # The SDK checks no types, and sets nothing that the reply leaves out.
    content = _text(getattr(message, "content", None))
    reason = getattr(choice, "finish_reason", None)
    if reason in _BROKEN_OFF:
        return Failure("server_error", f"the answer ended with {reason!r}", Retry.LATER)
    answer = _with_usage(
        Answer(prompt_hash, output=content, finish_reason=_text(reason)),
        getattr(completion, "usage", None),
        sent_text,
    )
    if reason == "content_filter":
        return _failed(answer, "content_filter", "the answer was cut by the server's filter")
    if not content:
        refusal = _text(getattr(message, "refusal", None))
        if refusal:
            refused = replace(answer, output=refusal)
            return _failed(refused, "content_filter", "the model refused to answer")
        if reason == "length":
            return _failed(answer, "truncated", "max_tokens was reached before the answer began")
    if content is None:
        return _failed(answer, "invalid_output", "the answer has no text")
    return replace(answer, output=_unwrap(content)) if wrapped else answer


def read_embeddings(
    rows: list[tuple[str, str]], reply: Any, clean: Clean
) -> list[Answer] | Failure:
    """Return the vectors of some (prompt hash, text), matched by their `index`."""
    data = getattr(reply, "data", None)
    vectors = {
        getattr(item, "index", None): _vector(getattr(item, "embedding", None))
        for item in (data if isinstance(data, list) else [])
    }
    if set(vectors) != set(range(len(rows))) or None in vectors.values():
        return _no_answer(reply, clean)
    lengths = [estimate_tokens(text) for _, text in rows]
    total = _count(getattr(reply, "usage", None), "prompt_tokens")
    shares = _share_out(sum(lengths) if total is None else total, lengths)
    return [
        Answer(
            prompt_hash,
            embedding=vectors[index],
            prompt_tokens=shares[index],
            completion_tokens=0,
            # A server counts the tokens of all texts together.
            tokens_estimated=total is None or len(rows) > 1,
        )
        for index, (prompt_hash, _) in enumerate(rows)
    ]


def is_wrapped(call: dict[str, Any], config: dict[str, Any]) -> bool:
    """Tell whether the choices of a call are asked for as an object."""
    choice: bool = call["output"]["type"] == "choice"
    return choice and config["structured_outputs"] == "json_schema"


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has: one for every four bytes of UTF-8."""
    return 1 + len(text.encode(errors="replace")) // _BYTES_PER_TOKEN


def _response_format(output: dict[str, Any], how: str) -> dict[str, Any] | None:
    if output["type"] not in {"choice", "json"} or how == "none":
        return None
    if how == "json_object":
        return {"type": "json_object"} if output["type"] == "json" else None
    if output["type"] == "choice":
        # Most servers want an object at the top.
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"answer": {"type": "string", "enum": output["choices"]}},
            "required": ["answer"],
            "additionalProperties": False,
        }
    else:
        schema = _sent(output["schema"])
    shape: dict[str, Any] = {"name": "answer", "schema": schema}
    if schema.get("type") == "object" and _may_be_strict(schema):
        shape["strict"] = True
    return {"type": "json_schema", "json_schema": shape}


def _sent(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_sent(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    sent = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            sent[key] = {name: _sent(part) for name, part in value.items()}
        elif key in _VALUES:
            sent[key] = value
        elif key not in _NOT_SENT:
            sent[key] = _sent(value)
    return sent


def _may_be_strict(schema: Any) -> bool:
    """Tell whether every part says its type, and every object all its properties.

    OpenAI's strict mode wants all properties required, no others allowed, and few keywords; it
    refuses other schemas.
    """
    if not isinstance(schema, dict) or not _STRICT_KEYWORDS.issuperset(schema):
        return False
    properties = schema.get("properties", {})
    kind = schema.get("type")
    if kind == "object" or (isinstance(kind, list) and "object" in kind) or properties:
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", [])) != set(properties):
            return False
    elif not _SAYS_WHAT.intersection(schema):
        return False
    parts = [*schema.get("anyOf", []), *properties.values()]
    for name in ("$defs", "definitions"):
        parts += schema.get(name, {}).values()
    if "items" in schema:
        parts.append(schema["items"])
    return all(map(_may_be_strict, parts))


def _unwrap(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and isinstance(value.get("answer"), str):
        return str(value["answer"])
    return text


def _with_usage(answer: Answer, usage: Any, sent_text: str) -> Answer:
    prompt_tokens = _count(usage, "prompt_tokens")
    completion_tokens = _count(usage, "completion_tokens")
    if prompt_tokens is not None and completion_tokens is not None:
        return replace(answer, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return replace(
        answer,
        prompt_tokens=estimate_tokens(sent_text),
        completion_tokens=estimate_tokens(answer.output or ""),
        tokens_estimated=True,
    )


def _text(value: Any) -> str | None:
    """Return a text; some servers send the parts of one, others a number or an object."""
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str)) or None
    return value if isinstance(value, str) else None


def _vector(value: Any) -> list[float] | None:
    if not isinstance(value, list):
        return None
    if all(isinstance(number, float) for number in value):
        return value
    if not all(isinstance(number, int | float) for number in value):
        return None
    # Arrow takes no whole number that a single float does not hold exactly.
    return [float(number) for number in value]


def _count(usage: Any, name: str) -> int | None:
    count = getattr(usage, name, None)
    return int(count) if isinstance(count, int | float) and 0 <= count < MOST_TOKENS else None


def _share_out(total: int, weights: list[int]) -> list[int]:
    """Return whole shares of a total that add up to it, in proportion to the weights."""
    shares, given, seen = [], 0, 0
    for weight in weights:
        seen += weight
        upto = round(total * seen / sum(weights))
        shares.append(upto - given)
        given = upto
    return shares


def _no_answer(reply: Any, clean: Clean) -> Failure:
    # Some servers report an error with status 200; its code is then the status.
    error = getattr(reply, "error", None)
    if isinstance(error, dict | str):
        code = str(error.get("code")) if isinstance(error, dict) else ""
        status = int(code) if code.isdecimal() and 400 <= int(code) < 600 else 500
        return failure_of_status(status, error, clean)
    return Failure(
        "server_error",
        f"the reply is no answer: {clean(str(reply))}"
        if isinstance(reply, str)
        else "the reply is no answer, or has not one for each text",
        Retry.LATER,
    )


def _failed(answer: Answer, code: str, message: str) -> Answer:
    return replace(answer, error_code=code, error=message)
