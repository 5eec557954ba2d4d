import asyncio
import hashlib
import json
import time

import pyarrow as pa
import pytest

from dbt_llm.config import ReplayLLM
from dbt_llm.engine import start_engine
from dbt_llm.engine_replay import ReplayEngine, made_up_answer
from dbt_llm.errors import EngineError
from dbt_llm.schema import ANSWERS
from tests.unit.generations import call_of, key, requests_of

PROMPTS = [f"prompt {i}" for i in range(50)]


def config(**entry):
    return ReplayLLM(engine="replay", **entry).model_dump(mode="json")


def answer(prompts, call=None, **entry):
    """Return the answers as rows, in the order in which they came."""
    call = call or call_of()
    tables = []

    async def run():
        engine = start_engine(config(**entry), {})
        await engine.answer(requests_of(prompts, call), call.content, tables.append)
        await engine.close()

    asyncio.run(run())
    assert all(table.schema == ANSWERS for table in tables)
    return pa.concat_tables(tables).to_pylist()


def outputs(prompts, **entry):
    """Return the output of every prompt, in the prompts' order."""
    by_hash = {row["prompt_hash"]: row["output"] for row in answer(prompts, **entry)}
    return [by_hash[key(prompt)] for prompt in prompts]


def test_a_made_up_answer_is_the_beginning_of_the_prompts_sha256():
    digest = hashlib.sha256("größe".encode()).hexdigest()
    assert made_up_answer("größe") == f"replay {digest[:12]}"
    assert outputs(["größe", "b"]) == [f"replay {digest[:12]}", "replay 3e23e8160039"]


def test_answers_are_deterministic():
    assert answer(PROMPTS) == answer(PROMPTS)


@pytest.mark.parametrize("entry", [{}, {"rules": [{"prompt": "no such"}]}])
def test_every_request_is_answered_once_in_shuffled_order(entry):
    hashes = [row["prompt_hash"] for row in answer(PROMPTS, **entry)]
    assert sorted(hashes) == sorted(key(prompt) for prompt in PROMPTS)
    assert hashes != [key(prompt) for prompt in PROMPTS]


def test_an_unscripted_answer_has_these_fields():
    (row,) = answer(["12345678"])
    assert row == {
        "prompt_hash": key("12345678"),
        "output": made_up_answer("12345678"),
        "embedding": None,
        "status": "ok",
        "error_code": None,
        "error": None,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "tokens_estimated": False,
        "latency_s": 0.0,
        "attempts": 1,
    }


def test_no_request_gives_no_answer():
    assert answer([]) == []


def test_choices_are_chosen_by_the_prompt():
    labels = ["red", "green", "blue"]
    call = call_of(choices=labels)
    rows = {row["prompt_hash"]: row["output"] for row in answer(PROMPTS, call)}
    expected = {
        key(p, choices=labels): labels[int(hashlib.sha256(p.encode()).hexdigest()[:8], 16) % 3]
        for p in PROMPTS
    }
    assert rows == expected
    assert set(rows.values()) == set(labels)


def test_the_first_rule_that_fits_decides_and_an_exact_one_before_all():
    rules = [
        {"contains": "cat", "output": "meow"},
        {"contains": "dog", "output": "woof"},
        {"prompt": "a cat", "output": "exactly"},
        {"prompt": "a cat", "output": "too late"},
    ]
    prompts = ["a cat", "two cats", "a dog", "cat and dog", "cow"]
    assert outputs(prompts, rules=rules) == [
        "exactly",
        "meow",
        "woof",
        "meow",
        made_up_answer("cow"),
    ]


def test_a_rule_without_condition_fits_every_prompt():
    assert outputs(["a", "b"], rules=[{"output": "same"}]) == ["same", "same"]


def test_an_empty_output_is_an_answer():
    assert outputs(["a"], rules=[{"prompt": "a", "output": ""}]) == [""]


def test_a_rule_with_an_error_code_fails_its_prompts():
    rules = [
        {"contains": "long", "error_code": "context_length"},
        {"contains": "odd", "error_code": "invalid_output", "error": "no JSON", "output": "{"},
    ]
    rows = {row["prompt_hash"]: row for row in answer(["long", "odd", "fine"], rules=rules)}
    fields = ("status", "error_code", "error", "output")
    assert [tuple(rows[key(p)][f] for f in fields) for p in ("long", "odd", "fine")] == [
        ("error", "context_length", "scripted error context_length", None),
        ("error", "invalid_output", "no JSON", "{"),
        ("ok", None, None, made_up_answer("fine")),
    ]


def test_otherwise_error_fails_what_no_rule_fits():
    rows = answer(["a", "b"], rules=[{"prompt": "a", "output": "A"}], otherwise="error")
    found = {row["prompt_hash"]: (row["output"], row["error_code"]) for row in rows}
    assert found == {key("a"): ("A", None), key("b"): (None, "invalid_request")}


def test_a_delay_keeps_back_its_own_prompt_only():
    rows = answer(["slow", "fast"], rules=[{"prompt": "slow", "delay_s": 0.05}])
    assert [row["prompt_hash"] for row in rows] == [key("fast"), key("slow")]
    assert rows[1]["latency_s"] >= 0.05


def test_concurrency_limits_the_answers_under_way():
    started = time.monotonic()
    answer([str(i) for i in range(6)], latency_s=0.02, concurrency=2)
    assert time.monotonic() - started >= 0.06


def test_answers_are_read_from_a_file_after_the_rules(tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = [{"prompt": "a", "output": "file"}, {"contains": "b", "output": "größe"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text(text, encoding="utf-8")
    rules = [{"prompt": "a", "output": "rule"}]
    assert outputs(["a", "ab"], answers=str(path), rules=rules) == ["rule", "größe"]


@pytest.mark.parametrize("line", ["{", '{"promt": "a"}', "5", '{"delay_s": -1}'])
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "a", "output": "A"}\n\n' + line)
    with pytest.raises(EngineError) as raised:
        ReplayEngine(config(answers=str(path)))
    assert str(raised.value).startswith(f"The replay answers {path}, line 3, are no rule: ")


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "none.jsonl"
    with pytest.raises(EngineError) as raised:
        ReplayEngine(config(answers=str(path)))
    assert str(raised.value) == (
        f"The replay answers {path} cannot be read: No such file or directory."
    )


def test_an_unknown_error_code_is_refused():
    with pytest.raises(EngineError, match="has the error code 'oops'; use one of context_length,"):
        ReplayEngine(config(rules=[{"error_code": "oops"}]))
