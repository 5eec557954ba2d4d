"""A plan of the example project, with the real model's tokenizer, and the build that follows it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from tests.e2e.conftest import WEIGHTS
from tests.project import ROOT

pytestmark = pytest.mark.usefixtures("weights")

DBT = "import sys; from dbt.cli.main import cli; sys.argv[0] = 'dbt'; cli()"


@pytest.fixture
def example(tmp_path: Path) -> Path:
    folder = tmp_path / "example_project"
    apart = shutil.ignore_patterns("lake", "weights", "target", "logs", "dbt_packages", "*.duckdb")
    shutil.copytree(ROOT / "example_project", folder, ignore=apart)
    (folder / "lake").mkdir()
    (folder / "weights").mkdir()
    (folder / "weights" / WEIGHTS.name).symlink_to(WEIGHTS.absolute())
    (folder / "packages.yml").write_text(f"packages:\n  - local: {ROOT}\n")
    run(folder, "-c", DBT, "deps")
    run(folder, "-c", DBT, "seed")
    run(folder, "-c", DBT, "run", "--select", "stg_tickets")
    return folder


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plan(example: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(run(example, "-m", "dbt_llm.cli", "plan", "--json"))
    return {model["node_id"].split(".")[-1]: model for model in found}


def test_the_build_asks_what_the_plan_said(example: Path) -> None:
    planned = plan(example)
    assert not list((example / "lake").rglob("*.parquet"))
    run(example, "-c", DBT, "build")
    generations = DeltaTable(example / "lake" / "llm" / "generations").to_pyarrow_table()
    asked = duckdb.sql(
        "select split_part(node_id, '.', 3), call_hash, count(*), "
        "coalesce(sum(prompt_tokens) filter (completion_tokens is not null), 0) "
        "from generations group by all"
    ).fetchall()
    assert generations.num_rows > 400
    by_model: dict[str, list[tuple[int, float]]] = {}
    for model, _, rows, tokens in asked:
        by_model.setdefault(model, []).append((rows, tokens))
    # The second call of ticket_facts gets what the first one lets pass, and the plan says so.
    (facts,) = [one for one in planned["ticket_facts"]["warnings"] if "no prompts yet" in one]
    assert facts.startswith("a call of default (json)")
    whole = {"ticket_summaries", "ticket_replies", "ticket_topics", "similar_subjects"}
    assert set(planned) == {*whole, "ticket_facts"} == set(by_model)
    for name, model in planned.items():
        expected = [
            (call["to_ask"], call["prompt_tokens"]) for call in model["calls"] if call["to_ask"]
        ]
        assert len(expected) == 1
        (rows, tokens) = expected[0]
        found = by_model[name] if name in whole else [max(by_model[name])]
        assert [one[0] for one in found] == [rows], name
        assert tokens == pytest.approx(found[0][1], rel=0.05), name
    (too_long,) = planned["ticket_summaries"]["warnings"]
    assert too_long.startswith("1 of its prompts do not fit into the 2,048 tokens of default")
    assert {call["to_ask"] for model in plan(example).values() for call in model["calls"]} == {0}
