"""The `openai` engine through dbt, against a scripted endpoint (reports from the field: 8, 20-24).

The server answers with a hash of the prompt, so an answer on another row shows.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from dbt_llm import pool
from tests.endpoint import (
    Endpoint,
    Reply,
    SeenRequest,
    TokenBucket,
    chat,
    echo,
    embed,
    error,
    in_turn,
    latency,
    structured_echo,
    tokens,
)
from tests.project import Outcome, Project

KEY = "sk-right-0123456789"


@pytest.fixture(autouse=True)
def engines_end_with_their_endpoint() -> Iterator[None]:
    yield
    # Every test has a server and so an engine of its own; dbt-llm keeps engines until it ends.
    for key, own in list(pool._pools.items()):
        if own.config["engine"] == "openai":
            import ray

            for replica in pool._pools.pop(key).replicas:
                ray.kill(replica.actor)


def use(project: Project, endpoint: Endpoint, **settings: Any) -> None:
    """Let the project's LLM be a server."""
    entry = {"engine": "openai", "model": "m", "base_url": endpoint.base_url}
    project.llms = {"default": entry | settings}


def ask(project: Project, rows: int, name: str = "answers", prompt: str = "'p' || i") -> None:
    """Write a model of so many prompts."""
    project.model(
        name, f"select i, {prompt} as p, llm_generate({prompt}) as r from range({rows}) t(i)"
    )


def run(project: Project, *arguments: str, **variables: Any) -> Outcome:
    outcome = project.dbt("run", *arguments, **variables)
    assert outcome.success, outcome.log
    return outcome


def assert_right(project: Project, rows: int, name: str = "answers", null: int = 0) -> None:
    """Check that a model has so many rows, the answers of the server, and so many NULL."""
    found = project.query(f"select p, r from {name}")
    assert (len(found), sum(r is None for _, r in found)) == (rows, null)
    assert [(p, r) for p, r in found if r not in {None, echo(p)}] == []


def prompts(endpoint: Endpoint) -> list[str]:
    return [request.prompt for request in endpoint.requests]


def failures(project: Project) -> dict[str, int]:
    """Return the failed rows of the store per code."""
    return dict(project.generations("error_code, count(*)", "status = 'error' group by error_code"))


def shuffled(request: SeenRequest) -> Reply:
    """Answer each prompt after a time of its own, up to a tenth of a second."""
    return Reply(delay_s=int(echo(request.prompt)[-2:], 16) / 2560)


# What is answered


def test_every_answer_is_on_its_row_and_a_second_run_sends_nothing(project: Project) -> None:
    with Endpoint(shuffled, api_key=KEY) as endpoint:
        use(project, endpoint, api_key=KEY, price={"prompt": 0.1, "completion": 0.5})
        ask(project, 500, prompt="'p' || (i * 7919 % 400)")
        outcome = run(project)
        assert outcome.summary("answers").startswith("400 prompts, 0 stored, 400 generated, ")
        assert_right(project, 500)
        assert endpoint.counts() == {200: 400}
        assert len(set(prompts(endpoint))) == 400

        outcome = run(project)
        assert outcome.summary("answers") == "400 prompts, 400 stored, 0 generated"
        assert endpoint.counts() == {200: 400}
    stored = project.generations(
        "prompt, output, prompt_tokens, completion_tokens, tokens_estimated, cost_usd, attempts"
    )
    assert len(stored) == 400
    for prompt, output, asked, told, estimated, cost_usd, attempts in stored:
        assert (output, asked, told) == (echo(prompt), tokens(prompt), tokens(echo(prompt)))
        assert cost_usd == pytest.approx((asked * 0.1 + told * 0.5) / 1e6, rel=1e-12)
        assert (estimated, attempts) == (False, 1)
    assert project.generations(
        "distinct engine, model, llm, status, finish_reason, latency_s > 0"
    ) == [("openai", "m", "default", "ok", "stop", True)]


def test_what_is_sent_is_the_call(project: Project) -> None:
    with Endpoint() as endpoint:
        use(
            project,
            endpoint,
            api_key=KEY,
            headers={"X-Team": "llm"},
            query={"api-version": "2024-10-21"},
            chat_template_options={"enable_thinking": False},
            sampling={"max_tokens": 50, "extra": {"top_k": 20}},
        )
        project.model(
            "answers",
            "select llm_generate('Hello', system := 'Be brief.', stop := ['x'], seed := 7) as r",
        )
        run(project)
        (request,) = endpoint.requests
    assert request.path == "/v1/chat/completions"
    assert request.query == {"api-version": "2024-10-21"}
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["x-team"] == "llm"
    assert request.body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        "max_tokens": 50,
        "temperature": 0.0,
        "seed": 7,
        "stop": ["x"],
        "top_k": 20,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_all_functions_have_their_types_and_values(project: Project) -> None:
    fields = '{"name": "VARCHAR", "age": "INTEGER", "tags": "VARCHAR[]"}'
    with Endpoint(shuffled) as endpoint:
        use(project, endpoint, embedding_batch=7)
        project.model(
            "typed",
            "select i, 'ticket no. ' || i || '.' as body, llm_generate(body) as answer, "
            "llm_classify(body, ['good', 'bad', 'odd']) as mood, "
            f"llm_filter(body, 'Is it late?') as late, llm_extract(body, '{fields}') as facts, "
            "llm_embed(body) as v from range(40) t(i)",
        )
        outcome = run(project)
        assert outcome.summary("typed").startswith("200 prompts, 0 stored, 200 generated, ")
        assert project.query("select column_name, column_type from (describe typed)") == [
            ("i", "BIGINT"),
            ("body", "VARCHAR"),
            ("answer", "VARCHAR"),
            ("mood", "VARCHAR"),
            ("late", "BOOLEAN"),
            ("facts", 'STRUCT("name" VARCHAR, age INTEGER, tags VARCHAR[])'),
            ("v", "FLOAT[]"),
        ]
        said = said_by_kind(endpoint)
        rows = project.query("select body, answer, mood, late, facts, v from typed")
        assert len(rows) == 40
        for body, answer, mood, late, facts, vector in rows:
            number = body.removeprefix("ticket no. ")
            assert answer == echo(body)
            assert mood == said["good", number]["answer"]
            assert late is (said["yes", number]["answer"] == "yes")
            assert facts == said["name", number]
            assert vector == embed(body)
        batches = [r for r in endpoint.requests if r.path == "/v1/embeddings"]
        sizes = [len(request.body["input"]) for request in batches]
        assert (sum(sizes), max(sizes)) == (40, 7)
        assert endpoint.counts() == {200: 160 + len(sizes)}
        run(project)
        assert endpoint.counts() == {200: 160 + len(sizes)}


def said_by_kind(endpoint: Endpoint) -> dict[tuple[str, str], Any]:
    """Return what the server said in JSON, by what was asked for and the ticket's number."""
    said = {}
    for request in endpoint.requests:
        if "response_format" in request.body:
            schema = request.body["response_format"]["json_schema"]["schema"]
            kind = (
                next(iter(schema["properties"]["answer"]["enum"]), "")
                if ("answer" in schema["properties"])
                else "name"
            )
            number = request.prompt.partition("ticket no. ")[2].partition(".")[0] + "."
            said[kind, number] = json.loads(structured_echo(request.prompt, schema))
    return said


def test_tokens_are_estimated_where_the_server_says_none(project: Project) -> None:
    with Endpoint(lambda request: chat(echo(request.prompt), usage={})) as endpoint:
        use(project, endpoint, price={"prompt": 1e6, "completion": 2e6})
        ask(project, 3)
        run(project)
    # One for every four bytes, and one more.
    assert project.generations(
        "distinct tokens_estimated, prompt_tokens, completion_tokens, cost_usd"
    ) == [(True, 1, 5, 11.0)]


# Limits


def test_two_models_in_four_threads_share_the_limit_and_the_prompts(project: Project) -> None:
    with Endpoint(latency(0.05)) as endpoint:
        use(project, endpoint, requests_per_minute=1200)
        ask(project, 40, "one")
        ask(project, 40, "two", prompt="'p' || (i + 30)")
        run(project)
        assert_right(project, 40, "one")
        assert_right(project, 40, "two")
        assert sorted(prompts(endpoint)) == sorted(f"p{i}" for i in range(70))
        times = [request.time for request in endpoint.requests]
    # 20 a second; each with a limit of its own, they would take half of that. How exactly it is
    # held is tested in virtual time: a busy machine delivers late, and then several at once.
    assert times[-1] - times[0] > 69 / 20 * 0.7


def test_the_rate_of_a_server_is_learned(project: Project) -> None:
    limit = TokenBucket(3000, burst=20)
    with Endpoint(in_turn(limit, latency(0.05))) as endpoint:
        use(project, endpoint)
        ask(project, 500)
        run(project)
        assert_right(project, 500)
        assert failures(project) == {}
        # A client that does not learn is refused half of the time. See test_throttle.py for more.
        assert limit.refused_share(after_s=5) < 0.25
        assert len(limit.accepted) == 500


RETRY_AFTER = {
    "seconds": ("2", {}, 1.95),
    "date": ("DATE", {}, 1.9),
    "capped": ("90", {"max_retry_after_s": 1.5}, 1.45),
    "zero": ("0", {}, 0.0),
    "no time": ("abc", {}, 0.1),
}


@pytest.mark.parametrize("text, settings, least_s", RETRY_AFTER.values(), ids=RETRY_AFTER)
def test_retry_after_is_honoured_up_to_the_cap(
    project: Project, text: str, settings: dict[str, Any], least_s: float
) -> None:
    refused: list[float] = []

    def once(request: SeenRequest) -> Reply | None:
        if refused:
            return None
        refused.append(request.time)
        # A date has whole seconds, so that this one is 2 to 3 s away.
        when = formatdate(time.time() + 3, usegmt=True) if text == "DATE" else text
        return error(429, f"Rate limit reached at {request.prompt}.", retry_after=when)

    with Endpoint(once) as endpoint:
        use(project, endpoint, **settings)
        ask(project, 12, prompt="'please keep this prompt secret ' || i")
        outcome = run(project)
        assert_right(project, 12)
        first, again = [r for r in endpoint.requests if r.attempt or r.time == refused[0]]
        assert (first.prompt, first.attempt, again.attempt) == (again.prompt, 0, 1)
        assert least_s <= again.time - first.time < 60
        assert endpoint.counts() == {200: 12, 429: 1}
    assert sorted(project.generations("attempts, count(*)", "true group by all")) == [
        (1, 11),
        (2, 1),
    ]
    assert "keep this prompt secret" not in outcome.log
    assert "keep this prompt secret" not in (project.folder / "logs/dbt.log").read_text()


def test_a_limit_late_in_a_job_loses_nothing(project: Project) -> None:
    def tired(request: SeenRequest) -> Reply | None:
        return error(429, "Rate limit reached.") if request.number >= 60 else None

    with Endpoint(tired) as endpoint:
        use(project, endpoint, request_timeout_s=6)
        ask(project, 100)
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert "40 rows failed with rate_limited" in outcome.log
        assert "Rate limit reached." in outcome.log
        assert failures(project) == {"rate_limited": 40}
        assert project.generations("count(*)", "status = 'ok'") == [(60,)]
    with Endpoint() as endpoint:
        use(project, endpoint)
        outcome = run(project)
        assert outcome.summary("answers").startswith("100 prompts, 60 stored, 40 generated, ")
        assert len(endpoint.requests) == 40
        assert_right(project, 100)


# Rows that fail


def test_three_of_a_hundred_connections_are_dropped(project: Project) -> None:
    dropped = {"p7", "p40", "p99"}

    def drop(request: SeenRequest) -> Reply | None:
        return Reply(reset=True) if request.prompt in dropped else None

    with Endpoint(drop) as endpoint:
        use(project, endpoint, max_attempts=2)
        ask(project, 100)
        outcome = run(project)
        summary = outcome.summary("answers")
        assert summary.startswith("100 prompts, 0 stored, 97 generated, 3 failed, "), summary
        assert "3 rows failed with connection, for example prompt_hash " in outcome.log
        assert_right(project, 100, null=3)
        assert failures(project) == {"connection": 3}
        assert sorted(project.generations("prompt, attempts", "status = 'error'")) == [
            ("p40", 2),
            ("p7", 2),
            ("p99", 2),
        ]
        assert endpoint.counts() == {200: 97}
        dropped.clear()
        summary = run(project).summary("answers")
        assert summary.startswith("100 prompts, 97 stored, 3 generated, "), summary
        assert_right(project, 100)


def test_filtered_rows_alone_fail_and_are_not_tried_again(project: Project) -> None:
    def filtered(request: SeenRequest) -> Reply | None:
        if request.prompt == "p3":
            return error(400, "The response was filtered.", "content_filter")
        if request.prompt == "p4":
            return chat("half of a te", "content_filter", prompt=request.prompt)
        return None

    project.config["max_error_ratio"] = 0.2
    with Endpoint(filtered) as endpoint:
        use(project, endpoint)
        ask(project, 20)
        outcome = run(project)
        assert ", 18 generated, 2 failed, " in outcome.summary("answers")
        assert sorted(prompts(endpoint)) == sorted(f"p{i}" for i in range(20))
        assert_right(project, 20, null=2)
        assert sorted(
            project.generations("prompt, error_code, output, attempts", "status = 'error'")
        ) == [("p3", "content_filter", None, 1), ("p4", "content_filter", "half of a te", 1)]
        # It lasts: nothing is asked again.
        run(project)
        assert len(endpoint.requests) == 20


def test_a_server_that_resets_above_eight_connections_and_stalls_once(project: Project) -> None:
    def stall(request: SeenRequest) -> Reply:
        return Reply(stall=request.prompt == "p5", delay_s=0.05)

    with Endpoint(stall, max_connections=8) as endpoint:
        use(project, endpoint, attempt_timeout_s=2, max_attempts=2)
        ask(project, 200)
        outcome = run(project)
        assert ", 199 generated, 1 failed, " in outcome.summary("answers")
        assert_right(project, 200, null=1)
        assert project.generations("prompt, error_code, attempts", "status = 'error'") == [
            ("p5", "timeout", 2)
        ]
        # It learned how many there may be.
        assert len(endpoint.connections_refused) < 50


def test_a_prompt_that_is_too_long_and_one_that_is_refused(project: Project) -> None:
    project.config["max_error_ratio"] = 0.2

    def refuse(request: SeenRequest) -> Reply | None:
        if request.prompt == "p3":
            return error(400, "Too long by 7 tokens.", "context_length_exceeded")
        if request.prompt == "p4":
            return error(400, "Invalid character in messages[0].")
        return None

    with Endpoint(refuse) as endpoint:
        use(project, endpoint)
        ask(project, 20)
        run(project)
        assert_right(project, 20, null=2)
        assert failures(project) == {"context_length": 1, "invalid_request": 1}
        messages = project.generations("error", "error_code = 'invalid_request'")
        assert "Invalid character in messages[0]." in messages[0][0]
        # At most one request of our own finds out that the server refuses p4 alone.
        assert len(set(prompts(endpoint)) - {f"p{i}" for i in range(20)}) <= 1


# Failures of all


def test_a_parameter_that_the_server_does_not_know_stops_the_job(project: Project) -> None:
    def modern(request: SeenRequest) -> Reply | None:
        if "max_tokens" not in request.body:
            return None
        words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return error(400, words, "unsupported_parameter", param="max_tokens")

    with Endpoint(modern) as endpoint:
        use(project, endpoint)
        ask(project, 500)
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert "refuses every request: HTTP 400 unsupported_parameter" in outcome.log
        assert "Use 'max_completion_tokens' instead." in outcome.log
        assert "max_tokens_parameter" in outcome.log
        assert len(endpoint.requests) <= 15
        assert not any(project.store.glob("part-*"))
    with Endpoint(modern) as endpoint:
        use(project, endpoint, max_tokens_parameter="max_completion_tokens")
        assert ", 500 generated, " in run(project).summary("answers")
        assert_right(project, 500)


def test_a_server_without_json_schema_keeps_the_answers_of_other_calls(project: Project) -> None:
    def simple(request: SeenRequest) -> Reply | None:
        if "response_format" in request.body:
            return error(400, "response_format is not supported.", param="response_format")
        if "good" in request.prompt:
            return chat("bad")
        return None

    with Endpoint(in_turn(simple, latency(0.02))) as endpoint:
        use(project, endpoint)
        project.model(
            "answers",
            "select 'p' || i as p, llm_generate(p) as r, "
            "llm_classify(p, ['good', 'bad']) as mood from range(100) t(i)",
        )
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert "refuses every request: HTTP 400" in outcome.log
        assert "response_format is not supported." in outcome.log
        assert "structured_outputs" in outcome.log
        assert endpoint.count(400) <= 15
        stored = endpoint.count(200)
        assert project.generations("count(*)", "status = 'ok'") == [(stored,)]

        use(project, endpoint, structured_outputs="none")
        summary = run(project).summary("answers")
        assert summary.startswith(f"200 prompts, {stored} stored, {200 - stored} generated, ")
        assert_right(project, 100)
        assert project.query("select mood, count(*) from answers group by mood") == [("bad", 100)]


def test_a_wrong_key_fails_the_model_at_once_and_the_right_one_asks_all(project: Project) -> None:
    with Endpoint(latency(0.05), api_key=KEY) as endpoint:
        use(project, endpoint, api_key="sk-wrong-9876543210")
        ask(project, 500)
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert "HTTP 401 invalid_api_key: Incorrect API key provided: ***" in outcome.log
        assert "Check api_key or api_key_env" in outcome.log
        assert "sk-wrong" not in outcome.log
        refused = len(endpoint.requests)
        assert refused <= 15
        assert not any(project.store.glob("part-*"))
        # Nothing goes on behind the failed model.
        time.sleep(1.0)
        assert (len(endpoint.requests), endpoint.in_flight) == (refused, 0)

        use(project, endpoint, api_key=KEY)
        summary = run(project).summary("answers")
        assert summary.startswith("500 prompts, 0 stored, 500 generated, "), summary
        assert_right(project, 500)
        assert endpoint.count(200) == 500


def test_a_key_revoked_in_the_middle_keeps_what_was_answered(project: Project) -> None:
    valid = True

    def revoked(request: SeenRequest) -> Reply | None:
        nonlocal valid
        valid = valid and request.number < 150
        return None if valid else error(401, "The key was revoked.", "invalid_api_key")

    with Endpoint(in_turn(revoked, latency(0.02))) as endpoint:
        use(project, endpoint)
        ask(project, 1200)
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert "The key was revoked." in outcome.log
        assert endpoint.count(200) == 150
        assert project.generations("count(*)", "status = 'ok'") == [(150,)]
        assert set(failures(project)) <= {"auth"}
        # Those under way, and what is sent until a request of our own is refused as well.
        assert endpoint.count(401) <= 600
        time.sleep(1.0)
        assert endpoint.in_flight == 0
        before = len(endpoint.requests)
        assert before == 150 + endpoint.count(401)

    with Endpoint() as endpoint:
        use(project, endpoint)
        outcome = run(project)
        assert outcome.summary("answers").startswith("1,200 prompts, 150 stored, 1,050 ")
        assert len(endpoint.requests) == 1050
        assert_right(project, 1200)


def test_a_server_that_is_not_there_ends_the_job(project: Project) -> None:
    with Endpoint() as endpoint:
        use(project, endpoint, max_attempts=2)
    ask(project, 100)
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert f"The endpoint {endpoint.base_url}/ of model m does not answer" in outcome.log
    assert "base_url" in outcome.log
    assert not any(project.store.glob("part-*"))


def test_one_model_that_fails_does_not_hurt_its_neighbour(project: Project) -> None:
    with Endpoint(latency(0.05), api_key=KEY) as endpoint:
        use(project, endpoint, api_key=KEY)
        project.llms["locked"] = project.llms["default"] | {"api_key": "sk-wrong-9876543210"}
        ask(project, 100, "good")
        project.model(
            "bad", "select llm_generate('q' || i, model := 'locked') as r from range(100) t(i)"
        )
        outcome = project.dbt("run")
        assert outcome.statuses == {"good": "success", "bad": "error"}
        assert_right(project, 100, "good")
        assert not any(prompt.startswith("q") for (prompt,) in project.generations("prompt"))


# When nothing may be asked


def test_cached_mode_names_what_is_missing_and_sends_nothing(project: Project) -> None:
    with Endpoint() as endpoint:
        use(project, endpoint)
        ask(project, 7)
        outcome = project.dbt("run", llm_mode="cached")
        assert outcome.statuses == {"answers": "error"}
        assert "llm_mode is cached and 7 prompt(s) have no stored answer" in outcome.log
        assert "answers" in outcome.log
        assert endpoint.requests == []
        run(project)
        run(project, llm_mode="cached")
        assert len(endpoint.requests) == 7


def test_an_unset_key_matters_only_where_something_is_asked(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Endpoint(api_key=KEY) as endpoint:
        use(project, endpoint, api_key_env="DBT_LLM_TEST_KEY")
        monkeypatch.delenv("DBT_LLM_TEST_KEY", raising=False)
        ask(project, 5)
        for command in ("parse", "compile"):
            outcome = project.dbt(command)
            assert outcome.success, outcome.log
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert (
            "The environment variable DBT_LLM_TEST_KEY (api_key_env of the model m) is not set"
            in outcome.log
        )
        assert endpoint.requests == []

        monkeypatch.setenv("DBT_LLM_TEST_KEY", KEY)
        assert ", 5 generated, " in run(project).summary("answers")
        monkeypatch.delenv("DBT_LLM_TEST_KEY")
        assert run(project).summary("answers") == "5 prompts, 5 stored, 0 generated"
        assert_right(project, 5)
        assert len(endpoint.requests) == 5


# Ctrl-C


def test_ctrl_c_stops_sending_and_keeps_what_was_answered(project: Project, tmp_path: Path) -> None:
    with Endpoint(latency(0.3)) as endpoint:
        use(project, endpoint, max_concurrency=4)
        ask(project, 2000)
        log = tmp_path / "interrupted.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                project.command("run"),
                cwd=project.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            endpoint.wait_until(lambda seen: seen.count(200) >= 20, timeout_s=120)
            # As a terminal does it: to dbt, and to all that it started.
            os.killpg(process.pid, signal.SIGINT)
            interrupted = time.monotonic()
            assert process.wait(timeout=60) != 0
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert time.monotonic() - interrupted < 20
        endpoint.wait_until(lambda seen: seen.in_flight == 0, timeout_s=5)
        # All would take 150 s.
        assert max(request.time for request in endpoint.requests) - interrupted < 10
        answered = endpoint.count(200)
        ((stored,),) = project.generations("count(*)", "status = 'ok'")
        assert answered - 4 <= stored <= answered
        assert failures(project) == {}
        assert "Traceback" not in log.read_text().partition("Encountered an error")[0]
        # dbt shows its own words about the interruption, and keeps the model's for its log.
        written = (project.folder / "logs/dbt.log").read_text()
        assert f"Interrupted after {stored} of 2,000 answers" in written

        ask(project, 60)
        before = len(endpoint.requests)
        run(project)
        assert_right(project, 60)
        assert {request.prompt for request in endpoint.requests[before:]}.isdisjoint(
            prompt
            for (prompt,) in project.generations("prompt", f"run_id = '{first_run(project)}'")
        )


def first_run(project: Project) -> str:
    ((run_id,),) = project.generations("arg_min(run_id, created_at)")
    return str(run_id)
