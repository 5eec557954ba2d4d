"""What a call is on the wire, and what a reply says; replies go through the SDK's own types."""

import json

import pytest

from dbt_llm.call import make_call
from dbt_llm.config import load_config
from dbt_llm.openai_failure import Failure, Retry
from dbt_llm.openai_request import (
    chat_messages,
    chat_options,
    estimate_tokens,
    is_wrapped,
    read_completion,
    read_embeddings,
)
from tests.endpoint import chat

CHOICES = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["good", "bad"]}},
    "required": ["answer"],
    "additionalProperties": False,
}


def entry_of(**entry):
    raw = {"llms": {"default": {"engine": "openai", "model": "m", **entry}}}
    return load_config(raw).llms["default"]


def body_of(options=None, prompt="Hi", **entry):
    llm = entry_of(**entry)
    call = make_call(json.dumps({"model": "default", **(options or {})}), {"default": llm})
    options = chat_options(call.content, llm.model_dump(mode="json"))
    return {**options, "messages": chat_messages(call.content, prompt)}


def shape_of(schema, how="json_schema"):
    call = {"sampling": {"max_tokens": 1}, "output": {"type": "json", "schema": schema}}
    config = entry_of(structured_outputs=how).model_dump(mode="json")
    return chat_options(call, config).get("response_format")


def completion_of(body):
    from openai._models import construct_type
    from openai.types.chat import ChatCompletion

    return construct_type(type_=ChatCompletion, value=body)


def read(reply, wrapped=False, sent="What?"):
    return read_completion("h", completion_of(reply), sent, wrapped, lambda message: message)


def told(reply, **how):
    answer = read(reply, **how)
    return answer.output, answer.error_code, answer.finish_reason


def embeddings_of(body):
    from openai._models import construct_type
    from openai.types import CreateEmbeddingResponse

    return construct_type(type_=CreateEmbeddingResponse, value=body)


def vectors_of(body, rows):
    return read_embeddings(rows, embeddings_of(body), lambda message: message)


def test_the_least_body():
    assert body_of() == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 512,
        "temperature": 0.0,
    }


def test_a_body_of_many_options():
    options = {
        "system": "Be brief.",
        "temperature": 0.5,
        "max_tokens": 7,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["\n", "END"],
    }
    assert body_of(options, system="Be long.") == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["\n", "END"],
    }


def test_the_system_prompt_of_the_profile_is_sent():
    assert body_of(system="Be long.")["messages"][0] == {"role": "system", "content": "Be long."}


def test_no_temperature_is_sent_where_it_is_null():
    assert "temperature" not in body_of(sampling={"temperature": None})


def test_the_limit_of_tokens_goes_by_the_servers_name():
    body = body_of(max_tokens_parameter="max_completion_tokens")
    assert body["max_completion_tokens"] == 512
    assert "max_tokens" not in body


def test_extra_parameters_are_merged_and_win():
    extra = {"top_k": 5, "temperature": 1, "chat_template_kwargs": {"thinking": True}}
    body = body_of(sampling={"extra": extra}, chat_template_options={"enable_thinking": False})
    assert body["extra_body"] == extra
    body = body_of(sampling={"extra": {"top_k": 5}}, chat_template_options={"thinking": False})
    assert body["extra_body"] == {"chat_template_kwargs": {"thinking": False}, "top_k": 5}
    assert "extra_body" not in body_of()


@pytest.mark.parametrize(
    ("how", "choice", "json_"),
    [
        (
            "json_schema",
            {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": CHOICES, "strict": True},
            },
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "type": "object",
                        "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
                        "required": ["a"],
                        "additionalProperties": False,
                    },
                    "strict": True,
                },
            },
        ),
        ("json_object", None, {"type": "json_object"}),
        ("none", None, None),
    ],
)
def test_labels_and_fields_are_asked_for_as_the_server_knows(how, choice, json_):
    classify = {"function": "classify", "labels": ["good", "bad"]}
    extract = {"function": "extract", "fields": '{"a": "INTEGER"}'}
    assert body_of(classify, structured_outputs=how).get("response_format") == choice
    assert body_of(extract, structured_outputs=how).get("response_format") == json_
    assert "response_format" not in body_of(structured_outputs=how)


@pytest.mark.parametrize(
    ("how", "wrapped"), [("json_schema", True), ("json_object", False), ("none", False)]
)
def test_only_choices_with_a_schema_are_wrapped(how, wrapped):
    config = {"structured_outputs": how}
    assert is_wrapped({"output": {"type": "choice", "choices": ["a"]}}, config) is wrapped
    assert is_wrapped({"output": {"type": "json", "schema": {}}}, config) is False


def closed(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (closed(a=TEXT), True),
        (closed(a=closed(b={"anyOf": [TEXT, {"type": "null"}]})), True),
        (closed(a={"type": "array", "items": closed(b=TEXT)}), True),
        (closed(a={"enum": [{"type": "object"}]}), True),
        ({**closed(a={"$ref": "#/$defs/b"}), "$defs": {"b": closed(c=TEXT)}}, True),
        # A property may have the name of a keyword.
        (closed(properties=TEXT, oneOf=TEXT, type=TEXT, required=TEXT), True),
        ({**closed(a=TEXT), "additionalProperties": True}, False),
        ({"type": "object", "properties": {"a": TEXT}, "required": ["a"]}, False),
        ({**closed(a=TEXT, b=TEXT), "required": ["a"]}, False),
        (closed(a={"type": "object"}), False),
        (closed(a={"type": "array", "items": {"type": "object"}}), False),
        ({**closed(a={"$ref": "#/$defs/b"}), "$defs": {"b": {"type": "object"}}}, False),
        (closed(a={"anyOf": [TEXT, {"type": "object"}]}), False),
        (closed(a={"type": ["object", "null"]}), False),
        (closed(a={"oneOf": [TEXT]}), False),
        (closed(a={**TEXT, "default": "x"}), False),
        (closed(a={}), False),
        (closed(a=True), False),
        ({"anyOf": [closed(a=TEXT)]}, False),
        ({"type": "array", "items": TEXT}, False),
        ({}, False),
    ],
)
def test_a_schema_is_strict_only_where_openai_would_take_it(schema, strict):
    shape = shape_of(schema)["json_schema"]
    assert shape.get("strict", False) is strict
    assert shape["schema"] == schema


def test_keywords_that_few_servers_know_are_not_sent_but_names_are():
    schema = closed(
        maxLength={"type": "string", "maxLength": 9},
        **{"$comment": {"type": "integer", "$comment": "INTEGER"}},
        properties=closed(maxLength={"anyOf": [{"type": "string", "maxLength": 3}]}),
        items={"type": "array", "items": {"type": "number", "$comment": "DOUBLE"}},
        values={"enum": [{"maxLength": 1}], "default": {"$comment": 1}},
    )
    schema["$defs"] = {"maxLength": {"type": "string", "maxLength": 2}}
    before = json.dumps(schema)
    sent = shape_of(schema)["json_schema"]["schema"]
    assert sent == {
        **closed(
            maxLength={"type": "string"},
            **{"$comment": {"type": "integer"}},
            properties=closed(maxLength={"anyOf": [{"type": "string"}]}),
            items={"type": "array", "items": {"type": "number"}},
            values={"enum": [{"maxLength": 1}], "default": {"$comment": 1}},
        ),
        "$defs": {"maxLength": {"type": "string"}},
    }
    assert json.dumps(schema) == before


def test_a_completion_is_read_with_its_usage():
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    answer = read(chat("Good.", usage=usage, reasoning="I think so.").body)
    assert (answer.prompt_hash, answer.output, answer.finish_reason) == ("h", "Good.", "stop")
    assert (answer.prompt_tokens, answer.completion_tokens) == (11, 5)
    assert (answer.tokens_estimated, answer.status) == (False, "ok")


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"prompt_tokens": 3},
        {"prompt_tokens": None, "completion_tokens": 1},
        {"prompt_tokens": "many", "completion_tokens": 1},
        {"prompt_tokens": -1, "completion_tokens": 1},
    ],
)
def test_tokens_are_estimated_where_the_server_does_not_count_them(usage):
    answer = read(chat("é" * 10, usage=usage).body, sent="x" * 40)
    assert (answer.prompt_tokens, answer.completion_tokens) == (11, 6)
    assert answer.tokens_estimated is True


def test_a_token_is_about_four_bytes():
    assert [estimate_tokens(text) for text in ("", "abc", "abcd", "éé", "日本")] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (chat("cut", "length"), ("cut", None, "length")),
        (chat("", "stop"), ("", None, "stop")),
        (chat(None), (None, "invalid_output", "stop")),
        (chat(None, "length"), (None, "truncated", "length")),
        (chat("", "length"), ("", "truncated", "length")),
        (chat(None, "length", reasoning="hm"), (None, "truncated", "length")),
        (chat("half", "content_filter"), ("half", "content_filter", "content_filter")),
        (chat(None, "content_filter"), (None, "content_filter", "content_filter")),
        (chat(None, refusal="I will not."), ("I will not.", "content_filter", "stop")),
        (chat("", refusal="I will not."), ("I will not.", "content_filter", "stop")),
        (chat("text", refusal=""), ("text", None, "stop")),
    ],
)
def test_an_answer_that_is_none_has_an_error_code(reply, answer):
    assert told(reply.body) == answer


def message(content):
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}


@pytest.mark.parametrize(
    ("content", "output", "code"),
    [
        ([{"type": "thinking", "thinking": []}, {"text": "a"}, {"text": "b"}], "ab", None),
        ([], None, "invalid_output"),
        ({"text": "a"}, None, "invalid_output"),
        (7, None, "invalid_output"),
    ],
    ids=["parts", "none", "object", "number"],
)
def test_content_of_any_type_is_text_or_an_error(content, output, code):
    assert told(message(content)) == (output, code, None)


def test_what_a_reply_leaves_out_is_not_missed():
    assert told({"choices": [{"message": {"content": "x"}}]}) == ("x", None, None)
    assert told({"choices": [{"message": {}}]}) == (None, "invalid_output", None)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_answer_that_the_server_broke_off_is_asked_again(reason):
    assert read(chat("half", reason).body) == Failure(
        "server_error", f"the answer ended with {reason!r}", Retry.LATER
    )


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ('{"answer": "good"}', "good"),
        (' {"answer": "good", "why": 1}\n', "good"),
        ("good", "good"),
        ('{"answer": 1}', '{"answer": 1}'),
        ('["good"]', '["good"]'),
        ("7", "7"),
        ('{"answer": "go', '{"answer": "go'),
    ],
)
def test_a_wrapped_choice_is_unwrapped(content, output):
    assert told(chat(content).body, wrapped=True) == (output, None, "stop")
    assert told(chat(content).body, wrapped=False) == (content, None, "stop")


@pytest.mark.parametrize(
    ("error", "code", "retry", "words"),
    [
        ({"code": 429, "message": "slow"}, "rate_limited", Retry.SLOWER, "HTTP 429: slow"),
        ({"code": "400", "message": "bad"}, "invalid_request", Retry.NEVER, "HTTP 400 400: bad"),
        ({"code": "odd", "message": "x"}, "server_error", Retry.LATER, "HTTP 500 odd: x"),
        ({"code": 7, "message": "x"}, "server_error", Retry.LATER, "HTTP 500: x"),
        ("boom", "server_error", Retry.LATER, "HTTP 500: boom"),
    ],
)
def test_an_error_with_status_200_is_one(error, code, retry, words):
    for reply in ({"error": error}, {"error": error, "choices": None}):
        failure = read(reply)
        assert (failure.code, failure.retry, failure.message) == (code, retry, words)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": None}, {"choices": "abc"}, []])
def test_a_reply_that_is_no_completion_is_a_failure(reply):
    failure = read(reply)
    assert (failure.code, failure.retry) == ("server_error", Retry.LATER)
    assert failure.message == "the reply is no answer, or has not one for each text"


def test_a_page_instead_of_an_answer_is_a_failure_that_shows_it():
    page = "<html>Log in, please</html>"
    failure = read_completion("h", page, "p", False, lambda message: message)
    assert failure == Failure("server_error", f"the reply is no answer: {page}", Retry.LATER)


ROWS = [("h0", "a"), ("h1", "b" * 40), ("h2", "c" * 8)]


def vector(index, *numbers):
    return {"object": "embedding", "index": index, "embedding": list(numbers)}


def test_vectors_are_matched_by_their_index():
    data = [vector(2, 3.0), vector(0, 1.0), vector(1, 2.0)]
    answers = vectors_of({"data": data, "usage": {"prompt_tokens": 30, "total_tokens": 30}}, ROWS)
    told = {answer.prompt_hash: (answer.embedding, answer.prompt_tokens) for answer in answers}
    assert told == {"h0": ([1.0], 2), "h1": ([2.0], 22), "h2": ([3.0], 6)}
    assert all(answer.tokens_estimated and answer.completion_tokens == 0 for answer in answers)


def test_one_vector_has_the_servers_count():
    usage = {"prompt_tokens": 30, "total_tokens": 30}
    (answer,) = vectors_of({"data": [vector(0, 1, 2.5)], "usage": usage}, ROWS[:1])
    assert (answer.embedding, answer.prompt_tokens) == ([1, 2.5], 30)
    assert answer.tokens_estimated is False


@pytest.mark.parametrize("usage", [{}, {"usage": None}, {"usage": {"total_tokens": 3}}])
def test_tokens_of_texts_are_estimated_without_a_count(usage):
    data = [vector(index, 1.0) for index in range(3)]
    answers = vectors_of({"data": data, **usage}, ROWS)
    assert [answer.prompt_tokens for answer in answers] == [1, 11, 3]
    assert all(answer.tokens_estimated for answer in answers)


@pytest.mark.parametrize(
    "data",
    [
        [vector(0, 1.0), vector(1, 1.0)],
        [vector(0, 1.0), vector(1, 1.0), vector(1, 1.0)],
        [vector(1, 1.0), vector(2, 1.0), vector(3, 1.0)],
        [vector(0, 1.0), vector(1, 1.0), {"index": 2}],
        [vector(0, 1.0), vector(1, 1.0), {"embedding": [1.0]}],
        [vector(0, 1.0), vector(1, 1.0), {"index": 2, "embedding": "text"}],
        [vector(0, 1.0), vector(1, 1.0), vector(2, None)],
        [],
        None,
        "text",
    ],
)
def test_not_one_vector_for_each_text_is_a_failure(data):
    failure = vectors_of({"data": data}, ROWS)
    assert (failure.code, failure.retry) == ("server_error", Retry.LATER)
    assert failure.message == "the reply is no answer, or has not one for each text"


def test_an_error_instead_of_vectors_is_one():
    failure = vectors_of({"error": {"code": 400, "message": "too long"}}, ROWS)
    assert (failure.code, failure.message) == ("invalid_request", "HTTP 400: too long")
