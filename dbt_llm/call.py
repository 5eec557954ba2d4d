"""A call: what is constant at one call site, and the keys that follow from it.

`call_hash = sha256(canonical JSON of the call)` and `prompt_hash = sha256(call_hash || prompt)`,
both as 64 lower-case hex digits over UTF-8 bytes. A prompt is hashed as it is: no trimming and
no Unicode normalization. `functions.py` computes the prompt hash in SQL; a test compares both.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dbt_llm.config import LLMConfig, OpenAILLM, Sampling, VllmLLM
from dbt_llm.errors import CallError
from dbt_llm.options import OPTIONS_OF, EmbedOptions, Options

# Of vLLM's engine arguments these choose the weights or shape the prompt, so they are part of
# the key. All others (memory, parallelism, data types) only change speed or rounding.
_ANSWER_CHANGING_ENGINE_ARGS = (
    "chat_template",
    "convert",
    "hf_overrides",
    "pooler_config",
    "quantization",
    "revision",
    "tokenizer",
    "tokenizer_revision",
)


@dataclass(frozen=True)
class Call:
    """One call site, resolved against the profile."""

    llm: str
    """The alias in the profile. Not part of the key: a renamed alias keeps its answers."""
    text: str
    """The canonical JSON, of which `call_hash` is the sha256."""
    call_hash: str

    @property
    def content(self) -> dict[str, Any]:
        """The call as a dictionary: model, model_args, system, sampling, output."""
        content: dict[str, Any] = json.loads(self.text)
        return content


def make_call(options_json: str, llms: Mapping[str, LLMConfig]) -> Call:
    """Resolve the options of a call site against the LLMs of the profile.

    `options_json` is an object of the options, and of `function`: generate (where it is left
    out), classify, filter, extract or embed.

    Raises:
        CallError: an option is wrong, or the LLM is not in the profile.
    """
    raw = {key: value for key, value in json.loads(options_json).items() if value is not None}
    kind = OPTIONS_OF[raw.pop("function", "generate")]
    try:
        options = kind.model_validate(raw)
    except ValidationError as error:
        problems = "; ".join(_describe(problem) for problem in error.errors())
        raise CallError(f"A call of an LLM function has a wrong option: {problems}.") from None
    if options.model not in llms:
        raise CallError(
            f"A call of an LLM function names the model {options.model!r}, which is not among "
            f"the llms of the profile: {', '.join(sorted(llms))}."
        )
    config = llms[options.model]
    content: dict[str, Any] = {"model": config.model, "model_args": _answer_changing_args(config)}
    if isinstance(options, EmbedOptions):
        content["output"] = {"type": "embedding"}
        if isinstance(config, OpenAILLM) and config.sampling.extra:
            content["sampling"] = {"extra": config.sampling.extra}
    else:
        content["system"] = options.system if options.system is not None else config.system
        content["sampling"] = _sampling(options, config.sampling)
        content["wrap"] = options.wrap()
        content["output"] = options.output()
    text = canonical_json({key: value for key, value in content.items() if value is not None})
    return Call(llm=options.model, text=text, call_hash=sha256_hex(text))


def user_turn(call: dict[str, Any], prompt: str) -> str:
    """Return what an LLM is told in the user's turn: the call's words around the prompt."""
    wrap = call.get("wrap", {"before": "", "after": ""})
    return f"{wrap['before']}{prompt}{wrap['after']}"


def canonical_json(value: Any) -> str:
    """Return JSON that is equal for equal values: sorted keys, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_hex(text: str) -> str:
    """Return the sha256 of the text's UTF-8 bytes, as DuckDB's `sha256(VARCHAR)` does."""
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_hash(call_hash: str, prompt: str) -> str:
    """Return the key of a generation."""
    return sha256_hex(call_hash + prompt)


def _describe(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    return f"{'.'.join(map(str, problem['loc']))}: {message} (got {problem['input']!r})"


def _answer_changing_args(config: LLMConfig) -> dict[str, Any] | None:
    arguments: dict[str, Any] = {}
    if isinstance(config, VllmLLM):
        given = config.engine_args
        arguments = {name: given[name] for name in _ANSWER_CHANGING_ENGINE_ARGS if name in given}
    if config.on_long_prompt != "error":
        arguments["on_long_prompt"] = config.on_long_prompt
    if config.chat_template_options:
        arguments["chat_template_options"] = config.chat_template_options
    return arguments or None


def _sampling(options: Options, defaults: Sampling) -> dict[str, Any]:
    given = options.model_dump(
        include={"temperature", "max_tokens", "top_p", "seed", "stop", "extra"}, exclude_none=True
    )
    try:
        merged = Sampling.model_validate({**defaults.model_dump(), **given})
    except ValidationError as error:
        problem = _describe(error.errors()[0])
        raise CallError(f"A call of an LLM function has a wrong option: {problem}.") from None
    return merged.model_dump(mode="json", exclude_none=True)
