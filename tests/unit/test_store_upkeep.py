"""Compaction, vacuum and checkpoints of the store: nothing is lost, and nothing counts twice."""

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import CommitFailedError

from dbt_llm import compaction, replaced, storage, store_upkeep
from dbt_llm.compaction import SMALL_BYTES, SmallFile, plan_merges
from dbt_llm.config import StoreConfig
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import StoreError
from dbt_llm.lookup import lasting, show_answers
from dbt_llm.run_log import RunLog
from dbt_llm.schema import Answer
from dbt_llm.store import Store, open_store
from dbt_llm.store_upkeep import Compacted, compact, last_checkpoint, tidy, vacuum
from tests.unit.generations import call_of, failing, good, key, write_part

GENERATIONS = "generations"
DAY_S = 24 * 3600


@pytest.fixture(params=["delta", "parquet"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    return StoreConfig(path=str(tmp_path / "lake"), format=request.param)


@pytest.fixture
def delta(tmp_path: Path) -> StoreConfig:
    return StoreConfig(path=str(tmp_path / "lake"))


def created(config: StoreConfig) -> Store:
    store = open_store(config)
    store.create()
    return store


def filled(config: StoreConfig, parts: int = 12, rows: int = 3) -> Store:
    """Return a store of small parts with one commit each."""
    store = created(config)
    for number in range(parts):
        prompts = [f"p{number}-{row}" for row in range(rows)]
        store.commit([write_part(store.folder, prompts, good)])
    return store


def all_rows(store: Store) -> list[tuple[Any, ...]]:
    """Read every column of every row, in an order of their own."""
    relation = store.relation(store.snapshot(), False)
    if relation is None:
        return []
    rows = duckdb.connect().execute(f"select * from {relation}").fetchall()
    return sorted(rows, key=repr)


def answers(store: Store) -> dict[str, Any]:
    """Look all answers up as a build does."""
    connection = duckdb.connect()
    show_answers(connection, store, lasting(), [call_of().call_hash])
    rows = connection.execute("select prompt_hash, output from dbt_llm_generations").fetchall()
    found = dict(rows)
    assert len(found) == len(rows)
    return found


def part_names(store: Store) -> set[str]:
    return {path.name for path in store.folder.glob("part-*.parquet")}


def age_records(store: Store, days: float) -> None:
    then = time.time() - days * DAY_S
    for path in (store.folder / "_replaced").iterdir():
        os.utime(path, (then, then))


# Compaction


def test_many_small_files_become_one_with_the_same_rows(config: StoreConfig) -> None:
    store = filled(config)
    before, old = all_rows(store), part_names(store)
    done = compact(config, GENERATIONS)
    assert (done.files, done.into_files) == (12, 1)
    assert done.into_bytes < done.bytes
    assert all_rows(store) == all_rows(open_store(config)) == before
    assert len(store.snapshot().files) == 1
    assert store.snapshot().rows == 36
    if config.format == "delta":
        assert last_checkpoint(store.files.inside("_delta_log")) == store.snapshot().version == 13
    # Who read the older state just now still can.
    assert old < part_names(store)
    assert compact(config, GENERATIONS) == Compacted()
    assert store.adopt() == 0
    assert all_rows(store) == before


def test_a_file_has_one_call_and_its_rows_are_sorted(config: StoreConfig) -> None:
    store = created(config)
    for number in range(4):
        for seed in (1, 2):
            call = call_of(seed=seed)
            parts = [write_part(store.folder, [f"p{number}", f"q{number}"], good, call=call)]
            store.commit(parts)
    assert compact(config, GENERATIONS).into_files == 2
    for file in store.snapshot().files:
        metadata = pq.read_metadata(file)
        hashes = pq.read_table(file)["prompt_hash"].to_pylist()
        assert hashes == sorted(hashes) and len(hashes) == 8
        names = metadata.schema.names
        found = metadata.row_group(0).column(names.index("call_hash")).statistics
        assert found.min == found.max in {call_of(seed=1).call_hash, call_of(seed=2).call_hash}
        assert pq.read_schema(file).names == compaction.LAYOUTS[GENERATIONS].schema.names


def test_the_log_of_a_compacted_delta_table_has_statistics(delta: StoreConfig) -> None:
    from deltalake import DeltaTable

    store = filled(delta)
    compact(delta, GENERATIONS)
    table = DeltaTable(str(store.folder))
    actions = table.get_add_actions(flatten=True)
    hashes = sorted(key(f"p{number}-{row}") for number in range(12) for row in range(3))
    assert {
        name: actions[name].to_pylist()
        for name in ("num_records", "min.prompt_hash", "max.prompt_hash", "min.call_hash")
    } == {
        "num_records": [36],
        "min.prompt_hash": [hashes[0]],
        "max.prompt_hash": [hashes[-1]],
        "min.call_hash": [call_of().call_hash],
    }
    commit = store.folder / "_delta_log" / f"{table.version():020d}.json"
    changes = [json.loads(line) for line in commit.read_text().splitlines()]
    files = [change.get("add") or change.get("remove") for change in changes[1:]]
    assert len(files) == 13
    assert [file["dataChange"] for file in files] == [False] * 13


def test_the_best_answer_of_a_key_stays_the_best(config: StoreConfig) -> None:
    store = created(config)
    later = int((time.time() + 3600) * 1e6)
    store.commit([write_part(store.folder, ["a", "b", "c"], good)])
    newer = lambda prompt_hash, prompt: Answer(prompt_hash, output=f"new {prompt}")  # noqa: E731
    store.commit([write_part(store.folder, ["a"], newer, after_us=later)])
    store.commit([write_part(store.folder, ["b"], failing("truncated"), after_us=later)])
    store.commit([write_part(store.folder, ["d"], failing("timeout"))])
    before = answers(store)
    assert before == {key("a"): "new a", key("b"): "<b>", key("c"): "<c>"}
    rows = all_rows(store)
    assert compact(config, GENERATIONS).into_files == 1
    assert answers(store) == before
    assert all_rows(store) == rows


def test_embeddings_long_texts_and_nulls_come_through(config: StoreConfig) -> None:
    store = created(config)
    texts = ["a\0b", "ü" * 1_000, "", "'\"", "\n"]
    for text in texts:
        store.commit([write_part(store.folder, [text], good, git_sha=None)])
        vector = lambda hash_, _: Answer(hash_, embedding=[0.1, float("inf")])  # noqa: E731
        store.commit([write_part(store.folder, [text + "!"], vector, git_sha="abc")])
    store.commit([write_part(store.folder, ["hidden"], good, keep_prompts=False)])
    before = all_rows(store)
    compact(config, GENERATIONS)
    assert len(store.snapshot().files) == 1
    assert all_rows(store) == before


def test_delta_scan_reads_what_was_compacted(delta: StoreConfig) -> None:
    connection = duckdb.connect()
    if not load_delta_extension(connection):
        pytest.skip("DuckDB's Delta extension is not installed for this DuckDB version")
    store = filled(delta)
    older = store.relation(store.snapshot(), True)
    compact(delta, GENERATIONS)
    for number in range(12):
        store.commit([write_part(store.folder, [f"late {number}"], good)])
    tidy(delta, GENERATIONS)
    assert last_checkpoint(store.files.inside("_delta_log")) > 0
    for relation, rows in ((older, 36), (store.relation(store.snapshot(), True), 48)):
        assert connection.execute(f"select count(*) from {relation}").fetchall() == [(rows,)]


def test_files_that_are_not_ours_are_left_alone(config: StoreConfig) -> None:
    store = filled(config, parts=3)
    strange = write_part(store.folder, ["x"], good)
    table = pq.read_table(strange.path)
    pq.write_table(table.append_column("extra", [["more"]]), strange.path)
    if config.format == "delta":
        assert store.adopt() == 1
    compact(config, GENERATIONS)
    assert strange.path in store.snapshot().files
    assert len(store.snapshot().files) == 2


def test_an_old_reader_keeps_its_state(config: StoreConfig) -> None:
    store = filled(config)
    snapshot = store.snapshot()
    before = all_rows(store)
    compact(config, GENERATIONS)
    vacuum(config, GENERATIONS, 168, dry_run=False)
    relation = store.relation(snapshot, False)
    rows = duckdb.connect().execute(f"select * from {relation}").fetchall()
    assert sorted(rows, key=repr) == before


def test_a_table_that_is_not_there_needs_nothing(config: StoreConfig) -> None:
    assert compact(config, GENERATIONS) == Compacted()
    assert vacuum(config, GENERATIONS, 0, dry_run=False).files == 0
    tidy(config, GENERATIONS)
    assert not Path(config.path).exists()


# What is merged


def small(sizes: list[int], group: str = "c") -> list[SmallFile]:
    return [SmallFile(f"{group}{number}", size, group) for number, size in enumerate(sizes)]


def merged_sizes(files: list[SmallFile], thorough: bool) -> list[list[int]]:
    return [[file.size for file in merge] for merge in plan_merges(files, thorough=thorough)]


def test_what_a_person_asks_for_is_thorough() -> None:
    sizes = [10, 3_000_000, 20]
    assert merged_sizes(small(sizes), True) == [[10, 20, 3_000_000]]
    assert merged_sizes(small([10]) + small([20], "d"), True) == []


def test_a_large_file_is_not_rewritten_for_a_few_small_ones() -> None:
    few, large = [1_000] * 5, [5_000_000] * 6
    assert merged_sizes(small(large + few), False) == [few, large]
    assert merged_sizes(small([5_000_000] * 3 + few), False) == [few]
    assert merged_sizes(small([1_000] * 3), False) == []


def test_merged_files_have_a_bounded_size() -> None:
    sizes = [SMALL_BYTES - 1] * 9
    assert [len(merge) for merge in merged_sizes(small(sizes), True)] == [4, 4]


def test_it_takes_little_memory(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(config, parts=10)
    before = all_rows(store)
    unpacked = pq.read_metadata(store.snapshot().files[0]).row_group(0).total_byte_size
    monkeypatch.setattr(compaction, "_MOST_UNPACKED_BYTES", int(unpacked * 4.5))
    assert compact(config, GENERATIONS).into_files == 3
    assert all_rows(store) == before


# Killed at any point

STEPS: list[tuple[Any, str]] = [
    (compaction, "_read"),
    (pq, "write_table"),
    (compaction, "write_record"),
    (storage, "_sync"),
    (store_upkeep, "_commit"),
]


class Killed(BaseException):
    """Ends the process, as far as this code can tell."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step[1].strip("_"))
def test_a_kill_loses_nothing_and_doubles_nothing(
    config: StoreConfig,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[Any, str],
    after: bool,
) -> None:
    store = filled(config)
    write_part(store.folder, ["uncommitted"], good)
    before = all_rows(store)
    module, name = step
    real: Callable[..., Any] = getattr(module, name)

    def dies(*arguments: Any, **options: Any) -> None:
        if after:
            real(*arguments, **options)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, dies)
        # Nothing cleans up behind a process that was killed.
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        if not (config.format == "parquet" and name == "_commit"):
            with pytest.raises(Killed):
                compact(config, GENERATIONS)
    again = open_store(config)
    assert all_rows(store) == all_rows(again) == before
    # The part of a run is taken in, and nothing of the compaction.
    again.create()
    adopted = again.adopt()
    assert adopted == (1 if config.format == "delta" else 0)
    whole = all_rows(again)
    assert len(whole) == 37
    compact(config, GENERATIONS)
    assert all_rows(again) == whole
    # Leftovers go with what was replaced, once they cannot be of a compaction under way.
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert all_rows(again) == whole
    age_records(store, days=2)
    vacuum(config, GENERATIONS, 0, dry_run=False)
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert all_rows(again) == whole
    assert part_names(again) == {Path(file).name for file in again.snapshot().files}
    assert again.adopt() == 0
    assert list((store.folder / "_replaced").glob("*.json")) == []


def test_a_file_that_cannot_be_read_does_not_stop_the_others(config: StoreConfig) -> None:
    store = filled(config, parts=3)
    other = [write_part(store.folder, [f"x{n}"], good, call=call_of(seed=9)) for n in range(3)]
    store.commit(other)
    damaged = Path(other[1].path)
    content = damaged.read_bytes()
    damaged.write_bytes(b"PAR1" + b"\0" * (len(content) - 4))
    with pytest.raises(StoreError, match=r"damaged|cannot be compacted .* No answer is lost"):
        compact(config, GENERATIONS)
    damaged.write_bytes(content)
    assert len(all_rows(store)) == 12
    compact(config, GENERATIONS)
    assert len(store.snapshot().files) == 2
    assert len(all_rows(store)) == 12


# Others at work


def in_threads(*work: Callable[[], Any]) -> list[BaseException]:
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(work))

    def run(one: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            one()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_one_process_at_a_time(config: StoreConfig) -> None:
    store = filled(config)
    before = all_rows(store)
    with store_upkeep._alone(store.files) as alone:
        assert alone
        for work in (
            lambda: compact(config, GENERATIONS),
            lambda: vacuum(config, GENERATIONS, 0, dry_run=False),
        ):
            with pytest.raises(StoreError, match="Another process compacts or vacuums"):
                work()
        tidy(config, GENERATIONS)
    assert len(store.snapshot().files) == 12
    assert all_rows(store) == before
    assert compact(config, GENERATIONS).files == 12


def test_two_compactions_at_once_without_a_lock(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(config)
    before = all_rows(store)
    both_have_read = threading.Barrier(2)
    real = compaction.write_record

    def write_record(*arguments: Any) -> Any:
        both_have_read.wait(timeout=60)
        return real(*arguments)

    @store_upkeep.contextmanager
    def unlocked(folder: Path) -> Any:
        yield True

    monkeypatch.setattr(compaction, "write_record", write_record)
    monkeypatch.setattr(store_upkeep, "_alone", unlocked)
    assert in_threads(*[lambda: compact(config, GENERATIONS)] * 2) == []
    assert all_rows(store) == before
    assert store.adopt() == 0
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert all_rows(store) == before
    assert len(part_names(store)) == 1


def test_commits_while_it_compacts(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions come between what it reads and what it commits."""
    store = filled(config)
    other = open_store(config)
    real = store_upkeep._commit
    late = iter(["one", "two"])

    def commit(*arguments: Any) -> None:
        for prompt in late:
            other.commit([write_part(other.folder, [prompt], good)])
            break
        real(*arguments)

    monkeypatch.setattr(store_upkeep, "_commit", commit)
    assert compact(config, GENERATIONS).files == 12
    prompts = {row[3] for row in all_rows(store)}
    assert len(prompts) == (38 if config.format == "delta" else 36)


@pytest.mark.parametrize("done", [False, True])
def test_a_table_that_refuses_the_commit_keeps_no_leftovers(
    delta: StoreConfig, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    from deltalake.exceptions import DeltaError

    store = filled(delta)
    before, real = all_rows(store), store_upkeep._commit

    def refused(*arguments: Any) -> None:
        if done:
            real(*arguments)
        raise DeltaError("no such feature")

    monkeypatch.setattr(store_upkeep, "_commit", refused)
    with pytest.raises(StoreError, match=r"no such feature\. No answer is lost"):
        compact(delta, GENERATIONS)
    assert all_rows(store) == before
    assert len(part_names(store)) == (13 if done else 12)


def test_a_merged_file_that_somebody_removes_before_its_commit(
    delta: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltalake import DeltaTable

    store = filled(delta)
    before = all_rows(store)
    real = compaction._write

    def vacuumed(*arguments: Any) -> Any:
        written = real(*arguments)
        DeltaTable(str(store.folder)).vacuum(
            0, dry_run=False, enforce_retention_duration=False, full=True
        )
        return written

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "_write", vacuumed)
        assert compact(delta, GENERATIONS) == Compacted()
    assert all_rows(store) == before
    assert compact(delta, GENERATIONS).files == 12
    assert all_rows(store) == before


def test_a_part_that_was_adopted_and_compacted_is_not_committed_again(delta: StoreConfig) -> None:
    store, other = filled(delta, parts=2), open_store(delta)
    mine = write_part(store.folder, ["mine"], good)
    assert other.adopt() == 1
    assert compact(delta, GENERATIONS).files == 3
    version = store.snapshot().version
    store.commit([mine])
    assert store.snapshot().version == version
    assert len(all_rows(store)) == 7


def test_a_part_that_is_committed_again_all_the_same_is_put_right(
    delta: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dbt_llm import store as store_module

    store = filled(delta, parts=2)
    mine = write_part(store.folder, ["mine"], good)
    store.commit([mine])
    compact(delta, GENERATIONS)
    with monkeypatch.context() as patch:
        # The writer looked before the record was there.
        patch.setattr(store_module, "read_records", lambda _: [])
        store.commit([mine])
    assert len(all_rows(store)) == 8
    compact(delta, GENERATIONS)
    assert len(all_rows(store)) == 7


def test_replaced_files_are_not_taken_in_when_the_log_has_forgotten_them(
    delta: StoreConfig,
) -> None:
    store = filled(delta)
    compact(delta, GENERATIONS)
    before = all_rows(store)
    # As if a week had passed, and somebody had written a checkpoint then.
    from dbt_llm.store import DeltaStore

    assert isinstance(store, DeltaStore)
    assert len(part_names(store)) == 13
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeltaStore, "_removed", lambda _: set())
        assert store.adopt() == 0
    assert all_rows(store) == before


@pytest.mark.parametrize("vacuumed", [False, True])
def test_a_lost_log_is_made_anew_from_the_files(delta: StoreConfig, vacuumed: bool) -> None:
    store = filled(delta)
    compact(delta, GENERATIONS)
    store.commit([write_part(store.folder, ["later"], good)])
    if vacuumed:
        vacuum(delta, GENERATIONS, 0, dry_run=False)
    before = all_rows(store)
    shutil.rmtree(store.folder / "_delta_log")
    again = created(delta)
    assert again.adopt() == 37
    assert all_rows(again) == before
    assert again.adopt() == 0
    compact(delta, GENERATIONS)
    vacuum(delta, GENERATIONS, 0, dry_run=False)
    assert all_rows(again) == before
    assert len(part_names(again)) == 1


def test_a_store_may_change_its_format(tmp_path: Path) -> None:
    configs = [StoreConfig(path=str(tmp_path), format=one) for one in ("delta", "parquet")]
    for one, other in (configs, configs[::-1]):
        shutil.rmtree(tmp_path / GENERATIONS, ignore_errors=True)
        store = filled(one)
        compact(one, GENERATIONS)
        before = all_rows(store)
        changed = created(other)
        changed.adopt()
        assert all_rows(changed) == before


# Vacuum


def test_a_vacuum_keeps_what_was_replaced_lately(config: StoreConfig) -> None:
    store = filled(config)
    compact(config, GENERATIONS)
    assert vacuum(config, GENERATIONS, 168, dry_run=False).files == 0
    age_records(store, days=3)
    shown = vacuum(config, GENERATIONS, 24, dry_run=True)
    if config.format == "parquet":
        assert shown.files == 12
    # In a Delta table the log says when, and it says just now.
    assert len(part_names(store)) == 13
    shown = vacuum(config, GENERATIONS, 0, dry_run=True)
    assert (shown.files, len(part_names(store))) == (12, 13)
    assert vacuum(config, GENERATIONS, 0, dry_run=False) == shown
    assert len(part_names(store)) == 1
    assert len(all_rows(store)) == 36
    # The record goes the next time, for somebody may read it together with the older list of files.
    assert len(list((store.folder / "_replaced").glob("*.json"))) == 1
    assert vacuum(config, GENERATIONS, 0, dry_run=False).files == 0
    assert list((store.folder / "_replaced").glob("*.json")) == []


def test_a_file_that_was_merged_twice_is_as_old_as_the_second_time(config: StoreConfig) -> None:
    store = filled(config, parts=2)
    compact(config, GENERATIONS)
    (first,) = store.snapshot().files
    age_records(store, days=30)
    store.commit([write_part(store.folder, ["more"], good)])
    compact(config, GENERATIONS)
    vacuum(config, GENERATIONS, 168, dry_run=False)
    assert Path(first).exists()
    assert len(all_rows(store)) == 7
    assert store.adopt() == 0


@pytest.mark.parametrize("removed", [1, 2, 3])
def test_a_vacuum_that_is_killed(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    store = filled(config, parts=2)
    compact(config, GENERATIONS)
    store.commit([write_part(store.folder, ["more"], good)])
    compact(config, GENERATIONS)
    before = all_rows(store)
    real, left = Path.unlink, removed

    def unlink(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            vacuum(config, GENERATIONS, 0, dry_run=False)
    assert len(part_names(store)) == 5 - removed
    assert store.adopt() == 0
    assert all_rows(store) == before
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert len(part_names(store)) == 1
    assert all_rows(store) == before


def test_a_vacuum_keeps_what_a_run_has_not_committed(delta: StoreConfig) -> None:
    store = filled(delta)
    write_part(store.folder, ["under way"], good)
    compact(delta, GENERATIONS)
    vacuum(delta, GENERATIONS, 0, dry_run=False)
    assert store.adopt() == 1
    assert len(all_rows(store)) == 37


def test_a_vacuum_removes_what_others_replaced(delta: StoreConfig) -> None:
    from deltalake import DeltaTable

    store = filled(delta)
    before = all_rows(store)
    DeltaTable(str(store.folder)).optimize.compact()
    assert store.adopt() == 0
    assert vacuum(delta, GENERATIONS, 0, dry_run=False).files == 12
    assert all_rows(store) == before


def test_a_record_leads_nowhere_else(config: StoreConfig, tmp_path: Path) -> None:
    store = filled(config)
    compact(config, GENERATIONS)
    outside = tmp_path / "precious"
    outside.write_text("kept")
    inside = store.folder / "sub"
    inside.mkdir()
    (inside / "precious").write_text("kept")
    (record,) = (store.folder / "_replaced").glob("*.json")
    content = json.loads(record.read_text())
    names = ["../../precious", str(outside), "sub/precious", "sub", ".", "..", "\0"]
    replaced._known.clear()
    record.write_text(json.dumps({**content, "replaced": content["replaced"] + names}))
    (record.parent / "broken.json").write_text("[")
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert outside.exists() and (inside / "precious").exists()
    assert len(part_names(store)) == 1


def test_a_version_that_was_restored_keeps_its_files(delta: StoreConfig) -> None:
    from deltalake import DeltaTable

    store = filled(delta)
    version, before = store.snapshot().version, all_rows(store)
    compact(delta, GENERATIONS)
    DeltaTable(str(store.folder)).restore(version)
    assert store.adopt() == 0
    vacuum(delta, GENERATIONS, 0, dry_run=False)
    assert all_rows(store) == before
    assert compact(delta, GENERATIONS).files == 12
    assert all_rows(store) == before


# Without being asked


def test_tidy_does_nothing_while_there_is_little_to_do(config: StoreConfig) -> None:
    store = filled(config, parts=8)
    tidy(config, GENERATIONS)
    assert len(store.snapshot().files) == 8
    assert sorted(path.name for path in store.folder.iterdir() if "part" not in path.name) == (
        ["_delta_log"] if config.format == "delta" else []
    )


def test_tidy_merges_and_writes_a_checkpoint(config: StoreConfig) -> None:
    store = filled(config)
    before = all_rows(store)
    tidy(config, GENERATIONS)
    assert len(store.snapshot().files) == 1
    assert all_rows(store) == all_rows(open_store(config)) == before
    if config.format == "delta":
        assert last_checkpoint(store.files.inside("_delta_log")) == store.snapshot().version
    version = store.snapshot().version
    tidy(config, GENERATIONS)
    assert store.snapshot().version == version


def test_tidy_is_off_where_the_profile_says_so(config: StoreConfig) -> None:
    store = filled(config)
    tidy(config.model_copy(update={"compact": False}), GENERATIONS)
    assert len(store.snapshot().files) == 12


def test_tidy_removes_what_was_replaced_a_week_ago(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(config)
    tidy(config, GENERATIONS)
    tidy(config, GENERATIONS)
    assert len(part_names(store)) == 13
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 8 * DAY_S)
    before = all_rows(store)
    if config.format == "delta":
        # delta-rs has a clock of its own.
        monkeypatch.setattr(store_upkeep, "RETENTION_HOURS", 0)
    tidy(config, GENERATIONS)
    assert len(part_names(store)) == 1
    tidy(config, GENERATIONS)
    assert list((store.folder / "_replaced").glob("*.json")) == []
    assert all_rows(store) == before


def test_files_stay_few_over_many_runs(config: StoreConfig) -> None:
    """As many as a run of ten commits makes, however many runs there were."""
    store = created(config)
    most = 0
    for number in range(60):
        store.commit([write_part(store.folder, [f"p{number}"], good)])
        tidy(config, GENERATIONS)
        most = max(most, len(store.snapshot().files))
    assert most <= 10
    assert len(all_rows(store)) == 60
    if config.format == "delta":
        log = store.files.inside("_delta_log")
        assert store.snapshot().version - last_checkpoint(log) < 10


def test_the_run_log_is_tidied_as_well(config: StoreConfig) -> None:
    from datetime import UTC, datetime

    log = RunLog(config)
    for number in range(25):
        log.append(
            {
                "run_id": f"r{number}",
                "node_id": "model.a",
                "invocation_id": "i",
                "status": "ok",
                "started_at": datetime(2026, 1, 1, 0, number, tzinfo=UTC),
                "jobs": [{"llm": "default", "asked": number}] * (number % 3),
            }
        )
        tidy(config, "runs")
        tidy(config, "runs")
    rows = all_rows(log.table)
    assert len(rows) == 25
    assert len(log.table.snapshot().files) <= 9
    compact(config, "runs")
    assert len(log.table.snapshot().files) == 1
    assert all_rows(log.table) == rows
    vacuum(config, "runs", 0, dry_run=False)
    assert len(part_names(log.table)) == 1
    assert all_rows(log.table) == rows


def test_old_commits_go_once_a_checkpoint_has_them(delta: StoreConfig) -> None:
    store = filled(delta)
    log = store.folder / "_delta_log"
    then = time.time() - 40 * DAY_S
    for path in log.iterdir():
        os.utime(path, (then, then))
    other = open_store(delta)
    assert len(all_rows(other)) == 36
    tidy(delta, GENERATIONS)
    for number in range(12):
        store.commit([write_part(store.folder, [f"late {number}"], good)])
        tidy(delta, GENERATIONS)
    assert len(all_rows(store)) == len(all_rows(other)) == len(all_rows(open_store(delta))) == 48
    other.commit([write_part(other.folder, ["last"], good)])
    assert len(all_rows(open_store(delta))) == 49


# What only looks like a failure


def test_a_commit_that_landed_and_was_reported_as_lost_keeps_its_file(
    delta: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(delta)
    before = all_rows(store)
    real = store_upkeep._commit
    calls = []

    def lands_unheard(table: Any, actions: list[Any]) -> None:
        real(table, actions)
        calls.append(len(actions))
        raise CommitFailedError("somebody else came first")

    monkeypatch.setattr(store_upkeep, "_commit", lands_unheard)
    done = compact(delta, GENERATIONS)
    assert calls == [13]
    assert (done.files, done.into_files) == (12, 1)
    assert all_rows(store) == before
    assert open_store(delta).forget_lost() == 0


def test_a_file_whose_writing_failed_late_doubles_nothing(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(config)
    before = all_rows(store)
    real = storage.LocalFolder.put

    def fails_late(self: Any, name: str, write: Any) -> int:
        size = real(self, name, write)
        if "-compacted-" in name and name.endswith(".parquet"):
            raise OSError("the answer was lost")
        return size

    with monkeypatch.context() as patch:
        patch.setattr(storage.LocalFolder, "put", fails_late)
        # Nor can the file be removed.
        patch.setattr(storage.LocalFolder, "delete", lambda *_: (_ for _ in ()).throw(OSError()))
        with pytest.raises(StoreError, match="the answer was lost"):
            compact(config, GENERATIONS)
    again = created(config)
    again.adopt()
    assert all_rows(again) == before


def test_a_vacuum_leaves_a_compaction_alone_that_is_under_way(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines that share no locks."""
    store = filled(config)
    before = all_rows(store)
    real = compaction.merge_files

    def merges(*arguments: Any) -> Any:
        written = list(real(*arguments))
        vacuum(config, GENERATIONS, 0, dry_run=False)
        return written

    monkeypatch.setattr(compaction, "merge_files", merges)
    monkeypatch.setattr(store_upkeep, "_alone", lambda _: contextlib.nullcontext(True))
    compact(config, GENERATIONS)
    monkeypatch.setattr(compaction, "merge_files", real)
    vacuum(config, GENERATIONS, 0, dry_run=False)
    assert all_rows(open_store(config)) == before


def test_a_log_from_a_backup_takes_in_what_came_since(delta: StoreConfig, tmp_path: Path) -> None:
    store = filled(delta)
    shutil.copytree(store.folder / "_delta_log", tmp_path / "backup")
    for number in range(4):
        store.commit([write_part(store.folder, [f"later-{number}"], good)])
    compact(delta, GENERATIONS)
    before = all_rows(store)
    shutil.rmtree(store.folder / "_delta_log")
    shutil.copytree(tmp_path / "backup", store.folder / "_delta_log")
    age_records(store, days=1)
    again = created(delta)
    again.adopt()
    found = {row[0] for row in all_rows(again)}
    assert found == {row[0] for row in before}
