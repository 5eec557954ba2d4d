import random
import time
from itertools import pairwise

import duckdb
import pyarrow.parquet as pq
import pytest

from dbt_llm import lengths
from dbt_llm.lengths import EXPECTED, expect_lengths, usual_tokens
from dbt_llm.schema import Answer
from dbt_llm.spool import prepare_requests
from tests.unit.generations import LLMS, call_of, make_call, write_part
from tests.unit.test_spool import batch, prompts, spooled

CALL = call_of()
OTHER = call_of(seed=1)


def answering(tokens):
    """Return answers whose completion tokens a function of the prompt says."""
    return lambda key, prompt: Answer(key, output="", completion_tokens=tokens(prompt))


def text(size, number):
    """Return a prompt of so many bytes that begins like no other."""
    return f"{size} {number} ".ljust(size, "x")


def taught(folder, tokens_of_size, call=CALL, rows=20, **changes):
    """Write a part in which prompts of each size got answers of so many tokens on average."""
    rows_of = [text(size, number) for size in tokens_of_size for number in range(rows)]
    tokens = {
        prompt: tokens_of_size[len(prompt)] + (1 if index % 2 else -1)
        for index, prompt in enumerate(rows_of)
    }
    return write_part(folder, rows_of, answering(tokens.__getitem__), call, **changes).path


def expected(history, *calls):
    with duckdb.connect() as connection:
        learned = expect_lengths(connection, history, {call.call_hash: call for call in calls})
        rows = connection.execute(f"select call_hash, size, tokens from {EXPECTED}").fetchall()
    return learned, {(call_hash, size): tokens for call_hash, size, tokens in rows}


# What is expected


def test_the_mean_of_each_class_of_prompt_length_is_learned(tmp_path):
    path = taught(tmp_path, {40: 300, 50: 500, 200: 10})
    learned, tokens = expected([path], CALL)
    assert learned == {CALL.call_hash}
    # 40 and 50 bytes are one class, from 31 on.
    assert tokens == {
        (CALL.call_hash, 5): 400,
        (CALL.call_hash, 7): 10,
        (CALL.call_hash, None): 270,
    }


def test_a_call_learns_from_its_own_answers_alone(tmp_path):
    history = [taught(tmp_path, {40: 300}), taught(tmp_path, {40: 20}, OTHER)]
    _, tokens = expected(history, CALL, OTHER)
    assert tokens[CALL.call_hash, None] == 300
    assert tokens[OTHER.call_hash, None] == 20


def test_rows_of_other_calls_in_a_compacted_file_do_not_count(tmp_path):
    parts = [taught(tmp_path, {40: 300}), taught(tmp_path, {40: 20}, OTHER)]
    compacted = tmp_path / "part-00001-compacted.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"copy (from read_parquet({parts})) to '{compacted}' (format parquet)")
    learned, tokens = expected([str(compacted)], CALL)
    assert learned == {CALL.call_hash}
    assert tokens[CALL.call_hash, None] == 300


def test_a_class_of_few_rows_is_taken_for_any_other(tmp_path):
    history = [taught(tmp_path, {40: 300}), taught(tmp_path, {200: 9000}, rows=4)]
    _, tokens = expected(history, CALL)
    assert set(tokens) == {(CALL.call_hash, 5), (CALL.call_hash, None)}


def test_without_stored_prompts_the_call_is_one_class(tmp_path):
    path = taught(tmp_path, {40: 300, 200: 10}, keep_prompts=False)
    learned, tokens = expected([path], CALL)
    assert learned == {CALL.call_hash}
    assert tokens == {(CALL.call_hash, None): 155}


def test_answers_without_a_count_teach_nothing(tmp_path):
    path = write_part(
        tmp_path, [text(40, 1)], lambda key, _: Answer(key, error_code="timeout")
    ).path
    learned, tokens = expected([path], CALL)
    assert learned == set()
    assert tokens == {(CALL.call_hash, None): 512}


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ('{"model": "default"}', 512),
        ('{"model": "default", "max_tokens": 77}', 77),
        ('{"model": "default", "choices": ["a", "b"]}', 4),
        ('{"model": "default", "json_schema": {"type": "object"}}', 64),
        ('{"model": "default", "function": "embed"}', 0),
    ],
)
def test_what_a_call_without_history_is_taken_for(options, tokens):
    call = make_call(options, LLMS)
    assert usual_tokens(call) == tokens
    assert expected([], call) == (set(), {(call.call_hash, None): tokens})


def test_files_that_are_gone_or_broken_are_passed_over(tmp_path):
    broken = tmp_path / "part-9-broken.parquet"
    broken.write_bytes(b"PAR1 this is none PAR1")
    path = taught(tmp_path, {40: 300})
    learned, tokens = expected([str(broken), str(tmp_path / "part-8-gone.parquet"), path], CALL)
    assert learned == {CALL.call_hash}
    assert tokens[CALL.call_hash, 5] == 300


def test_the_rows_of_a_broken_file_cost_no_run(tmp_path):
    path = taught(tmp_path, {40: 300})
    content = bytearray((tmp_path / path).read_bytes())
    # The footer is whole, and what it leads to is not.
    content[4:-3000] = bytes(len(content) - 3004)
    (tmp_path / path).write_bytes(content)
    learned, tokens = expected([path], CALL)
    assert (learned, tokens) == (set(), {(CALL.call_hash, None): 512})


def test_old_and_new_files_are_read_and_not_all(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "_NEWEST_FILES", 3)
    monkeypatch.setattr(lengths, "_OLDER_FILES", 3)
    seen = []
    read_metadata = pq.read_metadata

    def read(path):
        seen.append(path)
        return read_metadata(path)

    # The newest files of a job that knew the lengths have the short answers alone.
    history = [taught(tmp_path, {200: 900}) for _ in range(10)]
    history += [taught(tmp_path, {40: 30}) for _ in range(5)]
    monkeypatch.setattr(lengths.pq, "read_metadata", read)
    _, tokens = expected(history, CALL)
    assert len(seen) == 6
    assert seen[:3] == history[:-4:-1]
    assert (tokens[CALL.call_hash, 5], tokens[CALL.call_hash, 7]) == (30, 900)


def test_of_a_file_of_large_prompts_a_bounded_part_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "_MOST_PROMPT_BYTES", 20_000)
    path = taught(tmp_path, {1000: 300}, rows=200)
    samples = lengths._samples([path], {CALL.call_hash})
    assert [(sample.file, sample.call_hash) for sample in samples] == [(path, CALL.call_hash)]
    assert 1 <= samples[0].rows <= 40


# The order of the requests


def ordered(tmp_path, *batches, history=()):
    raw = spooled(tmp_path / "raw", *batches)
    calls = {call.call_hash: call for call in (CALL, OTHER)}
    folder = tmp_path / f"requests-{time.monotonic_ns()}"
    return prepare_requests(
        raw, calls, folder, asked=[], others=[], limit=None, history=history
    ).files


def shuffled(rows):
    random.Random(0).shuffle(rows)
    return rows


def test_the_longest_answers_are_asked_first(tmp_path):
    history = [taught(tmp_path / "store", {40: 900, 100: 20, 300: 100})]
    rows = shuffled([text(size, number) for size in (40, 100, 300) for number in range(100)])
    (file,) = ordered(tmp_path, batch(rows), history=history)
    sizes = [len(prompt) for prompt in prompts(file)]
    assert sizes == [40] * 100 + [300] * 100 + [100] * 100
    assert sorted(prompts(file)) == sorted(rows)


def test_without_history_the_order_is_by_the_prompts_alone(tmp_path):
    rows = shuffled([text(size, number) for size in (40, 100, 300) for number in range(100)])
    (plain,) = ordered(tmp_path, batch(rows))
    (file,) = ordered(tmp_path, batch(rows), history=[taught(tmp_path / "store", {40: 900}, OTHER)])
    assert prompts(file) == prompts(plain)
    assert [len(prompt) for prompt in prompts(file)] == [300] * 100 + [100] * 100 + [40] * 100


def test_lengths_that_differ_little_leave_the_order_as_it_is(tmp_path):
    rows = shuffled([text(size, number) for size in (40, 100, 300) for number in range(100)])
    (plain,) = ordered(tmp_path, batch(rows))
    history = [taught(tmp_path / "store", {40: 140, 100: 200, 300: 170})]
    (file,) = ordered(tmp_path, batch(rows), history=history)
    assert prompts(file) == prompts(plain)


def test_prompts_that_begin_alike_stay_together_within_a_class(tmp_path):
    history = [taught(tmp_path / "store", {100: 20, 300: 900})]
    beginnings = [letter * 70 for letter in "abcdefgh"]
    rows = shuffled(
        [
            (beginning + f"{number:03}").ljust(size, "y")
            for beginning in beginnings
            for number in range(600)
            for size in (100, 300)
        ]
    )
    (file,) = ordered(tmp_path, batch(rows), history=history)
    order = [(len(prompt), prompt[0]) for prompt in prompts(file)]
    assert [size for size, _ in order] == [300] * 4800 + [100] * 4800
    assert sum(one != two for one, two in pairwise(order)) == 2 * len(beginnings) - 1


def test_small_groups_are_not_torn_apart_for_the_length_of_their_answers(tmp_path):
    # Twenty instructions with fifty texts each: each instruction is to be computed once.
    history = [taught(tmp_path / "store", {100: 20, 300: 900})]
    beginnings = [f"{number:02} ".ljust(70, "i") for number in range(20)]
    rows = shuffled(
        [
            (beginning + f"{number:03}").ljust(300 if number % 2 else 100, "y")
            for beginning in beginnings
            for number in range(50)
        ]
    )
    (file,) = ordered(tmp_path, batch(rows), history=history)
    order = [prompt[:2] for prompt in prompts(file)]
    assert sum(one != two for one, two in pairwise(order)) == len(beginnings) - 1


def test_calls_with_the_longest_answers_come_first(tmp_path):
    history = [
        taught(tmp_path / "store", {40: 20}),
        taught(tmp_path / "store", {40: 900}, OTHER),
    ]
    rows = [text(40, number) for number in range(100)]
    files = ordered(tmp_path, batch(rows), batch(rows, OTHER), history=history)
    assert [file.call for file in files] == [OTHER, CALL]
    history = [
        taught(tmp_path / "again", {40: 900}),
        taught(tmp_path / "again", {40: 20}, OTHER),
    ]
    files = ordered(tmp_path, batch(rows), batch(rows, OTHER), history=history)
    assert [file.call for file in files] == [CALL, OTHER]


def test_calls_whose_lengths_overlap_take_turns(tmp_path):
    history = [
        taught(tmp_path / "store", {40: 2000, 300: 10}),
        taught(tmp_path / "store", {40: 200}, OTHER),
    ]
    rows = [text(size, number) for size in (40, 300) for number in range(100)]
    short = [row for row in rows if len(row) == 40]
    files = ordered(tmp_path, batch(rows), batch(short, OTHER), history=history)
    assert [(file.call, file.rows) for file in files] == [(CALL, 100), (OTHER, 100), (CALL, 100)]
    assert [{len(prompt) for prompt in prompts(file)} for file in files] == [{40}, {40}, {300}]
    found = [(file.call, prompt) for file in files for prompt in prompts(file)]
    assert len(found) == len(set(found)) == 300


def test_a_few_rows_get_no_file_of_their_own(tmp_path):
    history = [
        taught(tmp_path / "store", {40: 2000, 300: 10}),
        taught(tmp_path / "store", {40: 200}, OTHER),
    ]
    rows = [text(40, number) for number in range(100)]
    few = [text(300, number) for number in range(5)]
    files = ordered(tmp_path, batch(rows + few), batch(rows, OTHER), history=history)
    assert [(file.call, file.rows) for file in files] == [(CALL, 105), (OTHER, 100)]
    assert prompts(files[0])[-5:] == sorted(few)
