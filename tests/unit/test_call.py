import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm.call import canonical_json, make_call, prompt_hash, sha256_hex, user_turn
from dbt_llm.config import load_config
from dbt_llm.errors import CallError
from dbt_llm.fields import fields_schema
from tests.unit.generations import LLMS, call_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


def llms(**entry):
    return load_config({"llms": {"default": {"engine": "replay", **entry}}}).llms


def call_hash(options_json, entries=LLMS):
    return make_call(options_json, entries).call_hash


# A changed hash would lose every stored answer of every user.
def test_the_keys_of_stored_answers_never_change():
    call = call_of()
    assert call.llm == "default"
    assert call.text == (
        '{"model":"replay","output":{"type":"text"},'
        '"sampling":{"max_tokens":512,"temperature":0.0}}'
    )
    assert call.call_hash == "858b530c853f475b382d0791c0e288da2993e7cab799e8c58c4af56633433b0b"
    assert prompt_hash(call.call_hash, "héllo\0") == (
        "aa82ff45912e0c6a9b169dd1d628db72738f8486e90bd003b7a953cccbdd7a47"
    )


def test_a_call_with_all_options_has_this_canonical_text():
    call = call_of(
        system="Be brief.",
        max_tokens=16,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        stop="\n",
        json_schema={"type": "object"},
        extra={"top_k": 5},
    )
    assert call.text == (
        '{"model":"replay","output":{"schema":{"type":"object"},"type":"json"},'
        '"sampling":{"extra":{"top_k":5},"max_tokens":16,"seed":7,"stop":["\\n"],'
        '"temperature":0.5,"top_p":0.9},"system":"Be brief."}'
    )


def test_content_is_the_parsed_text():
    assert call_of(choices=["yes", "no"]).content == {
        "model": "replay",
        "output": {"type": "choice", "choices": ["yes", "no"]},
        "sampling": {"max_tokens": 512, "temperature": 0.0},
    }


def test_prompt_hash_is_sha256_over_call_hash_and_prompt():
    assert prompt_hash("c" * 64, "é") == hashlib.sha256(b"c" * 64 + b"\xc3\xa9").hexdigest()
    assert sha256_hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(("one", "two"), [("e\u0301", "\u00e9"), ("a ", "a"), ("A", "a")])
def test_prompts_are_hashed_as_they_are(one, two):
    assert prompt_hash("c", one) != prompt_hash("c", two)


@given(value=JSON)
def test_canonical_json_is_ascii_and_parses_back(value):
    text = canonical_json(value)
    assert text.isascii()
    assert json.loads(text) == value


@given(value=st.dictionaries(st.text(), st.integers()))
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@pytest.mark.parametrize(
    "option",
    [
        {"model": "other"},
        {"system": "s"},
        {"system": ""},
        {"max_tokens": 9},
        {"temperature": 0.5},
        {"top_p": 1.0},
        {"seed": 0},
        {"stop": "a"},
        {"stop": ["a", "b"]},
        {"choices": ["a", "b"]},
        {"choices": ["b", "a"]},
        {"json_schema": {}},
        {"json_schema": {"type": "object"}},
        {"extra": {"top_k": 1}},
        {"extra": {"top_k": 2}},
    ],
)
def test_every_option_has_a_hash_of_its_own(option):
    others = [
        {},
        {"model": "other", "seed": 1},
        {"system": "t"},
        {"max_tokens": 10},
        {"temperature": 0.6},
        {"top_p": 0.9},
        {"seed": 1},
        {"stop": ["a", "c"]},
        {"choices": ["a", "b", "c"]},
        {"json_schema": {"type": "array"}},
        {"extra": {"top_p": 1}},
    ]
    assert call_of(**option).call_hash not in {call_of(**other).call_hash for other in others}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ('{"temperature": 0}', '{"temperature": 0.0}'),
        ('{"temperature": -0.0}', '{"temperature": 0.0}'),
        ('{"temperature": 0.10}', '{"temperature": 1e-1}'),
        ('{"temperature": 0}', "{}"),
        ('{"max_tokens": 512}', "{}"),
        ('{"top_p": 1}', '{"top_p": 1.0}'),
        ('{"stop": "a"}', '{"stop": ["a"]}'),
        ('{"system": null, "seed": null}', "{}"),
        ('{"json_schema": {"a": 1, "b": 2}}', '{"json_schema": "{ \\"b\\": 2, \\"a\\": 1 }"}'),
        ('{"extra": {"a": "é"}}', '{"extra": "{\\"a\\":\\"\\\\u00e9\\"}"}'),
    ],
)
def test_equal_values_written_differently_have_one_hash(one, two):
    first, second = ({"model": "default", **json.loads(text)} for text in (one, two))
    assert call_hash(json.dumps(first)) == call_hash(json.dumps(second))


def test_a_renamed_llm_keeps_its_answers():
    renamed = load_config({"llms": {"small": {"engine": "replay"}}}).llms
    assert call_hash('{"model": "small"}', renamed) == call_of().call_hash


def test_the_defaults_of_the_profile_are_part_of_the_key():
    warm = llms(sampling={"temperature": 0.5}, system="Be brief.")
    assert call_hash('{"model": "default"}', warm) == (
        call_of(temperature=0.5, system="Be brief.").call_hash
    )


def test_a_call_overrides_the_defaults_of_the_profile():
    warm = llms(sampling={"temperature": 0.5, "stop": ["x"]}, system="Be brief.")
    call = make_call('{"model": "default", "temperature": 0, "system": "", "stop": "y"}', warm)
    assert call.content["sampling"] == {"max_tokens": 512, "stop": ["y"], "temperature": 0.0}
    assert call.content["system"] == ""


def test_settings_that_do_not_change_answers_are_not_part_of_the_key():
    entry = {"replicas": 3, "price": {"prompt": 1}, "latency_s": 1, "concurrency": 2}
    assert call_hash('{"model": "default"}', llms(**entry)) == call_of().call_hash


def test_engine_arguments_that_choose_weights_or_template_are_part_of_the_key():
    def vllm(**arguments):
        entry = {"engine": "vllm", "model": "replay", "engine_args": arguments}
        return load_config({"llms": {"default": entry}}).llms

    options = '{"model": "default"}'
    assert call_hash(options, vllm(max_model_len=9, dtype="float32")) == call_of().call_hash
    assert make_call(options, vllm(revision="r", dtype="x")).content["model_args"] == {
        "revision": "r"
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"temperature": "hot"}, "temperature: Input should be a valid number (got 'hot')"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0 (got -1.0)"),
        ({"temperature": True}, "temperature: Input should be a valid number (got True)"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than 0 (got 0)"),
        ({"max_tokens": 1.5}, "max_tokens: Input should be a valid integer (got 1.5)"),
        ({"top_p": 2}, "top_p: Input should be less than or equal to 1 (got 2.0)"),
        ({"seed": "x"}, "seed: Input should be a valid integer (got 'x')"),
        ({"system": 5}, "system: Input should be a valid string (got 5)"),
        ({"choices": []}, "choices: is an empty list; give at least one choice (got [])"),
        ({"choices": ["a", None]}, "choices.1: Input should be a valid string (got None)"),
        (
            {"choices": ["a", "a"]},
            "choices: holds a choice twice, but for case and spaces (got ['a', 'a'])",
        ),
        ({"json_schema": "{"}, "json_schema: is no valid JSON (got '{')"),
        ({"json_schema": "[]"}, "json_schema: Input should be a valid dictionary (got [])"),
        ({"extra": "5"}, "extra: Input should be a valid dictionary (got 5)"),
        ({"tempature": 1}, "tempature: Extra inputs are not permitted (got 1)"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_value(options, problem):
    with pytest.raises(CallError) as raised:
        call_of(**options)
    assert str(raised.value) == f"A call of an LLM function has a wrong option: {problem}."


def test_all_wrong_options_are_reported_together():
    with pytest.raises(CallError) as raised:
        call_of(seed="x", stop=5)
    assert "seed: Input should be a valid integer (got 'x')" in str(raised.value)
    assert "stop: Input should be a valid list (got 5)" in str(raised.value)


def test_an_unknown_llm_is_refused_with_the_known_ones():
    with pytest.raises(CallError) as raised:
        call_of(model="gpt")
    assert str(raised.value) == (
        "A call of an LLM function names the model 'gpt', which is not among the llms of the "
        "profile: default, other."
    )


def test_choices_and_json_schema_exclude_each_other():
    with pytest.raises(CallError, match="choices and json_schema are both given; give one"):
        call_of(choices=["a"], json_schema={})


# An empty list stops nothing, but would be another key, and so another bill.
def test_an_empty_stop_list_is_refused():
    with pytest.raises(CallError, match="stop"):
        call_of(stop=[])


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("number", ["Infinity", "NaN"])
def test_a_number_that_json_does_not_know_is_refused(name, number):
    with pytest.raises(CallError, match=name):
        make_call(f'{{"model": "default", "{name}": {number}}}', LLMS)


@pytest.mark.parametrize("name", ["extra", "json_schema"])
@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": [-Infinity]}'])
def test_json_with_a_number_that_json_does_not_know_is_refused(name, text):
    with pytest.raises(CallError, match=f"{name}: is no valid JSON"):
        call_of(**{name: text})


# The typed functions

KINDS = {
    "classify": {"labels": ["a", "b"]},
    "filter": {"question": "Is it late?"},
    "extract": {"fields": {"name": "VARCHAR", "days": "INTEGER[]"}},
}


def typed(kind, **options):
    return call_of(function=kind, **KINDS.get(kind, {}), **options)


# As above: a changed hash would lose every stored answer of every user.
@pytest.mark.parametrize(
    ("kind", "call_hash"),
    [
        ("classify", "c02780c6fb2f5d3f94e4a01420d0dd62ec23b2cae38d5158b7e9645613b17d8f"),
        ("filter", "dc93e35867edd855d3ec4a407fc3a16a22e18feae6172c2780240e711afbf6a0"),
        ("extract", "9a738ab68699dcad09f856ba0f82099538a3fad36f599cdcb9b600cc1e42ff37"),
        ("embed", "b7c89a87d2bd63f79fcab2f1699f867da95c75dc4f25d61a1b82fc29319410b9"),
    ],
)
def test_the_keys_of_stored_typed_answers_never_change(kind, call_hash):
    assert typed(kind).call_hash == call_hash


def test_llm_generate_is_the_kind_that_need_not_be_named():
    assert call_of(function="generate", seed=1) == call_of(seed=1)


def test_a_classification_is_told_the_instruction_and_the_labels():
    call = call_of(function="classify", labels=["späte", "x y"], instruction="Which topic?").content
    assert user_turn(call, "My\ntext") == (
        "Which topic?\nAnswer with one of these labels: späte, x y\n\nText:\nMy\ntext\n\nLabel:"
    )
    assert call["output"] == {"type": "choice", "choices": ["späte", "x y"]}
    assert user_turn(typed("classify").content, "").startswith("Classify the text.\n")


def test_a_filter_is_told_the_question():
    call = typed("filter").content
    assert user_turn(call, "My text") == (
        "Answer the question about the text with yes or no.\n\n"
        "Question: Is it late?\n\nText:\nMy text\n\nAnswer:"
    )
    assert call["output"] == {"type": "choice", "choices": ["yes", "no"]}


def test_an_extraction_is_told_the_instruction_and_the_fields():
    fields = {"größe": "DOUBLE", "home": {"city": "VARCHAR"}}
    call = call_of(function="extract", fields=fields, instruction="Read the order.").content
    assert user_turn(call, "My text") == (
        "Read the order.\nAnswer with a JSON object of these fields, with null where the "
        'text does not say it: "größe" (number), "home" (object of "city" (text))\n\n'
        "Text:\nMy text\n\nJSON:"
    )
    assert call["output"] == {"type": "json", "schema": fields_schema(fields)}
    assert user_turn(typed("extract").content, "").startswith("Extract the fields from the text.\n")


def test_a_plain_call_says_nothing_but_the_prompt():
    assert user_turn(call_of(choices=["a"]).content, "{} My text\n") == "{} My text\n"


def test_an_embedding_has_nothing_but_its_model():
    profile = llms(system="Be brief.", sampling={"temperature": 1})
    call = make_call('{"function": "embed", "model": "default"}', profile)
    assert call.content == {"model": "replay", "output": {"type": "embedding"}}
    assert call.call_hash == typed("embed").call_hash


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_typed_kinds_take_the_shared_options_too(kind):
    content = typed(kind, system="s", seed=1, max_tokens=9, stop="x", extra={"top_k": 1}).content
    assert content["system"] == "s"
    assert content["sampling"] == {
        "temperature": 0.0,
        "seed": 1,
        "max_tokens": 9,
        "stop": ["x"],
        "extra": {"top_k": 1},
    }


def test_every_option_of_the_typed_kinds_has_a_hash_of_its_own():
    calls = [
        call_of(),
        call_of(choices=["a", "b"]),
        call_of(choices=["yes", "no"]),
        call_of(json_schema=fields_schema({"name": "VARCHAR"})),
        *(
            call_of(function="classify", **options)
            for options in (
                {"labels": ["a", "b"]},
                {"labels": ["b", "a"]},
                {"labels": ["a", "b", "c"]},
                {"labels": ["a, b"]},
                {"labels": ["a", "b"], "instruction": "Which?"},
                {"labels": ["a", "b"], "instruction": ""},
                {"labels": ["a", "b"], "system": "s"},
                {"labels": ["a", "b"], "seed": 1},
                {"labels": ["a", "b"], "model": "other"},
            )
        ),
        call_of(function="filter", question="Late?"),
        call_of(function="filter", question="late?"),
        call_of(function="filter", question="Late?", seed=1),
        *(
            call_of(function="extract", **options)
            for options in (
                {"fields": {"name": "VARCHAR"}},
                {"fields": {"name": "VARCHAR(40)"}},
                {"fields": {"name": "INTEGER"}},
                {"fields": {"name": "BIGINT"}},
                {"fields": {"named": "VARCHAR"}},
                {"fields": {"name": "VARCHAR", "days": "INTEGER"}},
                {"fields": {"days": "INTEGER", "name": "VARCHAR"}},
                {"fields": {"name": "VARCHAR"}, "instruction": "Read."},
            )
        ),
        call_of(function="embed"),
        call_of(function="embed", model="other"),
    ]
    assert len({call.call_hash for call in calls}) == len(calls)


def test_fields_as_text_and_as_an_object_have_one_hash():
    text = '{ "name": "VARCHAR", "days" : "INTEGER[]" }'
    assert call_of(function="extract", fields=text) == typed("extract")


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("classify", {}, "labels: Field required (got {'model': 'default'})"),
        ("classify", {"labels": []}, "labels: is an empty list; give at least one label (got [])"),
        ("classify", {"labels": "a"}, "labels: Input should be a valid list (got 'a')"),
        (
            "classify",
            {"labels": ["a", None]},
            "labels.1: Input should be a valid string (got None)",
        ),
        ("classify", {"labels": ["a", 1]}, "labels.1: Input should be a valid string (got 1)"),
        (
            "classify",
            {"labels": ["a", "A "]},
            "labels: holds a label twice, but for case and spaces (got ['a', 'A '])",
        ),
        (
            "classify",
            {"labels": ["a"], "instruction": 5},
            "instruction: Input should be a valid string (got 5)",
        ),
        (
            "classify",
            {"labels": ["a"], "choices": ["a"]},
            "choices: Extra inputs are not permitted (got ['a'])",
        ),
        ("filter", {}, "question: Field required (got {'model': 'default'})"),
        ("filter", {"question": 5}, "question: Input should be a valid string (got 5)"),
        (
            "filter",
            {"question": "?", "instruction": "x"},
            "instruction: Extra inputs are not permitted (got 'x')",
        ),
        ("extract", {}, "fields: Field required (got {'model': 'default'})"),
        ("extract", {"fields": "{"}, "fields: is no valid JSON (got '{')"),
        ("extract", {"fields": "[]"}, "fields: Input should be a valid dictionary (got [])"),
        (
            "extract",
            {"fields": {}},
            'fields: is no JSON object of fields and types, such as {"name": "VARCHAR"} (got {})',
        ),
        ("embed", {"seed": 1}, "seed: Extra inputs are not permitted (got 1)"),
    ],
)
def test_a_wrong_option_of_a_typed_kind_is_refused(kind, options, problem):
    with pytest.raises(CallError) as raised:
        call_of(function=kind, **options)
    assert str(raised.value) == f"A call of an LLM function has a wrong option: {problem}."


def test_an_unknown_type_of_a_field_is_refused_with_its_name_and_value():
    with pytest.raises(CallError) as raised:
        call_of(function="extract", fields={"a": "BLOB"})
    assert "wrong option: fields: the type 'BLOB' of 'a' is unknown; use " in str(raised.value)
    assert str(raised.value).endswith("(got {'a': 'BLOB'}).")


@pytest.mark.parametrize("kind", ["generate", *KINDS, "embed"])
@pytest.mark.parametrize("engine", ["replay", "vllm"])
def test_what_becomes_of_a_long_prompt_is_part_of_the_key_where_it_is_set(kind, engine):
    def of(**entry):
        options = {"function": kind, "model": "default", **KINDS.get(kind, {})}
        return make_call(json.dumps(options), llms(engine=engine, model="replay", **entry))

    plain = of()
    assert plain == typed(kind)
    assert of(on_long_prompt="error", chat_template_options={}) == plain
    cut = of(on_long_prompt="truncate")
    assert cut.content["model_args"] == {"on_long_prompt": "truncate"}
    silent = of(chat_template_options={"enable_thinking": False})
    assert silent.content["model_args"] == {"chat_template_options": {"enable_thinking": False}}
    loud = of(chat_template_options={"enable_thinking": True})
    assert len({call.call_hash for call in (plain, cut, silent, loud)}) == 4
