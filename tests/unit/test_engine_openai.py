"""The `openai` engine against a real HTTP server that does what the test says."""

import asyncio
import json
import random
import socket
import time

import pyarrow as pa
import pytest

from dbt_llm.call import make_call, prompt_hash
from dbt_llm.check import OutputCheck
from dbt_llm.config import load_config
from dbt_llm.engine import start_engine
from dbt_llm.engine_replay import made_up_answer
from dbt_llm.errors import EndpointError, EngineError
from dbt_llm.runner import engine_settings
from dbt_llm.schema import ANSWERS
from tests.endpoint import (
    Endpoint,
    Reply,
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

PROMPTS = [f"prompt {number}" for number in range(100)]


class Job:
    """One engine and one call; `rows` is what each prompt got, by the prompt."""

    def __init__(self, base_url, options=None, **entry):
        raw = {"engine": "openai", "model": "m", "base_url": base_url, **entry}
        llms = load_config({"llms": {"default": raw}}).llms
        self.entry = llms["default"]
        self.call = make_call(json.dumps({"model": "default", **(options or {})}), llms)
        self.rows = {}
        self.error = None

    def start(self):
        return start_engine(engine_settings(self.entry), self.entry.secrets())

    async def ask(self, engine, prompts):
        hashes = {prompt_hash(self.call.call_hash, prompt): prompt for prompt in prompts}
        requests = pa.table({"prompt_hash": list(hashes), "prompt": list(hashes.values())})

        def emit(answers):
            assert answers.schema == ANSWERS
            for row in OutputCheck(self.call.content).apply(answers).to_pylist():
                prompt = hashes[row["prompt_hash"]]
                assert prompt not in self.rows, "answered twice"
                self.rows[prompt] = row

        await engine.answer(requests, self.call.content, emit)

    async def run(self, prompts):
        engine = self.start()
        try:
            await self.ask(engine, prompts)
        except EndpointError as stopped:
            self.error = str(stopped)
        finally:
            await engine.close()
        return self

    @property
    def outputs(self):
        return {prompt: row["output"] for prompt, row in self.rows.items()}

    @property
    def codes(self):
        """Error codes of the rows that have one."""
        return {prompt: row["error_code"] for prompt, row in self.rows.items() if row["error_code"]}


def run(endpoint, prompts, options=None, **entry):
    base_url = endpoint if isinstance(endpoint, str) else endpoint.base_url
    return asyncio.run(Job(base_url, options, **entry).run(prompts))


def echoes(prompts):
    return {prompt: echo(prompt) for prompt in prompts}


def only(prompts, reply):
    """Return a script for these prompts alone."""
    return lambda request: reply if request.prompt in prompts else None


def shuffled(request):
    return Reply(delay_s=random.uniform(0, 0.05))


def refused_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_every_row_gets_its_own_answer():
    with Endpoint(shuffled) as endpoint:
        job = run(endpoint, PROMPTS * 2)
    assert job.outputs == echoes(PROMPTS)
    assert len(endpoint.requests) == 100
    row = job.rows["prompt 7"]
    assert row["latency_s"] > 0
    del row["latency_s"], row["prompt_hash"]
    assert row == {
        "output": echo("prompt 7"),
        "embedding": None,
        "status": "ok",
        "error_code": None,
        "error": None,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "tokens_estimated": False,
        "attempts": 1,
    }


def test_no_prompts_are_no_requests():
    with Endpoint() as endpoint:
        assert run(endpoint, []).rows == {}
        assert run(endpoint, [], {"function": "embed"}).rows == {}
    assert endpoint.requests == []


def test_labels_are_unwrapped():
    with Endpoint(shuffled) as endpoint:
        job = run(endpoint, PROMPTS, {"function": "classify", "labels": ["good", "bad"]})
    expected = {}
    for request in endpoint.requests:
        schema = request.body["response_format"]["json_schema"]["schema"]
        asked = next(prompt for prompt in PROMPTS[::-1] if prompt in request.prompt)
        expected[asked] = json.loads(structured_echo(request.prompt, schema))["answer"]
    assert job.outputs == expected
    assert set(expected.values()) == {"good", "bad"}


def test_fields_are_asked_for_as_json():
    options = {"function": "extract", "fields": '{"name": "VARCHAR(20)", "age": "INTEGER"}'}
    with Endpoint(shuffled) as endpoint:
        job = run(endpoint, PROMPTS[:20], options)
    assert job.codes == {}
    for request in endpoint.requests:
        asked = next(prompt for prompt in PROMPTS[::-1] if prompt in request.prompt)
        schema = request.body["response_format"]["json_schema"]["schema"]
        expected = made_up_answer(request.prompt, {"type": "json", "schema": schema})
        assert job.outputs[asked] == expected


def test_embeddings_go_in_batches():
    with Endpoint(shuffled) as endpoint:
        job = run(endpoint, PROMPTS, {"function": "embed"}, embedding_batch=32)
    assert {prompt: row["embedding"] for prompt, row in job.rows.items()} == {
        prompt: embed(prompt) for prompt in PROMPTS
    }
    assert sorted(len(request.body["input"]) for request in endpoint.requests) == [4, 32, 32, 32]
    assert {row["output"] for row in job.rows.values()} == {None}
    # "prompt 7" and "prompt 77" are three tokens each.
    assert sum(row["prompt_tokens"] for row in job.rows.values()) == 300


def test_what_goes_with_every_request():
    headers = {"X-Team": "blue team", "authorization": "Token my-own"}
    with Endpoint() as endpoint:
        run(endpoint, ["p"], api_key="sk-right-1234", query={"api-version": "2024-10-21"})
        run(endpoint, ["p"])
        run(endpoint, ["p"], headers=headers)
    with_key, without, own = endpoint.requests
    assert with_key.headers["authorization"] == "Bearer sk-right-1234"
    assert with_key.query == {"api-version": "2024-10-21"}
    assert "authorization" not in without.headers
    assert (own.headers["authorization"], own.headers["x-team"]) == ("Token my-own", "blue team")


REFUSALS = {
    "content_filter": error(400, "no", code="content_filter"),
    "context_length": error(400, "no", code="context_length_exceeded"),
    "invalid_request": error(400, "no"),
    "server_error": error(500, "no"),
    "connection": Reply(reset=True),
    "timeout": Reply(stall=True),
    "rate_limited": error(429, "no", retry_after="0"),
    "auth": error(403, "no"),
    "truncated": chat(None, "length"),
    "invalid_output": chat(None),
}


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("prompts", [PROMPTS[:20], ["prompt 3"]], ids=["among-others", "alone"])
def test_a_bad_row_alone_has_the_code(code, prompts):
    entry = {"max_attempts": 2, "attempt_timeout_s": 0.3, "request_timeout_s": 1.5}
    with Endpoint(only({"prompt 3"}, REFUSALS[code])) as endpoint:
        job = run(endpoint, prompts, **entry)
    assert job.error is None
    assert job.codes == {"prompt 3": code}
    expected = echoes(prompts)
    del expected["prompt 3"]
    assert {p: text for p, text in job.outputs.items() if p != "prompt 3"} == expected


def test_a_filtered_prompt_and_half_an_answer_are_not_asked_again():
    prompt = "prompt 3, which says what nobody should ever see in any log"
    filtered = error(400, f"The prompt '{prompt}' was filtered.", code="content_filter")
    script = in_turn(only({prompt}, filtered), only({"prompt 4"}, chat("ha", "content_filter")))
    with Endpoint(script) as endpoint:
        job = run(endpoint, [prompt, *PROMPTS[4:23]])
    assert job.codes == {prompt: "content_filter", "prompt 4": "content_filter"}
    assert len(endpoint.requests) == 20
    message = "HTTP 400 content_filter: The prompt '[…]' was filtered."
    assert job.rows[prompt]["error"] == message
    assert job.outputs["prompt 4"] == "ha"


def test_a_wrong_key_ends_the_job_after_a_handful_of_requests():
    # The pace does not hold back what is not sent anyway.
    with Endpoint(api_key="sk-right-1234") as endpoint:
        job = run(endpoint, PROMPTS, api_key="sk-wrong-5678", requests_per_minute=120)
    assert job.rows == {}
    assert len(endpoint.requests) <= 12
    assert job.error == (
        f"The endpoint {endpoint.base_url}/ of model m refuses every request: "
        "HTTP 401 invalid_api_key: Incorrect API key provided: ***. Check api_key or api_key_env "
        "of the LLM in the profile, and the key's rights. What was answered before is stored; "
        "the refused requests are asked again by the next run."
    )


def test_a_wrong_key_ends_a_job_of_embeddings_as_soon():
    with Endpoint(api_key="sk-right-1234") as endpoint:
        job = run(endpoint, PROMPTS, {"function": "embed"}, api_key="sk-wrong-5678")
    assert job.rows == {}
    assert len(endpoint.requests) <= 12
    assert "refuses every request: HTTP 401" in job.error


def test_a_secret_header_is_masked():
    refusal = error(401, "Unknown: abc-5678 of x=1.")
    headers = {"Proxy-Auth": "Basic abc-5678", "x": "1"}
    with Endpoint(lambda request: refusal) as endpoint:
        job = run(endpoint, ["p"], headers=headers)
    assert "HTTP 401 invalid_request_error: Unknown: *** of x=1." in job.error


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        (error(404, "The model `m` does not exist.", code="model_not_found"), "Check model, "),
        (error(422, "seed: extra fields are not permitted"), "Check model, "),
        (error(403, "Not your model."), "Check api_key "),
        (error(429, "Quota.", code="insufficient_quota"), "Check the account's quota"),
        (Reply(404, {"detail": "Not Found"}), "Check model, "),
        (Reply(404, "<h1>nginx</h1>"), "Check model, "),
    ],
)
def test_what_is_wrong_with_every_request_ends_the_job(refusal, advice):
    with Endpoint(lambda request: refusal) as endpoint:
        job = run(endpoint, PROMPTS)
    assert job.rows == {}
    assert len(endpoint.requests) <= 12
    assert f"refuses every request: HTTP {refusal.status}" in job.error
    assert advice in job.error


def test_a_refused_parameter_is_fixed_by_the_config():
    refusal = error(
        400, "Use 'max_completion_tokens'.", "unsupported_parameter", param="max_tokens"
    )
    with Endpoint(lambda request: refusal if "max_tokens" in request.body else None) as endpoint:
        job = run(endpoint, PROMPTS)
        asked = len(endpoint.requests)
        fixed = run(endpoint, PROMPTS, max_tokens_parameter="max_completion_tokens")
    assert job.rows == {}
    assert asked <= 12
    assert "HTTP 400 unsupported_parameter: Use 'max_completion_tokens'." in job.error
    assert "max_tokens_parameter" in job.error
    assert fixed.outputs == echoes(PROMPTS)


def test_a_control_request_tells_a_bad_row_from_a_bad_call():
    with Endpoint(only({"prompt 3"}, error(400, "no"))) as endpoint:
        job = run(endpoint, ["prompt 3"], {"max_tokens": 500})
    assert job.codes == {"prompt 3": "invalid_request"}
    row, control = endpoint.requests
    assert (row.prompt, row.body["max_tokens"]) == ("prompt 3", 500)
    assert (control.prompt, control.body["max_tokens"]) == ("Hi", 16)


def test_a_job_of_bad_rows_alone_codes_them_all():
    with Endpoint(only(PROMPTS, error(400, "no"))) as endpoint:
        job = run(endpoint, PROMPTS[:30])
    assert job.error is None
    assert job.codes == dict.fromkeys(PROMPTS[:30], "invalid_request")
    assert endpoint.count(200) <= 30


def test_a_key_that_is_revoked_keeps_what_was_answered():
    def script(request):
        return error(401, "Revoked.") if request.number >= 40 else Reply(delay_s=0.01)

    with Endpoint(script) as endpoint:
        job = run(endpoint, PROMPTS, max_concurrency=8)
    assert job.rows == {p: r for p, r in job.rows.items() if r["output"] == echo(p)}
    assert len(job.rows) == 40
    # The control request takes as long as a few others.
    assert len(endpoint.requests) <= 40 + 4 * 8
    assert "refuses every request: HTTP 401" in job.error


def test_the_engine_can_be_used_again_after_a_stop():
    allowed = []

    async def both(endpoint):
        job = Job(endpoint.base_url)
        engine = job.start()
        with pytest.raises(EndpointError):
            await job.ask(engine, PROMPTS)
        assert job.rows == {}
        allowed.append(True)
        await job.ask(engine, PROMPTS)
        await engine.close()
        return job

    with Endpoint(lambda request: None if allowed else error(401, "Not yet.")) as endpoint:
        job = asyncio.run(both(endpoint))
    assert job.outputs == echoes(PROMPTS)


def test_a_stop_of_one_call_does_not_end_another():
    def script(request):
        return error(400, "no seed") if "seed" in request.body else Reply(delay_s=0.01)

    async def both(endpoint):
        good, bad = Job(endpoint.base_url), Job(endpoint.base_url, {"seed": 1})
        engine = good.start()
        results = await asyncio.gather(
            good.ask(engine, PROMPTS), bad.ask(engine, PROMPTS), return_exceptions=True
        )
        await engine.close()
        return good, bad, results

    with Endpoint(script) as endpoint:
        good, bad, (fine, stopped) = asyncio.run(both(endpoint))
    assert fine is None
    assert good.outputs == echoes(PROMPTS)
    assert bad.rows == {}
    assert isinstance(stopped, EndpointError)


def test_what_passes_is_tried_again_and_counted():
    first = only(PROMPTS[:20:2], error(500, "x"))
    with Endpoint(lambda request: first(request) if request.attempt == 0 else None) as endpoint:
        job = run(endpoint, PROMPTS[:20])
    assert job.outputs == echoes(PROMPTS[:20])
    attempts = [job.rows[prompt]["attempts"] for prompt in PROMPTS[:20]]
    assert attempts == [2, 1] * 10
    assert endpoint.counts() == {500: 10, 200: 20}


@pytest.mark.parametrize(
    "bad",
    [
        Reply(body="<html>Log in</html>", headers={"content-type": "text/html"}),
        Reply(body="<html>Log in</html>", headers={"content-type": "application/json"}),
        Reply(body='{"choices": [{"message": {"content": "x"', headers={"content-type": "a/json"}),
        Reply(body={"choices": "abc"}),
        Reply(body={"error": {"message": "busy", "code": 500}}),
        Reply(body="[" * 100_000, headers={"content-type": "application/json"}),
        Reply(body={"data": 7, "choices": 7}),
        Reply(body="null", headers={"content-type": "application/json"}),
    ],
)
@pytest.mark.parametrize("function", ["generate", "embed"])
def test_a_reply_that_is_no_answer_is_asked_again(bad, function):
    with Endpoint(lambda request: bad if request.attempt == 0 else None) as endpoint:
        job = run(endpoint, ["prompt 1"], {"function": function})
    row = job.rows["prompt 1"]
    assert (job.error, row["error_code"], row["attempts"]) == (None, None, 2)


def test_few_connections_and_a_stall_end_in_time():
    stalled = only({"prompt 7"}, Reply(stall=True))
    started = time.monotonic()
    with Endpoint(in_turn(stalled, latency(0.02)), max_connections=8) as endpoint:
        job = run(endpoint, PROMPTS, attempt_timeout_s=0.5, request_timeout_s=4.0)
    assert time.monotonic() - started < 60
    assert job.codes == {"prompt 7": "timeout"}
    assert {**job.outputs, "prompt 7": echo("prompt 7")} == echoes(PROMPTS)
    assert job.rows["prompt 7"]["attempts"] >= 2
    assert endpoint.connections_refused


@pytest.mark.parametrize("most", [1, 8])
def test_rows_that_are_dropped_for_ever_do_not_fail_the_others(most):
    # Also the last ones, after which nothing else is answered.
    dropped = {"prompt 0", "prompt 50", "prompt 99"}
    with Endpoint(only(dropped, Reply(reset=True))) as endpoint:
        job = run(endpoint, PROMPTS, max_attempts=2, max_concurrency=most)
    assert job.error is None
    assert job.codes == dict.fromkeys(dropped, "connection")
    assert len(job.rows) == 100
    assert {job.rows[prompt]["attempts"] for prompt in dropped} == {2}


@pytest.mark.parametrize("function", ["generate", "embed"])
def test_a_server_that_is_not_there_ends_the_job(function):
    base_url = f"http://127.0.0.1:{refused_port()}/v1"
    job = run(base_url, PROMPTS[:32], {"function": function}, max_attempts=2)
    assert job.rows == {}
    assert job.error.startswith(f"The endpoint {base_url}/ of model m does not answer: ")
    assert "(after 2 attempts that ended with connection)" in job.error


def test_rows_that_fail_again_and_again_do_not_keep_the_server_from_each_other():
    dropped = {f"prompt {number}" for number in range(0, 100, 5)}
    with Endpoint(only(dropped, Reply(reset=True))) as endpoint:
        job = run(endpoint, PROMPTS[:100], max_attempts=3)
        tries = [r.time for r in endpoint.requests if r.prompt in dropped]
    assert job.codes == dict.fromkeys(dropped, "connection")
    assert len(tries) == 3 * len(dropped)
    # Each waits for itself, half a second and then one; in turn they would take minutes.
    assert max(tries) - min(tries) < 15


@pytest.mark.parametrize("refusal", [Reply(503), Reply(reset=True), Reply(500)])
def test_a_server_that_never_works_ends_the_job_after_a_few_attempts(refusal):
    with Endpoint(lambda request: refusal) as endpoint:
        job = run(endpoint, PROMPTS, max_attempts=2)
    assert job.rows == {}
    assert "does not answer: " in job.error
    assert len(endpoint.requests) <= 20


def test_a_429_late_in_a_job_loses_nothing():
    def script(request):
        late = request.number in range(80, 84)
        return error(429, "slow", retry_after="1") if late else Reply(delay_s=0.005)

    with Endpoint(script) as endpoint:
        job = run(endpoint, PROMPTS)
    assert job.outputs == echoes(PROMPTS)
    sent = {(request.prompt, request.attempt): request.time for request in endpoint.requests}
    again = [prompt for prompt, attempt in sent if attempt == 1]
    assert len(again) == endpoint.count(429) >= 4
    assert all(sent[prompt, 1] >= sent[prompt, 0] + 0.99 for prompt in again)


def test_a_long_retry_after_is_cut():
    def script(request):
        return error(429, "slow", retry_after="90") if request.number == 5 else None

    started = time.monotonic()
    with Endpoint(script) as endpoint:
        job = run(endpoint, PROMPTS[:20], max_retry_after_s=0.5)
    assert job.outputs == echoes(PROMPTS[:20])
    assert 0.5 <= time.monotonic() - started < 60


def test_limits_of_the_server_are_learned():
    bucket = TokenBucket(1200, burst=20)
    with Endpoint(bucket) as endpoint:
        job = run(endpoint, PROMPTS[:60])
    assert job.outputs == echoes(PROMPTS[:60])
    slots = Slots(4, status=503)
    with Endpoint(in_turn(slots, latency(0.02))) as endpoint:
        job = run(endpoint, PROMPTS)
    assert job.outputs == echoes(PROMPTS)
    # Without learning, each would be refused several times.
    assert len(slots.refused) <= 30


def test_a_bad_text_among_many_is_found_by_halving():
    def script(request):
        return error(400, "bad text") if "prompt 21" in request.body["input"] else None

    with Endpoint(script) as endpoint:
        job = run(endpoint, PROMPTS[:32], {"function": "embed"})
    assert job.codes == {"prompt 21": "invalid_request"}
    vectors = {prompt: row["embedding"] for prompt, row in job.rows.items()}
    assert vectors == {p: None if p == "prompt 21" else embed(p) for p in PROMPTS[:32]}
    assert endpoint.count(400) == 6


def test_fewer_vectors_than_texts_is_no_answer_to_any():
    def script(request):
        if len(request.body["input"]) == 1:
            return None
        return Reply(body={"object": "list", "data": [], "model": "m"})

    with Endpoint(script) as endpoint:
        job = run(endpoint, PROMPTS[:4], {"function": "embed"}, max_attempts=1)
    assert {p: row["embedding"] for p, row in job.rows.items()} == {
        p: embed(p) for p in PROMPTS[:4]
    }


def test_a_cancelled_job_hands_on_what_is_finished():
    script = in_turn(only(PROMPTS[10:], Reply(stall=True)), latency(0.0))

    async def cancelled(endpoint):
        job = Job(endpoint.base_url)
        engine = job.start()
        work = asyncio.ensure_future(job.ask(engine, PROMPTS))
        await asyncio.to_thread(endpoint.wait_until, lambda e: e.count(200) == 10)
        while len(job.rows) < 10 and not work.done():
            # The last may still be on its way from the socket.
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        rows = dict(job.rows)
        await asyncio.sleep(0)
        await engine.close()
        return job, rows, engine._throttle.window.in_flight

    with Endpoint(script) as endpoint:
        job, rows, in_flight = asyncio.run(cancelled(endpoint))
    assert job.outputs == echoes(PROMPTS[:10])
    assert rows == job.rows
    assert in_flight == 0


def test_a_failure_of_the_receiver_is_raised():
    async def failing(endpoint):
        job = Job(endpoint.base_url)
        engine = job.start()
        requests = pa.table({"prompt_hash": ["a", "b"], "prompt": ["now", "later"]})

        def emit(answers):
            raise EngineError("disk full")

        try:
            await engine.answer(requests, job.call.content, emit)
        finally:
            await engine.close()

    slow = only({"later"}, Reply(delay_s=0.5))
    with Endpoint(slow) as endpoint, pytest.raises(EngineError, match=r"^disk full$"):
        asyncio.run(failing(endpoint))


def test_an_organization_of_the_environment_stays_with_openai(monkeypatch):
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-the-team")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-of-the-team")
    with Endpoint() as endpoint:
        run(endpoint, PROMPTS[:1], api_key="sk-some-key")
        sent = endpoint.requests[0].headers
    assert sent["authorization"] == "Bearer sk-some-key"
    assert not {"openai-organization", "openai-project"} & set(sent)
