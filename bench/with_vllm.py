"""Measures with a real LLM, SmolLM2-135M-Instruct through vLLM: what dbt-llm makes of an engine."""

import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pyarrow.parquet as pq

from bench.figures import Figure, alternate, timed
from bench.vllm_baselines import Baseline, Requests, paused
from bench.with_replay import dbt_seconds
from dbt_llm.chat_template import ChatTemplate
from dbt_llm.job import run_job
from dbt_llm.job_spec import JobResult, JobSpec
from dbt_llm.pool import close_pools, get_pool
from dbt_llm.spool import Prepared, prepare_requests
from tests.e2e.conftest import WEIGHTS
from tests.project import Project

LENGTHS = {4: 10, 12: 4, 48: 1, 160: 1}
"""Of 16 answers, how many have so many tokens."""
INSTRUCTIONS = 20
BLOCK_TOKENS = 32
CACHE_BLOCKS = 72
"""Too few for rows of `SEQUENCES` different instructions."""
SEQUENCES = 16


def efficiency(rows: int, runs: int) -> Iterator[Figure]:
    """Answers of very uneven lengths on a warm engine, against `LLM.chat` and `ray.data.llm`.

    Ours is the time of a dbt run less that of one that asks nothing, so that all that dbt-llm does
    is in it. `LLM.chat` gets the same requests in the same order, from a list in memory; what is
    subtracted for `ray.data.llm` says `vllm_baselines`. While one side runs, all processes of the
    other are stopped.
    """
    project = new_project({"enable_prefix_caching": False})
    body = "'Note ' || i || ' is about' || repeat(' one number and', i % 7 + 1) || ' another.'"
    project.model("prompts", f"select i, {body} as body from range({rows}) t(i)")
    project.model("answers", uneven_answers())
    assert project.dbt("--quiet", "run", "--select", "prompts").success
    with watched() as seen:
        dbt_seconds(project, "answers")
    assert len(seen.requests) == rows
    tokens = project.generations("sum(prompt_tokens), sum(completion_tokens)")[0]
    label = f"{rows:,} prompts, {tokens[1]:,} uneven tokens"

    engine_and_ray = psutil.Process().children(recursive=True)
    try:
        for name, target in (("chat", "≥ 0.97"), ("ray_data", "> 1")):
            baseline = Baseline(name, seen.spec.engine, seen.requests, project.folder)

            def ours(baseline: Baseline = baseline) -> float:
                shutil.rmtree(project.store)
                with paused(baseline.processes()):
                    return dbt_seconds(project, "answers")

            def theirs(name: str = name, baseline: Baseline = baseline) -> float:
                with paused(engine_and_ray):
                    seconds, *taken = baseline.run()
                if name == "ray_data":
                    # It starts an engine for each run in any case, and its Ray would go on.
                    baseline.close()
                assert tuple(taken) == tokens
                return seconds

            try:
                mine, other = (tokens[1] / seconds for seconds in alternate(runs, ours, theirs))
            finally:
                baseline.close()
            yield Figure(f"{label}, against {baseline.what}", mine, other, "tokens/s", target)
    finally:
        close_pools()


def prefix(rows: int, runs: int) -> list[Figure]:
    """Cached prompt tokens of 20 instructions, shuffled, and what putting them in order takes.

    The cache is too small for all of them at once, so that the order matters. The engine's own
    counters tell what was cached. The time is that of all that `prepare_requests` does.
    """
    project = new_project(
        {
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": CACHE_BLOCKS,
            "max_num_seqs": SEQUENCES,
            "disable_log_stats": False,
        }
    )
    project.model(
        "answers", "select i, llm_generate(body, max_tokens := 2) as r from {{ ref('prompts') }}"
    )
    counts = []
    before = 0
    try:
        for number in range(runs):
            project.model("prompts", instructed_prompts(rows, number))
            with watched() as seen:
                assert project.dbt("--quiet", "run").success
            cached = cached_tokens(seen.spec)
            best = best_cached_tokens(seen.requests)
            counts.append((cached - before, best, seen.preparing_s, seen.result.generating_s))
            before = cached
    finally:
        close_pools()
    cached, best, preparing_s, generating_s = map(statistics.median, zip(*counts, strict=True))
    label = f"{INSTRUCTIONS} instructions, {rows:,} rows"
    return [
        Figure(f"cached prompt tokens, {label}", cached, best, "tokens", "≥ 0.97"),
        Figure(f"order, {label}, and 1 % of the run", preparing_s, generating_s / 100, "s", "≤ 1"),
    ]


def start(rows: int, runs: int) -> list[Figure]:
    """Five models on one LLM, with a prompt each, against one model; each in a new process."""
    figures = alternate(runs, lambda: _start_seconds(5), lambda: _start_seconds(1), warm_up=False)
    return [Figure("start of five models, one engine", *figures, target="≤ 1.2")]


def _start_seconds(models: int) -> float:
    """Return what a dbt process with LLM calls takes, less one without; it starts one engine."""
    project = new_project({})
    names = [f"model_{number}" for number in range(models)]
    for name in names:
        project.model(name, f"select llm_generate('Say {name}.', max_tokens := 1) as r")

    def process(*selected: str) -> float:
        command = project.command("--quiet", "run", "--select", *selected)
        return timed(lambda: subprocess.run(command, cwd=project.folder, check=True))

    seconds = process(*names) - process("nothing")
    assert project.generations("count(*)") == [(models,)]
    logs = list((project.folder / "target/llm/logs").iterdir())
    assert len(logs) == 1, logs
    return seconds


def new_project(engine_args: dict[str, Any]) -> Project:
    """Return a project whose LLM is the small one."""
    assert (WEIGHTS / "model.safetensors").exists(), f"no weights in {WEIGHTS}: run `make weights`"
    project = Project(Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "project")
    engine_args = {"max_model_len": 1024, **engine_args}
    project.llms = {
        "default": {"engine": "vllm", "model": str(WEIGHTS), "engine_args": engine_args}
    }
    project.model("nothing", "select 1 as i")
    return project


def uneven_answers() -> str:
    """Return a query that asks each prompt for an answer of exactly one of `LENGTHS`."""
    selects, first = [], 0
    for length, share in LENGTHS.items():
        selects.append(
            f"select i, llm_generate(body, max_tokens := {length}, "
            "extra := '{\"ignore_eos\": true}') as r from {{ ref('prompts') }} "
            f"where i % 16 between {first} and {first + share - 1}"
        )
        first += share
    return " union all ".join(selects)


def instructed_prompts(rows: int, number: int) -> str:
    """Return a query of shuffled prompts; each `number` has instructions of its own."""
    instruction = (
        f"'Task {number}.' || i % {INSTRUCTIONS} || ': ' || repeat('Read the text, look whether "
        f"rule ' || i % {INSTRUCTIONS} || ' applies to it, and answer with a word. ', 9)"
    )
    return (
        f"select i, {instruction} || 'The text: order ' || i || ' came late.' as body "
        f"from range({rows}) t(i) order by hash(i)"
    )


@dataclass
class Seen:
    """What a dbt run asked, and how long parts of it took."""

    spec: JobSpec = field(init=False)
    result: JobResult = field(init=False)
    requests: Requests = field(default_factory=list)
    """In the order in which the engine got them."""
    preparing_s: float = 0.0


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """Watch the one job of a dbt run in this process."""
    seen = Seen()

    def watched_job(
        spec: JobSpec,
        secrets: Any,
        store: Any,
        cancelled: Any,
        report: Any,
        result: JobResult,
        meter: Any,
    ) -> None:
        seen.spec, seen.result = spec, result
        for file in spec.requests:
            prompts = pq.read_table(file.path)["prompt"].to_pylist()
            seen.requests += [(file.call.content, prompt) for prompt in prompts]
        run_job(spec, secrets, store, cancelled, report, result, meter)

    def timed_prepare(*arguments: Any, **options: Any) -> Prepared:
        started = time.perf_counter()
        prepared = prepare_requests(*arguments, **options)
        seen.preparing_s += time.perf_counter() - started
        return prepared

    with (
        patch("dbt_llm.job.run_job", watched_job),
        patch("dbt_llm.spool.prepare_requests", timed_prepare),
    ):
        yield seen


def cached_tokens(spec: JobSpec) -> int:
    """Return how many prompt tokens a job's engine took from its cache since it started."""
    import ray

    def count(_: Any) -> int:
        from vllm.v1.metrics.reader import get_metrics_snapshot

        metrics = {metric.name: metric for metric in get_metrics_snapshot()}
        return int(metrics["vllm:prefix_cache_hits"].value)

    (replica,) = get_pool(spec.engine, {}, spec.replicas, spec.log_folder).replicas
    hits: int = ray.get(replica.actor.__ray_call__.remote(count))
    return hits


def best_cached_tokens(requests: Requests) -> int:
    """Return how many prompt tokens a cache of any size can give, whatever the order.

    A block is known by all tokens up to its end; the first prompt that has it makes it. The block
    that ends a prompt is made anew, since vLLM computes a prompt's last token in any case.
    """
    from transformers import AutoTokenizer

    template = ChatTemplate(AutoTokenizer.from_pretrained(WEIGHTS), None, {})
    holders: Counter[tuple[int, ...]] = Counter()
    takers: Counter[tuple[int, ...]] = Counter()
    for request in requests:
        tokens = tuple(template.tokens(*request))
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            holders[tokens[:end]] += 1
            takers[tokens[:end]] += end < len(tokens)
    return BLOCK_TOKENS * sum(min(takers[block], holders[block] - 1) for block in holders)
