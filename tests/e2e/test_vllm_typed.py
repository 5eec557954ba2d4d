"""Typed columns from a real LLM: constrained decoding and embeddings (SmolLM2, vLLM, CPU)."""

from collections.abc import Callable

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
