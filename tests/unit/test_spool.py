import os
import stat
import threading
import time
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dbt_llm.call import prompt_hash
from dbt_llm.files import private_folder
from dbt_llm.schema import REQUESTS
from dbt_llm.spool import (
    RawSpool,
    RequestFile,
    mark_in_use,
    missing_requests,
    prepare_requests,
    remove_abandoned,
)
from tests.unit.generations import call_of, good, key, write_part

CALL = call_of()
OTHER = call_of(seed=1)
CALLS = {call.call_hash: call for call in (CALL, OTHER)}


def batch(prompts, call=CALL):
    return pa.record_batch(
        {
            "prompt_hash": [prompt_hash(call.call_hash, prompt) for prompt in prompts],
            "call_hash": [call.call_hash] * len(prompts),
            "prompt": prompts,
        }
    )


def spooled(folder, *batches):
    spool = RawSpool(folder)
    for one in batches:
        spool.add(one)
    return spool.take()


def prepared(tmp_path, *batches, asked=(), others=(), limit=None):
    raw = spooled(tmp_path / "raw", *batches)
    folder = tmp_path / f"requests-{time.monotonic_ns()}"
    return prepare_requests(raw, CALLS, folder, asked=list(asked), others=list(others), limit=limit)


def prompts(file):
    return pq.read_table(file.path)["prompt"].to_pylist()


# RawSpool


def test_eight_threads_lose_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr("dbt_llm.spool._FLUSH_ROWS", 1000)
    spool = RawSpool(tmp_path / "raw")
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait()
        for step in range(50):
            spool.add(batch([f"{number}-{step}-{i}" for i in range(20)]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spool.rows == 8000
    rows = pq.read_table(spool.take())["prompt"].to_pylist()
    assert sorted(rows) == sorted(
        f"{n}-{step}-{i}" for n in range(8) for step in range(50) for i in range(20)
    )


def test_many_bytes_are_written_before_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("dbt_llm.spool._FLUSH_BYTES", 1000)
    spool = RawSpool(tmp_path / "raw")
    spool.add(batch(["x" * 2000]))
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["raw-0.parquet"]


def test_nothing_spooled_gives_no_file_and_no_folder(tmp_path):
    assert RawSpool(tmp_path / "raw").take() is None
    assert list(tmp_path.iterdir()) == []


def test_a_spool_begins_anew_after_take(tmp_path):
    spool = RawSpool(tmp_path / "raw")
    spool.add(batch(["a"]))
    first = spool.take()
    assert spool.take() is None
    spool.add(batch(["b"]))
    second = spool.take()
    assert pq.read_table(first)["prompt"].to_pylist() == ["a"]
    assert pq.read_table(second)["prompt"].to_pylist() == ["b"]


def test_any_text_survives_the_spool(tmp_path):
    texts = [
        "",
        "a\0b",
        "\0",
        "👩‍👩‍👧",
        "e\u0301",
        "\u00e9",
        "line\r\nline",
        "'\"\\",
        "x" * 100_000,
    ]
    result = prepared(tmp_path, batch(texts))
    (file,) = result.files
    assert sorted(prompts(file)) == sorted(texts)


# prepare_requests


def test_requests_are_distinct_and_the_raw_file_is_gone(tmp_path):
    result = prepared(tmp_path, batch(["a", "b", "a"]), batch(["b", "c"]))
    (file,) = result.files
    table = pq.read_table(file.path)
    assert table.schema.names == REQUESTS.names
    assert (file.rows, result.rows, result.left_to_others) == (3, 3, 0)
    assert file.call == CALL
    assert dict(zip(table["prompt_hash"].to_pylist(), prompts(file), strict=True)) == {
        key("a"): "a",
        key("b"): "b",
        key("c"): "c",
    }
    assert list((tmp_path / "raw").iterdir()) == []


def test_each_call_has_a_file_of_its_own(tmp_path):
    result = prepared(tmp_path, batch(["a", "b"]), batch(["a"], OTHER))
    assert {file.call.call_hash: sorted(prompts(file)) for file in result.files} == {
        CALL.call_hash: ["a", "b"],
        OTHER.call_hash: ["a"],
    }
    assert result.rows == 3


def test_what_was_asked_before_is_left_out(tmp_path):
    asked = prepared(tmp_path, batch(["a", "b"])).files
    result = prepared(tmp_path, batch(["a", "b", "c"]), batch(["a"], OTHER), asked=asked)
    assert {f.call.call_hash: prompts(f) for f in result.files} == {
        CALL.call_hash: ["c"],
        OTHER.call_hash: ["a"],
    }
    assert result.left_to_others == 0


def test_what_others_ask_is_left_to_them_and_counted(tmp_path):
    asked = prepared(tmp_path, batch(["a"])).files
    others = prepared(tmp_path, batch(["a", "b", "c", "z"])).files
    result = prepared(tmp_path, batch(["a", "b", "c", "c", "d"]), asked=asked, others=others)
    (file,) = result.files
    assert prompts(file) == ["d"]
    assert result.left_to_others == 2


def test_no_file_where_everything_was_asked(tmp_path):
    asked = prepared(tmp_path, batch(["a"])).files
    result = prepared(tmp_path, batch(["a"]), asked=asked)
    assert (result.files, result.rows) == ([], 0)


@pytest.mark.parametrize("limit", [0, 1, 3, 6, 7, 100])
def test_the_limit_is_exact_over_all_calls(tmp_path, limit):
    result = prepared(
        tmp_path,
        batch(["a", "b", "c", "a"]),
        batch(["a", "b", "c", "d"], OTHER),
        limit=limit,
    )
    assert result.rows == min(limit, 7)
    assert sum(len(prompts(file)) for file in result.files) == min(limit, 7)


def test_equal_beginnings_lie_together_with_the_longest_group_first(tmp_path):
    short, long, middle = "s" * 64, "l" * 64, "m" * 64
    texts = [short + "1", long + "1", middle + "22", short + "2", long + "x" * 9, middle + "1"]
    (file,) = prepared(tmp_path, batch(texts)).files
    assert prompts(file) == [
        long + "1",
        long + "x" * 9,
        middle + "1",
        middle + "22",
        short + "1",
        short + "2",
    ]


def test_groups_of_the_same_length_do_not_mix(tmp_path):
    beginnings = [letter * 64 for letter in "abcdefgh"]
    texts = [beginning + f"{i:03}" for i in range(50) for beginning in beginnings]
    (file,) = prepared(tmp_path, batch(texts)).files
    order = [text[0] for text in prompts(file)]
    changes = sum(one != two for one, two in pairwise(order))
    assert changes == len(beginnings) - 1


# missing_requests


def test_missing_requests_are_those_without_a_row_in_the_parts(tmp_path):
    files = prepared(tmp_path, batch(["a", "b", "c"]), batch(["a"], OTHER)).files
    parts = [
        write_part(tmp_path / "parts", ["a"], good).path,
        write_part(tmp_path / "parts", ["a"], good, call=OTHER).path,
    ]
    (left,) = missing_requests(files, parts, tmp_path / "pass-1")
    assert sorted(prompts(left)) == ["b", "c"]
    assert (left.rows, left.call) == (2, CALL)
    assert pq.read_table(left.path).schema.names == REQUESTS.names


def test_missing_requests_without_parts_are_all(tmp_path):
    files = prepared(tmp_path, batch(["a"])).files
    assert missing_requests(files, [], tmp_path / "pass-1") == files


def test_missing_requests_of_a_finished_job_are_none(tmp_path):
    files = prepared(tmp_path, batch(["a"])).files
    part = write_part(tmp_path / "parts", ["a", "z"], good)
    assert missing_requests(files, [part.path], tmp_path / "pass-1") == []


def test_missing_requests_keep_their_order(tmp_path):
    texts = [letter * 70 + f"{i:04}" for letter in "ab" for i in range(2000)]
    files = prepared(tmp_path, batch(texts)).files
    part = write_part(tmp_path / "parts", texts[::2], good)
    (left,) = missing_requests(files, [part.path], tmp_path / "pass-1")
    asked = set(texts[1::2])
    assert prompts(left) == [text for text in prompts(files[0]) if text in asked]


# Folders


def test_spool_folders_are_for_their_owner_only(tmp_path):
    spooled(tmp_path / "llm" / "spool" / "run" / "raw", batch(["a"]))
    result = prepared(tmp_path, batch(["a"]))
    folders = [
        tmp_path / "llm" / "spool" / "run" / "raw",
        private_folder(tmp_path / "new"),
        Path(result.files[0].path).parent,
    ]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3


def test_only_spools_older_than_a_day_are_removed(tmp_path):
    old, fresh = tmp_path / "old", tmp_path / "fresh"
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "raw-0.parquet").write_bytes(b"x")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    remove_abandoned(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["fresh"]
    assert (fresh / "raw-0.parquet").read_bytes() == b"x"


def test_a_spool_in_use_is_kept_for_days(tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(folder, (two_days_ago, two_days_ago))
    mark_in_use(folder)
    remove_abandoned(tmp_path)
    assert folder.is_dir()
    mark_in_use(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_no_spools_at_all_are_no_problem(tmp_path):
    remove_abandoned(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_a_request_file_says_what_is_in_it(tmp_path):
    (file,) = prepared(tmp_path, batch(["a"])).files
    sampling = CALL.content["sampling"]
    # Without any history: a token for four bytes, beside the template's, and what may come.
    assert file == RequestFile(file.path, 1, CALL, 12.25, sampling["max_tokens"])
