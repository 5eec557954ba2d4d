import json
import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm.check import OutputCheck, without_reasoning
from dbt_llm.fields import fields_schema
from dbt_llm.schema import ANSWERS, ERROR_CODES, Answer, answers_table

LABELS = ["positive", "negative"]
TEXT = {"type": "text"}
FIELDS = {
    "type": "json",
    "schema": fields_schema({"name": "VARCHAR", "ages": "INTEGER[]", "home": {"city": "VARCHAR"}}),
}
ALICE = '{"name": "Alice", "ages": [3, 4], "home": {"city": null}}'
UNFINISHED = "the answer ended within its reasoning"


def choice(*choices):
    return {"type": "choice", "choices": list(choices)}


def checked(output, text, finish_reason="stop"):
    """Check one answer; return its output, error code and error."""
    answer = Answer(
        "h",
        output=text,
        finish_reason=finish_reason,
        prompt_tokens=5,
        completion_tokens=7,
        latency_s=0.5,
        attempts=2,
    )
    before = answers_table([answer])
    after = OutputCheck({"output": output}).apply(before)
    assert after.schema == ANSWERS
    changed = {"output", "status", "error_code", "error"}
    kept = [name for name in ANSWERS.names if name not in changed]
    assert after.select(kept) == before.select(kept)
    (row,) = after.to_pylist()
    assert row["status"] == ("ok" if row["error_code"] is None else "error")
    assert row["error_code"] in {None, *ERROR_CODES}
    return row["output"], row["error_code"], row["error"]


# Choices


@pytest.mark.parametrize(
    "text",
    [
        "positive",
        "Positive.",
        " positive\n",
        '"POSITIVE"',
        "**positive**",
        "'positive'",
        "`Positive`",
    ],
)
def test_a_choice_is_read_through_case_spaces_and_marks(text):
    assert checked(choice(*LABELS), text) == ("positive", None, None)


@pytest.mark.parametrize(
    "text",
    ["neutral", "The sentiment is positive", "", " ", ".", '"', "pos", "positive negative", "null"],
)
def test_what_is_no_choice_is_an_error_that_keeps_what_was_said(text):
    assert checked(choice(*LABELS), text) == (
        text,
        "invalid_output",
        "the answer is none of the choices",
    )


@pytest.mark.parametrize("text", ["", "The sentiment is"])
def test_a_choice_that_was_cut_is_truncated(text):
    assert checked(choice(*LABELS), text, "length") == (
        text,
        "truncated",
        "max_tokens was reached before a choice was made",
    )


def test_a_choice_that_was_made_before_the_cut_counts():
    assert checked(choice(*LABELS), "Positive.", "length") == ("positive", None, None)


@pytest.mark.parametrize("label", ["Very Good", " spaced ", "good.", "C++", "?!", "größe", "真"])
def test_the_label_is_given_as_it_was_written(label):
    for text in (label, label.upper(), f'"{label}"', f" {label}\n"):
        assert checked(choice("other", label), text) == (label, None, None)


def test_a_label_of_marks_alone_is_read_through_spaces():
    assert checked(choice("other", "*"), " *\n") == ("*", None, None)


@pytest.mark.parametrize("text", ["a\nb", '"a\\nb"', "A\nB."])
def test_a_label_with_a_line_break_may_come_as_a_json_string(text):
    assert checked(choice("a\nb", "c"), text) == ("a\nb", None, None)


@pytest.mark.parametrize("label", ['say "hi"', '"', "\\", "\t", 'a"'])
def test_a_label_with_characters_that_json_escapes_is_read_from_a_json_string(label):
    assert checked(choice("other", label), json.dumps(label)) == (label, None, None)


@given(
    labels=st.lists(
        st.text("ab C", min_size=1), min_size=1, unique_by=lambda c: c.strip().casefold()
    )
)
def test_every_label_is_read_as_itself(labels):
    for label in labels:
        assert checked(choice(*labels), label) == (label, None, None)


@pytest.mark.parametrize("labels", [["C", "C*"], ["C*", "C"], ["yes", "yes!"], ["5", "5*", "5**"]])
def test_labels_that_differ_in_marks_alone_stay_apart(labels):
    assert [checked(choice(*labels), label)[0] for label in labels] == labels


# JSON


@pytest.mark.parametrize(
    "text",
    [
        ALICE,
        f" {ALICE}\n",
        f"```json\n{ALICE}\n```",
        f"```\n{ALICE}\n```",
        f"```JSON\n{ALICE}```\n",
        f"\n\n```json \n{ALICE}\n\n```\n",
    ],
)
def test_json_is_taken_from_a_code_fence(text):
    assert [s and s.strip() for s in checked(FIELDS, text)] == [ALICE, None, None]


def test_a_code_fence_within_a_value_stays():
    value = '{"name": "```sql\\nselect 1\\n```", "ages": [], "home": null}'
    assert checked(FIELDS, f"```json\n{value}\n```") == (value, None, None)


@pytest.mark.parametrize(
    "text", ["", "Alice", "{'name': 1}", f"Here: {ALICE}", f"{ALICE}, {ALICE}"]
)
def test_what_is_no_json_is_an_error_that_keeps_what_was_said(text):
    output, code, error = checked(FIELDS, text)
    assert (output, code) == (text, "invalid_output")
    assert error.startswith("the answer is no JSON: ")


@pytest.mark.parametrize(
    "text", ["", ALICE[:-1], "```json\n" + ALICE[:20], '{"name":' + " \n\t" * 99, "\n" * 99]
)
def test_json_that_was_cut_is_truncated(text):
    assert checked(FIELDS, text, "length") == (
        text,
        "truncated",
        "max_tokens was reached before the JSON was complete",
    )


def test_json_that_was_complete_before_the_cut_counts():
    assert checked(FIELDS, ALICE, "length") == (ALICE, None, None)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"name": 5, "ages": [], "home": null}', "name does not fit the schema (anyOf)"),
        ('{"name": "A", "ages": 3, "home": null}', "ages does not fit the schema (anyOf)"),
        ('{"name": "A", "ages": []}', "the answer does not fit the schema (required)"),
        (
            '{"name": "A", "ages": [], "home": null, "x": 1}',
            "the answer does not fit the schema (additionalProperties)",
        ),
        ("[]", "the answer does not fit the schema (type)"),
        ("null", "the answer does not fit the schema (type)"),
    ],
)
def test_json_that_does_not_fit_names_the_field(text, where):
    assert checked(FIELDS, text) == (text, "invalid_output", where)


def test_a_nested_field_that_does_not_fit_is_named_by_its_path():
    schema = {"properties": {"a": {"items": {"properties": {"b": {"type": "integer"}}}}}}
    text = '{"a": [{"b": 1}, {"b": "x"}]}'
    assert checked({"type": "json", "schema": schema}, text) == (
        text,
        "invalid_output",
        "a/1/b does not fit the schema (type)",
    )


# DuckDB raises on it, so one such row would fail every later run of the model.
@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\ud800x"])
def test_json_that_duckdb_cannot_read_is_invalid(half):
    text = f'{{"name": "{half}", "ages": [], "home": null}}'
    assert checked(FIELDS, text)[:2] == (text, "invalid_output")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_number_that_json_does_not_know_is_invalid(number):
    text = f'{{"a": {number}}}'
    output = {"type": "json", "schema": {"type": "object"}}
    assert checked(output, text)[:2] == (text, "invalid_output")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000])
def test_json_nested_too_deeply_is_invalid(text):
    assert checked(FIELDS, text)[:2] == (text, "invalid_output")


# Reasoning


@pytest.mark.parametrize(
    ("output", "said", "answer"),
    [
        (TEXT, "Two apples.\n", "Two apples.\n"),
        (choice(*LABELS), "Positive.", "positive"),
        (FIELDS, ALICE, ALICE),
        (FIELDS, f"```json\n{ALICE}\n```", ALICE),
    ],
)
@pytest.mark.parametrize(
    "reasoning",
    ["<think>Let me see: {}, negative.</think>\n\n", "\n<think>\n\n</think>", "Hm. </think> "],
)
def test_reasoning_before_an_answer_is_removed(output, said, answer, reasoning):
    assert checked(output, reasoning + said) == (answer, None, None)


@pytest.mark.parametrize("output", [TEXT, choice(*LABELS), FIELDS])
@pytest.mark.parametrize("finish_reason", ["length", "stop"])
@pytest.mark.parametrize("text", ["<think>", "\n<think>The positive side"])
def test_reasoning_without_an_end_is_truncated(output, finish_reason, text):
    assert checked(output, text, finish_reason) == (text, "truncated", UNFINISHED)


def test_an_error_after_reasoning_keeps_the_reasoning():
    text = "<think>Hm.</think> neutral"
    assert checked(choice(*LABELS), text)[:2] == (text, "invalid_output")


@given(text=st.text().filter(lambda text: "think>" not in text))
def test_text_without_reasoning_is_as_it_was(text):
    assert without_reasoning(text) == text


def test_a_mention_of_the_mark_is_no_reasoning():
    assert checked(TEXT, "Write <think> first.") == ("Write <think> first.", None, None)


# Tables


@pytest.mark.parametrize("texts", [[], ["a", " b\n"], [""]])
def test_text_without_reasoning_is_the_very_table(texts):
    table = answers_table([Answer(str(i), output=text) for i, text in enumerate(texts)])
    assert OutputCheck({"output": TEXT}).apply(table) is table


def test_an_answer_without_a_text_is_an_error():
    table = answers_table([Answer("h"), Answer("i", output="a")])
    rows = OutputCheck({"output": TEXT}).apply(table).to_pylist()
    assert [row["error_code"] for row in rows] == ["invalid_output", None]
    assert rows[0]["status"] == "error"


def test_embeddings_keep_their_numbers():
    table = answers_table([Answer("h", embedding=[1.0, 2.0], output="<think>")])
    assert OutputCheck({"output": {"type": "embedding"}}).apply(table).equals(table)


@pytest.mark.parametrize(
    "embedding", [None, [], [1.0, math.nan], [math.inf], [-math.inf, 0.0], [1e300], [None]]
)
def test_an_embedding_that_is_none_is_an_error(embedding):
    table = answers_table([Answer("h", embedding=embedding)])
    (row,) = OutputCheck({"output": {"type": "embedding"}}).apply(table).to_pylist()
    assert (row["status"], row["error_code"]) == ("error", "invalid_output")


def test_embeddings_of_one_run_have_one_length():
    check = OutputCheck({"output": {"type": "embedding"}})
    sizes = {"a": 2, "b": 3, "c": 2}
    codes = {}
    for key, size in sizes.items():
        table = answers_table([Answer(key, embedding=[1.0] * size)])
        (row,) = check.apply(table).to_pylist()
        codes[key] = (row["error_code"], row["error"])
    wrong = "the embedding has 3 numbers, the first of this run 2"
    assert codes == {"a": (None, None), "b": ("server_error", wrong), "c": (None, None)}


@pytest.mark.parametrize("output", [TEXT, choice(*LABELS), FIELDS])
def test_errors_of_the_engine_stay_as_they_are(output):
    table = answers_table(
        [
            Answer("1", output="<think>Positive.", error_code="timeout", error="late"),
            Answer("2", error_code="context_length", error="long", prompt_tokens=9),
        ]
    )
    assert OutputCheck({"output": output}).apply(table) == table


def test_rows_keep_their_order_and_their_keys():
    said = ["Positive.", "neutral", None, "negative"]
    table = answers_table([Answer(f"h{i}", output=text) for i, text in enumerate(said)])
    checked_table = OutputCheck({"output": choice(*LABELS)}).apply(table)
    assert checked_table.select(["prompt_hash", "output", "status"]).to_pylist() == [
        {"prompt_hash": "h0", "output": "positive", "status": "ok"},
        {"prompt_hash": "h1", "output": "neutral", "status": "error"},
        {"prompt_hash": "h2", "output": None, "status": "error"},
        {"prompt_hash": "h3", "output": "negative", "status": "ok"},
    ]


def test_a_table_in_chunks_is_checked_as_one():
    parts = [answers_table([Answer(str(i), output="POSITIVE")]) for i in range(3)]
    result = OutputCheck({"output": choice(*LABELS)}).apply(pa.concat_tables(parts))
    assert result["output"].to_pylist() == ["positive"] * 3
