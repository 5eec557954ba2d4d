"""The example project, with the replay engine: built, built again, changed."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import deltalake
import duckdb
import pytest

from tests.project import ROOT


@pytest.fixture
def example(tmp_path: Path) -> Path:
    folder = tmp_path / "example_project"
    ignored = shutil.ignore_patterns(
        "lake", "weights", "target", "logs", "dbt_packages", "*.duckdb"
    )
    shutil.copytree(ROOT / "example_project", folder, ignore=ignored)
    (folder / "lake").mkdir()
    (folder / "packages.yml").write_text(f"packages:\n  - local: {ROOT}\n")
    dbt(folder, "deps")
    return folder


def dbt(folder: Path, *arguments: str) -> str:
    program = "import sys; from dbt.cli.main import cli; sys.argv[0] = 'dbt'; cli()"
    target = [] if arguments[0] == "deps" else ["--target", "replay"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, *target, "--no-use-colors"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def generated(log: str) -> int:
    return sum(int(found.replace(",", "")) for found in re.findall(r"([\d,]+) generated", log))


def test_example_is_built_and_asks_nothing_again(example: Path) -> None:
    first = dbt(example, "build")
    assert generated(first) > 350
    connection = duckdb.connect(str(example / "replay.duckdb"), read_only=True)
    tickets, summaries = connection.execute(
        "select (select count(*) from stg_tickets), (select count(*) from ticket_summaries)"
    ).fetchall()[0]
    assert tickets == summaries == 220
    asked, filtered, facts, amounts, types = connection.execute(
        "select (select count(distinct body) from stg_tickets where rating = 1), count(*), "
        "count(facts), count(amount), any_value(typeof(facts)) from ticket_facts"
    ).fetchall()[0]
    assert types == "STRUCT(about VARCHAR, days_waited SMALLINT, amount DECIMAL(9,2))"
    assert 0 < filtered == facts == amounts < 28
    # The filter is asked about each of these tickets, and the fields of those that pass.
    passed = connection.execute("select count(distinct body) from ticket_facts").fetchall()[0][0]
    assert f"ticket_facts: {asked + passed} prompts, 0 stored, {asked + passed} generated" in first
    assert connection.execute(
        "select count(*), count(most_similar), bool_and(subject <> most_similar), "
        "bool_and(similarity between -1 and 1.001) from similar_subjects"
    ).fetchall() == [(42, 42, True, True)]
    connection.close()

    second = dbt(example, "build")
    assert "Done. PASS=45 WARN=0 ERROR=0" in second
    assert generated(second) == 0
    texts, overview = (
        deltalake.DeltaTable(example / "lake" / "tables" / "replay" / "main" / name)
        for name in ("text_summaries", "ticket_overview")
    )
    assert (texts.version(), overview.version()) == (0, 0)
    assert texts.metadata().description.startswith("A one-sentence summary of each distinct text")
    assert texts.to_pyarrow_table().num_rows == 198

    seed = example / "seeds" / "tickets.csv"
    with seed.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    changed = next(row for row in rows if row["body"] and int(row["rating"] or 5) > 2)
    changed["body"] = "The left sleeve is longer than the right one."
    with seed.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    third = dbt(example, "build")
    # A changed body of a satisfied customer is one new summary; there is no reply to draft.
    assert generated(third) == 1
    texts.update_incremental()
    assert texts.version() == 1
    added = texts.get_add_actions(flatten=True)["num_records"].to_pylist()
    table = texts.to_pyarrow_table().to_pylist()
    assert [row["tickets"] for row in table if row["body"] == changed["body"]] == [1]
    assert len(table) == len({row["prompt_hash"] for row in table}) == sum(added)
