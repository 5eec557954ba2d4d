"""Recorded answers: a JSON-lines file that a team checks in, and that the `replay` engine serves.

A line holds a call (less the model, which may differ where it is replayed), a prompt, and what was
answered. Lines are sorted, so that a new recording differs from the last one in what is new.
"""

import json
from pathlib import Path
from typing import Any

from dbt_llm import sql
from dbt_llm.call import canonical_json
from dbt_llm.errors import StoreError
from dbt_llm.lookup import BEST_FIRST, lasting, read_newest
from dbt_llm.store import Store

_BATCH_ROWS = 10_000
_ANSWER = (
    *("output", "embedding", "error_code", "error"),
    *("finish_reason", "prompt_tokens", "completion_tokens"),
)


def call_key(call: dict[str, Any]) -> str:
    """Return what a recorded call is found by: all of it but the model."""
    return canonical_json(recorded_call(call))


def recorded_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as it is recorded."""
    return {key: value for key, value in call.items() if key not in {"model", "model_args"}}


def write_answers(cursor: Any, store: Store, path: Path) -> int:
    """Write the best stored answer to each prompt; return how many there are.

    Errors that another run would ask again are left out.

    Raises:
        StoreError: nothing is stored, or not what was asked (`keep_prompts: false`), or the file
            cannot be written.
    """
    _, relation = read_newest(cursor, store)
    if relation is None:
        raise StoreError(f"There is nothing to record: no answer is stored in {store.files}.")
    stored = f"select * from {relation} where {lasting()}"
    if sql.scalar(cursor, f"select count(*) from ({stored}) where prompt is null"):
        raise StoreError(
            f"The store {store.files} has answers without their prompts, so they cannot be "
            "recorded. Set store.keep_prompts to true, and ask for them again with llm_refresh."
        )
    answers = cursor.execute(
        f"select call, prompt, {', '.join(_ANSWER)} from ({stored}) "
        f"qualify row_number() over ({BEST_FIRST}) = 1 order by call_hash, prompt"
    )
    written = 0
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with hidden.open("w", encoding="utf-8") as file:
            while rows := answers.fetchmany(_BATCH_ROWS):
                file.writelines(_line(row) for row in rows)
                written += len(rows)
        hidden.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}.") from error
    finally:
        hidden.unlink(missing_ok=True)
    return written


def _line(row: tuple[Any, ...]) -> str:
    call, prompt, *answer = row
    line = {"call": recorded_call(json.loads(call)), "prompt": prompt}
    line |= {name: value for name, value in zip(_ANSWER, answer, strict=True) if value is not None}
    return json.dumps(line, ensure_ascii=False) + "\n"
