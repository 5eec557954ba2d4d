"""The `openai` engine against a bare client: the SDK and a semaphore, with nothing else."""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.figures import Figure, alternate
from dbt_llm.call import make_call, prompt_hash
from dbt_llm.config import Config, load_config
from dbt_llm.engine_openai import OpenAIEngine
from dbt_llm.runner import engine_settings
from tests.endpoint import echo

LATENCY_S = 0.05
SLOTS = 256


def http(rows: int, runs: int) -> list[Figure]:
    """New prompts over HTTP: the `openai` engine against a bare client of the same SDK."""
    server = Server()
    try:
        ours, baseline = alternate(
            runs,
            lambda: engine_seconds(server.base_url, rows),
            lambda: client_seconds(server.base_url, rows),
        )
    finally:
        server.close()
    label = f"HTTP, {rows:,} prompts, {SLOTS} slots of {LATENCY_S:g} s"
    return [Figure(label, ours, baseline, target="≤ 1.11 (0.9 of the client)")]


class Server:
    """The scripted endpoint in a process of its own; it answers `SLOTS` requests at a time."""

    def __init__(self) -> None:
        port_file = Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "port"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.endpoint", "--latency", str(LATENCY_S)),
                *("--slots", str(SLOTS), "--over", "queue", "--port-file", str(port_file)),
            ],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.DEVNULL,
        )
        while not port_file.exists():
            assert self._process.poll() is None, "the endpoint did not start"
            time.sleep(0.05)
        self.base_url = f"http://127.0.0.1:{port_file.read_text()}/v1"

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait()


def engine_seconds(base_url: str, rows: int) -> float:
    """Return how long the engine takes for so many new prompts, checks included."""
    config: Config = load_config(
        {"llms": {"default": {"engine": "openai", "model": "m", "base_url": base_url}}}
    )
    entry = config.llms["default"]
    call = make_call(json.dumps({"model": "default"}), config.llms)
    prompts = [f"prompt {number}" for number in range(rows)]
    hashes = [prompt_hash(call.call_hash, prompt) for prompt in prompts]
    requests = pa.table({"prompt_hash": hashes, "prompt": prompts})
    answers: list[pa.Table] = []

    async def run() -> float:
        engine = OpenAIEngine(engine_settings(entry), entry.secrets())
        started = time.perf_counter()
        await engine.answer(requests, call.content, answers.append)
        seconds = time.perf_counter() - started
        await engine.close()
        return seconds

    seconds = asyncio.run(run())
    table = pa.concat_tables(answers)
    by_hash = dict(zip(table["prompt_hash"].to_pylist(), table["output"].to_pylist(), strict=True))
    assert by_hash == dict(zip(hashes, map(echo, prompts), strict=True))
    return seconds


def client_seconds(base_url: str, rows: int) -> float:
    """Return how long a bare client takes for them."""
    import openai

    async def run() -> float:
        client = openai.AsyncOpenAI(api_key="unused", base_url=base_url, max_retries=0)
        slots = asyncio.Semaphore(SLOTS)

        async def ask(number: int) -> str:
            async with slots:
                reply: Any = await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": f"prompt {number}"}],
                    max_tokens=512,
                    temperature=0.0,
                )
                return str(reply.choices[0].message.content)

        started = time.perf_counter()
        outputs = await asyncio.gather(*(ask(number) for number in range(rows)))
        seconds = time.perf_counter() - started
        assert outputs == [echo(f"prompt {number}") for number in range(rows)]
        await client.close()
        return seconds

    return asyncio.run(run())
