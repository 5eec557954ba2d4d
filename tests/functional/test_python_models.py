"""LLM functions in Python models, in notebooks, and through the Jinja wrappers."""

import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import dbt_llm
from dbt_llm.errors import CallError, ConfigError, NotSettledError, UnresolvedError
from tests.project import REPLAY, Project

PYTHON_MODEL = """
import dbt_llm

def model(dbt, session):
    dbt.config(materialized="table")
    posts = dbt.ref("posts")
    session.register("posts_df", posts.to_arrow_table())
    return dbt_llm.resolve(
        session,
        "select i, llm_generate('About ' || body) as r from posts_df",
        node_id="model.my_project.answers",
    )
"""


def test_python_model_uses_the_profile_and_the_store(project: Project) -> None:
    project.model("posts", "select i, 'p' || i as body from range(5) t(i)")
    project.write("models/answers.py", PYTHON_MODEL)
    # In a process of its own: a Python model's module keeps its cursor, and so the database, open.
    outcome = project.dbt_process("run")
    assert outcome.success, outcome.log
    assert project.query(
        "select count(*), count(*) filter (r = made_up('About p' || i)) from answers"
    ) == [(5, 5)]
    assert project.dbt_process("run").summary("answers") == "5 prompts, 5 stored, 0 generated"
    assert project.generations("distinct node_id") == [("model.my_project.answers",)]


def test_notebook_uses_a_config_of_its_own(tmp_path: Path) -> None:
    config = {"store": {"path": str(tmp_path / "lake")}, "llms": REPLAY}
    connection = duckdb.connect()
    connection.execute("create table posts as select i, 'p' || i as body from range(5) t(i)")
    query = "select i, llm_classify(body, ['a', 'b']) as c from posts order by i"
    with pytest.raises(UnresolvedError, match="llm_mode is cached and 5 prompt"):
        dbt_llm.resolve(connection, query, config=config, mode="cached")
    first = dbt_llm.resolve(connection, query, config=config).fetchall()
    assert [i for i, _ in first] == [0, 1, 2, 3, 4]
    assert {c for _, c in first} <= {"a", "b"}
    again = dbt_llm.resolve(connection, query, config=config, mode="cached").fetchall()
    assert again == first


def test_input_that_can_be_read_once_is_refused(tmp_path: Path) -> None:
    config = {"store": {"path": str(tmp_path / "lake")}, "llms": REPLAY}
    connection = duckdb.connect()
    table = pa.table({"body": ["a", "b"]})
    connection.register(
        "posts", pa.RecordBatchReader.from_batches(table.schema, table.to_batches())
    )
    # DuckDB 2.0 refuses the second reading itself; 1.5 reads nothing, and the message is ours.
    refusals = (NotSettledError, duckdb.InvalidInputException)
    with pytest.raises(refusals, match="can be read only once"):
        dbt_llm.resolve(connection, "select llm_generate(body) as r from posts", config=config)


def test_notebook_query_without_a_call_and_with_a_wrong_one(tmp_path: Path) -> None:
    config = {"store": {"path": str(tmp_path / "lake")}, "llms": REPLAY}
    connection = duckdb.connect()
    assert dbt_llm.resolve(connection, "select 42 as x", config=config).fetchall() == [(42,)]
    with pytest.raises(CallError, match="'nobody'"):
        dbt_llm.resolve(connection, "select llm_generate('x', model := 'nobody')", config=config)
    assert not (tmp_path / "lake").exists()


def test_config_is_asked_for_where_no_plugin_is_at_work() -> None:
    program = (
        "import duckdb, dbt_llm\n"
        "try: dbt_llm.resolve(duckdb.connect(), 'select 1')\n"
        "except dbt_llm.python_models.ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("dbt_llm.resolve needs a config where no dbt plugin is at work")
    assert issubclass(ConfigError, Exception)


WRAPPERS = {
    "generate": (
        """{{ dbt_llm.llm_generate("'it''s ' || i", stop=["'"], temperature=0.5) }}""",
        "llm_generate('it''s ' || i, stop := [''''], temperature := 0.5)",
    ),
    "details": ("{{ dbt_llm.llm_details('i') }}.status", "llm_details(i).status"),
    "prompt_hash": ("{{ dbt_llm.llm_prompt_hash('i') }}", "llm_prompt_hash(i)"),
    "classify": (
        """{{ dbt_llm.llm_classify('i', ["good", "isn't"], instruction='Say.') }}""",
        "llm_classify(i, ['good', 'isn''t'], instruction := 'Say.')",
    ),
    "filter": ("{{ dbt_llm.llm_filter('i', 'Odd?') }}", "llm_filter(i, 'Odd?')"),
    "extract": (
        "{{ dbt_llm.llm_extract('i', {'n': 'INTEGER', 'tags': ['VARCHAR']}) }}",
        """llm_extract(i, '{"n": "INTEGER", "tags": ["VARCHAR"]}')""",
    ),
    "embed": ("{{ dbt_llm.llm_embed('i', model='default') }}", "llm_embed(i, model := 'default')"),
}


def test_jinja_wrappers_are_the_functions(project: Project) -> None:
    for name, (jinja, sql) in WRAPPERS.items():
        project.model(
            f"wrapped_{name}",
            f"select i, {jinja} as wrapped, {sql} as plain from range(3) t(i)",
        )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    for name in WRAPPERS:
        assert project.query(
            f"select count(*) from wrapped_{name} where wrapped = plain and wrapped is not null"
        ) == [(3,)], name
