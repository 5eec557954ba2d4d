"""Baselines for the `vllm` engine, each in a process of its own.

    python -m bench.vllm_baselines chat|ray_data REQUESTS

answers the requests of a file once per line of its standard input, and prints a line with the
seconds and the tokens that it took. `Baseline` is the other end.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from dbt_llm.engine_vllm import (
    _sampling_parameters,
    _set_cpu_environment,
    engine_arguments,
    has_gpu,
)
from dbt_llm.openai_request import chat_messages

Requests = list[tuple[dict[str, Any], str]]
"""Calls and prompts, in the order in which they are asked."""
Taken = tuple[float, int, int]
"""Seconds, prompt tokens and completion tokens."""


WHAT = {"chat": "`LLM.chat`", "ray_data": "`ray.data.llm`"}
"""The baselines, and what people call them."""


class Baseline:
    """A baseline's process, which starts with its first run."""

    def __init__(self, name: str, engine: dict[str, Any], requests: Requests, folder: Path) -> None:
        """`engine` is what dbt-llm's engine is started with. The process's log goes to `folder`."""
        self.what = WHAT[name]
        self._name = name
        self._path, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._path.write_text(json.dumps({"engine": engine, "requests": requests}))
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> Taken:
        """Answer all requests once."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, f"the baseline ended; see {self._log}"
        seconds, prompt_tokens, completion_tokens = json.loads(answer)
        return seconds, prompt_tokens, completion_tokens

    def processes(self) -> list[psutil.Process]:
        """Return the process and its descendants, if there is one."""
        if self._process is None:
            return []
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]

    def close(self) -> None:
        """End the process; another run starts a new one."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        with self._log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "bench.vllm_baselines", self._name, str(self._path)],
                cwd=Path(__file__).parent.parent,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )


@contextlib.contextmanager
def paused(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Stop processes for a while. vLLM's worker wakes up all the time while it has no request."""
    stopped = []
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                stopped.append(process)
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def chat(engine: dict[str, Any], requests: Requests) -> Callable[[], Taken]:
    """One `LLM.chat` over all requests, in their order."""
    from vllm import LLM

    # What Ray gives its workers; otherwise a busy machine would favour this one.
    os.nice(15)
    llm = LLM(**_arguments(engine))
    conversations = [chat_messages(*request) for request in requests]
    parameters = [_sampling_parameters(call) for call, _ in requests]

    def run() -> Taken:
        started = time.perf_counter()
        outputs = llm.chat(conversations, parameters, use_tqdm=False)
        return (
            time.perf_counter() - started,
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(output.outputs[0].token_ids) for output in outputs),
        )

    return run


def ray_data(engine: dict[str, Any], requests: Requests) -> Callable[[], Taken]:
    """Ray Data's LLM processor over all requests, in blocks of its own batch size.

    Every execution of a dataset starts an engine. The time runs from when that is ready until the
    last row comes, so that what the other stages do before, up to the tokens, costs nothing.
    """
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    # More CPUs than there are, or its five stages would not all be placed on a small machine.
    ray.init(address="local", num_cpus=16, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    arguments = _arguments(engine)
    config = vLLMEngineProcessorConfig(
        model_source=arguments.pop("model"),
        engine_kwargs=arguments,
        log_engine_metrics=False,
    )
    processor = build_processor(config)
    stage = processor.get_stage_by_name("vLLMEngineStage")
    ready = Path(tempfile.mkdtemp(prefix="dbt-llm-bench-")) / "ready"

    class Marked(stage.fn):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ready.touch()

    stage.fn = Marked
    if not has_gpu():
        stage.map_batches_kwargs["num_gpus"] = 0
    rows = [
        {"messages": chat_messages(call, prompt), "sampling_params": _plain_parameters(call)}
        for call, prompt in requests
    ]

    def run() -> Taken:
        blocks = -(-len(rows) // config.batch_size)
        prompt_tokens = completion_tokens = 0
        for answer in processor(ray.data.from_items(rows, override_num_blocks=blocks)).iter_rows():
            ended = time.time()
            prompt_tokens += answer["num_input_tokens"]
            completion_tokens += answer["num_generated_tokens"]
        return ended - ready.stat().st_mtime, prompt_tokens, completion_tokens

    return run


def _plain_parameters(call: dict[str, Any]) -> dict[str, Any]:
    sampling = dict(call["sampling"])
    return sampling.pop("extra", {}) | sampling


def _arguments(engine: dict[str, Any]) -> dict[str, Any]:
    arguments = engine_arguments(engine, on_cpu=not has_gpu())
    # `LLM` does not know it, and Ray sets it.
    del arguments["enable_log_requests"]
    return arguments


def main() -> None:
    name, path = sys.argv[1:]
    # What vLLM and Ray print goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not has_gpu():
        _set_cpu_environment()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    given = json.loads(Path(path).read_text())
    run = {"chat": chat, "ray_data": ray_data}[name](given["engine"], given["requests"])
    for _ in sys.stdin:
        print(json.dumps(run()), file=answers, flush=True)


if __name__ == "__main__":
    main()
