"""Counts the tokens of requests with an LLM's own tokenizer, where that is on this machine."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbt_llm import sql
from dbt_llm.call import Call
from dbt_llm.chat_template import ChatTemplate, read_template
from dbt_llm.config import LLMConfig, VllmLLM
from dbt_llm.errors import EngineError
from dbt_llm.memory_fit import longest_sequence
from dbt_llm.spool import RequestFile

_COUNTED_ROWS = 2_000

Count = Callable[[Call, str], int]


@dataclass(frozen=True)
class Counted:
    """What the requests of a file have."""

    mean: float
    """Tokens that the engine reads, per request; it reads none of those that do not fit."""
    too_long: int
    """Requests that do not fit."""
    longest: int
    exact: bool
    """Whether all were counted, not a sample."""


class TokenCounter:
    """Counts the tokens of requests, texts of the call and chat template included."""

    def __init__(self, count: Count, most: int | None) -> None:
        """`most` is what the model takes at most, prompt and answer together."""
        self._count = count
        self.most = most

    def count_file(self, cursor: Any, file: RequestFile, cut: bool) -> Counted:
        """Count the requests of a file, or some of many; `cut`: what is too long is cut."""
        source = sql.parquet([file.path])
        step = -(-file.rows // _COUNTED_ROWS)
        sample = cursor.execute(
            f"select prompt, (select avg(strlen(prompt)) from {source}) from {source} "
            f"where file_row_number % {step:d} = 0"
        ).fetchall()
        counts = [self._count(file.call, prompt) for prompt, _ in sample]
        most = self.most or math.inf
        read = [tokens if tokens < most else 0 for tokens in counts]
        if cut:
            # Room for the answer is left.
            answer = file.call.content.get("sampling", {}).get("max_tokens", 1)
            read = [min(tokens, most - answer) for tokens in counts]
        # A sample may have other lengths than all have.
        mean_bytes = sample[0][1]
        sample_bytes = sum(len(prompt.encode()) for prompt, _ in sample) / len(sample)
        mean = sum(read) / len(read) * (mean_bytes / sample_bytes if sample_bytes else 1)
        too_long = sum(tokens >= most for tokens in counts) * step
        return Counted(mean, too_long, max(counts), step == 1)


def token_counter(llm: LLMConfig) -> TokenCounter | None:
    """Return what counts for an LLM; None where its tokenizer is not at hand."""
    if not isinstance(llm, VllmLLM):
        return None
    try:
        from transformers import AutoTokenizer, PretrainedConfig
    except ImportError:
        return None
    arguments = llm.engine_args
    source = str(arguments.get("tokenizer") or llm.model)
    if Path(source).expanduser().is_dir():
        source = str(Path(source).expanduser())
    try:
        # Nothing is fetched, and no code of the model's folder is run.
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=arguments.get("tokenizer_revision"),
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, ImportError):
        return None
    of_model = None
    with suppress(OSError, ValueError):
        config, _ = PretrainedConfig.get_config_dict(source, local_files_only=True)
        of_model = config.get("max_position_embeddings")
    return TokenCounter(_count(llm, tokenizer), longest_sequence(arguments, of_model))


def _count(llm: VllmLLM, tokenizer: Any) -> Count:
    if llm.engine_args.get("runner") == "pooling":
        return lambda _, prompt: len(tokenizer.encode(prompt))
    try:
        given = read_template(llm.engine_args.get("chat_template"))
        template = ChatTemplate(tokenizer, given, llm.chat_template_options)
    except EngineError:
        # The run will say what is wrong with it.
        return lambda _, prompt: len(tokenizer.encode(prompt))
    return lambda call, prompt: len(template.tokens(call.content, prompt))
