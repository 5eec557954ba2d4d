"""Typed columns: classify, filter, extract and embed (reports from the field: 5, 6, 9, 18)."""

import json

import pytest

from dbt_llm.engine_replay import made_up_embedding
from tests.project import Project

FIELDS = '{"name": "VARCHAR", "age": "INTEGER", "tags": "VARCHAR[]", "home": {"city": "VARCHAR"}}'
STRUCT = "STRUCT(name VARCHAR, age INTEGER, tags VARCHAR[], home STRUCT(city VARCHAR))"
POSTS = "(values (1, 'good'), (2, 'bad'), (3, 'odd'), (4, null)) t(i, body)"
ALICE = '{"name": "Alice", "age": 30, "tags": ["a", "b"], "home": {"city": null}}'


def script(project: Project, answers: dict[str, str]) -> None:
    """Let the engine answer these prompts so, and refuse all others."""
    rules = [{"prompt": prompt, "output": output} for prompt, output in answers.items()]
    # Not in the profile, where Jinja takes a line break from the end of a text.
    project.write("answers.jsonl", "".join(json.dumps(rule) + "\n" for rule in rules))
    path = str(project.folder / "answers.jsonl")
    project.llms = {"default": {"engine": "replay", "answers": path, "otherwise": "error"}}


def run(project: Project) -> None:
    outcome = project.dbt("run")
    assert outcome.success, outcome.log


def test_each_function_has_the_type_of_its_column(project: Project) -> None:
    project.model(
        "typed",
        "select i, llm_classify(body, ['positive', 'negative']) as mood, "
        "llm_filter(body, 'Is it odd?') as odd, "
        f"llm_extract(body, '{FIELDS}') as facts, llm_embed(body) as v from {POSTS}",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("typed").startswith("12 prompts, 0 stored, 12 generated")
    columns = project.query(
        "select column_name, data_type from information_schema.columns "
        "where table_name = 'typed' order by ordinal_position"
    )
    assert [(name, type_.replace('"', "")) for name, type_ in columns] == [
        ("i", "INTEGER"),
        ("mood", "VARCHAR"),
        ("odd", "BOOLEAN"),
        ("facts", STRUCT),
        ("v", "FLOAT[]"),
    ]
    assert project.query(
        "select i, mood in ('positive', 'negative'), odd is not null, facts is not null, len(v) "
        "from typed order by i"
    ) == [
        (1, True, True, True, 8),
        (2, True, True, True, 8),
        (3, True, True, True, 8),
        (4, None, False, False, None),
    ]

    # A second run finds every answer and asks nothing.
    version = project.version()
    outcome = project.dbt("run")
    assert outcome.summary("typed").startswith("12 prompts, 12 stored, 0 generated")
    assert (project.version(), project.generations("count(*)")) == (version, [(12,)])


def test_answers_are_labels_or_null_and_the_store_keeps_what_was_said(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    said = {
        "a": "Positive.",
        "b": " positive\n",
        "c": "neutral",
        "d": "The sentiment is positive",
    }
    script(project, said)
    project.model(
        "moods",
        "select body, llm_classify(body, ['positive', 'negative']) as mood "
        "from (values ('a'), ('b'), ('c'), ('d')) t(body)",
    )
    project.write(
        "models/moods.yml",
        "models: [{name: moods, columns: [{name: mood, data_tests: "
        "[{accepted_values: {arguments: {values: [positive, negative]}}}]}]}]",
    )
    outcome = project.dbt("build")
    assert outcome.success, outcome.log
    assert sorted(outcome.statuses.values()) == ["pass", "success"]
    assert "2 rows failed with invalid_output" in outcome.log
    assert project.query("select body, mood from moods order by body") == [
        ("a", "positive"),
        ("b", "positive"),
        ("c", None),
        ("d", None),
    ]
    error = ("error", "invalid_output", "the answer is none of the choices")
    assert sorted(project.generations("prompt, output, status, error_code, error")) == [
        ("a", "positive", "ok", None, None),
        ("b", "positive", "ok", None, None),
        ("c", "neutral", *error),
        ("d", "The sentiment is positive", *error),
    ]
    # A wrong answer stays, as it would be given again.
    assert project.dbt("run").summary("moods").startswith("4 prompts, 4 stored, 0 generated")


def test_json_is_read_from_a_fence_and_after_reasoning(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    script(
        project,
        {
            "plain": ALICE,
            "fence": f"```json\n{ALICE}\n```",
            "thought": f'<think>Is it {{"name": "Bob"}}? No.</think>\n\n{ALICE}',
            "both": f"Hm.\n</think>\n```\n{ALICE}\n```\n",
            "prose": "The name is Alice.",
            "wrong": ALICE.replace("30", '"thirty"'),
            "endless": '<think>{"name": "Alice"',
        },
    )
    project.model(
        "facts",
        f"select body, llm_extract(body, '{FIELDS}') as f from (values ('plain'), ('fence'), "
        "('thought'), ('both'), ('prose'), ('wrong'), ('endless')) t(body)",
    )
    run(project)
    alice = json.loads(ALICE)
    assert dict(project.query("select body, f from facts")) == {
        **dict.fromkeys(["plain", "fence", "thought", "both"], alice),
        **dict.fromkeys(["prose", "wrong", "endless"]),
    }
    assert project.query(
        "select f.name, f.tags[2], f.home.city from facts where body = 'both'"
    ) == [("Alice", "b", None)]
    assert sorted(project.generations("prompt, error_code, output", "status = 'error'")) == [
        ("endless", "truncated", '<think>{"name": "Alice"'),
        ("prose", "invalid_output", "The name is Alice."),
        ("wrong", "invalid_output", ALICE.replace("30", '"thirty"')),
    ]
    assert project.generations("error", "prompt = 'wrong'") == [
        ("age does not fit the schema (anyOf)",)
    ]
    assert project.generations("count(*)", f"output = '{ALICE}'") == [(4,)]


def test_ten_rows_of_a_cte_are_ten_structs(project: Project) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    script(project, {f"row {i}": json.dumps({"n": i}) for i in range(100)})
    project.model(
        "structs",
        "with rows as (select i, 'row ' || i as body from range(100) t(i) order by i desc limit 10)"
        f", asked as (select i, llm_generate(body, json_schema := '{json.dumps(schema)}') as r, "
        """llm_extract(body, '{"n": "INTEGER"}') as f from rows) """
        "select i, r::json::struct(n integer) as s, f from asked",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("structs").startswith("20 prompts, 0 stored, 20 generated")
    assert project.query("select i, s, f from structs order by i") == [
        (i, {"n": i}, {"n": i}) for i in range(90, 100)
    ]


def test_json_that_went_on_in_spaces_until_the_cut_is_asked_once(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    said = '{"name":' + " \n" * 60
    project.write(
        "answers.jsonl",
        json.dumps({"prompt": "a", "output": said, "error_code": "truncated"}) + "\n",
    )
    path = str(project.folder / "answers.jsonl")
    project.llms = {"default": {"engine": "replay", "answers": path}}
    project.model("facts", """select llm_extract('a', '{"name": "VARCHAR"}') as f""")
    run(project)
    assert project.query("select f from facts") == [(None,)]
    assert project.generations("error_code, attempts, output") == [("truncated", 1, said)]
    assert project.dbt("run").summary("facts").startswith("1 prompt, 1 stored, 0 generated")


def test_numbers_are_rounded_to_their_type_and_too_large_ones_are_errors(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    said = {
        "rounded": '{"price": 3.14159, "share": 0.1}',
        "large": '{"price": 999.994, "share": 3.4e38}',
        "rounded up": '{"price": 999.995, "share": 0}',
        "price": '{"price": 1000, "share": 0}',
        "share": '{"price": 1, "share": 1e39}',
        "infinite": '{"price": 1, "share": 1e400}',
        "digits": '{"price": 1, "share": 1' + "0" * 400 + "}",
    }
    script(project, said)
    project.model(
        "numbers",
        """select p, llm_extract(p, '{"price": "DECIMAL(5,2)", "share": "FLOAT"}') as f from """
        f"(values {', '.join(f'({p!r})' for p in said)}) t(p)",
    )
    run(project)
    assert project.query(
        "select p, f.price::varchar, f.share from numbers where f is not null"
    ) == [
        ("rounded", "3.14", pytest.approx(0.1)),
        ("large", "999.99", pytest.approx(3.4e38)),
    ]
    assert sorted(project.generations("prompt, error_code, output", "status <> 'ok'")) == sorted(
        (prompt, "invalid_output", said[prompt])
        for prompt in ("rounded up", "price", "share", "infinite", "digits")
    )
    assert project.generations("error", "prompt = 'price'") == [("1000 does not fit its type",)]


def test_reasoning_is_removed_from_plain_text(project: Project) -> None:
    script(project, {"a": "<think>Hm.</think>\n\nTwo.", "b": "Two.\n"})
    project.model("answers", "select p, llm_generate(p) as r from (values ('a'), ('b')) t(p)")
    run(project)
    assert project.query("select p, r from answers order by p") == [("a", "Two."), ("b", "Two.\n")]


def test_a_contract_on_typed_columns_holds(project: Project) -> None:
    project.model(
        "typed",
        "select i, llm_classify(body, ['x', 'y']) as mood, llm_filter(body, 'Odd?') as odd, "
        """llm_extract(body, '{"name": "VARCHAR", "age": "INTEGER"}') as facts, """
        f"llm_embed(body) as v from {POSTS}",
    )
    columns = {"i": "integer", "mood": "varchar", "odd": "boolean", "v": "float[]"}
    columns["facts"] = "struct(name varchar, age integer)"
    project.write(
        "models/typed.yml",
        json.dumps(
            {
                "models": [
                    {
                        "name": "typed",
                        "config": {"contract": {"enforced": True}},
                        "columns": [{"name": n, "data_type": t} for n, t in columns.items()],
                    }
                ]
            }
        ),
    )
    run(project)
    assert project.query("select count(*), count(facts), count(v) from typed") == [(4, 3, 3)]


@pytest.mark.parametrize("wrong", ["boolean", "integer"])
def test_a_contract_that_a_typed_column_breaks_fails_before_anything_is_asked(
    project: Project, wrong: str
) -> None:
    project.model("typed", "select llm_classify('x', ['a', 'b']) as mood")
    project.write(
        "models/typed.yml",
        "models: [{name: typed, config: {contract: {enforced: true}}, "
        f"columns: [{{name: mood, data_type: {wrong}}}]}}]",
    )
    outcome = project.dbt("run")
    assert outcome.statuses == {"typed": "error"}
    assert "contract" in outcome.log
    assert not project.store.exists()


def test_a_filter_in_where_asks_what_the_cheap_predicate_leaves(project: Project) -> None:
    script(project, {"p7": "Yes.", "p8": " NO\n", "p9": "**yes**"})
    project.model(
        "late", "select i from range(10) t(i) where llm_filter('p' || i, 'Is it late?') and i >= 7"
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("late").startswith("3 prompts, 0 stored, 3 generated")
    assert project.query("select i from late order by i") == [(7,), (9,)]
    assert sorted(project.generations("prompt, output")) == [
        ("p7", "yes"),
        ("p8", "no"),
        ("p9", "yes"),
    ]


def test_embeddings_are_numbers_in_the_store_and_can_be_compared(project: Project) -> None:
    project.model(
        "embedded",
        "select i, text, llm_embed(text) as v from (values (1, 'late parcel'), (2, 'password'), "
        "(3, 'late parcel'), (4, null), (5, '')) t(i, text)",
    )
    project.model(
        "pairs",
        "select a.i as a, b.i as b, list_cosine_similarity(a.v, b.v) as s "
        "from {{ ref('embedded') }} a join {{ ref('embedded') }} b on a.i < b.i",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("embedded").startswith("3 prompts, 0 stored, 3 generated")
    vectors = dict(project.query("select i, v from embedded"))
    for i, text in {1: "late parcel", 2: "password", 3: "late parcel", 5: ""}.items():
        assert vectors[i] == pytest.approx(made_up_embedding(text), abs=1e-6)
    assert vectors[4] is None
    similarities = {(a, b): s for a, b, s in project.query("select a, b, s from pairs")}
    assert similarities[1, 3] == pytest.approx(1.0)
    assert similarities[1, 2] == pytest.approx(similarities[2, 3])
    assert similarities[1, 2] < 0.99
    assert similarities[1, 4] is None
    assert project.generations(
        "typeof(embedding), len(embedding), count(*), count(output)", "true group by all"
    ) == [("FLOAT[]", 8, 3, 0)]
    stored = dict(project.generations("prompt, embedding"))
    assert stored == {"late parcel": vectors[1], "password": vectors[2], "": vectors[5]}
    assert project.dbt("run").summary("embedded").startswith("3 prompts, 3 stored, 0 generated")


def test_stored_embeddings_and_objects_come_back_from_a_parquet_store(project: Project) -> None:
    project.config["store"]["format"] = "parquet"
    project.model(
        "typed", f"select i, llm_embed(body) as v, llm_extract(body, '{FIELDS}') as f from {POSTS}"
    )
    run(project)
    before = project.query("select * from typed order by i")
    assert project.dbt("run").summary("typed").startswith("6 prompts, 6 stored, 0 generated")
    assert project.query("select * from typed order by i") == before
    assert project.generations("count(embedding), count(output), count(*)") == [(3, 3, 6)]


def test_typed_functions_work_in_an_incremental_model(project: Project) -> None:
    sql = (
        "select i, llm_classify('p' || i, ['a', 'b']) as c, "
        "(llm_extract('p' || i, '{{\"n\": \"INTEGER\"}}')).n as n from range({}) t(i)"
    )
    config = {"materialized": "incremental", "unique_key": "i"}
    project.model("rows", sql.format(3), **config)
    run(project)
    before = project.query("select * from rows order by i")
    project.model("rows", sql.format(5), **config)
    assert project.dbt("run").summary("rows").startswith("10 prompts, 6 stored, 4 generated")
    after = project.query("select * from rows order by i")
    assert (after[:3], len(after)) == (before, 5)
    assert all(c in {"a", "b"} and n is not None for _, c, n in after)


BAD_CALLS = {
    "llm_classify('x', [])": "labels: is an empty list; give at least one label (got [])",
    "llm_classify('x', null)": "labels: Field required",
    "llm_classify('x', ['a', null])": "labels.1: Input should be a valid string (got None)",
    "llm_classify('x', ['a', 'A'])": "holds a label twice, but for case and spaces",
    "llm_classify('x', ['a'], model := 'gpt')": "names the model 'gpt', which is not among",
    "llm_filter('x', null)": "question: Field required",
    "llm_filter('x', 5)": "question: Input should be a valid string (got 5)",
    "llm_extract('x', null)": "fields: Field required",
    "llm_extract('x', '')": "Malformed JSON",
    "llm_extract('x', '{}')": "Empty object in JSON structure",
    "llm_extract('x', '{\"a\": \"FOO\"}')": "FOO",
    "llm_extract('x', '{\"a\": \"DECIMAL(39,2)\"}')": "DECIMAL type width must be between 1 and 38",
    "llm_extract('x', '{\"a\": \"BLOB\"}')": "fields: the type 'BLOB' of 'a' is unknown",
    "llm_embed('x', model := 'gpt')": "names the model 'gpt', which is not among",
}


@pytest.mark.parametrize("call, message", BAD_CALLS.items())
def test_a_wrong_constant_fails_before_anything_is_asked(
    project: Project, call: str, message: str
) -> None:
    project.model("answers", f"select {call} as r, llm_generate('good') as g")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert message in outcome.log
    assert not project.store.exists()


@pytest.mark.parametrize("call", ["llm_classify('x', [c])", "llm_filter('x', c)"])
def test_a_column_in_the_place_of_a_constant_is_refused(project: Project, call: str) -> None:
    project.model("answers", f"select {call} as r from (values ('a')) t(c)")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "constant" in outcome.log
    assert not project.store.exists()
