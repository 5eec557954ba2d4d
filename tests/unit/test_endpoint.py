"""The test server itself, against the clients that people use: the OpenAI SDK and httpx."""

import array
import asyncio
import base64
import json
import signal
import socket
import subprocess
import sys
import time
from hashlib import sha256

import jsonschema
import pytest

from tests.endpoint import (
    Endpoint,
    FixedWindow,
    Queue,
    Reply,
    SeenRequest,
    SlidingWindow,
    Slots,
    TokenBucket,
    chat,
    echo,
    embed,
    error,
    in_turn,
    latency,
    structured_echo,
)
from tests.project import ROOT

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["good", "bad", "mixed"]},
        "why": {"type": "string"},
        "stars": {"type": "integer"},
        "score": {"type": "number"},
        "sure": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "city": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["label", "why", "stars", "score", "sure", "tags", "city"],
    "additionalProperties": False,
}


def with_sdk(endpoint, use, api_key="sk-test", **options):
    """Return what an async function makes of an SDK client."""

    async def run():
        client = openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=api_key, max_retries=0, **options
        )
        async with client:
            return await use(client)

    return asyncio.run(run())


def complete(client, prompt, **options):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    return client.chat.completions.create(model="m", messages=messages, **options)


def ask(endpoint, *prompts, **options):
    """Return the SDK's completions, or errors, of prompts that are sent all at once."""

    async def use(client):
        calls = [complete(client, prompt) for prompt in prompts]
        return await asyncio.gather(*calls, return_exceptions=True)

    return with_sdk(endpoint, use, **options)


def post(endpoint, prompt="a", path="/chat/completions", **options):
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
    return httpx.post(endpoint.base_url + path, json=body, **options)


def test_the_default_answer_depends_on_the_prompt():
    prompts = [f"größe {i}" for i in range(200)]
    with Endpoint() as endpoint:
        answers = ask(endpoint, *prompts)
    assert [answer.choices[0].message.content for answer in answers] == [
        f"echo {sha256(prompt.encode()).hexdigest()[:12]}" for prompt in prompts
    ]
    first = answers[0]
    assert (first.model, first.choices[0].finish_reason) == ("m", "stop")
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (2, 5)
    assert first.usage.total_tokens == 7
    assert endpoint.statuses == [200] * 200
    assert sorted(request.prompt for request in endpoint.requests) == sorted(prompts)
    assert [request.number for request in endpoint.requests] == list(range(200))
    assert (endpoint.connections, endpoint.in_flight, endpoint.abandoned) == (0, 0, [])


def test_a_request_is_recorded_as_it_was_sent():
    with Endpoint() as endpoint, httpx.Client() as client:
        url = endpoint.base_url.replace("/v1", "/openai/deployments/x")
        for _ in range(2):
            answer = client.post(
                f"{url}/chat/completions",
                params={"api-version": "2024-10-21"},
                headers={"Api-Key": "k"},
                json={
                    "messages": [
                        {"role": "user", "content": "earlier"},
                        {"role": "user", "content": [{"type": "text", "text": "last"}]},
                        {"role": "assistant", "content": "{"},
                    ]
                },
            )
    assert answer.json()["choices"][0]["message"]["content"] == echo("last")
    first, second = endpoint.requests
    assert first.path == "/openai/deployments/x/chat/completions"
    assert first.query == {"api-version": "2024-10-21"}
    assert first.headers["api-key"] == "k"
    assert first.body["messages"][0] == {"role": "user", "content": "earlier"}
    assert (first.method, first.prompt) == ("POST", "last")
    assert (first.attempt, second.attempt) == (0, 1)
    assert (first.in_flight, first.connections) == (1, 1)
    assert first.time < second.time <= time.monotonic()
    assert endpoint.connections_made == 1


def test_a_large_prompt_and_one_in_many_pieces_arrive_whole():
    prompt = "ü" * 2_000_000
    with Endpoint() as endpoint:
        content = post(endpoint, prompt).json()["choices"][0]["message"]["content"]
        body = json.dumps({"messages": [{"role": "user", "content": "b"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
            for piece in (2 * (head.encode() + body)).partition(b"\r\n\r"):
                connection.sendall(piece)
                time.sleep(0.01)  # Or the pieces could arrive as one.
            received = b""
            while received.count(echo("b").encode()) < 2:
                received += connection.recv(65536)
    assert content == echo(prompt)
    assert endpoint.statuses == [200, 200, 200]


def test_a_structured_answer_fits_its_schema():
    wanted = {"type": "json_schema", "json_schema": {"name": "r", "strict": True, "schema": SCHEMA}}

    async def use(client):
        return [await complete(client, f"p{i}", response_format=wanted) for i in range(20)]

    with Endpoint() as endpoint:
        answers = with_sdk(endpoint, use)
    texts = [answer.choices[0].message.content for answer in answers]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts == [structured_echo(f"p{i}", SCHEMA) for i in range(20)]
    assert {json.loads(text)["label"] for text in texts} == {"good", "bad", "mixed"}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, "base64"),
        ({"encoding_format": "base64"}, "base64"),
        ({"encoding_format": "float"}, "float"),
    ],
)
def test_embeddings_carry_the_index_of_their_input(options, sent):
    async def use(client):
        return await client.embeddings.create(model="e", input=["a", "b", "c"], **options)

    with Endpoint() as endpoint:
        answer = with_sdk(endpoint, use)
    (request,) = endpoint.requests
    assert (request.prompt, request.body["encoding_format"]) == ("a", sent)
    assert [row.index for row in answer.data] == [2, 1, 0]
    rows = {row.index: row.embedding for row in answer.data}
    if options.get("encoding_format") == "base64":  # The SDK decodes what it chose itself.
        rows = {i: list(array.array("f", base64.b64decode(text))) for i, text in rows.items()}
    assert [rows[0], rows[1], rows[2]] == [embed("a"), embed("b"), embed("c")]
    assert len(rows[0]) == 8
    assert answer.usage.prompt_tokens == 3


def test_one_input_with_dimensions():
    with Endpoint() as endpoint:
        url = f"{endpoint.base_url}/embeddings"
        answer = httpx.post(url, json={"input": "a", "dimensions": 100}).json()
    assert answer["data"][0]["embedding"] == embed("a", 100)
    assert len(answer["data"][0]["embedding"]) == 100


def test_models_and_unknown_paths():
    with Endpoint() as endpoint:
        models = httpx.get(f"{endpoint.base_url}/models").json()
        missing = post(endpoint, path="/completionz")
        stream = httpx.post(f"{endpoint.base_url}/chat/completions", json={"stream": True})
        broken = httpx.post(f"{endpoint.base_url}/chat/completions", content=b"{")
        chunked = httpx.post(f"{endpoint.base_url}/chat/completions", content=iter([b"{}"]))
    assert [model["id"] for model in models["data"]] == ["test-model"]
    assert missing.json() == {
        "error": {
            "message": "Invalid URL (POST /v1/completionz)",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }
    assert [answer.status_code for answer in (stream, broken, chunked)] == [400, 400, 411]
    assert endpoint.statuses == [200, 404, 400, 400, 411]


def test_an_error_has_a_code_and_headers():
    def script(request):
        if request.attempt == 0:
            return error(
                429, "Slow down.", "rate_limit_exceeded", "requests", retry_after="2", x_limit="9"
            )
        if request.attempt == 1:
            return error(400, "Filtered.", "content_filter", param="prompt")
        return Reply(529) if request.attempt == 2 else None

    with Endpoint(script) as endpoint:
        (limited,), (filtered,), (busy,), (fine,) = (ask(endpoint, "a") for _ in range(4))
    assert type(limited) is openai.RateLimitError
    assert (limited.code, limited.type) == ("rate_limit_exceeded", "requests")
    assert limited.response.headers["retry-after"] == "2"
    assert limited.response.headers["x-limit"] == "9"
    assert limited.request_id == "req-0"
    assert type(filtered) is openai.BadRequestError
    assert (filtered.code, filtered.param) == ("content_filter", "prompt")
    assert (busy.status_code, busy.body["message"]) == (529, "Scripted.")
    assert fine.choices[0].message.content == echo("a")
    assert endpoint.counts() == {429: 1, 400: 1, 529: 1, 200: 1}
    assert endpoint.count(429) == 1
    assert endpoint.count(503) == 0


def test_scripted_chats_and_texts():
    replies = [
        chat("half", "length", {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}),
        chat("x", usage={}, reasoning="hm"),
        chat(None, refusal="No."),
        Reply(502, "<h1>Bad gateway</h1>", {"Content-Type": "text/html"}),
    ]
    with Endpoint(lambda request: replies[request.number]) as endpoint:
        (cut,), (thought,), (refused,) = (ask(endpoint, "a") for _ in range(3))
        page = post(endpoint)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("half", "length")
    assert cut.usage.completion_tokens == 2
    assert thought.usage is None
    assert thought.choices[0].message.reasoning_content == "hm"
    assert refused.choices[0].message.content is None
    assert refused.choices[0].message.refusal == "No."
    assert (page.status_code, page.text) == (502, "<h1>Bad gateway</h1>")
    assert page.headers["content-type"] == "text/html"


def test_a_reset_and_a_stall():
    def script(request):
        return {"reset": Reply(reset=True), "stall": Reply(stall=True)}.get(request.prompt)

    with Endpoint(script) as endpoint:
        reset, stalled, fine = ask(endpoint, "reset", "stall", "fine", timeout=1.0)
        endpoint.wait_until(lambda endpoint: endpoint.connections == 0)
        by_prompt = {r.prompt: s for r, s in zip(endpoint.requests, endpoint.statuses, strict=True)}
        number = next(r.number for r in endpoint.requests if r.prompt == "stall")
        assert endpoint.abandoned == [number]
        with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
            body = b'{"messages": [{"role": "user", "content": "reset"}]}'
            connection.sendall(
                b"POST /chat/completions HTTP/1.1\r\ncontent-length: 52\r\n\r\n" + body
            )
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
    assert type(reset) is openai.APIConnectionError
    assert type(stalled) is openai.APITimeoutError
    assert fine.choices[0].message.content == echo("fine")
    assert by_prompt == {"reset": None, "stall": None, "fine": 200}
    assert endpoint.in_flight == 0


def test_the_end_closes_a_stalled_connection():
    endpoint = Endpoint(lambda request: Reply(stall=True))
    client = socket.create_connection(("127.0.0.1", endpoint.port))
    with endpoint:
        client.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
        endpoint.wait_until(lambda endpoint: endpoint.in_flight == 1)
        ended = time.monotonic()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert time.monotonic() - ended < 5
    assert (endpoint.in_flight, endpoint.connections, endpoint.abandoned) == (0, 0, [])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", endpoint.port))
    client.close()


def test_a_delay_passes_before_the_answer():
    with Endpoint(latency(1.0)) as endpoint:
        started = time.monotonic()
        ask(endpoint, *(f"p{i}" for i in range(20)))
        assert 1.0 <= time.monotonic() - started < 20
    assert endpoint.most_in_flight == 20
    assert max(request.in_flight for request in endpoint.requests) == 20


def test_a_wrong_key_is_echoed():
    with Endpoint(api_key="sk-right") as endpoint:
        (wrong,) = ask(endpoint, "a", api_key="sk-wrong")
        (right,) = ask(endpoint, "a", api_key="sk-right")
        azure = post(endpoint, headers={"api-key": "sk-right"})
    assert type(wrong) is openai.AuthenticationError
    assert wrong.response.json() == {
        "error": {
            "message": "Incorrect API key provided: sk-wrong",
            "type": "invalid_request_error",
            "code": "invalid_api_key",
            "param": None,
        }
    }
    assert right.choices[0].message.content == echo("a")
    assert azure.status_code == 200


def test_a_connection_above_the_limit_is_reset():
    with Endpoint(latency(1.0), max_connections=8) as endpoint:
        answers = ask(endpoint, *(f"p{i}" for i in range(12)))
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    assert [type(answer) for answer in failed] == [openai.APIConnectionError] * 4
    assert len(endpoint.connections_refused) == 4
    assert endpoint.statuses == [200] * 8


def test_the_failure_of_a_script_is_raised_at_the_end():
    def script(request):
        raise KeyError("oops")

    def use():
        with Endpoint(script) as endpoint:
            answers.append(post(endpoint))

    answers = []
    with pytest.raises(KeyError, match="oops"):
        use()
    assert answers[0].status_code == 500


def accepted(limit, times):
    """Return whether each of the requests at these times is accepted."""
    return [limit(SeenRequest("POST", "/", time=at)) is None for at in times]


def test_a_token_bucket_refills_up_to_its_burst():
    limit = TokenBucket(60, burst=2, retry_after=True)
    assert accepted(limit, [100, 100, 100, 100.5, 101, 101.5]) == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]
    assert accepted(limit, [200, 200, 200]) == [True, True, False]
    assert limit.accepted == [100, 100, 101, 200, 200]
    assert limit.refused == [100, 100.5, 101.5, 200]
    assert limit.refused_share() == 4 / 9
    assert limit.refused_share(after_s=1) == 2 / 5
    assert limit.refused_share(after_s=200) == 0
    refusal = limit(SeenRequest("POST", "/", time=200.1))
    assert (refusal.status, refusal.headers) == (429, {"retry-after": "1"})
    assert refusal.body["error"]["code"] == "rate_limit_exceeded"
    assert limit(SeenRequest("GET", "/v1/models", time=200.1)) is None
    assert len(limit.accepted) == 5


def test_a_sliding_window_counts_any_minute_back():
    limit = SlidingWindow(2, retry_after=True)
    assert accepted(limit, [0, 30, 59, 60, 89, 90]) == [True, True, False, True, False, True]
    assert limit(SeenRequest("POST", "/", time=100)).headers == {"retry-after": "20"}


def test_a_fixed_window_starts_anew_with_the_minute():
    limit = FixedWindow(2, minute_s=10)
    assert accepted(limit, [9, 9, 9.9, 10, 11, 12]) == [True, True, False, True, True, False]
    assert limit(SeenRequest("POST", "/", time=19)).headers == {}


def test_a_queue_answers_some_at_a_time():
    queue = Queue(2, latency_s=1.0)
    delays = [queue(SeenRequest("POST", "/", time=at)).delay_s for at in [5, 5, 5, 5.5, 9]]
    assert delays == [1, 1, 2, 1.5, 1]


def test_slots_refuse_what_is_above_them():
    assert Slots(3)(SeenRequest("POST", "/", in_flight=3)) is None
    assert Slots(3)(SeenRequest("POST", "/", in_flight=4)).status == 429
    slots = Slots(3, status=503)
    with Endpoint(in_turn(slots, latency(1.0))) as endpoint:
        answers = ask(endpoint, *(f"p{i}" for i in range(10)))
    refused = [answer for answer in answers if isinstance(answer, Exception)]
    assert [answer.status_code for answer in refused] == [503] * 7
    assert (len(slots.accepted), len(slots.refused)) == (3, 7)
    assert endpoint.counts() == {200: 3, 503: 7}


def test_a_token_bucket_holds_against_a_real_client():
    bucket = TokenBucket(60, burst=5, minute_s=3600)
    with Endpoint(bucket) as endpoint:
        answers = ask(endpoint, *(f"p{i}" for i in range(30)))
    assert sum(type(answer) is openai.RateLimitError for answer in answers) == 25
    assert endpoint.counts() == {200: 5, 429: 25}
    assert (len(bucket.accepted), len(bucket.refused)) == (5, 25)
    assert bucket.refused_share() == 25 / 30


def start(*arguments):
    command = [sys.executable, "-m", "tests.endpoint", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_server_in_a_process_of_its_own(tmp_path):
    port_file = tmp_path / "port"
    with start("--latency", "0.01", "--slots", "4", "--port-file", str(port_file)) as server:
        url = server.stdout.readline().strip()
        while not port_file.exists():
            assert server.poll() is None
        answer = httpx.post(f"{url}/chat/completions", json={"messages": []}).json()
        server.send_signal(signal.SIGTERM)
        counts = json.loads(server.stdout.readline())
    assert url == f"http://127.0.0.1:{port_file.read_text()}/v1"
    assert answer["choices"][0]["message"]["content"] == echo("")
    assert counts == {"statuses": {"200": 1}, "most_in_flight": 1, "connections": 1}
    assert server.returncode == 0


def test_a_server_stops_after_its_time():
    with start("--seconds", "0.1") as server:
        assert server.wait(timeout=60) == 0


def test_a_server_stops_with_its_parent(tmp_path):
    program = (
        "import pathlib, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'tests.endpoint', '--port-file', sys.argv[1]])\n"
        "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "port")],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=True,
    )
    # The server inherited stdout, so this was not at its end before the server's.
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts == {"statuses": {}, "most_in_flight": 0, "connections": 0}
