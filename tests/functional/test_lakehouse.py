import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import polars
import pytest
import yaml

from dbt_llm.delta_extension import _shipped, load_delta_extension
from dbt_llm.project_setup import IS_INCREMENTAL
from tests.project import Project


def table_of(project: Project, name: str, **options: Any) -> Any:
    from deltalake import DeltaTable

    return DeltaTable(str(project.folder / "lake/tables/dev/main" / name), **options)


STRANGER = """
import duckdb, pickle, sys
folder, extension, database, sql = sys.argv[1:]
settings = {"extension_directory": folder, "autoinstall_known_extensions": "false"}
connection = duckdb.connect(database, read_only=True, config=settings)
connection.execute("set enable_progress_bar = false")
if extension:
    connection.execute(f"install '{extension}'")
    connection.execute("load delta")
sys.stdout.buffer.write(pickle.dumps(connection.execute(sql).fetchall()))
"""


def read_as_stranger(project: Project, sql: str, *, extension: bool) -> list[tuple[Any, ...]]:
    """Query the database in a process that has, or has not, the Delta extension; no plugin."""
    path = ""
    if extension:
        with duckdb.connect() as connection:
            path = next((str(one) for one in _shipped(connection, "delta")), "")
        if not path:
            pytest.skip("there is no Delta extension for this DuckDB")
    database = str(project.folder / project.database)
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(project.folder / "extensions"), path, database, sql],
        capture_output=True,
        check=False,
        cwd=project.folder.parent,
    )
    assert done.returncode == 0, done.stderr.decode()
    rows: list[tuple[Any, ...]] = pickle.loads(done.stdout)
    return rows


def test_an_enriched_table_is_read_by_all(project: Project) -> None:
    project.model(
        "answers",
        "select i as id, llm_prompt_hash('x' || i) as prompt_hash, llm_generate('x' || i) as r "
        "from range({{ var('n') }}) t(i)",
        materialized="lakehouse",
        unique_key="prompt_hash",
        # Polars 2.1 finds no file below a folder with a space in its name.
        location=str(project.folder.parent / "answers"),
    )
    project.model("below", "select count(*) as n from {{ ref('answers') }}")
    folder = project.folder.parent / "answers"
    from deltalake import DeltaTable

    assert project.dbt("run", n=3).success
    outcome = project.dbt("run", n=3)
    assert outcome.summary("answers") == "3 prompts, 3 stored, 0 generated"
    assert DeltaTable(str(folder)).version() == 0
    outcome = project.dbt("run", n=5)
    assert outcome.summary("answers").startswith("5 prompts, 3 stored, 2 generated")
    assert project.query("select n from below") == [(5,)]
    rows = sorted(
        tuple(row.values()) for row in DeltaTable(str(folder)).to_pyarrow_table().to_pylist()
    )
    hashes = dict(project.generations("prompt, prompt_hash"))
    outputs = dict(project.generations("prompt, output"))
    assert rows == [(i, hashes[f"x{i}"], outputs[f"x{i}"]) for i in range(5)]
    assert polars.read_delta(str(folder)).sort("id").rows() == rows
    with duckdb.connect() as connection:
        if load_delta_extension(connection):
            scanned = connection.execute(f"from delta_scan('{folder}') order by id")
            assert scanned.fetchall() == rows
    old = DeltaTable(str(folder), version=0).to_pyarrow_table()
    assert sorted(old["id"].to_pylist()) == [0, 1, 2]
    assert [entry["version"] for entry in DeltaTable(str(folder)).history()] == [1, 0]


@pytest.mark.parametrize("extension", [True, False])
def test_the_views_work_in_a_process_without_the_plugin(
    project: Project, extension: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not extension:
        monkeypatch.setattr("dbt_llm.lakehouse.load_delta_extension", lambda cursor: False)
    query = "select i as id, {'a b': [i]} as \"the data\" from range(3) t(i) "
    wheres = {"filled": "true", "empty": "false", "emptied": "{{ var('first', false) }}"}
    for name, where in wheres.items():
        for format_ in ("delta", "parquet"):
            project.model(
                f"{name}_{format_}",
                f"{query} where {where}",
                materialized="lakehouse",
                format=format_,
            )
    for variables in ({"first": True}, {}):
        outcome = project.dbt("run", **variables)
        assert outcome.success, outcome.log
    names = sorted(f"{name}_{format_}" for name in wheres for format_ in ("delta", "parquet"))
    columns = read_as_stranger(
        project,
        "select table_name, column_name, data_type from information_schema.columns order by all",
        extension=extension,
    )
    assert columns == [
        (table, *column)
        for table in names
        for column in (("id", "BIGINT"), ("the data", 'STRUCT("a b" BIGINT[])'))
    ]
    rows = read_as_stranger(
        project,
        " union all ".join(f"select '{name}', * from {name}" for name in names) + " order by all",
        extension=extension,
    )
    assert rows == [
        (name, i, {"a b": [i]}) for name in ("filled_delta", "filled_parquet") for i in range(3)
    ]


OLD = [(i, "old") for i in range(4)]
NEW = [(i, "new") for i in range(2, 6)]
MERGED = [*OLD[:2], *NEW]


# Config, and the table after a run with OLD and one with NEW.
class Attaching(Project):
    """A project that attaches the database of another one."""

    other: Project

    def _prepare(self) -> None:
        super()._prepare()
        profile = yaml.safe_load((self.folder / "profiles.yml").read_text())
        output = profile["test"]["outputs"]["dev"]
        output["attach"] = [
            {"path": str(self.other.folder / self.other.database), "alias": "theirs"}
        ]
        # A machine may have the extension installed, and DuckDB would load it by itself.
        output["settings"] = {"autoload_known_extensions": False}
        self.write("profiles.yml", yaml.safe_dump(profile))


def test_a_view_in_an_attached_database_is_read(project: Project, tmp_path: Path) -> None:
    project.model("t", "select 1 as n", materialized="lakehouse")
    assert project.dbt("run").success
    reading = Attaching(tmp_path / "reading")
    reading.other = project
    reading.model("copied", "select * from theirs.main.t")
    outcome = reading.dbt("run")
    assert outcome.success, outcome.log
    assert reading.query("select * from copied") == [(1,)]


STRATEGIES: dict[str, tuple[dict[str, Any], list[tuple[int, str]]]] = {
    "overwrite": ({}, NEW),
    "overwrite_key": ({"unique_key": "id", "incremental_strategy": "overwrite"}, NEW),
    "append": ({"incremental_strategy": "append"}, sorted([*OLD, *NEW])),
    "merge": ({"unique_key": "id"}, MERGED),
    "merge_two": ({"unique_key": ["id", "the part.1"]}, MERGED),
    "delete_insert": ({"unique_key": "id", "incremental_strategy": "delete+insert"}, MERGED),
    "delete_insert_part": (
        {"unique_key": "the part.1", "incremental_strategy": "delete+insert"},
        NEW,
    ),
}


def test_strategies_and_partitions(project: Project) -> None:
    query = (
        "select i as id, 'p/' || (i % 2) as \"the part.1\", '{{ var(\"v\") }}' as v "
        "from range({{ var('first') }}, {{ var('first') }} + 4) t(i)"
    )
    models = {}
    for strategy, (config, expected) in STRATEGIES.items():
        for format_ in ("delta", "parquet"):
            for partition_by in (None, "the part.1"):
                name = f"{strategy}_{format_}{'_parts' if partition_by else ''}"
                models[name] = expected
                given = {"partition_by": partition_by} if partition_by else {}
                project.model(
                    name, query, materialized="lakehouse", format=format_, **config, **given
                )
    for first, v in ((0, "old"), (2, "new")):
        outcome = project.dbt("run", first=first, v=v)
        assert outcome.success, outcome.log
    for name, found in contents(project, models).items():
        assert [(i, v) for i, _, v in found] == models[name], name
        assert all(part == f"p/{i % 2}" for i, part, _ in found), name
    # The same again writes nothing, but for append and for overwrite without a key.
    before = files_of(project)
    outcome = project.dbt(
        "run", "--exclude", "append_*", "overwrite_delta*", "overwrite_parquet*", first=2, v="new"
    )
    assert outcome.success, outcome.log
    assert len(outcome.statuses) == 20
    assert files_of(project) == before
    outcome = project.dbt("run", "--full-refresh", first=8, v="x")
    assert outcome.success, outcome.log
    for name, found in contents(project, models).items():
        assert found == [(i, f"p/{i % 2}", "x") for i in range(8, 12)], name


def contents(project: Project, names: Iterable[str]) -> dict[str, list[tuple[Any, ...]]]:
    with duckdb.connect(str(project.folder / project.database), read_only=True) as connection:
        load_delta_extension(connection)
        return {name: connection.execute(f"from {name} order by all").fetchall() for name in names}


def files_of(project: Project) -> set[Path]:
    return {path for path in (project.folder / "lake").rglob("*") if path.is_file()}


def test_on_schema_change(project: Project) -> None:
    project.write("macros/is_incremental.sql", IS_INCREMENTAL)
    changes = ("ignore", "fail", "append_new_columns", "sync_all_columns")
    for change in changes:
        project.model(
            change,
            "select 1 as id, {{ var('columns') }}{% if is_incremental() %}, 7 as later{% endif %}",
            materialized="lakehouse",
            unique_key="id",
            on_schema_change=change,
        )
    asking = "select 1 as id{% if is_incremental() %}, llm_generate('x') as later{% endif %}"
    project.model(
        "asks", asking, materialized="lakehouse", unique_key="id", on_schema_change="fail"
    )
    assert project.dbt("run", columns="2 as a").success
    outcome = project.dbt("run", columns="3 as a")
    failed = {"fail": "error", "asks": "error"}
    assert outcome.statuses == {**dict.fromkeys(changes, "success"), **failed}
    assert "new later (INTEGER)" in outcome.log
    assert not project.store.exists()
    assert contents(project, changes) == {
        "ignore": [(1, 3)],
        "fail": [(1, 2)],
        "append_new_columns": [(1, 3, 7)],
        "sync_all_columns": [(1, 3, 7)],
    }


def test_other_commands_and_nodes_over_a_lakehouse_table(project: Project) -> None:
    project.model(
        "t",
        "select i as id, 'n' || i as name from range(2) t(i)",
        materialized="lakehouse",
        unique_key="id",
    )
    project.model("shown", "select * from {{ ref('t') }}", materialized="view")
    project.write(
        "models/t.yml",
        "models: [{name: t, columns: [{name: id, tests: [unique, not_null]}]}]\n"
        "unit_tests: [{name: names, model: t, given: [], "
        "expect: {rows: [{id: 0, name: n0}, {id: 1, name: n1}]}}]",
    )
    project.write(
        "snapshots/kept.sql",
        "{% snapshot kept %}{{ config(unique_key='id', strategy='check', check_cols='all') }}"
        "select * from {{ ref('t') }}{% endsnapshot %}",
    )
    for _ in range(2):
        outcome = project.dbt("build")
        assert outcome.success, outcome.log
    assert set(outcome.statuses.values()) == {"success", "pass"}
    assert table_of(project, "t").version() == 0
    # dbt's process has to load the extension for it.
    outcome = project.dbt_process("docs", "generate")
    assert outcome.success, outcome.log
    catalog = json.loads((project.folder / "target/catalog.json").read_text())
    assert {
        name: column["type"]
        for name, column in catalog["nodes"]["model.my_project.t"]["columns"].items()
    } == {"id": "BIGINT", "name": "VARCHAR"}
    outcome = project.dbt("show", "--inline", "select name from {{ ref('shown') }} where id = 1")
    assert "n1" in outcome.log
    outcome = project.dbt("run", "--select", "t", "--empty")
    assert outcome.success, outcome.log
    assert table_of(project, "t").version() == 0


def test_a_hook_that_fails_leaves_a_table_that_the_next_run_takes_up(project: Project) -> None:
    for hook, success in (("select error('boom')", False), ("select 1", True)):
        project.model(
            "t",
            "select 1 as n",
            materialized="lakehouse",
            unique_key="n",
            post_hook=hook,
        )
        outcome = project.dbt("run")
        assert outcome.success is success, outcome.log
    assert table_of(project, "t").version() == 0
    assert table_of(project, "t").to_pyarrow_table().to_pylist() == [{"n": 1}]


@pytest.mark.parametrize(
    "macro", [IS_INCREMENTAL, "{% macro is_incremental() %}{{ return(false) }}{% endmacro %}", ""]
)
def test_is_incremental(project: Project, macro: str) -> None:
    if macro:
        project.write("macros/is_incremental.sql", macro)
    project.model(
        "t",
        "select i as id from range({{ var('n') }}) t(i) "
        "{% if is_incremental() %} where i > (select max(id) from {{ this }}) {% endif %}",
        materialized="lakehouse",
        incremental_strategy="append",
        format="parquet",
    )
    assert project.dbt("run", n=3).success
    outcome = project.dbt("run", n=5)
    assert outcome.success is (macro == IS_INCREMENTAL)
    if not outcome.success:
        assert "macros/is_incremental.sql" in outcome.log
        return
    assert project.query("select count(*), count(distinct id) from t") == [(5, 5)]
    assert project.dbt("run", "--full-refresh", n=2).success
    assert project.query("select count(*) from t") == [(2,)]


def test_is_incremental_in_a_macro_of_the_project(project: Project) -> None:
    project.write(
        "macros/only_new.sql",
        "{% macro only_new() %}"
        "{% if is_incremental() %} where i > (select max(id) from {{ this }}) {% endif %}"
        "{% endmacro %}",
    )
    project.model(
        "t",
        "select i as id from range(3) t(i) {{ only_new() }}",
        materialized="lakehouse",
        incremental_strategy="append",
    )
    assert project.dbt("run").success
    outcome = project.dbt("run")
    assert not outcome.success and "macros/is_incremental.sql" in outcome.log
    project.write("macros/is_incremental.sql", IS_INCREMENTAL)
    assert project.dbt("run").success
    # Plain DuckDB would have to install the Delta extension.
    assert contents(project, ["t"]) == {"t": [(0,), (1,), (2,)]}


def test_without_a_table_a_run_is_not_incremental(project: Project) -> None:
    query = (
        "select i as id from range(3) t(i) "
        "{% if dbt_llm.is_incremental() %} where i > (select max(id) from {{ this }}) {% endif %}"
    )
    project.model("replaced", query, materialized="lakehouse")
    names = ("delta", "parquet", "replaced")
    expected = {name: [(0,), (1,), (2,)] for name in names}
    for name in ("delta", "parquet"):
        project.model(name, "select 1 as id", materialized="view")
    assert project.dbt("run").success
    for name in ("delta", "parquet"):
        options = {"format": name, "incremental_strategy": "append"}
        project.model(name, query, materialized="lakehouse", **options)
    for _ in range(2):
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        assert contents(project, names) == expected
    shutil.rmtree(project.folder / "lake" / "tables")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert contents(project, names) == expected


def test_what_stood_there_before_is_replaced_and_back(project: Project) -> None:
    before = ("table", "view", "incremental")
    for materialized in (None, "lakehouse", None):
        for name in before:
            project.model(
                f"was_{name}",
                "select 1 as one",
                materialized=materialized or name,
                format="parquet",
            )
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        for name in before:
            assert project.query(f"select * from was_{name}") == [(1,)]
    assert len(project.query("select * from information_schema.tables")) == 3


def test_hooks_docs_alias_and_odd_names(project: Project) -> None:
    project.write(
        "models/t.sql",
        "{{ config(materialized='lakehouse', alias='my t.1', schema='other one', "
        "grants={'select': ['everybody']}, "
        "persist_docs={'relation': true, 'columns': true}, "
        "pre_hook='create temp table word as select 7 as w', "
        "post_hook='create table if not exists seen as select * from {{ this }}') }} "
        'select w as "the n.1" from word',
    )
    project.write(
        "models/t.yml",
        "models: [{name: t, description: The table., "
        "columns: [{name: the n.1, quote: true, description: A n.}]}]",
    )
    from deltalake import DeltaTable

    for version in (0, 1):
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        assert "Grants for relations are not supported by DuckDB" in outcome.log
        assert project.query("select * from seen") == [(7,)]
        assert project.query("select comment from duckdb_views() where not internal") == [
            ("The table.",)
        ]
        (log,) = (project.folder / "lake/tables").rglob("_delta_log")
        table = DeltaTable(str(log.parent))
        # Each run overwrites; the descriptions stay, and make no version of their own.
        assert (table.version(), table.metadata().description) == (version, "The table.")
        (field,) = table.schema().fields
        assert (field.name, field.metadata) == ("the n.1", {"comment": "A n."})
    assert log.parent.parent.name.startswith("main_other_one-")
    assert log.parent.name.startswith("my_t.1-")


def test_contract(project: Project) -> None:
    models = {"plain": "", "constrained": "constraints: [{type: not_null}]"}
    for value, type_, good in (
        ("1", "varchar", set()),
        ("1", "integer", {"plain", "constrained"}),
        ("null::integer", "integer", {"plain"}),
    ):
        for name in models:
            project.model(name, f"select {value} as n", materialized="lakehouse")
        entries = ", ".join(
            f"{{name: {name}, config: {{contract: {{enforced: true}}}}, columns: [{{name: n, "
            f"data_type: {type_}, {constraints}}}]}}"
            for name, constraints in models.items()
        )
        project.write("models/t.yml", f"models: [{entries}]")
        outcome = project.dbt("run")
        assert {name for name, one in outcome.statuses.items() if one == "success"} == good
        assert bool(files_of(project)) is bool(good or value != "1")
    assert [table_of(project, name).version() for name in models] == [1, 0]


def test_a_python_model(project: Project) -> None:
    project.write("macros/is_incremental.sql", IS_INCREMENTAL)
    project.write(
        "models/t.py",
        "import dbt_llm\n"
        "def model(dbt, session):\n"
        "    dbt.config(materialized='lakehouse', unique_key='n')\n"
        "    query = f'select {int(dbt.is_incremental)} as n, llm_generate(\\'x\\') as r'\n"
        "    return dbt_llm.resolve(session, query)\n",
    )
    for number in (1, 2, 2):
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        table = table_of(project, "t")
        assert table.version() == number - 1
        rows = table.to_pyarrow_table().to_pylist()
        assert sorted(row["n"] for row in rows) == list(range(number))
    assert len(project.generations()) == 1
    assert [
        name for (name,) in project.query("select table_name from information_schema.tables")
    ] == ["t"]


def test_a_model_that_fails_writes_nothing(project: Project) -> None:
    asking = "select llm_generate('x') as r"
    wrong = {"format": "orc", "on_schema_change": "none"}
    project.model("wrong", asking, materialized="lakehouse", **wrong)
    project.model("no_key", asking, materialized="lakehouse", incremental_strategy="merge")
    project.model("odd", "select interval 1 day as gap", materialized="lakehouse")
    project.model("failing", "select error('boom') as n", materialized="lakehouse")
    outcome = project.dbt("run")
    assert set(outcome.statuses.values()) == {"error"}
    for part in (
        "- format: ",
        "- on_schema_change: ",
        "needs a unique_key",
        "gap (INTERVAL)",
        "boom",
    ):
        assert part in outcome.log
    # And nothing was asked.
    assert files_of(project) == set()
