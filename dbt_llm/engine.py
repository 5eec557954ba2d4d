"""What an engine is: it turns requests of one call into answers, in any order."""

from collections.abc import Callable
from typing import Any, Protocol

import pyarrow as pa

Emit = Callable[[pa.Table], None]
"""Takes answers (schema `ANSWERS`) as soon as they are there."""


class Engine(Protocol):
    """One running engine; it lives in a Ray actor and answers many jobs."""

    version: str
    """Of the software that generates."""
    concurrency: int
    """Requests that it works on at the same time."""

    async def answer(self, requests: pa.Table, call: dict[str, Any], emit: Emit) -> None:
        """Answer every request (schema `REQUESTS`) exactly once.

        A request that fails is an answer with an error code.

        Raises:
            EngineError: the engine is dead; what was emitted before stays valid.
            CallError: the engine cannot do what the call asks for.
            EndpointError: every request would be refused alike.
        """

    async def close(self) -> None:
        """Free what the engine holds."""


def start_engine(config: dict[str, Any], secrets: dict[str, Any]) -> Engine:
    """Start the engine of an LLM entry (as plain data); takes as long as loading the weights.

    `secrets` is what the entry's `secrets()` returns.

    Raises:
        EngineError: with what is missing or the engine's last words.
    """
    if config["engine"] == "vllm":
        from dbt_llm.engine_vllm import VllmEngine

        return VllmEngine(config)
    if config["engine"] == "openai":
        from dbt_llm.engine_openai import OpenAIEngine

        return OpenAIEngine(config, secrets)
    from dbt_llm.engine_replay import ReplayEngine

    return ReplayEngine(config)
