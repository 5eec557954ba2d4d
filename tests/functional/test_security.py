"""What somebody else wrote (names, texts, files) stays data; prompts lie where few can read."""

import ast
import json
import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction
from hypothesis import given, settings
from hypothesis import strategies as st

import dbt_llm
from dbt_llm import sql
from dbt_llm.config import StoreConfig, load_config
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.engine_vllm import engine_arguments
from dbt_llm.errors import CallError, ConfigError, StoreError
from dbt_llm.files import file_name, write_private
from dbt_llm.runner import engine_settings
from dbt_llm.schema import GENERATIONS
from dbt_llm.store import open_store
from tests.project import REPLAY, ROOT, Project
from tests.unit.generations import call_of, good, write_part

MODULES = sorted((ROOT / "dbt_llm").glob("*.py"))
ODD = """o'hara "x" [1]*?{y} ;-- $HOME #1 a=b prompt_hash=1 ~ é \u202e"""
"""A folder whose name means something to SQL, a glob, a URL, a shell or Hive."""
FORMATS = pytest.mark.parametrize("format_", ["delta", "parquet"])


def store_in(folder: Path, format_: str):
    return open_store(StoreConfig(path=str(folder), format=format_))


def filled(folder: Path, format_: str, *prompts: str):
    store = store_in(folder, format_)
    store.create()
    store.commit([write_part(store.folder, prompts, good)])
    return store


def read(store, delta_scan: bool = False) -> list[str]:
    """Return the prompts that DuckDB finds in a store."""
    with duckdb.connect() as connection:
        if delta_scan and not load_delta_extension(connection):
            pytest.skip("DuckDB's Delta extension is not installed for this DuckDB version")
        relation = store.relation(store.snapshot(), delta_scan)
        return sorted(
            row for (row,) in connection.execute(f"select prompt from {relation}").fetchall()
        )


# Names of folders, models and schemas


@FORMATS
def test_a_project_works_in_a_folder_of_any_name(tmp_path: Path, format_: str) -> None:
    project = Project(tmp_path / ODD / "a?c" / "project")
    project.config["store"]["format"] = format_
    # dbt itself takes no such folder for the database.
    project.database = str(tmp_path / "dev.duckdb")
    project.schema = "two; -- words"
    project.model("it's", "select i, llm_generate('p' || i) as \"r; ' x\" from range(70) as t(i)")
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    same = """count(*) filter ("r; ' x" = made_up('p' || i))"""
    assert project.query(f"""select count(*), {same} from "two; -- words"."it's" """) == [(70, 70)]
    assert (project.folder / "target" / "llm").is_dir()
    outcome = project.dbt("run")
    assert outcome.summary("it's") == "70 prompts, 70 stored, 0 generated"


@FORMATS
@pytest.mark.parametrize("delta_scan", [True, False])
def test_a_store_reads_its_own_files_alone(tmp_path: Path, format_: str, delta_scan: bool) -> None:
    own = filled(tmp_path / "a*b[1]", format_, "own")
    # A copy of the store, edited: the same file names in a folder that the pattern would fit.
    for name in ("axb1", "axxb1", "a*b1"):
        copy = shutil.copytree(tmp_path / "a*b[1]", tmp_path / name) / "generations"
        for part in copy.glob("part-*.parquet"):
            other = write_part(copy, ["stranger"], good)
            Path(other.path).rename(part)
    assert read(own, delta_scan and format_ == "delta") == ["own"]


@FORMATS
def test_a_hive_like_folder_adds_no_column(tmp_path: Path, format_: str) -> None:
    store = filled(tmp_path / "status=error" / "prompt=7" / "x=1", format_, "own")
    with duckdb.connect() as connection:
        relation = store.relation(store.snapshot(), False)
        rows = connection.sql(f"select * from {relation}").to_arrow_table()
    assert rows.column_names == GENERATIONS.names
    assert rows["prompt"].to_pylist() == ["own"]
    assert rows["status"].to_pylist() == ["ok"]


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"store.path: holds a NUL"):
        load_config({"llms": REPLAY, "store": {"path": "a\0b"}})


@settings(max_examples=60, derandomize=True, deadline=None)
@given(one=st.text(), other=st.text())
def test_a_file_name_stays_in_its_folder_and_is_nobody_elses(one: str, other: str) -> None:
    for name in (one, f"../{one}", f"{one}/..", f"/{one}\0", one * 50):
        made = file_name(name) + ".json"
        assert os.sep not in made
        assert "\0" not in made
        assert made not in {".", ".."}
        assert len(made.encode()) < 200
        assert Path("/folder", made).resolve().parent == Path("/folder")
    assert (file_name(one) == file_name(other)) is (one == other)


def test_usual_names_are_file_names_as_they_are() -> None:
    names = ["model.shop.tickets", "snapshot.a_b.c-d", "Qwen2.5-0.5B-Instruct", "größe", "replay"]
    assert [file_name(name) for name in names] == names


def test_no_name_of_a_node_an_llm_or_a_model_leads_out_of_the_target_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    llms = {
        "../../l": {"engine": "replay", "model": "../../../../m/.."},
        "/l\0'": {"engine": "replay", "model": "/m\0" + "m" * 300},
    }
    config = {"store": {"path": "lake"}, "llms": llms}
    for node_id in ("../../../n", "/n/../n", "n\0" + "n" * 300, "..", ""):
        for llm in llms:
            call = f"llm_generate({len(node_id)}::varchar, model := {sql.literal(llm)})"
            with duckdb.connect() as connection:
                rows = dbt_llm.resolve(
                    connection, f"select {call} as r", config=config, node_id=node_id
                )
                assert len(rows.fetchall()) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["lake", "target"]
    outside = {path for path in tmp_path.rglob("*") if not path.is_relative_to(folder)}
    assert outside == {tmp_path / "a", tmp_path / "a" / "b"}
    # One spec per node, however odd its name; an empty one counts as none given.
    specs = list((folder / "target" / "llm").glob("*.json"))
    assert len(specs) == 5
    assert len(list((folder / "target" / "llm" / "logs").iterdir())) == 2


# What lies in a store


@pytest.mark.parametrize("kind", ["relative", "absolute", "url", "escaped", "folder"])
def test_a_delta_log_that_names_a_file_elsewhere_is_refused(tmp_path: Path, kind: str) -> None:
    store = filled(tmp_path / "lake", "delta", "own")
    secret = write_part(tmp_path / "secret", ["secret"], good)
    path = Path(secret.path)
    named = {
        "relative": f"../../secret/{path.name}",
        "absolute": str(path),
        "url": path.as_uri(),
        "escaped": f"%2E%2E/%2e%2e/secret/{path.name}",
        "folder": f"sub/{path.name}",
    }[kind]
    (tmp_path / "lake" / "generations" / "sub").symlink_to(path.parent)
    table = DeltaTable(str(store.folder))
    action = AddAction(named, secret.size, {}, 1, True, secret.stats())
    table.create_write_transaction([action], "append", GENERATIONS)
    with pytest.raises(StoreError, match="which is no file of its folder"):
        store_in(tmp_path / "lake", "delta").snapshot()


@FORMATS
def test_a_link_in_a_store_is_refused(tmp_path: Path, format_: str) -> None:
    store = filled(tmp_path / "lake", format_, "own")
    secret = write_part(tmp_path / "secret", ["secret"], good)
    link = store.folder / "part-0-r-0.parquet"
    link.symlink_to(secret.path)
    with pytest.raises(StoreError, match=r"names 'part-0-r-0.parquet', which is no file"):
        store.adopt() if format_ == "delta" else store.snapshot()
    link.unlink()
    (own,) = store.snapshot().files
    Path(own).unlink()
    Path(own).symlink_to(secret.path)
    with pytest.raises(StoreError, match="which is no file of its folder"):
        store.snapshot()


@pytest.mark.parametrize("delta_scan", [True, False])
def test_a_part_of_an_odd_name_is_one_file_of_the_store(tmp_path: Path, delta_scan: bool) -> None:
    store = filled(tmp_path / "lake", "delta", "own")
    for name in ("part-a%2F..%2Fx.parquet", "part-a*[1] ;'b.parquet", "part-..parquet.parquet"):
        part = write_part(store.folder, [name], good)
        Path(part.path).rename(store.folder / name)
    assert store.adopt() == 3
    assert store.adopt() == 0
    assert len(read(store, delta_scan)) == 4


@pytest.mark.parametrize(
    ("format_", "content"),
    [
        *(("delta", content) for content in ("no rows", "no keys", "other columns")),
        *((format_, content) for content in ("text", "pickle") for format_ in ("delta", "parquet")),
    ],
)
def test_a_part_that_is_none_is_an_error_that_names_it(
    tmp_path: Path, format_: str, content: str
) -> None:
    store = filled(tmp_path / "lake", format_, "own")
    path = store.folder / "part-0-r-0.parquet"
    if content in {"text", "pickle"}:
        path.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR." if content == "pickle" else b"text")
    else:
        table = {
            "no rows": GENERATIONS.empty_table(),
            "no keys": pa.table({f.name: pa.nulls(1, f.type) for f in GENERATIONS}),
            "other columns": pa.table({"x": [1]}),
        }[content]
        pq.write_table(table, path)
    with pytest.raises(StoreError, match=r"part-0-r-0.parquet is damaged"):
        store.adopt() if format_ == "delta" else store.snapshot()


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/x"},
        {"allOf": [{"$dynamicRef": "http://127.0.0.1:9/x"}]},
        {
            "properties": {"a": {"$id": "http://127.0.0.1:9/x", "$ref": "#/$defs/b"}},
            "$defs": {"b": {}},
        },
        {"$dynamicRef": "file:///etc/passwd"},
    ],
)
def test_a_schema_that_would_be_fetched_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(CallError, match="json_schema: has "):
        call_of(json_schema=json.dumps(schema))


def names_in(path: Path) -> set[str]:
    """Return all names, attributes, keyword arguments and imported modules of a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.name.split(".")[0] for alias in names}
                found.add(getattr(node, "module", None) or "")
    return found


def test_no_module_runs_what_it_reads() -> None:
    running = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "runpy"}
    running |= {"eval", "exec", "__import__", "allow_pickle", "shell", "popen", "from_pretrained"}
    running |= {"unsafe_load", "full_load"}
    found = {path.name: names_in(path) & running for path in MODULES}
    assert len(found) > 40
    # YAML is only read in the safe way, and a tokenizer without the code that lies beside it.
    assert {name: names for name, names in found.items() if names} == {
        "doctor.py": {"yaml"},
        "project_setup.py": {"yaml"},
        "token_count.py": {"from_pretrained"},
    }
    for path in MODULES:
        text = path.read_text()
        assert "yaml.load(" not in text
        assert text.count("from_pretrained(") == text.count("trust_remote_code=False")


def test_vllm_gets_no_code_of_a_model_and_logs_no_request_unless_told_to() -> None:
    def arguments(**engine_args: object) -> dict[str, object]:
        entry = {"engine": "vllm", "model": "m", "engine_args": engine_args}
        return engine_arguments(
            engine_settings(load_config({"llms": {"d": entry}}).llms["d"]), True
        )

    assert arguments()["trust_remote_code"] is False
    assert arguments()["enable_log_requests"] is False
    told = arguments(trust_remote_code=True, enable_log_requests=True)
    assert (told["trust_remote_code"], told["enable_log_requests"]) == (True, True)


# Who may read


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_file_is_private_whatever_the_umask_and_what_was_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        old = tmp_path / "old.json"
        old.write_text("{}")
        assert mode(old) == 0o666
        write_private(old, "new")
        write_private(tmp_path / "folder" / "new.json", "é")
    finally:
        os.umask(before)
    assert (mode(old), old.read_text()) == (0o600, "new")
    assert mode(tmp_path / "folder" / "new.json") == 0o600


def test_prompts_lie_in_the_spool_and_the_store_alone(project: Project) -> None:
    """The spool, specs and engine logs are private; a store follows the umask, as tables do."""
    secret = "0f5a-secret-prompt"
    project.llms = {"default": {"engine": "replay", "latency_s": 3.0}}
    # From a file, so that the text is in no SQL, which dbt logs.
    project.write("texts.json", json.dumps({"body": secret}))
    project.model("answers", "select llm_generate(body) as r from read_json('texts.json')")
    spool = project.folder / "target" / "llm" / "spool"
    with subprocess.Popen(
        project.command("run"), cwd=project.folder, umask=0, stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (found := list(spool.rglob("requests-*.parquet"))):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (requests,) = found
        ((run),) = spool.iterdir()
        assert requests.is_relative_to(run)
        assert mode(run) == 0o700
        log, _ = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert list(spool.iterdir()) == []
    target = project.folder / "target" / "llm"
    assert mode(target / "model.my_project.answers.json") == 0o600
    (engine_log,) = (target / "logs").iterdir()
    assert mode(engine_log) == 0o600
    assert {mode(path) for path in project.store.glob("part-*")} == {0o666}
    assert project.generations("prompt") == [(secret,)]
    for path in [*project.folder.glob("logs/**/*"), *project.folder.glob("target/**/*")]:
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert secret not in log
