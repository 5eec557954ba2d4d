"""Any text, wherever it may stand, reaches the store and comes back as it was."""

import asyncio
import json
import shutil

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dbt_llm import sql
from dbt_llm.call import make_call, prompt_hash
from dbt_llm.collector import Collector
from dbt_llm.config import load_config
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.engine_replay import ReplayEngine
from dbt_llm.functions import register_functions
from dbt_llm.record import write_answers
from dbt_llm.runner import engine_settings
from dbt_llm.schema import GENERATIONS, Answer
from dbt_llm.spool import RawSpool, prepare_requests
from tests.unit.generations import LLMS, call_of, key
from tests.unit.test_resolve_loop import Warehouse

SPECIAL = (
    *("", " ", "\0", "a\0b", "'", "''", '"', "\\", "{{ x }}", "{}", "%s", "$1", "?", "--", ";"),
    *("\n", "\r\n", "\r", "\t", "\x1c", "\x85", "\u2028", "\u2029", "\ufeff", "\ufffd", "\x7f"),
    *(
        "é",
        "e\u0301",
        "ß",
        "SS",
        "İ",
        "ﬁ",
        "👩\u200d👩\u200d👧",
        "🇱🇻",
        "\u202eabc",
        "مرحبا",
        "שלום",
    ),
    *("null", "NULL", "true", "0", "[]", '{"a": 1}', "\U0010ffff", "\ue000", "</s>", "<|im_end|>"),
)
TEXT = st.text() | st.sampled_from(SPECIAL) | st.lists(st.sampled_from(SPECIAL)).map("".join)
NAME = TEXT.filter(bool)
# DuckDB takes no NUL in the name of a field.
FIELD = NAME.map(lambda text: text.replace("\0", "")).filter(bool)
LABELS = st.lists(TEXT, min_size=2, max_size=4, unique_by=lambda text: text.strip().casefold())
SLOW = settings(
    max_examples=12, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)


def replayed(path, rows, call):
    """Return what the replay engine answers from a file: outputs by prompt."""
    config = load_config(
        {"llms": {"d": {"engine": "replay", "answers": str(path), "otherwise": "error"}}}
    )
    engine = ReplayEngine(engine_settings(config.llms["d"]))
    answers = []
    table = pa.table(
        {"prompt_hash": [str(i) for i in range(len(rows))], "prompt": pa.array(rows, pa.string())}
    )
    asyncio.run(engine.answer(table, call.content, answers.append))
    found = pa.concat_tables(answers).to_pylist()
    return {rows[int(row["prompt_hash"])]: (row["status"], row["output"]) for row in found}


class Texts:
    """Texts in every place of four calls, and what each call is to answer."""

    def __init__(self, alias, model, prompts, system, stop, labels, field, value):
        self.llms = load_config({"llms": {alias: {"engine": "replay", "model": model}}}).llms
        self.prompts = prompts
        self.labels = labels
        self.field = field
        schema = {"type": "object", "properties": {field: {"const": value}}}
        shared = {"model": alias, "system": system, "stop": stop}
        self.options = [
            shared,
            {"function": "classify", "labels": labels, "instruction": system, **shared},
            {"function": "extract", "fields": json.dumps({field: "VARCHAR"}), **shared},
            {"json_schema": json.dumps(schema), **shared},
        ]
        self.calls = [make_call(json.dumps(options), self.llms) for options in self.options]

    def sql(self):
        functions = ["llm_generate", "llm_classify", "llm_extract", "llm_generate"]
        items = [
            f"{function}(prompt, {_arguments(options)}) as r{n}"
            for n, (function, options) in enumerate(zip(functions, self.options, strict=True))
        ]
        hashes = [f"llm_prompt_hash(prompt, {_arguments(self.options[n])}) as h{n}" for n in (0, 3)]
        return f"select i, {', '.join([*items, *hashes])} from texts order by i"

    def output(self, n, prompt):
        if n == 1:
            return self.labels[len(prompt) % len(self.labels)]
        return json.dumps({self.field: prompt}) if n == 2 else f"{prompt}|{prompt[::-1]}"

    def answer(self, hash_, prompt):
        (n,) = (n for n, c in enumerate(self.calls) if prompt_hash(c.call_hash, prompt) == hash_)
        return Answer(hash_, output=self.output(n, prompt))

    def rows(self):
        hashes = [self.calls[n].call_hash for n in (0, 3)]
        return [
            (
                i,
                self.output(0, prompt),
                self.output(1, prompt),
                {self.field: prompt},
                self.output(3, prompt),
                *(prompt_hash(call_hash, prompt) for call_hash in hashes),
            )
            for i, prompt in enumerate(self.prompts)
        ]


def _arguments(options):
    return ", ".join(
        f"{name} := {sql.literal_list(value) if isinstance(value, list) else sql.literal(value)}"
        for name, value in options.items()
        if name != "function"
    )


TEXTS = st.builds(
    Texts,
    alias=NAME,
    model=NAME,
    prompts=st.lists(TEXT, min_size=1, max_size=5, unique=True),
    system=TEXT,
    stop=st.lists(TEXT, min_size=1, max_size=3),
    labels=LABELS,
    field=FIELD,
    value=TEXT,
)


@pytest.mark.parametrize("format_", ["delta", "parquet"])
def test_any_text_comes_back_from_sql_the_store_and_the_recorded_answers(tmp_path_factory, format_):
    connection = duckdb.connect()
    load_delta_extension(connection)

    @SLOW
    @given(texts=TEXTS)
    def run(texts):
        folder = tmp_path_factory.mktemp("texts")
        collector = Collector(texts.llms)
        register_functions(connection, collector)
        warehouse = Warehouse(connection, collector, folder, format_)
        numbered = {"i": range(len(texts.prompts)), "prompt": texts.prompts}
        given_ = pa.table(numbered, pa.schema({"i": pa.int64(), "prompt": pa.string()}))
        connection.register("given_texts", given_)
        connection.execute("create or replace table texts as from given_texts")
        _, rows = warehouse.build(texts.sql(), warehouse.jobs(texts.answer))
        assert rows == texts.rows()
        again = warehouse.jobs(texts.answer)
        _, rows = warehouse.build(texts.sql(), again)
        assert rows == texts.rows()
        assert again.rounds == []

        expected = set()
        for n, call in enumerate(texts.calls):
            for prompt in texts.prompts:
                hash_ = prompt_hash(call.call_hash, prompt)
                expected.add((hash_, call.call_hash, call.text, prompt, texts.output(n, prompt)))
        for stored in _read(warehouse.store, connection):
            columns = ("prompt_hash", "call_hash", "call", "prompt", "output")
            assert {tuple(row[name] for name in columns) for row in stored.to_pylist()} == expected

        path = folder / "answers.jsonl"
        assert write_answers(connection, warehouse.store, path) == len(expected)
        for n, call in enumerate(texts.calls):
            assert replayed(path, texts.prompts, call) == {
                prompt: ("ok", texts.output(n, prompt)) for prompt in texts.prompts
            }
        shutil.rmtree(folder)

    run()
    connection.close()


def _read(store, connection):
    """Read a store in every way that there is."""
    snapshot = store.snapshot()
    yield pq.ParquetDataset(list(snapshot.files), schema=GENERATIONS, partitioning=None).read()
    for delta_scan in {False, _has_delta(connection)}:
        relation = store.relation(snapshot, delta_scan)
        yield connection.sql(f"select * from {relation}").to_arrow_table()
    if snapshot.version is not None:
        yield pa.table(DeltaTable(str(store.folder)).to_pyarrow_table())


def _has_delta(connection):
    known = "select count(*) > 0 from duckdb_extensions() where extension_name = 'delta' and loaded"
    return bool(sql.scalar(connection, known))


@settings(max_examples=30)
@given(prompts=st.lists(TEXT, min_size=1, unique=True), limit=st.none() | st.integers(0, 5))
def test_any_text_comes_through_the_spool(tmp_path_factory, prompts, limit):
    folder = tmp_path_factory.mktemp("spool")
    spool = RawSpool(folder / "raw")
    call = call_of()
    for begin in range(0, len(prompts), 3):
        rows = prompts[begin : begin + 3]
        hashes = [key(prompt) for prompt in rows]
        batch = [pa.array(column, pa.string()) for column in (hashes, [call.call_hash] * len(rows))]
        names = ["prompt_hash", "call_hash", "prompt"]
        spool.add(pa.record_batch([*batch, pa.array(rows, pa.string())], names=names))
    prepared = prepare_requests(
        spool.take(), {call.call_hash: call}, folder, asked=[], others=[], limit=limit
    )
    wanted = len(prompts) if limit is None else min(limit, len(prompts))
    assert prepared.rows == wanted
    found = [row for file in prepared.files for row in pq.read_table(file.path).to_pylist()]
    assert len({row["prompt"] for row in found}) == wanted
    assert {row["prompt"] for row in found} <= set(prompts)
    assert all(row["prompt_hash"] == key(row["prompt"]) for row in found)


@pytest.mark.parametrize("text", ["x" * 3_000_000, "👩\u200d👩\u200d👧" * 100_000, "\0" * 100_000])
def test_a_huge_text_has_one_key_and_comes_back(tmp_path, text):
    with duckdb.connect() as connection:
        collector = Collector(LLMS)
        register_functions(connection, collector)
        warehouse = Warehouse(connection, collector, tmp_path)
        connection.execute("create or replace table texts as select ?::varchar as prompt", [text])
        query = "select llm_generate(prompt), llm_prompt_hash(prompt) from texts"
        jobs = warehouse.jobs(lambda hash_, prompt: Answer(hash_, output=prompt))
        _, rows = warehouse.build(query, jobs)
        assert rows == [(text, key(text))]
        path = tmp_path / "answers.jsonl"
        write_answers(connection, warehouse.store, path)
        assert replayed(path, [text], call_of()) == {text: ("ok", text)}
