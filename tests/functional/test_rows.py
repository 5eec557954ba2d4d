"""Every answer on its row, whatever the row holds (reports from the field, 2 to 4, 7, 12, 14)."""

import hashlib
import json

import pytest

from tests.project import Project

TEXTS = {
    "curly quotes": "“Yes,” she said — ‘no’.",
    "straight quotes": 'it\'s "quoted"',
    "arabic": "أين طلبي؟ لم يصل بعد",
    "family": "👨‍👩‍👧‍👦 is one emoji with joiners",
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "braces": "{{ not jinja }} {% nor this %} {0} %s",
    "newlines": "a\r\nb\n\tc",
    "blank": "   ",
    "empty": "",
    "html": "<b>&amp;</b><!-- -->",
    "long": "word " * 4000,
}


def made_up(prompt: str) -> str:
    return f"replay {hashlib.sha256(prompt.encode()).hexdigest()[:12]}"


def write_texts(project: Project, texts: dict[str, str]) -> None:
    lines = "".join(json.dumps({"name": name, "body": text}) + "\n" for name, text in texts.items())
    project.write("texts.json", lines)


def from_texts(select: str) -> str:
    columns = "{name: 'varchar', body: 'varchar'}"
    return f"select {select} from read_json('texts.json', columns={columns})"


def test_a_thousand_shuffled_answers_are_on_their_rows(project: Project) -> None:
    project.llms = {"default": {"engine": "replay", "latency_s": 0.0001}}
    project.model(
        "answers",
        "select i, 'p' || (i * 7919 % 1000) as p, llm_generate(p) as r from range(1000) t(i)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query(
        "select count(*), count(distinct r), count(*) filter (r = made_up(p)) from answers"
    ) == [(1000, 1000, 1000)]


def test_any_text_reaches_the_engine_and_the_table_unchanged(project: Project) -> None:
    write_texts(project, TEXTS)
    project.model(
        "answers", from_texts("name, body, llm_generate(body) as r, llm_prompt_hash(body) as h")
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    rows = {name: (body, r) for name, body, r in project.query("select name, body, r from answers")}
    assert rows == {name: (text, made_up(text)) for name, text in TEXTS.items()}
    # Composed and decomposed letters are two prompts: a key is not normalized.
    assert project.query("select count(distinct h) from answers") == [(len(TEXTS),)]
    stored = dict(project.generations("prompt, output"))
    assert stored == {text: made_up(text) for text in TEXTS.values()}


def test_nul_byte_makes_another_prompt(project: Project) -> None:
    project.model(
        "answers",
        "select i, p, llm_generate(p) as r from "
        "(values (1, 'hello' || chr(0) || 'world'), (2, 'hello')) as t(i, p)",
    )
    assert project.dbt("run").summary("answers").startswith("2 prompts, 0 stored, 2 generated")
    assert project.query("select i, r from answers order by i") == [
        (1, made_up("hello\0world")),
        (2, made_up("hello")),
    ]
    assert sorted(project.generations("prompt")) == [("hello",), ("hello\0world",)]


def test_null_asks_nothing_and_every_row_stays(project: Project) -> None:
    project.model(
        "answers",
        "select i, llm_generate(p) as r, llm_details(p) as d, llm_prompt_hash(p) as h from (values "
        "(1, null), (2, ''), (3, '   '), (4, 'Summarise: ' || null), "
        "(5, concat('Summarise: ', null))) as t(i, p)",
    )
    assert project.dbt("run").summary("answers").startswith("3 prompts, 0 stored, 3 generated")
    assert project.query("select i, r, h is null, d is null from answers order by i") == [
        (1, None, True, True),
        (2, made_up(""), False, False),
        (3, made_up("   "), False, False),
        (4, None, True, True),
        (5, made_up("Summarise: "), False, False),
    ]


def test_random_delays_and_a_repeated_prompt(project: Project) -> None:
    rules = [{"prompt": f"p{i}", "delay_s": (i * 37 % 11) / 50} for i in range(30)]
    project.llms = {"default": {"engine": "replay", "rules": rules}}
    project.model(
        "answers",
        "select i, 'p' || least(i, 27) as p, llm_generate(p) as r from range(30) t(i)",
    )
    assert project.dbt("run").summary("answers").startswith("28 prompts, 0 stored, 28 generated")
    assert project.query("select count(*) from answers where r = made_up(p)") == [(30,)]
    assert project.generations("count(*)", "prompt = 'p27'") == [(1,)]


def test_large_keys_and_null_keys_pass_through_exactly(project: Project) -> None:
    project.model(
        "answers",
        "select id, llm_generate('About ' || coalesce(id::varchar, 'nobody')) as r "
        "from (values (9007199254740993), (null), (-9223372036854775808)) as t(id)",
    )
    assert project.dbt("run").success
    assert set(project.query("select id, r from answers")) == {
        (9007199254740993, made_up("About 9007199254740993")),
        (None, made_up("About nobody")),
        (-9223372036854775808, made_up("About -9223372036854775808")),
    }


@pytest.mark.parametrize("errors_first", [True, False])
def test_errors_and_answers_have_one_schema(project: Project, errors_first: bool) -> None:
    project.config["max_error_ratio"] = 1.0
    rule = {"contains": "bad", "error_code": "server_error", "error": "broken"}
    project.llms = {"default": {"engine": "replay", "rules": [rule]}}
    words = ["bad", "good"] if errors_first else ["good", "bad"]
    for word in words:
        project.model("answers", f"select i, llm_generate('{word} ' || i) as r from range(5) t(i)")
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
    assert project.generations(
        "status, error_code, count(*), count(output)", "true group by all order by all"
    ) == [
        ("error", "server_error", 5, 0),
        ("ok", None, 5, 5),
    ]


def test_details_tell_what_happened(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    rule = {"contains": "bad", "error_code": "context_length", "error": "too long"}
    entry = {"engine": "replay", "rules": [rule], "price": {"prompt": 1e6, "completion": 2e6}}
    project.llms = {"default": entry}
    project.model("answers", "select p, llm_details(p) as d from (values ('good'), ('bad')) t(p)")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert "1 row failed with context_length, for example prompt_hash " in outcome.log
    assert project.query(
        "select p, d.output, d.status, d.error_code, d.error, d.finish_reason, d.prompt_tokens, "
        "d.completion_tokens, d.cost_usd, length(d.prompt_hash), d.created_at is not null "
        "from answers order by p"
    ) == [
        ("bad", None, "error", "context_length", "too long", None, 1, None, 0.0, 64, True),
        ("good", made_up("good"), "ok", None, None, "stop", 2, 5, 12.0, 64, True),
    ]


def test_lasting_failures_stay_and_passing_ones_are_asked_again(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    rules = [
        {"prompt": "long", "error_code": "context_length"},
        {"prompt": "late", "error_code": "timeout"},
    ]
    project.llms = {"default": {"engine": "replay", "rules": rules}}
    project.model(
        "answers", "select p, llm_generate(p) as r from (values ('long'), ('late'), ('ok')) t(p)"
    )
    assert ", 1 generated, 2 failed, " in project.dbt("run").summary("answers")
    again = project.dbt("run").summary("answers")
    assert again.startswith("3 prompts, 2 stored, 0 generated, 1 failed, ")
    project.llms = {"default": {"engine": "replay"}}
    assert project.dbt("run").summary("answers").startswith("3 prompts, 2 stored, 1 generated")
    assert sorted(project.query("select p, r from answers"), key=str) == [
        ("late", made_up("late")),
        ("long", None),
        ("ok", made_up("ok")),
    ]


def test_too_many_errors_fail_the_model_and_keep_the_good_answers(project: Project) -> None:
    rule = {"contains": "bad", "error_code": "server_error"}
    project.llms = {"default": {"engine": "replay", "rules": [rule]}}
    project.model(
        "answers",
        "select llm_generate(if(i < 2, 'bad ', 'good ') || i) as r from range(20) t(i)",
    )
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert (
        "2 of 20 prompts failed (server_error: 2), more than max_error_ratio = 0.05" in outcome.log
    )
    assert project.generations("count(*)", "status = 'ok'") == [(18,)]


def test_one_failure_among_many_stored_answers_is_no_failure(project: Project) -> None:
    rule = {"prompt": "p0", "error_code": "timeout"}
    project.llms = {"default": {"engine": "replay", "rules": [rule]}}
    project.model("answers", "select llm_generate('p' || i) as r from range(100) t(i)")
    for expected in ("0 stored, 99 generated, 1 failed", "99 stored, 0 generated, 1 failed"):
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        assert expected in outcome.summary("answers")


def test_what_a_failed_row_holds_is_no_answer(project: Project) -> None:
    project.config["max_error_ratio"] = 1.0
    rule = {"contains": "cut", "output": '{"half": ', "error_code": "truncated"}
    project.llms = {"default": {"engine": "replay", "rules": [rule]}}
    project.model("answers", "select llm_generate('cut') as r, llm_details('cut').output as o")
    assert project.dbt("run").success
    assert project.query("select r, o from answers") == [(None, None)]
    assert project.generations("output, error_code") == [('{"half": ', "truncated")]


def test_two_models_at_a_time_ask_for_a_shared_prompt_once(project: Project) -> None:
    project.llms = {"default": {"engine": "replay", "latency_s": 0.3}}
    for name in ("one", "two", "three", "four"):
        project.model(name, "select i, llm_generate('x' || i) as r from range(40) t(i)")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.generations("count(*), count(distinct prompt_hash)") == [(40, 40)]
    for name in ("one", "two", "three", "four"):
        assert project.query(f"select count(*) from {name} where r = made_up('x' || i)") == [(40,)]
