import json
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbt_llm.part_writer import PartWriter, read_part
from dbt_llm.parts import PART_PATTERN, Part, parts_of_run
from dbt_llm.schema import ANSWERS, GENERATIONS, Answer, answers_table
from dbt_llm.storage import LocalFolder, remove_half_files
from tests.unit.generations import (
    call_of,
    failing,
    good,
    key,
    provenance,
    requests_of,
    write_part,
)

CALL = call_of()


def rows(part):
    return pq.read_table(part.path).to_pylist()


def writer(folder, **changes):
    folder.mkdir(exist_ok=True)
    return PartWriter(LocalFolder(folder), CALL.call_hash, CALL.text, provenance(**changes), "1")


@given(prompts=st.lists(st.text(), min_size=1, unique=True))
@settings(max_examples=30)
def test_every_output_lies_beside_its_own_prompt(tmp_path_factory, prompts):
    part = write_part(tmp_path_factory.mktemp("parts"), prompts, good)
    found = {row["prompt_hash"]: (row["prompt"], row["output"]) for row in rows(part)}
    assert found == {key(prompt): (prompt, f"<{prompt}>") for prompt in prompts}


def test_a_long_call_makes_no_small_parts(tmp_path):
    call = call_of(system="x" * 200_000)
    one = PartWriter(LocalFolder(tmp_path), call.call_hash, call.text, provenance(), "1")
    for start in range(0, 2000, 500):
        requests = requests_of(map(str, range(start, start + 500)), call)
        one.add(
            answers_table([good(h, "p") for h in requests["prompt_hash"].to_pylist()]), requests
        )
    (part,) = one.flush()
    assert part.size < 1_000_000
    assert set(pq.read_table(part.path)["call"].to_pylist()) == {call.text}


def test_a_generation_has_all_its_fields(tmp_path):
    before = datetime.now(UTC) - timedelta(seconds=1)
    folder = tmp_path / "parts"
    part = write_part(folder, ["p"], good, git_sha="abc")
    (row,) = rows(part)
    created = row.pop("created_at")
    assert before <= created <= datetime.now(UTC) + timedelta(seconds=1)
    assert row == {
        "prompt_hash": key("p"),
        "call_hash": CALL.call_hash,
        "call": CALL.text,
        "prompt": "p",
        "output": "<p>",
        "embedding": None,
        "status": "ok",
        "error_code": None,
        "error": None,
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": None,
        "tokens_estimated": False,
        "cost_usd": 0.0,
        "latency_s": None,
        "attempts": 1,
        "llm": "default",
        "model": "replay",
        "engine": "replay",
        "engine_version": "1",
        "pipeline_version": "0.1.0",
        "git_sha": "abc",
        "node_id": "model.shop.tickets",
        "invocation_id": "i1",
        "run_id": "r1",
        "trace_id": "t1",
    }


@pytest.mark.parametrize("text", ["a\0b", "\0", "", "👩‍👩‍👧", "e\u0301", "\u2028", "\r\n", "'\"\\"])
def test_special_texts_come_back_as_they_were(tmp_path, text):
    (row,) = rows(write_part(tmp_path, [text], lambda h, p: Answer(h, output=p)))
    assert (row["prompt"], row["output"]) == (text, text)


@pytest.mark.parametrize("answer", [good, failing("timeout")])
@pytest.mark.parametrize("keep", [True, False])
def test_every_part_has_the_declared_schema(tmp_path, answer, keep):
    part = write_part(tmp_path, ["a", "b"], answer, keep_prompts=keep)
    assert pq.read_schema(part.path).remove_metadata() == GENERATIONS


def test_an_all_ok_and_an_all_error_part_have_one_parquet_schema(tmp_path):
    ok = write_part(tmp_path, ["a"], good)
    bad = write_part(tmp_path, ["a"], failing("timeout"))
    schemas = [pq.ParquetFile(part.path).schema for part in (ok, bad)]
    assert schemas[0].equals(schemas[1])


def test_embeddings_are_kept_as_single_floats(tmp_path):
    part = write_part(tmp_path, ["a"], lambda h, _: Answer(h, embedding=[0.5, -1.0]))
    table = pq.read_table(part.path)
    assert table.schema.field("embedding").type == pa.list_(pa.float32())
    assert table["embedding"].to_pylist() == [[0.5, -1.0]]


def test_prompts_are_not_kept_where_they_must_not_be(tmp_path):
    part = write_part(tmp_path, ["secret"], good, keep_prompts=False)
    (row,) = rows(part)
    assert (row["prompt"], row["prompt_hash"], row["output"]) == (None, key("secret"), "<secret>")


def test_a_cost_is_tokens_times_price_per_million(tmp_path):
    def answer(prompt_hash, prompt):
        tokens = {"a": (1000, 200), "b": (500, None), "c": (None, None)}[prompt]
        return Answer(prompt_hash, prompt_tokens=tokens[0], completion_tokens=tokens[1])

    prices = {"price_prompt": 0.15, "price_completion": 0.60}
    part = write_part(tmp_path, ["a", "b", "c"], answer, **prices)
    costs = {row["prompt"]: row["cost_usd"] for row in rows(part)}
    assert costs == {
        "a": pytest.approx(0.00027),
        "b": 0.0,  # Nothing was generated: the request was refused.
        "c": 0.0,
    }
    assert part.cost_usd == pytest.approx(0.00027)
    assert (part.prompt_tokens, part.completion_tokens) == (1000, 200)


def test_a_part_describes_itself(tmp_path):
    def answer(prompt_hash, prompt):
        code = {"b": "timeout", "c": "timeout", "d": "truncated"}.get(prompt)
        return Answer(prompt_hash, error_code=code, error=code and f"{prompt} failed")

    part = write_part(tmp_path, ["a", "b", "c", "d"], answer)
    hashes = [key(prompt) for prompt in "abcd"]
    assert (part.rows, part.call_hash) == (4, CALL.call_hash)
    assert (part.min_hash, part.max_hash) == (min(hashes), max(hashes))
    assert part.size == (tmp_path / part.path).stat().st_size
    assert part.errors == {"timeout": 2, "truncated": 1}
    assert part.example_hashes["timeout"] in {key("b"), key("c")}
    assert part.example_hashes["truncated"] == key("d")
    assert part.example_errors["truncated"] == "d failed"
    example = {key("b"): "b failed", key("c"): "c failed"}[part.example_hashes["timeout"]]
    assert part.example_errors["timeout"] == example


def test_the_statistics_are_those_of_the_rows(tmp_path):
    part = write_part(tmp_path, ["a", "b"], good)
    assert json.loads(part.stats()) == {
        "numRecords": 2,
        "minValues": {"prompt_hash": min(key("a"), key("b")), "call_hash": CALL.call_hash},
        "maxValues": {"prompt_hash": max(key("a"), key("b")), "call_hash": CALL.call_hash},
        "nullCount": {"prompt_hash": 0, "call_hash": 0},
    }


def test_a_part_crosses_a_process_as_plain_data(tmp_path):
    part = write_part(tmp_path, ["a"], failing("timeout"))
    assert Part(**json.loads(json.dumps(part.as_dict()))) == part


@pytest.mark.parametrize("answer", [good, failing("server_error")])
def test_read_part_equals_the_part_that_was_written(tmp_path, answer):
    part = write_part(tmp_path, ["a", "b", "c"], answer, price_prompt=1.0)
    assert read_part(LocalFolder(tmp_path), Path(part.path).name) == part


def test_a_truncated_part_cannot_be_read(tmp_path):
    part = write_part(tmp_path, ["a"], good)
    path = tmp_path / part.path
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises((pa.ArrowException, OSError)):
        read_part(LocalFolder(tmp_path), path.name)


def test_a_part_appears_whole_under_its_name(tmp_path, monkeypatch):
    seen = []
    write_table = pq.write_table

    def spy(table, file, **options):
        write_table(table, file, **options)
        seen.append([path.name for path in tmp_path.iterdir()])

    monkeypatch.setattr("dbt_llm.part_writer.pq.write_table", spy)
    part = write_part(tmp_path, ["a"], good)
    ((hidden,),) = seen
    assert hidden.startswith(".")
    assert not list(tmp_path.glob(hidden))
    assert [str(path) for path in tmp_path.glob(PART_PATTERN)] == [part.path]


def test_a_failed_write_leaves_no_part(tmp_path, monkeypatch):
    def fail(table, file, **options):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("dbt_llm.part_writer.pq.write_table", fail)
    with pytest.raises(OSError, match="No space left"):
        write_part(tmp_path, ["a"], good)
    assert list(tmp_path.glob(PART_PATTERN)) == []


def test_flush_returns_each_part_once(tmp_path):
    parts = writer(tmp_path)
    assert parts.flush() == []
    requests = requests_of(["a", "b"])
    for prompt in ("a", "b"):
        parts.add(answers_table([good(key(prompt), prompt)]), requests)
    (part,) = parts.flush()
    assert sorted(row["prompt"] for row in rows(part)) == ["a", "b"]
    assert parts.flush() == []


def test_a_full_buffer_is_written_without_a_flush(tmp_path, monkeypatch):
    monkeypatch.setattr("dbt_llm.part_writer._FLUSH_ROWS", 2)
    parts = writer(tmp_path)
    requests = requests_of(["a", "b", "c"])
    for prompt in ("a", "b"):
        parts.add(answers_table([good(key(prompt), prompt)]), requests)
    # In a thread of its own, so that the engine goes on.
    end = time.monotonic() + 30
    while not list(tmp_path.glob(PART_PATTERN)):
        assert time.monotonic() < end
        time.sleep(0.01)
    parts.add(answers_table([good(key("c"), "c")]), requests)
    assert [part.rows for part in parts.flush()] == [2, 1]


def test_an_engine_waits_for_a_disk_that_is_slower(tmp_path, monkeypatch):
    go_on = threading.Event()
    write_table = pq.write_table

    def slow(table, file, **options):
        assert go_on.wait(30)
        write_table(table, file, **options)

    monkeypatch.setattr("dbt_llm.part_writer._FLUSH_ROWS", 2)
    monkeypatch.setattr("dbt_llm.part_writer.pq.write_table", slow)
    parts = writer(tmp_path)
    prompts = [str(number) for number in range(40)]
    requests = requests_of(prompts)
    taken = []

    def engine():
        for prompt in prompts:
            parts.add(answers_table([good(key(prompt), prompt)]), requests)
            taken.append(prompt)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    # What is being written, and no more than four times as much again.
    assert len(taken) <= 12
    go_on.set()
    thread.join(30)
    assert sum(part.rows for part in parts.flush()) == len(prompts)


def test_eight_threads_share_a_writer(tmp_path, monkeypatch):
    monkeypatch.setattr("dbt_llm.part_writer._FLUSH_ROWS", 7)
    parts = writer(tmp_path)
    prompts = [f"{thread}-{i}" for thread in range(8) for i in range(20)]
    requests = requests_of(prompts)
    flushed = []

    def work(number):
        for i in range(20):
            prompt = f"{number}-{i}"
            parts.add(answers_table([good(key(prompt), prompt)]), requests)
            if i % 5 == 0:
                flushed.extend(parts.flush())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flushed.extend(parts.flush())
    assert sorted(row["prompt"] for part in flushed for row in rows(part)) == sorted(prompts)
    assert sorted(part.path for part in flushed) == sorted(map(str, tmp_path.glob(PART_PATTERN)))


def test_a_flush_waits_for_what_another_one_is_writing(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    write_table = pq.write_table

    def slow(table, file, **options):
        begun.set()
        assert go_on.wait(30)
        write_table(table, file, **options)

    monkeypatch.setattr("dbt_llm.part_writer.pq.write_table", slow)
    parts = writer(tmp_path)
    parts.add(answers_table([good(key("a"), "a")]), requests_of(["a"]))
    first = threading.Thread(target=parts.write)
    first.start()
    assert begun.wait(30)
    flushed = []
    second = threading.Thread(target=lambda: flushed.extend(parts.flush()))
    second.start()
    second.join(0.1)
    assert flushed == []
    assert second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert [part.rows for part in flushed] == [1]


def test_parts_are_found_by_their_run(tmp_path):
    first = write_part(tmp_path, ["a"], good, run_id="r1")
    second = write_part(tmp_path, ["b"], good, run_id="r2")
    third = write_part(tmp_path, ["c"], good, run_id="r1")
    folder = LocalFolder(tmp_path)
    names = [Path(part.path).name for part in (first, second, third)]
    assert parts_of_run(folder, "r1") == [names[0], names[2]]
    assert parts_of_run(folder, "r2") == [names[1]]
    assert parts_of_run(LocalFolder(tmp_path / "none"), "r1") == []


def test_answers_table_has_the_declared_schema_even_when_empty():
    assert answers_table([]).schema == ANSWERS
    table = answers_table([Answer("h", error_code="timeout", error="late")])
    assert table.schema == ANSWERS
    assert table["status"].to_pylist() == ["error"]


def test_half_parts_are_removed_once_they_are_old(tmp_path):
    part = write_part(tmp_path, ["p"], good)
    old, young = tmp_path / ".1-run-a.tmp", tmp_path / ".2-run-b.tmp"
    for path in (old, young):
        path.write_bytes(b"PAR1")
    for path in (old, Path(part.path)):
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    remove_half_files(tmp_path)
    assert set(tmp_path.iterdir()) == {young, Path(part.path)}
