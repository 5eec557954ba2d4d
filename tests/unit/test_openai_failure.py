"""What a failed request means, and what its message may show."""

import json
import time
from email.utils import formatdate
from types import SimpleNamespace

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm.openai_failure import (
    Failure,
    Retry,
    cleaner,
    failure_of,
    failure_of_status,
    retry_after,
)
from dbt_llm.schema import ERROR_CODES

NOW = 1_792_000_000.0
PROMPT = 'Is "this" invoice paid?\nIt names Jürgen Müller of Köln and 4,711 other things.'


def as_is(message):
    return message


def of_status(status, body=None, retry_after_s=None):
    failure = failure_of_status(status, body, as_is, retry_after_s)
    assert failure.code in ERROR_CODES
    return failure


def openai_error(message="m", **parts):
    return {"error": {"message": message, "type": None, "param": None, "code": None, **parts}}


@pytest.mark.parametrize(
    ("status", "code", "retry", "alike"),
    [
        (400, "invalid_request", Retry.NEVER, True),
        (401, "auth", Retry.NEVER, True),
        (403, "auth", Retry.NEVER, True),
        (404, "invalid_request", Retry.NEVER, True),
        (405, "invalid_request", Retry.NEVER, True),
        (408, "timeout", Retry.FEWER, False),
        (409, "server_error", Retry.LATER, False),
        (413, "invalid_request", Retry.NEVER, True),
        (422, "invalid_request", Retry.NEVER, True),
        (425, "server_error", Retry.LATER, False),
        (429, "rate_limited", Retry.SLOWER, False),
        (500, "server_error", Retry.LATER, False),
        (502, "server_error", Retry.LATER, False),
        (503, "server_error", Retry.FEWER, False),
        (504, "timeout", Retry.FEWER, False),
        (529, "server_error", Retry.FEWER, False),
    ],
)
def test_a_status_has_one_meaning(status, code, retry, alike):
    assert of_status(status) == Failure(code, f"HTTP {status}", retry, alike=alike)


@pytest.mark.parametrize("where", ["code", "type"])
def test_a_quota_that_is_used_up_is_not_waited_for(where):
    failure = of_status(429, openai_error(**{where: "insufficient_quota"}), 20.0)
    assert failure == Failure(
        "rate_limited", "HTTP 429 insufficient_quota: m", Retry.NEVER, alike=True
    )


@pytest.mark.parametrize(
    "parts",
    [{"code": "context_length_exceeded"}, {"param": "input_tokens"}, {"param": "input_text"}],
)
def test_a_prompt_that_is_too_long_is_the_rows_fault(parts):
    failure = of_status(400, openai_error(**parts))
    assert (failure.code, failure.retry, failure.alike) == ("context_length", Retry.NEVER, False)


@pytest.mark.parametrize(
    "parts",
    [
        {"code": "content_filter"},
        {"code": "content_policy_violation"},
        {"code": "x", "innererror": {"code": "ResponsibleAIPolicyViolation"}},
    ],
)
@pytest.mark.parametrize("status", [400, 403, 500])
def test_a_filtered_prompt_is_the_rows_fault(parts, status):
    failure = of_status(status, openai_error(**parts))
    assert (failure.code, failure.retry, failure.alike) == ("content_filter", Retry.NEVER, False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (openai_error("no", code="bad_thing"), "HTTP 400 bad_thing: no"),
        (openai_error("no", type="bad_request"), "HTTP 400 bad_request: no"),
        (openai_error("no")["error"], "HTTP 400: no"),
        # Gemini
        ([{"error": {"code": 400, "message": "no", "status": "INVALID_ARGUMENT"}}], "HTTP 400: no"),
        # SGLang
        ({"object": "error", "message": "no", "type": "Bad", "code": 400}, "HTTP 400: no"),
        # FastAPI
        ({"detail": "Not Found"}, "HTTP 400: Not Found"),
        ({"error": "no"}, "HTTP 400: no"),
        ("<h1>no</h1>", "HTTP 400: <h1>no</h1>"),
        ("", "HTTP 400"),
        (None, "HTTP 400"),
        ([], "HTTP 400"),
        ({}, "HTTP 400"),
        ([None], "HTTP 400"),
        (7, "HTTP 400"),
        ({"error": None}, "HTTP 400"),
        ({"error": {"message": None, "code": ["x"], "innererror": "y"}}, "HTTP 400"),
    ],
)
def test_error_bodies_of_all_kinds_are_read(body, message):
    assert of_status(400, body).message == message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("2", 2.0),
        (" 2.5 ", 2.5),
        ("90", 90.0),
        ("0", 0.0),
        ("1000000000", 1e9),
        ("abc", None),
        ("", None),
        ("-3", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        (formatdate(NOW + 30, usegmt=True), 30.0),
        (formatdate(NOW + 30, usegmt=True).removesuffix(" GMT"), 30.0),
        (formatdate(NOW - 30, usegmt=True), 0.0),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0),
        ("Sun, 99 Nov 1994 08:49:37 GMT", None),
    ],
)
def test_retry_after_is_read_in_all_forms(text, seconds):
    assert retry_after({} if text is None else {"retry-after": text}, NOW) == seconds


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [("250", 0.25), ("0", 0.0), ("x", 7.0), ("-1", 7.0), ("nan", 7.0)]
)
def test_milliseconds_come_first_where_they_can_be_read(milliseconds, seconds):
    assert retry_after({"retry-after-ms": milliseconds, "retry-after": "7"}, NOW) == seconds


@given(st.text())
def test_any_retry_after_is_none_or_a_wait(text):
    seconds = retry_after({"retry-after": text}, NOW)
    assert seconds is None or 0 <= seconds < float("inf")


def sdk_error(status, body=None, **headers):
    headers = {name.replace("_", "-"): text for name, text in headers.items()}
    response = SimpleNamespace(status_code=status, request=None, headers=headers)
    return openai.APIStatusError("sdk", response=response, body=body)


def test_a_long_retry_after_is_cut():
    for text in ("200", "1e300", formatdate(time.time() + 9_000, usegmt=True)):
        assert failure_of(sdk_error(429, retry_after=text), 120.0, as_is).retry_after_s == 120.0
    assert failure_of(sdk_error(503, retry_after="2"), 120.0, as_is).retry_after_s == 2.0
    assert failure_of(sdk_error(429, retry_after="abc"), 120.0, as_is).retry_after_s is None


def test_errors_without_a_status_are_told_apart():
    timed_out = failure_of(openai.APITimeoutError(None), 1.0, as_is)
    assert (timed_out.code, timed_out.retry) == ("timeout", Retry.FEWER)
    lost = openai.APIConnectionError(request=None)
    lost.__cause__ = ConnectionResetError("reset by peer")
    assert failure_of(lost, 1.0, as_is) == Failure(
        "connection", "ConnectionResetError: reset by peer", Retry.FEWER
    )
    unread = failure_of(json.JSONDecodeError("no", "{", 0), 1.0, as_is)
    assert unread == Failure(
        "server_error", "the answer cannot be read (JSONDecodeError)", Retry.LATER
    )


def test_secrets_are_masked():
    clean = cleaner(["sk-secret", "s3cret"], PROMPT)
    assert clean("wrong key sk-secret, s3cret and sk-secret") == "wrong key ***, *** and ***"


@pytest.mark.parametrize(
    "quotation",
    [PROMPT, json.dumps(PROMPT), json.dumps(PROMPT, ensure_ascii=False), repr(PROMPT)],
    ids=["plain", "json", "json-unicode", "python"],
)
def test_a_quoted_prompt_is_taken_out(quotation):
    shown = cleaner([], PROMPT)(f"cannot read {quotation}: too long")
    assert shown.startswith("cannot read ") and shown.endswith(": too long")
    assert "[…]" in shown
    for word in ("invoice", "Müller", "4,711", "Köln"):
        assert word not in shown


def test_a_part_of_a_prompt_is_taken_out_where_it_is_long_enough():
    clean = cleaner([], "0123456789 abcdefghijklmnopqrstuvwxyz")
    assert clean("at 'abcdefghijklmnopqrstuvwx' and abcdef") == "at '[…]' and abcdef"


@pytest.mark.parametrize("prompt", ['a "b"\nc d', "tab\there", "short one"])
def test_a_short_prompt_is_taken_out_as_a_whole(prompt):
    for quotation in (prompt, json.dumps(prompt)[1:-1], repr(prompt)[1:-1]):
        assert cleaner([], prompt)(f"no: {quotation}!") == "no: […]!"
    assert cleaner([], "Hi")("Hi is too short a prompt") == "Hi is too short a prompt"


def test_a_message_is_one_line_of_bounded_length():
    clean = cleaner([], "prompt")
    assert clean("a\n\n b\t c ") == "a b c"
    assert clean("x" * 300) == "x" * 300
    assert clean("x" * 301) == "x" * 300 + " …"


@given(st.text(min_size=24, max_size=200), st.text(max_size=20), st.text(max_size=20))
def test_no_message_shows_a_prompt(prompt, before, after):
    message = cleaner([], prompt)(before + prompt + after)
    assert prompt not in message
