"""A scripted OpenAI-compatible HTTP server on this machine, to test an HTTP client against.

    with Endpoint(in_turn(TokenBucket(600, burst=10), latency(0.05))) as endpoint:
        run_client(endpoint.base_url)
    assert endpoint.count(429) == 0

A *script* gets every request and returns a `Reply`, or None for the default answer, which depends
on the prompt, so that swapped rows show. It runs on the server's loop: it must not block. For a
benchmark, run the server in a process of its own: `python -m tests.endpoint --help`.
"""

import argparse
import asyncio
import base64
import hashlib
import heapq
import json
import math
import os
import signal
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

from dbt_llm.engine_replay import made_up_answer

MODEL = "test-model"

_PHRASES = {int(status): status.phrase for status in HTTPStatus}
_LINGER_0 = struct.pack("ii", 1, 0)
"""SO_LINGER that makes a close send RST instead of FIN."""


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: dict[str, Any] = field(default_factory=dict)
    """Empty if it was no JSON object; such a request gets a 400, and no script sees it."""
    prompt: str = ""
    """The text of the last user message, or the first embedding input."""
    number: int = 0
    """0 for the first request that arrived."""
    attempt: int = 0
    """How many earlier requests had this prompt."""
    time: float = 0.0
    """When it had arrived in full, in seconds of `time.monotonic`."""
    in_flight: int = 1
    """Requests that were being answered then, this one included."""
    connections: int = 1
    """Connections that were open then."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server does with a request. `reset` and `stall` leave out the rest."""

    status: int = 200
    body: dict[str, Any] | str | None = None
    """None is the default answer or, with a status of 400 and up, an error body.

    In a text, `\udcff` is sent as the byte FF, which is no UTF-8.
    """
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    """How long to wait before the answer or the reset."""
    reset: bool = False
    """Abort the TCP connection (RST)."""
    stall: bool = False
    """Never answer."""


Script = Callable[[SeenRequest], Reply | None]


def in_turn(*scripts: Script) -> Script:
    """Return a script that replies as the first of these that has a reply."""

    def script(request: SeenRequest) -> Reply | None:
        return next((reply for one in scripts if (reply := one(request)) is not None), None)

    return script


def latency(delay_s: float) -> Script:
    """Return a script that gives every request its default answer after a while."""
    return lambda request: Reply(delay_s=delay_s)


def error(
    status: int,
    message: str,
    code: str | None = None,
    type: str | None = "invalid_request_error",
    param: str | None = None,
    **headers: str,
) -> Reply:
    """Return an OpenAI error; the header `retry_after="2"` is sent as `retry-after: 2`."""
    body = {"error": {"message": message, "type": type, "param": param, "code": code}}
    return Reply(status, body, {name.replace("_", "-"): text for name, text in headers.items()})


def chat(
    content: str | None,
    finish_reason: str = "stop",
    usage: dict[str, Any] | None = None,
    reasoning: str | None = None,
    refusal: str | None = None,
    *,
    reasoning_key: str = "reasoning_content",
    prompt: str = "",
    model: str = MODEL,
) -> Reply:
    """Return a chat completion.

    A `usage` of None counts tokens from the texts (see `tokens`); an empty one is left out.
    """
    message = {"role": "assistant", "content": content, "refusal": refusal}
    if reasoning is not None:
        message[reasoning_key] = reasoning
    if usage is None:
        thought = tokens(reasoning) if reasoning else 0
        asked, told = tokens(prompt), tokens(content or "") + thought
        usage = {
            "prompt_tokens": asked,
            "completion_tokens": told,
            "total_tokens": asked + told,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    body = {
        "id": "chatcmpl-test",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": model,
        "choices": [choice],
    }
    return Reply(body=body | {"usage": usage} if usage else body)


def tokens(text: str) -> int:
    """Return the length of a text in tokens, as this server counts them."""
    return 1 + len(text) // 4


def echo(prompt: str) -> str:
    """Return the default answer to a chat request without a response format."""
    return f"echo {hashlib.sha256(prompt.encode()).hexdigest()[:12]}"


def structured_echo(prompt: str, schema: dict[str, Any]) -> str:
    """Return the default answer to a chat request with a JSON schema: JSON that fits it."""
    return made_up_answer(prompt, {"type": "json", "schema": schema})


def embed(text: str, dimensions: int = 8) -> list[float]:
    """Return the default embedding, numbers from -1 up to 1 that a float32 holds exactly."""
    digest = hashlib.sha256(text.encode()).digest()
    return [byte / 128 - 1 for byte in (digest * (1 + dimensions // 32))[:dimensions]]


class Limit:
    """A script that refuses what is over a limit, and remembers when it did.

    Only POST requests count. What a later script refuses is accepted here.
    """

    def __init__(self, *, status: int = 429, retry_after: bool = False) -> None:
        self.accepted: list[float] = []
        """When requests were accepted, in seconds as `SeenRequest.time`."""
        self.refused: list[float] = []
        self._status = status
        self._retry_after = retry_after

    def __call__(self, request: SeenRequest) -> Reply | None:
        if request.method != "POST":
            return None
        wait_s = self.wait_s(request)
        if wait_s <= 0:
            self.accepted.append(request.time)
            return None
        self.refused.append(request.time)
        headers = {"retry_after": str(math.ceil(wait_s))} if self._retry_after else {}
        if self._status == 429:
            return error(429, "Rate limit reached.", "rate_limit_exceeded", "requests", **headers)
        return error(self._status, "The server is overloaded.", None, "server_error", **headers)

    def wait_s(self, request: SeenRequest) -> float:
        """Return 0 to accept the request, else after how many seconds it would be accepted."""
        raise NotImplementedError

    def refused_share(self, after_s: float = 0.0) -> float:
        """Return the share refused of the requests from `after_s` after the first one on."""
        start_s = min(self.accepted[:1] + self.refused[:1], default=0.0) + after_s
        refused = sum(at >= start_s for at in self.refused)
        accepted = sum(at >= start_s for at in self.accepted)
        return refused / max(1, refused + accepted)


class TokenBucket(Limit):
    """Accepts `burst` requests at once, then `per_minute`; a minute lasts `minute_s` seconds."""

    def __init__(
        self, per_minute: float, burst: int, *, retry_after: bool = False, minute_s: float = 60.0
    ) -> None:
        super().__init__(retry_after=retry_after)
        self._per_s = per_minute / minute_s
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at: float | None = None

    def wait_s(self, request: SeenRequest) -> float:
        if self._filled_at is not None:
            gained = (request.time - self._filled_at) * self._per_s
            self._tokens = min(self._burst, self._tokens + gained)
        self._filled_at = request.time
        if self._tokens < 1 - 1e-9:
            return (1 - self._tokens) / self._per_s
        self._tokens -= 1
        return 0.0


class SlidingWindow(Limit):
    """Accepts at most `per_minute` requests in any minute of `minute_s` seconds."""

    def __init__(
        self, per_minute: int, *, retry_after: bool = False, minute_s: float = 60.0
    ) -> None:
        super().__init__(retry_after=retry_after)
        self._latest: deque[float] = deque(maxlen=per_minute)
        self._minute_s = minute_s

    def wait_s(self, request: SeenRequest) -> float:
        if len(self._latest) == self._latest.maxlen:
            wait_s = self._latest[0] + self._minute_s - request.time
            if wait_s > 0:
                return wait_s
        self._latest.append(request.time)
        return 0.0


class FixedWindow(Limit):
    """Accepts `per_minute` requests in every minute of the clock, which lasts `minute_s` s."""

    def __init__(
        self, per_minute: int, *, retry_after: bool = False, minute_s: float = 60.0
    ) -> None:
        super().__init__(retry_after=retry_after)
        self._per_minute = per_minute
        self._minute_s = minute_s
        self._minute = -1
        self._count = 0

    def wait_s(self, request: SeenRequest) -> float:
        minute = math.floor(request.time / self._minute_s)
        if minute != self._minute:
            self._minute, self._count = minute, 0
        if self._count >= self._per_minute:
            return (minute + 1) * self._minute_s - request.time
        self._count += 1
        return 0.0


class Slots(Limit):
    """Refuses a request that arrives while `n` others are being answered."""

    def __init__(self, n: int, *, status: int = 429, retry_after: bool = False) -> None:
        super().__init__(status=status, retry_after=retry_after)
        self._n = n

    def wait_s(self, request: SeenRequest) -> float:
        return 1.0 if request.in_flight > self._n else 0.0


class Queue:
    """A script that answers `slots` requests at a time, each in `latency_s`; the others wait."""

    def __init__(self, slots: int, latency_s: float) -> None:
        self._free_at = [0.0] * slots
        self._latency_s = latency_s

    def __call__(self, request: SeenRequest) -> Reply:
        done_at = max(request.time, self._free_at[0]) + self._latency_s
        heapq.heapreplace(self._free_at, done_at)
        return Reply(delay_s=done_at - request.time)


class Endpoint:
    """The server, in a thread of its own while the context lasts.

    An exception of the script is answered with a 500 and raised again at the end.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        api_key: str | None = None,
        max_connections: int | None = None,
        record: bool = True,
    ) -> None:
        """Make a server.

        `api_key`: what else is sent gets a 401. `max_connections`: a connection above them is
        reset as soon as it is made. `record`: False keeps no requests and statuses, so that
        memory does not grow in a benchmark (nor counts `attempt`).
        """
        self.connections = 0
        """Connections that are open now."""
        self.connections_made = 0
        self.connections_refused: list[float] = []
        """When connections above the limit were reset, in seconds of `time.monotonic`."""
        self.in_flight = 0
        """Requests that are being answered now."""
        self.most_in_flight = 0
        self.abandoned: list[int] = []
        """The numbers of the requests whose client hung up before the answer."""
        self._script = script
        self._api_key = api_key
        self._max_connections = max_connections
        self._record = record
        self._requests: list[SeenRequest] = []
        self._statuses: dict[int, int] = {}
        self._counts: Counter[int] = Counter()
        self._attempts: Counter[int] = Counter()
        self._number = 0
        self._failure: Exception | None = None
        self._open: set[_Connection] = set()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="endpoint", daemon=True)

    @property
    def base_url(self) -> str:
        """The URL for an OpenAI client, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def requests(self) -> list[SeenRequest]:
        """The requests in the order in which they arrived."""
        return list(self._requests)

    @property
    def statuses(self) -> list[int | None]:
        """The status sent to each of `requests`; None if not yet, or never, answered."""
        return [self._statuses.get(request.number) for request in self.requests]

    def count(self, status: int) -> int:
        """Return how many answers had this status."""
        return self._counts[status]

    def counts(self) -> dict[int, int]:
        """Return the number of answers per status."""
        return dict(self._counts)

    def wait_until(self, condition: Callable[[Self], bool], timeout_s: float = 30.0) -> None:
        """Wait for a condition, such as `lambda endpoint: endpoint.in_flight == 3`."""
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            if time.monotonic() > deadline:
                raise TimeoutError(f"The condition did not come true in {timeout_s} s.")
            time.sleep(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        # The end of a context that does nothing would stop the loop before the server is there.
        self._ready.wait()
        return self

    def __exit__(self, kind: object, raised: object, traceback: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if self._failure is not None and raised is None:
            raise self._failure

    def _serve(self) -> None:
        start = self._loop.create_server(lambda: _Connection(self), sock=self._socket, backlog=4096)
        server = self._loop.run_until_complete(start)
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for connection in list(self._open):
            connection.reset()
        self._loop.run_until_complete(asyncio.sleep(0))  # The sockets close in the next turn.
        self._loop.close()

    def _opened(self, connection: "_Connection") -> None:
        self.connections += 1
        self.connections_made += 1
        self._open.add(connection)
        if self._max_connections is not None and self.connections > self._max_connections:
            self.connections_refused.append(time.monotonic())
            connection.reset()

    def _closed(self, connection: "_Connection") -> None:
        self.connections -= 1
        self._open.discard(connection)

    def _arrived(
        self, method: str, target: str, headers: dict[str, str], content: bytes
    ) -> tuple[SeenRequest, Reply]:
        """Record a request and return what to do with it."""
        path, _, query = target.partition("?")
        body, problem = _read_body(headers, content)
        prompt = _prompt(body)
        attempt = 0
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self._record:
            key = hash(prompt)
            attempt = self._attempts[key]
            self._attempts[key] += 1
        request = SeenRequest(
            method=method,
            path=path,
            query=dict(parse_qsl(query, keep_blank_values=True)) if query else {},
            headers=headers,
            body=body,
            prompt=prompt,
            number=self._number,
            attempt=attempt,
            time=time.monotonic(),
            in_flight=self.in_flight,
            connections=self.connections,
        )
        self._number += 1
        if self._record:
            self._requests.append(request)
        try:
            return request, _fill(request, problem or self._decide(request))
        except Exception as failure:
            self._failure = self._failure or failure
            problem = error(500, f"The script failed: {failure!r}", type="server_error")
            return request, _fill(request, problem)

    def _decide(self, request: SeenRequest) -> Reply:
        if self._api_key is not None:
            sent = request.headers.get("authorization", request.headers.get("api-key", ""))
            sent = sent.removeprefix("Bearer ")
            if sent != self._api_key:
                return error(401, f"Incorrect API key provided: {sent}", "invalid_api_key")
        return (self._script and self._script(request)) or Reply()

    def _answered(self, request: SeenRequest, status: int) -> None:
        self.in_flight -= 1
        self._counts[status] += 1
        if self._record:
            self._statuses[request.number] = status

    def _hung_up(self, request: SeenRequest, *, by_client: bool) -> None:
        self.in_flight -= 1
        if by_client:
            self.abandoned.append(request.number)


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive: one request at a time, bodies with a Content-Length."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._transport: asyncio.Transport
        self._buffer = bytearray()
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._request: SeenRequest | None = None
        """The request that is being answered."""
        self._timer: asyncio.TimerHandle | None = None
        self._was_reset = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._endpoint._opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._request is not None:
            self._endpoint._hung_up(self._request, by_client=not self._was_reset)
        self._endpoint._closed(self)

    def reset(self) -> None:
        self._was_reset = True
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._read()

    def _read(self) -> None:
        if self._request is not None:
            return
        if self._head is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = _read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        method, target, headers = self._head
        length = int(headers.get("content-length", 0))
        if len(self._buffer) < length:
            return
        content = bytes(self._buffer[:length])
        del self._buffer[:length]
        self._head = None
        self._request, reply = self._endpoint._arrived(method, target, headers, content)
        if reply.stall:
            return
        if reply.delay_s > 0:
            loop = self._endpoint._loop
            self._timer = loop.call_later(reply.delay_s, self._act, self._request, reply)
        else:
            self._act(self._request, reply)

    def _act(self, request: SeenRequest, reply: Reply) -> None:
        self._timer = None
        if reply.reset:
            self.reset()
            return
        assert isinstance(reply.body, str)
        content = reply.body.encode(errors="surrogateescape")
        lines = [f"HTTP/1.1 {reply.status} {_PHRASES.get(reply.status, 'Unknown')}"]
        lines += [f"{name}: {text}" for name, text in reply.headers.items()]
        lines += [f"content-length: {len(content)}", "", ""]
        self._request = None
        self._endpoint._answered(request, reply.status)
        self._transport.write("\r\n".join(lines).encode() + content)
        if "close" in (request.headers.get("connection"), reply.headers.get("connection")):
            self._transport.close()
        elif self._buffer:
            self._endpoint._loop.call_soon(self._read)


def _read_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {}
    for line in lines:
        name, _, text = line.partition(":")
        headers[name.lower()] = text.strip()
    return method, target, headers


def _read_body(headers: dict[str, str], content: bytes) -> tuple[dict[str, Any], Reply | None]:
    """Return the body, and the error to answer if it is no JSON object."""
    if "transfer-encoding" in headers:
        return {}, error(411, "The test endpoint reads no chunked bodies.", connection="close")
    if not content:
        return {}, None
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return {}, error(400, "We could not parse the JSON body of your request.")
    return body, None


def _prompt(body: dict[str, Any]) -> str:
    if "input" in body:
        return next(iter(_inputs(body)), "")
    for message in reversed(body.get("messages") or []):
        if message.get("role") == "user":
            content = message.get("content") or ""
            if isinstance(content, str):
                return content
            return "".join(part.get("text", "") for part in content)
    return ""


def _inputs(body: dict[str, Any]) -> list[str]:
    given = body["input"]
    return [given] if isinstance(given, str) else [str(text) for text in given]


def _fill(request: SeenRequest, reply: Reply) -> Reply:
    """Return the reply with the text of its body and all headers but the length."""
    if reply.reset or reply.stall:
        return reply
    status, body = reply.status, reply.body
    if body is None:
        default = error(status, "Scripted.") if status >= 400 else _default_reply(request)
        status = default.status if status == 200 else status
        body = default.body
    headers = {"content-type": "text/plain", "x-request-id": f"req-{request.number}"}
    if not isinstance(body, str):
        body = json.dumps(body)
        headers["content-type"] = "application/json"
    headers.update((name.lower(), text) for name, text in reply.headers.items())
    return replace(reply, status=status, body=body, headers=headers)


def _default_reply(request: SeenRequest) -> Reply:
    method, path, body = request.method, request.path, request.body
    if method == "POST" and path.endswith("/chat/completions"):
        if body.get("stream"):
            return error(400, "The test endpoint does not stream.", param="stream")
        prompt, wanted = request.prompt, body.get("response_format") or {"type": "text"}
        if wanted["type"] == "json_schema":
            content = structured_echo(prompt, wanted["json_schema"]["schema"])
        else:
            content = echo(prompt)
        return chat(content, prompt=prompt, model=body.get("model", MODEL))
    if method == "POST" and path.endswith("/embeddings"):
        return _embeddings(body)
    if method == "GET" and path.endswith("/models"):
        model = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "tests"}
        return Reply(body={"object": "list", "data": [model]})
    return error(404, f"Invalid URL ({method} {path})")


def _embeddings(body: dict[str, Any]) -> Reply:
    """Return embeddings, the last input's first: only `index` says whose they are."""
    texts = _inputs(body)
    data = []
    for index, text in reversed(list(enumerate(texts))):
        numbers: list[float] | str = embed(text, body.get("dimensions", 8))
        if body.get("encoding_format") == "base64":
            numbers = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
        data.append({"object": "embedding", "index": index, "embedding": numbers})
    asked = sum(map(tokens, texts))
    usage = {"prompt_tokens": asked, "total_tokens": asked}
    model = body.get("model", MODEL)
    return Reply(body={"object": "list", "data": data, "model": model, "usage": usage})


def main() -> None:
    """Serve from a process of its own; print the URL first, and the counts at the end."""
    parser = argparse.ArgumentParser(prog="python -m tests.endpoint", description=main.__doc__)
    parser.add_argument("--latency", type=float, default=0.0, metavar="S", help="of an answer")
    parser.add_argument("--slots", type=int, metavar="N", help="answer at most N at a time")
    parser.add_argument(
        "--over", choices=["429", "503", "queue"], default="429", help="what others get"
    )
    parser.add_argument("--per-minute", type=float, metavar="N", help="a token bucket's rate")
    parser.add_argument("--burst", type=int, default=1, metavar="N", help="a token bucket's size")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--port-file", type=Path, metavar="F", help="write the port here")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="N", help="then stop")
    options = parser.parse_args()
    parent = os.getppid()
    scripts: list[Script] = []
    if options.per_minute is not None:
        scripts.append(TokenBucket(options.per_minute, options.burst, retry_after=True))
    if options.slots is not None and options.over == "queue":
        scripts.append(Queue(options.slots, options.latency))
    elif options.slots is not None:
        scripts.append(Slots(options.slots, status=int(options.over)))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    deadline = time.monotonic() + options.seconds
    script = in_turn(*scripts, latency(options.latency))
    with Endpoint(script, api_key=options.api_key, record=False) as endpoint:
        print(endpoint.base_url, flush=True)
        if options.port_file is not None:
            unfinished = options.port_file.with_name(f"{options.port_file.name}.new")
            unfinished.write_text(str(endpoint.port), encoding="utf-8")
            unfinished.replace(options.port_file)
        while not stopped.wait(0.1) and os.getppid() == parent and time.monotonic() < deadline:
            pass
        counts = {"statuses": endpoint.counts(), "most_in_flight": endpoint.most_in_flight}
    print(json.dumps(counts | {"connections": endpoint.connections_made}), flush=True)


if __name__ == "__main__":
    main()
