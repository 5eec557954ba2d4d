"""What a call is on the wire: the body of a chat completion, and what its answer says.

The names are those of the OpenAI API reference, which compatible servers share.
"""

import json
from dataclasses import replace
from typing import Any

from dbt_llm.call import user_turn
from dbt_llm.openai_failure import Clean, Failure, Retry, failure_of_status
from dbt_llm.schema import Answer

_BYTES_PER_TOKEN = 4
# Keywords that steer our own check or that few servers' decoders know; the check applies them.
_NOT_SENT = {"$comment", "maxLength"}


def chat_body(call: dict[str, Any], prompt: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `chat.completions.create` for one prompt."""
    system = call.get("system")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user_turn(call, prompt)})
    sampling = dict(call["sampling"])
    extra = sampling.pop("extra", {})
    body: dict[str, Any] = {"model": config["model"], "messages": messages}
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
    choices = getattr(completion, "choices", None) or []
    message = getattr(choices[0], "message", None) if choices else None
    if message is None:
        return _no_answer(completion, clean)
    reason = choices[0].finish_reason
    answer = _with_usage(
        Answer(prompt_hash, output=message.content, finish_reason=reason),
        getattr(completion, "usage", None),
        sent_text,
    )
    if reason == "content_filter":
        return _failed(answer, "content_filter", "the answer was cut by the server's filter")
    if message.content is None:
        refusal = getattr(message, "refusal", None)
        if refusal:
            refused = replace(answer, output=refusal)
            return _failed(refused, "content_filter", "the model refused to answer")
        if reason == "length":
            return _failed(answer, "truncated", "max_tokens was reached before the answer began")
        return _failed(answer, "invalid_output", "the answer has no text")
    return replace(answer, output=_unwrap(message.content)) if wrapped else answer


def read_embeddings(
    rows: list[tuple[str, str]], reply: Any, clean: Clean
) -> list[Answer] | Failure:
    """Return the vectors of some (prompt hash, text), matched by their `index`."""
    data = getattr(reply, "data", None)
    if not data or sorted(item.index for item in data) != list(range(len(rows))):
        return _no_answer(reply, clean)
    lengths = [estimate_tokens(text) for _, text in rows]
    usage = getattr(reply, "usage", None)
    total = usage.prompt_tokens if usage is not None else sum(lengths)
    shares = _share_out(total, lengths)
    return [
        Answer(
            rows[item.index][0],
            embedding=item.embedding,
            prompt_tokens=shares[item.index],
            completion_tokens=0,
            # A server counts the tokens of all texts together.
            tokens_estimated=usage is None or len(rows) > 1,
        )
        for item in data
    ]


def is_wrapped(call: dict[str, Any], config: dict[str, Any]) -> bool:
    """Tell whether the choices of a call are asked for as an object."""
    choice: bool = call["output"]["type"] == "choice"
    return choice and config["structured_outputs"] == "json_schema"


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has: one for every four bytes of UTF-8."""
    return 1 + len(text.encode()) // _BYTES_PER_TOKEN


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
    if _may_be_strict(schema):
        shape["strict"] = True
    return {"type": "json_schema", "json_schema": shape}


def _sent(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_sent(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    sent = {}
    for key, value in schema.items():
        if key == "properties":
            sent[key] = {name: _sent(part) for name, part in value.items()}
        elif key in {"enum", "const", "default", "examples"}:
            sent[key] = value
        elif key not in _NOT_SENT:
            sent[key] = _sent(value)
    return sent


def _may_be_strict(schema: Any) -> bool:
    """Tell whether every object names all its properties as required and allows no other.

    This is what OpenAI's strict mode asks of a schema; it refuses others.
    """
    if isinstance(schema, list):
        return all(_may_be_strict(part) for part in schema)
    if not isinstance(schema, dict):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or properties is not None:
        closed = schema.get("additionalProperties") is False
        if not closed or set(schema.get("required", [])) != set(properties or {}):
            return False
    parts = [*schema.values(), *(properties or {}).values()]
    return all(_may_be_strict(part) for part in parts if part is not properties)


def _unwrap(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict) and isinstance(value.get("answer"), str):
        return str(value["answer"])
    return text


def _with_usage(answer: Answer, usage: Any, sent_text: str) -> Answer:
    prompt_tokens = getattr(usage, "prompt_tokens", None)
    completion_tokens = getattr(usage, "completion_tokens", None)
    if prompt_tokens is not None and completion_tokens is not None:
        return replace(answer, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    return replace(
        answer,
        prompt_tokens=estimate_tokens(sent_text),
        completion_tokens=estimate_tokens(answer.output or ""),
        tokens_estimated=True,
    )


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
    if isinstance(error, dict):
        status = error.get("code")
        known = status if isinstance(status, int) and 400 <= status < 600 else 500
        return failure_of_status(known, error, clean)
    return Failure(
        "server_error",
        f"the reply is no answer: {clean(str(reply))}"
        if isinstance(reply, str)
        else "the reply is no answer, or has not one for each text",
        Retry.LATER,
    )


def _failed(answer: Answer, code: str, message: str) -> Answer:
    return replace(answer, error_code=code, error=message)
