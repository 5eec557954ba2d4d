import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm.call import canonical_json, make_call, prompt_hash, sha256_hex
from dbt_llm.config import load_config
from dbt_llm.errors import CallError
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
        ({"choices": ["a", "a"]}, "choices: holds a choice twice (got ['a', 'a'])"),
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
    with pytest.raises(CallError, match="gives both choices and json_schema; give one"):
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
