"""Says what a failed request to an endpoint means: which error code, and whether to try again."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

_LONGEST_MESSAGE = 300
# So many characters in a row that a message shares with its prompt are taken for a quotation.
_QUOTED = 24
# A whole prompt of so many characters is one even where it is shorter.
_WHOLE = 8
# What vLLM names as the wrong parameter of a prompt that is too long, in tokens or in characters.
_VLLM_TOO_LONG = ("input_tokens", "input_text")


class Retry(Enum):
    """Whether another attempt may help, and what the failure says about the server."""

    NEVER = "never"
    LATER = "later"
    """It failed at this request."""
    SLOWER = "slower"
    """It got more requests than it allows in a time."""
    FEWER = "fewer"
    """It could not cope with so many at the same time."""


@dataclass(frozen=True)
class Failure:
    """One failed attempt."""

    code: str
    """One of `ERROR_CODES`."""
    message: str
    retry: Retry
    retry_after_s: float | None = None
    alike: bool = False
    """Whether the server may refuse every other request for the same reason."""


Clean = Callable[[str], str]


def failure_of(error: Exception, longest_retry_after_s: float, clean: Clean) -> Failure:
    """Classify an error of the `openai` SDK by its type and status.

    `clean` takes what must not be seen out of the server's message.
    """
    import openai

    if isinstance(error, openai.APITimeoutError | TimeoutError):
        return Failure("timeout", "no answer within attempt_timeout_s", Retry.FEWER)
    if isinstance(error, openai.APIStatusError):
        retry_after_s = retry_after(error.response.headers, time.time())
        if retry_after_s is not None:
            retry_after_s = min(retry_after_s, longest_retry_after_s)
        return failure_of_status(error.status_code, error.body, clean, retry_after_s)
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__
        words = f"{type(cause or error).__name__}: {cause or error}".removesuffix(": ")
        return Failure("connection", clean(words), Retry.FEWER)
    words = f"the answer cannot be read ({type(error).__name__})"
    return Failure("server_error", words, Retry.LATER)


def failure_of_status(
    status: int, body: Any, clean: Clean, retry_after_s: float | None = None
) -> Failure:
    """Classify a reply by its HTTP status and the error object in its body."""
    detail = _detail(body)
    code, type_ = detail.get("code"), detail.get("type")
    message = clean(_message(status, detail))
    if _is_filtered(detail):
        return Failure("content_filter", message, Retry.NEVER)
    if status == 429:
        if "insufficient_quota" in (code, type_):
            return Failure("rate_limited", message, Retry.NEVER, alike=True)
        return Failure("rate_limited", message, Retry.SLOWER, retry_after_s)
    if status in {408, 409, 425} or status >= 500:
        kind = "timeout" if status in {408, 504} else "server_error"
        busy = status in {408, 503, 504, 529}
        return Failure(kind, message, Retry.FEWER if busy else Retry.LATER, retry_after_s)
    if status in {401, 403}:
        return Failure("auth", message, Retry.NEVER, alike=True)
    if code == "context_length_exceeded" or detail.get("param") in _VLLM_TOO_LONG:
        return Failure("context_length", message, Retry.NEVER)
    return Failure("invalid_request", message, Retry.NEVER, alike=True)


def retry_after(headers: Any, now: float) -> float | None:
    """Return the seconds that a reply asks to wait (RFC 9110, 10.2.3), or None.

    `now` is the time of day, for a date. `retry-after-ms` is Azure's and OpenAI's finer one.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is not None or text is None:
        return seconds
    try:
        date = parsedate_to_datetime(str(text))
    except (ValueError, IndexError):
        return None
    # A date without a zone is one of GMT, the only zone of HTTP.
    date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
    return max(0.0, date.timestamp() - now)


def cleaner(secrets: list[str], prompt: str) -> Clean:
    """Return a function that takes secrets and quotations of the prompt out of a message."""

    def clean(message: str) -> str:
        # Only now: most prompts are never in a message.
        escaped = (json.dumps(prompt), json.dumps(prompt, ensure_ascii=False), repr(prompt))
        forms = [prompt, *(text[1:-1] for text in escaped)]
        for secret in secrets:
            message = message.replace(secret, "***")
        message = re.sub(r"\s+", " ", _without_quotations(message[:4000], forms)).strip()
        short = message[:_LONGEST_MESSAGE]
        return short if len(message) <= _LONGEST_MESSAGE else f"{short} …"

    return clean


def _without_quotations(message: str, forms: list[str]) -> str:
    for form in forms:
        if len(form) >= _WHOLE:
            message = message.replace(form, "[…]")
    quotable = "\n".join(forms)
    kept, at = [], 0
    while at < len(message):
        if len(message) - at >= _QUOTED and message[at : at + _QUOTED] in quotable:
            end = at + _QUOTED
            while end < len(message) and message[end - _QUOTED + 1 : end + 1] in quotable:
                end += 1
            kept.append("[…]")
            at = end
        else:
            kept.append(message[at])
            at += 1
    return "".join(kept)


def _detail(body: Any) -> dict[str, Any]:
    # Gemini sends a list of one; SGLang has no `error` around it.
    if isinstance(body, list):
        body = body[0] if body else None
    if isinstance(body, dict) and isinstance(body.get("error"), dict | str):
        body = body["error"]
    if isinstance(body, str):
        return {"message": body}
    return body if isinstance(body, dict) else {}


def _message(status: int, detail: dict[str, Any]) -> str:
    # FastAPI says `detail`.
    words = detail.get("message") or detail.get("detail")
    code = detail.get("code") or detail.get("type")
    named = f" {code}" if isinstance(code, str) else ""
    return f"HTTP {status}{named}: {words}" if words else f"HTTP {status}{named}"


def _is_filtered(detail: dict[str, Any]) -> bool:
    inner = detail.get("innererror")
    inner_code = inner.get("code") if isinstance(inner, dict) else None
    filtered = ("content_filter", "content_policy_violation")
    return detail.get("code") in filtered or inner_code == "ResponsibleAIPolicyViolation"


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < float("inf") else None
