"""The `openai` engine against a real server: vLLM's own, with SmolLM2, on the CPU."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dbt_llm import pool
from tests.e2e.conftest import WEIGHTS
from tests.project import Project

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("weights")]

KEY = "sk-vllm-server-Gx73pQd9"
LENGTH = 1024
ENGINE_ARGS = {"max_model_len": LENGTH, "dtype": "float32", "block_size": 32}
TICKETS = (
    "'My parcel number ' || i || ' has not arrived after ' || (i % 9 + 2) || ' days. ' || "
    "['Please send it again.', 'I want my money back.', 'Where is it?'][i % 3 + 1]"
)


@contextmanager
def vllm_server(log: Path, *options: str) -> Iterator[str]:
    """Run vLLM's server while the context lasts; yield its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(WEIGHTS), "--served-model-name", "smol", str(WEIGHTS)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--api-key", KEY]
    command += ["--dtype", "float32", "--max-model-len", str(LENGTH)]
    command += ["--enforce-eager", "--block-size", "32", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 180
        while not _is_healthy(port):
            words = log.read_text(errors="replace")[-3000:]
            assert process.poll() is None, f"the server ended:\n{words}"
            assert time.monotonic() < deadline, f"the server did not start in 180 s:\n{words}"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        # Its workers too, should it have left any.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as reply:
            return int(reply.status) == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    whitespace = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    log = tmp_path_factory.mktemp("server") / "server.log"
    with vllm_server(log, "--structured-outputs-config", whitespace) as base_url:
        yield base_url


@pytest.fixture
def project(tmp_path: Path, server: str) -> Project:
    project = Project(tmp_path / "a project")
    project.llms = {"default": over_http(server)}
    return project


@pytest.fixture
def end_engines() -> Iterator[None]:
    """Free what an engine in this process holds, for the servers need memory too."""
    yield
    pool.close_pools()


def over_http(base_url: str, **settings: Any) -> dict[str, Any]:
    entry = {"engine": "openai", "model": "smol", "base_url": base_url, "api_key": KEY}
    return entry | {"sampling": {"max_tokens": 16}} | settings


def run(project: Project) -> Any:
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    return outcome


def test_text_labels_and_json_end_to_end(project: Project) -> None:
    fields = '{"parcel": "INTEGER", "days": "INTEGER", "angry": "BOOLEAN"}'
    labels = "['delivery', 'refund', 'line\nbreak']"
    project.llms["default"]["price"] = {"prompt": 1.0, "completion": 2.0}
    project.model(
        "tickets",
        f"select i, llm_generate({TICKETS}) as answer, llm_classify({TICKETS}, {labels}) as topic, "
        f"llm_filter({TICKETS}, 'Does the customer want money back?') as wants_refund, "
        f"llm_extract({TICKETS}, '{fields}', max_tokens := 96) as facts from range(24) t(i)",
    )
    project.model(
        "capitals",
        "select country, llm_generate('What is the capital of ' || country || '?') as answer "
        "from (values ('France'), ('Germany'), ('Japan')) t(country)",
    )
    outcome = run(project)
    assert outcome.summary("tickets").startswith("96 prompts, 0 stored, 96 generated, ")
    assert project.query(
        f"select count(*), count(answer), count(*) filter (list_contains({labels}, topic)), "
        "count(wants_refund), count(facts), any_value(typeof(facts)) from tickets"
    ) == [(24, 24, 24, 24, 24, 'STRUCT(parcel INTEGER, "days" INTEGER, angry BOOLEAN)')]
    # A small model, but it reads the number that stands in the text.
    ((right,),) = project.query("select count(*) from tickets where facts.parcel = i")
    assert right >= 12
    answers = dict(project.query("select country, answer from capitals"))
    for country, capital in (("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")):
        assert capital in answers[country]
    assert project.generations(
        "engine, model, status, bool_or(tokens_estimated), bool_and(prompt_tokens between 20 and "
        "300), bool_and(completion_tokens between 1 and 96), bool_and(latency_s > 0), "
        "bool_and(abs(cost_usd * 1e6 - prompt_tokens - 2 * completion_tokens) < 1e-6), count(*)",
        "true group by engine, model, status",
    ) == [("openai", "smol", "ok", False, True, True, True, True, 99)]
    again = run(project)
    assert again.summary("tickets") == "96 prompts, 96 stored, 0 generated"


def test_prompts_that_are_too_long_and_their_neighbours(project: Project) -> None:
    project.config["max_error_ratio"] = 0.2
    project.model(
        "answers",
        "select i, llm_details(case i when 7 then repeat('word ', 1500) "
        "when 8 then repeat('word ', 200000) else 'Say the number ' || i end, "
        "max_tokens := 4) as d from range(1, 21) t(i)",
    )
    run(project)
    # The `param` of vLLM's error is `input_tokens` where it counted them, and `input_text` where
    # the text alone was too long.
    assert project.query(
        "select i, d.error_code, d.output from answers where d.status <> 'ok' order by i"
    ) == [(7, "context_length", None), (8, "context_length", None)]
    assert project.query("select count(*) from answers where d.output <> ''") == [(18,)]
    for (message,) in project.generations("error", "status = 'error'"):
        assert f"maximum context length is {LENGTH} tokens" in message
        assert "word word" not in message


def test_a_wrong_key_and_a_wrong_model_are_told_apart(project: Project) -> None:
    project.model("answers", "select llm_generate('Hello ' || i) as r from range(50) t(i)")
    for settings, words in (
        ({"api_key": "sk-another"}, "HTTP 401"),
        ({"model": "another"}, "The model `another` does not exist"),
    ):
        project.llms["default"] |= settings
        outcome = project.dbt("run")
        assert outcome.statuses == {"answers": "error"}
        assert "refuses every request: " in outcome.log
        assert words in outcome.log
        project.llms["default"] |= {"api_key": KEY}
    assert not any(project.store.glob("part-*"))


@pytest.mark.usefixtures("end_engines")
def test_the_same_sql_on_both_engines(project: Project, server: str) -> None:
    project.model(
        "tickets",
        f"select i, {TICKETS} as body, llm_generate(body, max_tokens := 24) as answer, "
        "llm_classify(body, ['delivery', 'refund']) as topic, "
        'llm_extract(body, \'{"days": "INTEGER"}\') as facts from range(20) t(i)',
    )
    tables = {}
    for name, entry in (
        ("openai", over_http(server, model=str(WEIGHTS))),
        ("vllm", {"engine": "vllm", "model": str(WEIGHTS), "engine_args": ENGINE_ARGS}),
    ):
        project.llms = {"default": entry | {"sampling": {"max_tokens": 16}}}
        project.config["store"] = {"path": str(project.folder / "lake" / name)}
        run(project)
        tables[name] = project.query("select i, answer, topic, facts from tickets order by i")
        stored = project.generations("prompt_hash, prompt_tokens")
        tables[f"{name} prompts"] = sorted(stored)
    assert tables["openai prompts"] == tables["vllm prompts"]
    # Greedy, with the same kernels; only a near tie may fall out otherwise in another batch.
    columns = [zip(*tables[name], strict=True) for name in ("openai", "vllm")]
    for ours, theirs in zip(*columns, strict=True):
        assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 18, (ours, theirs)

    # The engine is no part of the key: what one has answered, the other does not ask.
    project.llms = {"default": over_http(server, model=str(WEIGHTS))}
    assert run(project).summary("tickets") == "60 prompts, 60 stored, 0 generated"


def test_embeddings_from_a_pooling_server(project: Project, tmp_path: Path) -> None:
    options = ("--runner", "pooling", "--convert", "embed")
    with vllm_server(tmp_path / "pooling.log", *options) as base_url:
        project.llms["embedder"] = over_http(base_url, embedding_batch=3)
        project.model(
            "embedded",
            "select i, text, llm_embed(text, model := 'embedder') as v from (values "
            "(1, 'The parcel is late.'), (2, 'My parcel has not arrived yet.'), "
            "(3, 'How do I reset my password?'), (4, 'The parcel is late.'), (5, null), "
            "(6, 'Blue is a colour.'), (7, 'Where is my parcel?')) t(i, text)",
        )
        run(project)
    assert project.query(
        "select typeof(v), len(v), count(*) from embedded group by all order by 2 nulls last"
    ) == [("FLOAT[]", 576, 6), ("FLOAT[]", None, 1)]
    assert project.query(
        "select a.i, arg_max(b.i, list_cosine_similarity(a.v, b.v)) from embedded a, embedded b "
        "where a.i in (1, 2) and b.i in (1, 2, 3) and a.i <> b.i group by a.i order by a.i"
    ) == [(1, 2), (2, 1)]
    ((rows, tokens),) = project.generations("count(embedding), sum(prompt_tokens)")
    assert rows == 5
    assert 20 <= tokens <= 60
