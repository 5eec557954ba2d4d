import json
import os
import shutil
import threading
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from dbt_llm import lookup
from dbt_llm.config import StoreConfig
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import ConfigError, StoreError
from dbt_llm.schema import GENERATIONS
from dbt_llm.store import DeltaStore, ParquetStore, open_store
from tests.unit.generations import call_of, good, key, write_part

FORMATS = pytest.mark.parametrize("format_", ["delta", "parquet"])
AS_ROOT = os.geteuid() == 0


def store_in(folder, format_):
    return open_store(StoreConfig(path=str(folder), format=format_))


def created(folder, format_):
    store = store_in(folder, format_)
    store.create()
    return store


def prompts(store, connection=None, delta_scan=False):
    """Read the store's prompts through DuckDB, as the SQL functions do."""
    relation = store.relation(store.snapshot(), delta_scan)
    if relation is None:
        return []
    rows = (connection or duckdb.connect()).execute(f"select prompt from {relation}").fetchall()
    return sorted(prompt for (prompt,) in rows)


@pytest.fixture(params=["delta", "parquet"])
def store(request, tmp_path):
    return created(tmp_path / "lake", request.param)


@FORMATS
def test_opening_a_store_writes_nothing(tmp_path, format_):
    store = store_in(tmp_path / "lake", format_)
    assert store.folder == tmp_path / "lake" / "generations"
    assert isinstance(store, DeltaStore if format_ == "delta" else ParquetStore)
    snapshot = store.snapshot()
    assert (snapshot.version, snapshot.files) == (None, ())
    assert store.relation(snapshot, False) is None
    assert store.adopt() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_new_store_is_empty(store):
    assert store.snapshot().files == ()
    assert prompts(store) == []
    assert [path.name for path in store.folder.iterdir() if path.name.startswith(".write")] == []


def test_creating_again_keeps_what_is_there(store):
    store.commit([write_part(store.folder, ["a"], good)])
    store.create()
    assert prompts(store) == ["a"]


def test_a_delta_store_of_few_files_is_read_without_the_extension(tmp_path, monkeypatch):
    loaded = []

    def load(connection):
        loaded.append(load_delta_extension(connection))
        return loaded[-1]

    monkeypatch.setattr(lookup, "load_delta_extension", load)
    monkeypatch.setattr(lookup, "_FEW_FILES", 2)
    store = created(tmp_path / "lake", "delta")
    with duckdb.connect() as connection:
        for rows, prompt in enumerate(["a", "b", "c"], start=1):
            store.commit([write_part(store.folder, [prompt], good)])
            _, relation = lookup.read_newest(connection, store)
            assert len(loaded) == (rows == 3)
            assert ("delta_scan" in relation) is any(loaded)
            found = connection.execute(f"select prompt from {relation}").fetchall()
            assert sorted(found) == [("a",), ("b",), ("c",)][:rows]


@pytest.mark.parametrize(
    ("feature", "protocol"),
    [
        (name, {"minReaderVersion": 3, "readerFeatures": [name], "writerFeatures": [name]})
        for name in ("deletionVectors", "columnMapping")
    ]
    + [("columnMapping", {"minReaderVersion": 2})],
)
def test_a_store_whose_files_do_not_tell_its_rows_is_refused(tmp_path, feature, protocol):
    store = created(tmp_path / "lake", "delta")
    store.commit([write_part(store.folder, ["a"], good)])
    writer = 7 if "writerFeatures" in protocol else 5
    log = store.folder / "_delta_log" / f"{2:020d}.json"
    log.write_text(json.dumps({"protocol": protocol | {"minWriterVersion": writer}}))
    for one in (store, store_in(tmp_path / "lake", "delta")):
        with pytest.raises(StoreError, match=f"uses {feature}, so its files alone do not tell"):
            one.snapshot()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_queries_outside_of_builds_do_without_the_file_that_is_gone(tmp_path, lost):
    store = created(tmp_path / "lake", "delta")
    store.commit([write_part(store.folder, [prompt], good) for prompt in ("a", "b", "c")])
    Path(store.snapshot().files[lost]).unlink()
    with duckdb.connect() as connection:
        lookup.show_store(connection, store)
        shown = connection.execute("select count(*) from dbt_llm_generations")
        assert shown.fetchone() == (2,)
        assert lookup.newest_us(connection, store) > 0
    # It stays in the log: the next build says that it is gone.
    assert len(store.snapshot().files) == 3


def test_a_committed_part_is_read(store):
    store.commit([])
    store.commit([write_part(store.folder, ["a", "b"], good)])
    store.commit([write_part(store.folder, ["c"], good), write_part(store.folder, ["d"], good)])
    assert prompts(store) == ["a", "b", "c", "d"]
    assert len(store.snapshot().files) == 3


def test_a_delta_store_counts_rows_and_versions(tmp_path):
    store = created(tmp_path, "delta")
    assert (store.snapshot().version, store.snapshot().rows) == (0, 0)
    store.commit([write_part(store.folder, ["a", "b"], good)])
    store.commit([write_part(store.folder, ["c"], good)])
    assert (store.snapshot().version, store.snapshot().rows) == (2, 3)


def test_a_delta_table_has_the_declared_schema(tmp_path):
    import pyarrow as pa
    from deltalake import DeltaTable

    store = created(tmp_path, "delta")
    store.commit([write_part(store.folder, ["a"], good)])
    assert pa.schema(DeltaTable(str(store.folder)).schema().to_arrow()) == GENERATIONS


def test_a_delta_store_shows_a_part_only_once_it_is_committed(tmp_path):
    store = created(tmp_path, "delta")
    part = write_part(store.folder, ["a"], good)
    assert prompts(store) == []
    store.commit([part])
    assert prompts(store) == ["a"]


def test_a_snapshot_does_not_change_with_the_store(store):
    store.commit([write_part(store.folder, ["a"], good)])
    snapshot = store.snapshot()
    store.commit([write_part(store.folder, ["b"], good)])
    relation = store.relation(snapshot, False)
    assert duckdb.sql(f"select prompt from {relation}").fetchall() == [("a",)]


def test_a_store_that_was_opened_again_sees_everything(store, tmp_path):
    store.commit([write_part(store.folder, ["a"], good)])
    format_ = "delta" if isinstance(store, DeltaStore) else "parquet"
    again = store_in(tmp_path / "lake", format_)
    assert prompts(again) == ["a"]
    again.commit([write_part(again.folder, ["b"], good)])
    assert prompts(store) == ["a", "b"]


# Adoption


def test_what_an_earlier_run_did_not_commit_is_adopted_once(tmp_path):
    store = created(tmp_path, "delta")
    store.commit([write_part(store.folder, ["a"], good)])
    write_part(store.folder, ["b", "c"], good)
    write_part(store.folder, ["d"], good)
    assert store.adopt() == 3
    version = store.snapshot().version
    assert store.adopt() == 0
    assert created(tmp_path, "delta").adopt() == 0
    assert store.snapshot().version == version
    assert prompts(store) == ["a", "b", "c", "d"]


def test_a_parquet_store_has_nothing_to_adopt(tmp_path):
    store = created(tmp_path, "parquet")
    write_part(store.folder, ["a"], good)
    assert store.adopt() == 0
    assert prompts(store) == ["a"]


def test_half_written_parts_are_neither_read_nor_adopted(store):
    write_part(store.folder, ["a"], good)
    (store.folder / ".00-r1-abc.tmp").write_bytes(b"half")
    store.adopt()
    assert prompts(store) == ["a"]


def test_two_runs_that_adopt_at_once_keep_every_row_once(tmp_path):
    created(tmp_path, "delta")
    for i in range(6):
        write_part(tmp_path / "generations", [f"p{i}"], good)
    in_parallel(4, lambda _: store_in(tmp_path, "delta").adopt())
    assert prompts(store_in(tmp_path, "delta")) == [f"p{i}" for i in range(6)]


# Refusals


def test_a_missing_part_is_refused(store):
    part = write_part(store.folder, ["a"], good)
    (store.folder / part.path).unlink()
    with pytest.raises(StoreError, match="it was not committed"):
        store.commit([part])
    assert prompts(store) == []


def test_a_truncated_part_is_refused(store):
    kept = write_part(store.folder, ["a"], good)
    part = write_part(store.folder, ["b"], good)
    os.truncate(part.path, part.size - 1)
    with pytest.raises(StoreError) as raised:
        store.commit([kept, part])
    assert part.path in str(raised.value)
    assert f"should have {part.size} bytes" in str(raised.value)
    assert kept.path not in str(raised.value)
    # The sound one is there all the same.
    if isinstance(store, DeltaStore):
        assert store.snapshot().files == (kept.path,)


def test_a_damaged_part_of_an_earlier_run_is_an_error_of_the_store(tmp_path):
    store = created(tmp_path, "delta")
    part = write_part(store.folder, ["a"], good)
    os.truncate(part.path, part.size - 1)
    with pytest.raises(StoreError) as raised:
        store.adopt()
    assert part.path in str(raised.value)


def test_a_damaged_file_in_a_parquet_store_is_an_error_of_the_store(tmp_path):
    store = created(tmp_path, "parquet")
    part = write_part(store.folder, ["a"], good)
    os.truncate(part.path, part.size - 1)
    with pytest.raises(StoreError) as raised:
        store.snapshot()
    assert part.path in str(raised.value)


def test_a_part_of_the_right_size_that_is_no_parquet_file_is_refused(tmp_path):
    store = created(tmp_path, "delta")
    part = write_part(store.folder, ["a"], good)
    (store.folder / part.path).write_bytes(b"\0" * part.size)
    with pytest.raises(StoreError) as raised:
        store.commit([part])
    assert part.path in str(raised.value)
    assert store.snapshot().files == ()


def test_a_delta_store_that_was_deleted_refuses_a_commit(tmp_path):
    store = created(tmp_path, "delta")
    store.commit([write_part(store.folder, ["a"], good)])
    shutil.rmtree(store.folder / "_delta_log")
    part = write_part(store.folder, ["b"], good)
    with pytest.raises(StoreError, match="is gone; the answers lie in 1 part files there"):
        store.commit([part])
    assert store.snapshot().files == ()


def test_a_deleted_store_can_be_created_again(store):
    store.commit([write_part(store.folder, ["a"], good)])
    shutil.rmtree(store.folder)
    assert store.snapshot().files == ()
    store.create()
    assert prompts(store) == []
    store.commit([write_part(store.folder, ["b"], good)])
    assert prompts(store) == ["b"]


def test_a_delta_store_that_was_replaced_is_read_anew(tmp_path):
    store = created(tmp_path, "delta")
    for prompt in "abc":
        store.commit([write_part(store.folder, [prompt], good)])
    shutil.rmtree(store.folder)
    created(tmp_path, "delta").commit([write_part(store.folder, ["new"], good)])
    assert prompts(store) == ["new"]


@FORMATS
@pytest.mark.skipif(AS_ROOT, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path, format_):
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written: Permission denied"):
        created(tmp_path / "lake", format_)


@FORMATS
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, format_):
    (tmp_path / "lake").write_text("not a folder")
    with pytest.raises(StoreError) as raised:
        created(tmp_path / "lake", format_)
    assert str(raised.value) == (
        f"The generation store {tmp_path / 'lake' / 'generations'} cannot be written: "
        "Not a directory. Nothing was asked. Check the folder's permissions and the space on its "
        "disk, or change store.path in the profile."
    )


# Many writers


def in_parallel(count, work):
    failures = []
    barrier = threading.Barrier(count)

    def run(number):
        try:
            barrier.wait()
            work(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@FORMATS
def test_eight_writers_lose_no_row_and_double_none(tmp_path, format_):
    def work(number):
        store = created(tmp_path, format_)
        for i in range(3):
            store.commit([write_part(store.folder, [f"{number}-{i}"], good)])

    in_parallel(8, work)
    assert prompts(store_in(tmp_path, format_)) == sorted(
        f"{number}-{i}" for number in range(8) for i in range(3)
    )


def test_eight_threads_share_one_store(store):
    in_parallel(8, lambda n: store.commit([write_part(store.folder, [f"p{n}"], good)]))
    assert prompts(store) == [f"p{n}" for n in range(8)]


# Reading


@pytest.mark.parametrize("name", ["my lake", "it's", "größe", "100%", 'a\'b "c"', "x=1", "[a]*"])
@FORMATS
def test_the_folder_may_have_any_name(tmp_path, name, format_):
    store = created(tmp_path / name, format_)
    store.commit([write_part(store.folder, ["a"], good)])
    assert prompts(store) == ["a"]
    assert prompts(store_in(tmp_path / name, format_)) == ["a"]
    assert store.adopt() == 0


# delta-rs takes %41 in a path for the letter A, and a backslash for a slash.
@pytest.mark.parametrize("name", ["a%41", "a%2Fb", "a\\b", "a\nb"])
def test_a_folder_that_delta_cannot_take_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"Use another store\.path"):
        store_in(tmp_path / name, "delta")
    assert created(tmp_path / name, "parquet").snapshot().files == ()


def test_a_delta_log_that_cannot_be_read_is_an_error_of_the_store(tmp_path):
    store = created(tmp_path, "delta")
    (store.folder / "_delta_log" / "00000000000000000000.json").write_text("{")
    with pytest.raises(StoreError) as raised:
        store_in(tmp_path, "delta").snapshot()
    assert str(store.folder) in str(raised.value)


def test_delta_scan_and_the_list_of_files_give_the_same_rows(tmp_path):
    connection = duckdb.connect()
    if not load_delta_extension(connection):
        pytest.skip("DuckDB's Delta extension is not installed for this DuckDB version")
    folder = tmp_path / "it's my lake"
    store = created(folder, "delta")
    other = call_of(seed=1)
    store.commit([write_part(store.folder, ["a", "b\0c"], good)])
    snapshot = store.snapshot()
    store.commit([write_part(store.folder, ["a"], good, call=other)])

    def rows(snapshot, delta_scan):
        relation = store.relation(snapshot, delta_scan)
        assert relation.startswith("delta_scan(" if delta_scan else "read_parquet(")
        columns = ", ".join(GENERATIONS.names)
        return connection.execute(f"select {columns} from {relation} order by 1").fetchall()

    assert rows(snapshot, True) == rows(snapshot, False)
    assert [row[0] for row in rows(snapshot, True)] == sorted([key("a"), key("b\0c")])
    assert rows(store.snapshot(), True) == rows(store.snapshot(), False)
    assert len(rows(store.snapshot(), True)) == 3


def test_part_files_hold_one_call_each_so_that_statistics_tell_them_apart(store):
    for call in (call_of(), call_of(seed=1)):
        store.commit([write_part(store.folder, ["a", "b"], good, call=call)])
    files = [pq.read_table(file) for file in store.snapshot().files]
    assert [len(set(table["call_hash"].to_pylist())) for table in files] == [1, 1]


def test_a_few_lost_files_are_forgotten_and_many_are_an_error(tmp_path):
    store = created(tmp_path, "delta")
    parts = [write_part(store.folder, [f"p{number}"], good) for number in range(14)]
    store.commit(parts)
    for part in parts[:2]:
        Path(part.path).unlink()
    assert store.forget_lost() == 2
    assert store.snapshot().rows == 12
    assert store.forget_lost() == 0
    for part in parts[2:13]:
        Path(part.path).unlink()
    with pytest.raises(StoreError, match="11 of 12 files of the generation store"):
        store.forget_lost()
    assert store.snapshot().rows == 12
