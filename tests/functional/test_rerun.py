"""What is asked, and what is never asked again."""

import subprocess
import sys
import threading

import pytest

from dbt_llm import plugin, resolve_loop
from tests.project import Project

MODEL = "select id, llm_generate('About ' || body) as answer from {{ ref('posts') }}"


def write_posts(project: Project, rows: dict[int, str]) -> None:
    values = ", ".join(f"({key}, '{body}')" for key, body in rows.items())
    project.model("posts", f"select * from (values {values}) as t(id, body)")


@pytest.fixture
def posts(project: Project) -> Project:
    write_posts(project, {key: f"post {key}" for key in range(20)})
    project.model("answers", MODEL)
    assert project.dbt("run").success
    return project


def wrong_rows(project: Project) -> list[tuple[object, ...]]:
    return project.query(
        "select * from answers join posts using (id) "
        "where answer is distinct from made_up('About ' || body)"
    )


def test_first_run_answers_every_row(posts: Project) -> None:
    assert wrong_rows(posts) == []
    assert posts.query("select count(*), count(answer) from answers") == [(20, 20)]


def test_rerun_asks_nothing_and_leaves_the_store_alone(posts: Project) -> None:
    version = posts.version()
    outcome = posts.dbt("run")
    assert outcome.summary("answers") == "20 prompts, 20 stored, 0 generated"
    assert posts.version() == version
    assert wrong_rows(posts) == []


def test_rerun_starts_no_ray_and_loads_no_engine(posts: Project) -> None:
    output = run_printing_modules(posts, ["run"], {"ray", "vllm", "torch"})
    assert "20 stored, 0 generated" in output
    assert "loaded: []" in output


def test_a_run_without_a_call_loads_no_library_that_takes_long(project: Project) -> None:
    project.model("plain", "select 1 as i")
    slow = {"ray", "vllm", "torch", "pandas", "deltalake", "pyarrow.parquet", "rich"}
    output = run_printing_modules(project, ["run"], slow)
    assert "loaded: []" in output


def run_printing_modules(project: Project, arguments: list[str], names: set[str]) -> str:
    """Run dbt in a fresh process; its output ends with which of the modules it loaded."""
    project._prepare()
    program = (
        "import sys; from dbt.cli.main import dbtRunner; "
        f"result = dbtRunner().invoke({arguments}); assert result.success; "
        f"print('loaded:', sorted({names} & set(sys.modules)))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=project.folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_full_refresh_asks_nothing(posts: Project) -> None:
    outcome = posts.dbt("run", "--full-refresh")
    assert outcome.summary("answers") == "20 prompts, 20 stored, 0 generated"


def test_changed_row_asks_for_its_prompt_alone(posts: Project) -> None:
    write_posts(posts, {key: f"post {key}" for key in range(19)} | {19: "quite another post"})
    outcome = posts.dbt("run")
    assert outcome.summary("answers").startswith("20 prompts, 19 stored, 1 generated, ")
    assert wrong_rows(posts) == []


def test_deleted_row_is_gone(posts: Project) -> None:
    write_posts(posts, {key: f"post {key}" for key in range(19)})
    outcome = posts.dbt("run")
    assert outcome.summary("answers") == "19 prompts, 19 stored, 0 generated"
    assert posts.query("select max(id), count(*) from answers") == [(18, 19)]


def test_another_model_uses_the_same_answers(posts: Project) -> None:
    posts.model("again", MODEL + " where id < 5")
    outcome = posts.dbt("run", "--select", "again")
    assert outcome.summary("again") == "5 prompts, 5 stored, 0 generated"


def test_refresh_asks_again_and_keeps_one_row_per_key(posts: Project) -> None:
    outcome = posts.dbt("run", "--select", "answers", llm_refresh=True)
    assert outcome.summary("answers").startswith("20 prompts, 0 stored, 20 generated")
    assert posts.generations("count(*), count(distinct prompt_hash)") == [(40, 20)]
    assert posts.dbt("run").summary("answers") == "20 prompts, 20 stored, 0 generated"
    assert wrong_rows(posts) == []


def test_limit_asks_for_so_many_and_leaves_the_rest_null(project: Project) -> None:
    write_posts(project, {key: f"post {key}" for key in range(20)})
    project.model("answers", MODEL)
    outcome = project.dbt("run", llm_limit=7)
    assert ", 7 generated, 13 left NULL, " in outcome.summary("answers")
    assert project.query("select count(*), count(answer) from answers") == [(20, 7)]
    assert project.dbt("run").summary("answers").startswith("20 prompts, 7 stored, 13 generated")


def test_cached_mode_fails_on_a_missing_prompt(posts: Project) -> None:
    assert posts.dbt("run", llm_mode="cached").success
    write_posts(posts, {1: "post 1", 2: "new"})
    outcome = posts.dbt("run", llm_mode="cached")
    assert not outcome.success
    assert "llm_mode is cached and 1 prompt(s) have no stored answer" in outcome.log
    assert posts.generations("count(*)") == [(20,)]


@pytest.mark.parametrize("mode", ["null", None])
def test_null_mode_asks_nothing(project: Project, mode: str | None) -> None:
    write_posts(project, {1: "a", 2: "b"})
    project.model("answers", MODEL)
    outcome = project.dbt("run", llm_mode=mode)
    assert outcome.summary("answers") == "2 prompts, 0 stored, 0 generated, 2 left NULL"
    assert project.query("select count(*), count(answer) from answers") == [(2, 0)]


def test_empty_flag_asks_nothing(project: Project) -> None:
    project.model("answers", "select llm_generate('a literal prompt') as answer")
    assert project.dbt("run", "--empty").success
    assert not project.store.exists()


@pytest.mark.parametrize(
    "name, value", [("llm_mode", "yes"), ("llm_limit", "-1"), ("llm_refresh", "maybe")]
)
def test_wrong_variable_is_named(posts: Project, name: str, value: str) -> None:
    outcome = posts.dbt("run", **{name: value})
    assert not outcome.success
    assert f"The dbt variable {name} is '{value}'" in outcome.log


def test_store_of_parquet_files(project: Project) -> None:
    project.config["store"]["format"] = "parquet"
    write_posts(project, {key: f"post {key}" for key in range(20)})
    project.model("answers", MODEL)
    assert project.dbt("run").summary("answers").startswith("20 prompts, 0 stored, 20 generated")
    outcome = project.dbt("run")
    assert "0 generated" in outcome.summary("answers")
    assert project.generations("count(*), count(distinct prompt_hash)") == [(20, 20)]
    assert not (project.store / "_delta_log").exists()
    assert wrong_rows(project) == []


@pytest.mark.parametrize("models", [["answers"], ["answers", "others"]])
def test_memory_is_freed_before_a_job_where_nothing_else_uses_the_database(
    project: Project, monkeypatch: pytest.MonkeyPatch, models: list[str]
) -> None:
    freed: list[object] = []
    monkeypatch.setattr(resolve_loop, "free_cached_blocks", freed.append)
    is_alone, all_ask = plugin._is_alone, threading.Barrier(len(models), timeout=60)

    def while_all_ask() -> bool:
        all_ask.wait()
        alone = is_alone()
        all_ask.wait()
        return alone

    monkeypatch.setattr(plugin, "_is_alone", while_all_ask)
    write_posts(project, {1: "one"})
    for model in models:
        project.model(model, MODEL.replace("About", model))
    assert project.dbt("run").success
    assert len(freed) == (1 if models == ["answers"] else 0)
