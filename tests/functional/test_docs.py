"""The examples of docs/functions.md run, and give what stands below them."""

import json
import re
from pathlib import Path

import duckdb
import pytest

import dbt_llm
from tests.project import ROOT, Project

PAGE = (ROOT / "docs" / "functions.md").read_text(encoding="utf-8")
REVIEWS = "select * from (values (1, 'Lovely.'), (2, 'Broken.'), (3, null)) as t(id, body)"


def blocks(language: str) -> list[str]:
    """Return the code blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def tables() -> dict[str, list[list[str]]]:
    """Return the table that follows an example, without its header."""
    found = re.findall(r"^```sql\n((?:(?!```).*\n)*)```\n\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return {
        sql: [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()[2:]]
        for sql, rows in found
    }


def test_every_sql_example_and_the_python_model_run(project: Project) -> None:
    examples = {f"example_{number:02}": sql for number, sql in enumerate(blocks("sql"), start=1)}
    assert len(examples) > 15
    for name, sql in examples.items():
        project.write(f"models/{name}.sql", sql)
    project.model("reviews", REVIEWS)
    (python_model,) = (block for block in blocks("python") if "def model(" in block)
    project.write("models/review_kinds.py", python_model)
    (answers,) = blocks("json")
    project.write("answers.jsonl", answers)
    replay = {"engine": "replay", "answers": str(project.folder / "answers.jsonl")}
    project.llms = {"default": replay, "embedder": replay}
    project.config["max_error_ratio"] = 1.0

    # In a process of its own: a Python model keeps the database open.
    outcome = project.dbt_process("run")
    assert outcome.success, outcome.log
    results = json.loads((project.folder / "target" / "run_results.json").read_text())["results"]
    statuses = {result["unique_id"].split(".")[2]: result["status"] for result in results}
    assert statuses == dict.fromkeys([*examples, "reviews", "review_kinds"], "success")

    with duckdb.connect(str(project.folder / project.database), read_only=True) as connection:
        shown = 0
        for name, sql in examples.items():
            if sql in tables():
                rows = connection.execute(f"select columns(*)::varchar from {name}").fetchall()
                actual = [["NULL" if cell is None else cell for cell in row] for row in rows]
                assert sorted(actual) == sorted(tables()[sql]), sql
                shown += 1
        assert shown > 7
        assert connection.execute(
            "select id, kind in ('praise', 'complaint') from review_kinds order by id"
        ).fetchall() == [(1, True), (2, True), (3, None)]


def test_the_example_for_notebooks_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (script,) = (block for block in blocks("python") if "duckdb.connect()" in block)
    exec(compile(script, "docs/functions.md", "exec"), {})
    config = {"store": {"path": "lake/llm"}, "llms": {"default": {"engine": "replay"}}}
    # The answers are stored, so the same calls are now answered without asking.
    query = "select llm_generate('Summarise message ' || id) from range(3) as messages(id)"
    stored = dbt_llm.resolve(duckdb.connect(), query, config=config, mode="cached").fetchall()
    assert len(stored) == 3
    printed = capsys.readouterr().out
    assert all(answer in printed for (answer,) in stored)
