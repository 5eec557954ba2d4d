"""Makes calls, requests and generations for the unit tests."""

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from dbt_llm.call import Call, make_call, prompt_hash
from dbt_llm.config import load_config
from dbt_llm.part_writer import PartWriter
from dbt_llm.parts import Part, Provenance
from dbt_llm.schema import REQUESTS, Answer, answers_table
from dbt_llm.storage import Folder, LocalFolder

LLMS = load_config(
    {
        "llms": {
            "default": {"engine": "replay"},
            "other": {"engine": "replay", "model": "other-model"},
        }
    }
).llms


def call_of(**options: Any) -> Call:
    return make_call(json.dumps({"model": "default", **options}), LLMS)


def key(prompt: str, **options: Any) -> str:
    return prompt_hash(call_of(**options).call_hash, prompt)


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "llm": "default",
        "model": "replay",
        "engine": "replay",
        "pipeline_version": "0.1.0",
        "node_id": "model.shop.tickets",
        "invocation_id": "i1",
        "run_id": "r1",
        "trace_id": "t1",
    }
    return Provenance(**{**values, **changes})


def requests_of(prompts: Iterable[str], call: Call | None = None) -> pa.Table:
    call_hash = (call or call_of()).call_hash
    rows = list(prompts)
    return pa.table(
        {"prompt_hash": [prompt_hash(call_hash, prompt) for prompt in rows], "prompt": rows},
        schema=REQUESTS,
    )


def write_part(
    folder: Path | Folder,
    prompts: Iterable[str],
    answer: Callable[[str, str], Answer],
    call: Call | None = None,
    **changes: Any,
) -> Part:
    """Write one part; `answer(prompt_hash, prompt)` makes the answers, which come shuffled."""
    call = call or call_of()
    requests = requests_of(prompts, call)
    answers = [answer(row["prompt_hash"], row["prompt"]) for row in requests.to_pylist()]
    random.Random(1).shuffle(answers)
    files = LocalFolder(folder) if isinstance(folder, Path) else folder
    files.make_folder()
    writer = PartWriter(files, call.call_hash, call.text, provenance(**changes), "1")
    writer.add(answers_table(answers), requests)
    (part,) = writer.flush()
    return part


def good(prompt_hash: str, prompt: str) -> Answer:
    return Answer(prompt_hash, output=f"<{prompt}>", finish_reason="stop", prompt_tokens=3)


def failing(code: str) -> Callable[[str, str], Answer]:
    return lambda prompt_hash, _: Answer(prompt_hash, error_code=code, error=f"{code} happened")
