"""Typed columns from a real LLM: constrained decoding and embeddings (SmolLM2, vLLM, CPU).

Reports from the field: 18 and 19.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import WEIGHTS
from tests.project import Project

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("weights")]

TICKETS = (
    "'My parcel number ' || i || ' has not arrived after ' || (i % 9 + 2) || ' days. ' || "
    "['Please send it again.', 'I want my money back.', 'Where is it?'][i % 3 + 1]"
)


@pytest.fixture
def project(vllm_project: Callable[[int], Project]) -> Project:
    return vllm_project(96)


def test_two_hundred_classifications_are_all_labels(project: Project) -> None:
    labels = "['delivery', 'refund', 'line\nbreak']"
    project.model(
        "classified",
        f"select i, llm_classify({TICKETS}, {labels}) as topic, "
        f"llm_filter({TICKETS}, 'Does the customer want money back?') as wants_refund "
        "from range(200) t(i)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query(
        f"select count(*), count(*) filter (list_contains({labels}, topic)), count(wants_refund), "
        "any_value(typeof(topic)), any_value(typeof(wants_refund)) from classified"
    ) == [(200, 200, 200, "VARCHAR", "BOOLEAN")]


def test_a_hundred_extractions_all_parse(project: Project) -> None:
    fields = '{"parcel":"INTEGER","days":"INTEGER","wish":"VARCHAR(60)","angry":"BOOLEAN"}'
    project.model(
        "extracted",
        f"select i, llm_extract({TICKETS}, '{fields}') as facts from range(100) t(i)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query(
        "select count(*), count(facts), any_value(typeof(facts)) from extracted"
    ) == [(100, 100, 'STRUCT(parcel INTEGER, "days" INTEGER, wish VARCHAR, angry BOOLEAN)')]
    # A small model, but it reads the number that stands in the text.
    ((right,),) = project.query("select count(*) from extracted where facts.parcel = i")
    assert right >= 50


def test_truncated_json_is_null_and_kept_in_the_store(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    project.model(
        "extracted",
        "select llm_extract('A long story about a lost parcel.', "
        '\'{"summary":"VARCHAR"}\', max_tokens := 3) as facts',
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select facts from extracted") == [(None,)]
    ((code, output),) = project.generations("error_code, output")
    assert code == "truncated"
    assert output.startswith("{")


def test_long_text_is_cut_where_the_profile_says_so(project: Project) -> None:
    project.llms["default"]["on_long_prompt"] = "truncate"
    project.model(
        "answers",
        "select llm_details(repeat('word ', 5000), max_tokens := 4) as d, "
        "llm_classify(repeat('parcel ', 5000), ['delivery', 'refund']) as topic",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    ((status, tokens, topic),) = project.query(
        "select d.status, d.prompt_tokens, topic from answers"
    )
    assert status == "ok"
    assert 1000 <= tokens <= 1020
    assert topic in {"delivery", "refund"}


def test_embeddings_are_vectors_of_one_dimension(project: Project) -> None:
    project.llms["embedder"] = {
        "engine": "vllm",
        "model": str(WEIGHTS),
        "engine_args": {"max_model_len": 512, "runner": "pooling", "convert": "embed"},
    }
    project.model(
        "embedded",
        "select i, text, llm_embed(text, model := 'embedder') as v from (values "
        "(1, 'The parcel is late.'), (2, 'My parcel has not arrived yet.'), "
        "(3, 'How do I reset my password?'), (4, 'The parcel is late.'), (5, null)) t(i, text)",
    )
    project.model(
        "nearest",
        "select a.i, arg_max(b.i, list_cosine_similarity(a.v, b.v)) as nearest "
        "from {{ ref('embedded') }} a join {{ ref('embedded') }} b "
        "on a.text is distinct from b.text where a.i in (1, 2) and b.v is not null group by a.i",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query(
        "select typeof(v), len(v), count(*) from embedded group by all order by 2 nulls last"
    ) == [("FLOAT[]", 576, 4), ("FLOAT[]", None, 1)]
    assert project.query(
        "select a.v = b.v from embedded a, embedded b where a.i = 1 and b.i = 4"
    ) == [(True,)]
    assert project.generations("count(*), count(embedding), count(output)") == [(3, 3, 0)]
    assert set(project.query("select i from nearest where i = 1 and nearest = 2")) == {(1,)}


def test_function_of_another_kind_of_llm_is_refused(project: Project) -> None:
    project.model("answers", "select llm_embed('x') as v")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "llm_embed needs an LLM with engine_args" in outcome.log


def test_json_that_loops_on_spaces_is_cut_and_asked_once(project: Project) -> None:
    # The bias makes the model write line breaks and spaces wherever the schema lets it.
    extra = {"logit_bias": {"198": 100, "216": 100}}
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
    }
    project.model(
        "answers",
        "select llm_generate('Name a colour.', max_tokens := 40, "
        f"json_schema := '{json.dumps(schema)}', extra := '{json.dumps(extra)}') as r",
    )
    # By default there are no such spaces in JSON.
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    ((answer,),) = project.query("select r from answers")
    assert json.loads(answer)["colour"] in {"red", "blue"}

    project.config["max_error_ratio"] = 1.0
    project.config["store"]["path"] = str(project.folder / "lake" / "loops")
    project.llms["default"]["engine_args"]["structured_outputs_config"] = {"backend": "xgrammar"}
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select r from answers") == [(None,)]
    ((code, attempts, tokens, output),) = project.generations(
        "error_code, attempts, completion_tokens, output"
    )
    assert (code, attempts, tokens) == ("truncated", 1, 40)
    assert len(output) - len("".join(output.split())) > 30
    assert project.dbt("run").summary("answers") == "1 prompt, 1 stored, 0 generated"


def test_text_that_is_too_long_to_embed_fails_or_is_cut(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    embedder: dict[str, Any] = {
        "engine": "vllm",
        "model": str(WEIGHTS),
        "engine_args": {"max_model_len": 512, "runner": "pooling", "convert": "embed"},
    }
    project.llms["embedder"] = embedder
    project.model(
        "embedded",
        "select i, llm_embed(text, model := 'embedder') as v from (values "
        "(1, 'The parcel is late.'), (2, repeat('word ', 5000)), (3, 'Hello.')) t(i, text)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("embedded").startswith("3 prompts, 0 stored, 2 generated, 1 failed")
    assert project.query("select i, len(v) from embedded order by i") == [
        (1, 576),
        (2, None),
        (3, 576),
    ]
    ((code, error),) = project.generations("error_code, error", "status <> 'ok'")
    assert code == "context_length"
    assert "max_model_len is 512" in error
    assert project.dbt("run").summary("embedded") == "3 prompts, 3 stored, 0 generated"

    # The option is part of the key, so all three are asked again.
    embedder["on_long_prompt"] = "truncate"
    outcome = project.dbt("run")
    assert outcome.summary("embedded").startswith("3 prompts, 0 stored, 3 generated, ")
    assert project.query("select count(v), min(len(v)) from embedded") == [(3, 576)]
    assert project.generations("prompt_tokens", "status = 'ok' and prompt like 'word%'") == [(511,)]


def test_a_template_without_a_system_role_has_the_system_prompt_in_the_users_turn(
    project: Project,
) -> None:
    project.write(
        "user only.jinja",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n",
    )
    template = str(project.folder / "user only.jinja")
    project.llms["default"]["engine_args"]["chat_template"] = template
    pirate, question = "You are a pirate.", "What is the capital of France?"
    project.model(
        "answers",
        f"select llm_details('{question}', system := '{pirate}') as told, "
        f"llm_details('{pirate}\n\n{question}') as asked, llm_details('{question}') as plain",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    ((told, asked, plain),) = project.query("select told, asked, plain from answers")
    assert [d["status"] for d in (told, asked, plain)] == ["ok", "ok", "ok"]
    assert told["prompt_tokens"] == asked["prompt_tokens"] > plain["prompt_tokens"]
    assert told["output"] == asked["output"]
    # The model's own template has a system prompt of its own; this one has none.
    assert plain["prompt_tokens"] < 20
    assert "Paris" in plain["output"]


def test_a_template_that_is_not_there_is_named(project: Project) -> None:
    project.llms["default"]["engine_args"]["chat_template"] = "no/such.jinja"
    project.model("answers", "select llm_generate('x') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "The chat template 'no/such.jinja' does not exist" in outcome.log
