import json
import math
import re
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dbt_llm import lake_changes, lake_files, sql
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import ConfigError, LakehouseError, SchemaChangeError
from dbt_llm.lake_config import load_model_config
from dbt_llm.lake_table import FILE, Docs
from dbt_llm.lake_types import arrow_schema, columns_of
from dbt_llm.lakehouse import Model, write_model

FORMATS = pytest.mark.parametrize("format_", ["delta", "parquet"])


class Lake:
    """A table, written from queries as dbt's macro has it done."""

    def __init__(self, folder, format_):
        self.folder = folder
        self.format = format_
        self.cursor = duckdb.connect()
        # As the plugin has it.
        self.cursor.execute("set arrow_large_buffer_size = true")

    def write(self, query, *, incremental=True, full_refresh=False, docs=None, **config):
        self.cursor.execute(f"create or replace temp table rows_of_test as {query}")
        model = Model(
            "model.p.m",
            "rows_of_test",
            load_model_config("model.p.m", {"format": self.format, **config}),
            str(self.folder),
            incremental,
            full_refresh,
            docs or Docs(),
        )
        self.select = write_model(self.cursor, model)
        return self.rows()

    def rows(self):
        return duckdb.sql(f"select * from ({self.files()}) order by all").fetchall()

    def files(self):
        """Read by files, also where the extension is there."""
        from dbt_llm.lake_table import scan

        state = self.state()
        return scan(list(state.columns), state, list(state.files))

    def state(self):
        from dbt_llm.lake_delta import DeltaTable
        from dbt_llm.lake_parquet import ParquetTable

        if self.format == "delta":
            return DeltaTable(str(self.folder)).state()
        return ParquetTable(str(self.folder), lambda q: columns_of(self.cursor, q)).state()

    def stats(self):
        """Return the statistics of the one file of a new Delta table."""
        (log,) = (self.folder / "_delta_log").glob("*.json")
        (add,) = [one["add"] for one in map(json.loads, log.open()) if "add" in one]
        return json.loads(add["stats"])

    @property
    def version(self):
        return self.state().version


@pytest.fixture(params=["delta", "parquet"])
def lake(request, tmp_path):
    return Lake(tmp_path / "a [t]able.v1 é'", request.param)


THREE = "select i as id, 'v' || i as v from range(3) t(i)"


def test_overwrite_replaces(lake):
    assert lake.write(THREE) == [(0, "v0"), (1, "v1"), (2, "v2")]
    assert lake.write("select 7::bigint as id, 'x' as v") == [(7, "x")]
    assert lake.version == 1


def test_a_table_without_rows_keeps_its_columns(lake):
    assert lake.write(f"{THREE} where false") == []
    assert [(c.name, c.sql_type) for c in lake.state().columns] == [
        ("id", "BIGINT"),
        ("v", "VARCHAR"),
    ]
    assert len(lake.write(THREE)) == 3


def test_append_adds_and_nothing_makes_no_version(lake):
    lake.write(THREE, incremental_strategy="append", incremental=False)
    assert len(lake.write(THREE, incremental_strategy="append")) == 6
    version = lake.version
    lake.write(f"{THREE} where false", incremental_strategy="append")
    assert lake.version == version


def test_append_without_a_view_is_refused(lake):
    lake.write(THREE, incremental_strategy="append", incremental=False)
    with pytest.raises(LakehouseError, match="--full-refresh"):
        lake.write(THREE, incremental_strategy="append", incremental=False)
    assert len(lake.rows()) == 3


@pytest.mark.parametrize("strategy", ["merge", "delete+insert"])
def test_only_what_changed_is_written(lake, strategy):
    config = {"unique_key": "id", "incremental_strategy": strategy}
    lake.write(THREE, **config)
    assert lake.version == 0
    lake.write(THREE, **config)
    assert lake.version == 0
    rows = lake.write("select 1::bigint as id, 'new' as v union all select 9, 'nine'", **config)
    assert rows == [(0, "v0"), (1, "new"), (2, "v2"), (9, "nine")]
    assert lake.version == 1


def test_overwrite_with_a_key_deletes_and_keeps_the_unchanged(lake):
    config = {"unique_key": "id", "incremental_strategy": "overwrite"}
    lake.write(THREE, **config)
    lake.write(THREE, **config)
    assert lake.version == 0
    assert lake.write(f"{THREE} where i > 0", **config) == [(1, "v1"), (2, "v2")]


@pytest.mark.parametrize("strategy", ["merge", "delete+insert"])
def test_a_change_rewrites_only_the_files_that_hold_it(lake, strategy, monkeypatch):
    monkeypatch.setattr("dbt_llm.lake_files.TARGET_BYTES", 1)
    monkeypatch.setattr("dbt_llm.lake_files._BATCH_ROWS", 2048)
    monkeypatch.setattr("dbt_llm.lakehouse._MANY_SMALL", 10_000)
    config = {"unique_key": "id", "incremental_strategy": strategy}
    lake.write("select i as id, i % 7 as v from range(20480) t(i)", **config)
    before = {file.path for file in lake.state().files}
    assert len(before) == 10
    # Two in one file, one in another.
    lake.write("select unnest([5, 6, 10000])::bigint as id, 99::bigint as v", **config)
    after = {file.path for file in lake.state().files}
    assert len(before - after) == 2
    assert sum(file.rows for file in lake.state().files) == 20480
    lake.write("select -1::bigint as id, 99::bigint as v", **config)
    assert after < {file.path for file in lake.state().files}


def test_null_is_a_key_and_keys_may_be_several(lake):
    config = {"unique_key": ["a", "b"]}
    query = "select * from (values (1, null, 'x'), (null, null, 'y'), (1, 2, 'z')) t(a, b, v)"
    lake.write(query, **config)
    lake.write(query, **config)
    assert lake.version == 0
    rows = lake.write("select 1 as a, null::integer as b, 'X' as v", **config)
    assert sorted(map(str, rows)) == ["(1, 2, 'z')", "(1, None, 'X')", "(None, None, 'y')"]


def test_a_repeated_key_is_named(lake):
    with pytest.raises(LakehouseError, match=r"2 rows with the same unique_key: id = NULL"):
        lake.write("select null::int as id, i as v from range(2) t(i)", unique_key="id")
    assert not (lake.folder / "_delta_log").exists()


def test_delete_insert_replaces_groups(lake):
    config = {"unique_key": "day", "incremental_strategy": "delete+insert"}
    lake.write("select i % 2 as day, i as v from range(4) t(i)", **config)
    lake.write("select i % 2 as day, i as v from range(3, -1, -1) t(i)", **config)
    assert lake.version == 0
    assert lake.write("select 0::bigint as day, 8::bigint as v", **config) == [
        (0, 8),
        (1, 1),
        (1, 3),
    ]


TZ = "TIMESTAMP WITH TIME ZONE"
# Name: two values that are not NULL, and the type in the table.
TYPES = {
    "boolean": ("true", "false", "BOOLEAN"),
    "tinyint": ("(-128)::tinyint", "127::tinyint", "TINYINT"),
    "smallint": ("(-32768)::smallint", "32767::smallint", "SMALLINT"),
    "integer": ("(-2147483648)::integer", "7", "INTEGER"),
    "bigint": ("(-9223372036854775808)::bigint", "9223372036854775807::bigint", "BIGINT"),
    "utinyint": ("255::utinyint", "0::utinyint", "SMALLINT"),
    "usmallint": ("65535::usmallint", "0::usmallint", "INTEGER"),
    "uinteger": ("4294967295::uinteger", "0::uinteger", "BIGINT"),
    "ubigint": ("18446744073709551615::ubigint", "0::ubigint", "DECIMAL(20, 0)"),
    "hugeint": ("100000000000000000000::hugeint", "(-1)::hugeint", "DECIMAL(38, 0)"),
    "uhugeint": ("100000000000000000000::uhugeint", "0::uhugeint", "DECIMAL(38, 0)"),
    "sum": ("(select sum(i) from range(4) t(i))", "0::hugeint", "DECIMAL(38, 0)"),
    "decimal": ("1.25::decimal(38, 10)", "(-1.5)::decimal(38, 10)", "DECIMAL(38, 10)"),
    "small decimal": ("1.5::decimal(4, 1)", "(-99.9)::decimal(4, 1)", "DECIMAL(4, 1)"),
    "float": ("0.1::float", "'-inf'::float", "FLOAT"),
    "double": ("'nan'::double", "1e300::double", "DOUBLE"),
    "text": ("'\u00e4\U0001f600''\"\\'", "''", "VARCHAR"),
    "long text": ("repeat('long ', 1000)", "'\n\t' || chr(0)", "VARCHAR"),
    "json": ("'{\"a\": 1}'::json", "'[]'::json", "VARCHAR"),
    "blob": ("'\\x00\\xff'::blob", "''::blob", "BLOB"),
    "uuid": (
        "'6ba7b810-9dad-11d1-80b4-00c04fd430c8'::uuid",
        "'00000000-0000-0000-0000-000000000000'::uuid",
        "VARCHAR",
    ),
    "enum": ("'a'::enum('a', 'b')", "'b'::enum('a', 'b')", "VARCHAR"),
    "date": ("date '2026-01-02'", "date '0001-01-01'", "DATE"),
    "timestamp": (
        "timestamp '2026-01-02 03:04:05.678901'",
        "timestamp '1969-12-31 23:59:59.999999'",
        "TIMESTAMP",
    ),
    "timestamp_s": (
        "'2026-01-02 03:04:05'::timestamp_s",
        "'1900-01-01'::timestamp_s",
        "TIMESTAMP",
    ),
    "timestamp_ms": (
        "'2026-01-02 03:04:05.6'::timestamp_ms",
        "'1900-01-01'::timestamp_ms",
        "TIMESTAMP",
    ),
    "timestamptz": (
        "timestamptz '2026-01-02 03:04:05.678901+02'",
        "timestamptz '1969-12-31 23:59:59.999999+00'",
        TZ,
    ),
    "list": ("[1, null, 3]", "[]::integer[]", "INTEGER[]"),
    "array": ("[1.5, 2.5]::float[2]", "[0, null]::float[2]", "FLOAT[]"),
    "list of arrays": ("[['a', 'b']::varchar[2]]", "[null]::varchar[2][]", "VARCHAR[][]"),
    "struct": (
        "{'a b': 1::utinyint, 'c.d': ['x'::enum('x')]}",
        "{'a b': null::utinyint, 'c.d': null::enum('x')[]}",
        'STRUCT("a b" SMALLINT, "c.d" VARCHAR[])',
    ),
    "map": (
        "map {'k': [1], 'l': null}",
        "map {}::map(varchar, integer[])",
        "MAP(VARCHAR, INTEGER[])",
    ),
    "deep": (
        "[{'t': timestamptz '2026-01-02 03:04:05+02', 'm': map {1: [{'d': 1.5::decimal(9, 2)}]}}]",
        "[null]",
        f'STRUCT("t" {TZ}, "m" MAP(INTEGER, STRUCT("d" DECIMAL(9, 2))[]))[]',
    ),
    "null": ("null::varchar", "null::varchar", "VARCHAR"),
    "untyped null": ("null", "null", "INTEGER"),
}
TYPED_ROWS = [
    "select "
    + ", ".join(
        [
            f"{number}::bigint as id",
            *(f'{cells[number]} as "{name}"' for name, cells in rows.items()),
        ]
    )
    for rows in [{name: (first, second, "null") for name, (first, second, _) in TYPES.items()}]
    for number in range(3)
]


def plain_value(value):
    """Return a value of any reader so that equal ones are equal here."""
    if isinstance(value, dict):
        return tuple(sorted((plain_value(one), plain_value(two)) for one, two in value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(plain_value, value))
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def plain_rows(rows):
    """Return rows sorted by id; readers show the column `map` as they like."""
    found = [{name: plain_value(value) for name, value in row.items()} for row in rows]
    return sorted(found, key=lambda row: row["id"])


def named(relation):
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def as_python(table):
    """Return the rows of an Arrow table, maps within values as dicts."""
    return named(duckdb.connect().from_arrow(table))


@pytest.fixture
def typed(lake):
    """A table of all types, in three files."""
    lake.cursor.execute("set TimeZone = 'Europe/Berlin'")
    for query in TYPED_ROWS:
        # Alone, a row of NULLs would have other types.
        first = f"{TYPED_ROWS[0]} where false union all {TYPED_ROWS[1]} where false"
        lake.write(f"{first} union all {query}", incremental_strategy="append")
    return lake


def test_every_type_comes_back(typed):
    columns = {one.name: one.sql_type for one in typed.state().columns if one.name != "id"}
    assert columns == {name: stored for name, (_, _, stored) in TYPES.items()}
    for number, query in enumerate(TYPED_ROWS):
        casts = ", ".join(f'"{name}"::{type_} as "{name}"' for name, type_ in columns.items())
        same = (
            f"select id, {casts} from ({query}) except all "
            f"select * from ({typed.files()}) where id = {number}"
        )
        assert typed.cursor.execute(same).fetchall() == []
    version = typed.version
    for strategy in ("merge", "delete+insert", "overwrite"):
        rows = " union all ".join(TYPED_ROWS)
        typed.write(rows, unique_key="id", incremental_strategy=strategy)
        assert typed.version == version


def test_all_readers_agree_on_rows_and_types(tmp_path):
    from deltalake import DeltaTable

    lake = Lake(tmp_path / "types", "delta")
    typed.__wrapped__(lake)
    expected = plain_rows(named(lake.cursor.sql(lake.files())))
    schema = arrow_schema(list(lake.state().columns))
    table = DeltaTable(str(lake.folder))
    assert pa.schema(table.schema().to_arrow()).equals(schema)
    assert plain_rows(as_python(table.to_pyarrow_table())) == expected
    frame = polars.read_delta(str(lake.folder))
    assert frame.schema == polars.from_arrow(schema.empty_table()).schema
    assert plain_rows(as_python(frame.to_arrow())) == expected
    if not load_delta_extension(lake.cursor):
        return
    scanned = lake.cursor.sql(f"from delta_scan('{lake.folder}')")
    assert plain_rows(named(scanned)) == expected
    described = {
        name: type_ for name, type_, *_ in lake.cursor.sql(f"describe {lake.files()}").fetchall()
    }
    assert dict(zip(scanned.columns, map(str, scanned.types), strict=True)) == described


COMPARED = [
    *("boolean", "tinyint", "bigint", "ubigint", "decimal", "small decimal", "float", "double"),
    *("text", "long text", "blob", "uuid", "date", "timestamp", "timestamptz"),
]


@pytest.mark.parametrize("odd", [False, True])
def test_statistics_hide_no_row(tmp_path, odd):
    """Each reader skips files by them, and finds what it should; `odd`: with NaN and infinity."""
    import deltalake

    lake = Lake(tmp_path / "types", "delta")
    names = [name for name in COMPARED if odd or name not in {"float", "double"}]
    for query in TYPED_ROWS:
        columns = ", ".join(f'"{name}"' for name in names)
        rows = f"select id, {columns} from ({' union all '.join(TYPED_ROWS)})"
        lake.write(f"{rows} semi join ({query}) using (id)", incremental_strategy="append")
    assert len(lake.state().files) == 3
    data = deltalake.DeltaTable(str(lake.folder)).to_pyarrow_dataset()
    lazy = polars.scan_delta(str(lake.folder))
    extension = load_delta_extension(lake.cursor)
    for name in names:
        column = data.to_table(columns=["id", name]).sort_by("id").column(name)
        for number, value in enumerate(column.slice(0, 2)):
            if value.as_py() != value.as_py():
                continue
            assert data.to_table(filter=pc.field(name) == value)["id"].to_pylist() == [number]
            literal = polars.from_arrow(column.slice(number, 1)).item()
            found = lazy.filter(
                polars.col(name) == polars.lit(literal, lazy.collect_schema()[name])
            )
            assert found.collect()["id"].to_list() == [number], name
            if extension:
                rows = lake.cursor.execute(
                    f"select id from delta_scan('{lake.folder}') where \"{name}\" = "
                    f'(select "{name}" from ({lake.files()}) where id = {number})'
                )
                assert rows.fetchall() == [(number,)], name
        nulls = data.to_table(filter=pc.field(name).is_null())
        assert nulls["id"].to_pylist() == [2], name


@pytest.mark.parametrize(
    ("high", "bound"),
    [
        ("b" * 64, "b" * 64),
        ("b" * 9000, "b" * 63 + "c"),
        ("b" * 63 + "\ud7ffx", "b" * 63 + "\ue000"),
        ("b" * 63 + "\U0010ffffx", "b" * 62 + "c"),
    ],
)
def test_a_long_text_is_bounded_by_its_beginning(tmp_path, high, bound):
    lake = Lake(tmp_path / "t", "delta")
    lake.cursor.execute("set variable high = ?", [high])
    lake.write("select getvariable('high') as text union all select repeat('a', 5000)")
    stats = lake.stats()
    assert (stats["minValues"], stats["maxValues"]) == ({"text": "a" * 64}, {"text": bound})


@pytest.mark.parametrize("value", ["'nan'::float", "'inf'::double", "date 'infinity'"])
def test_what_json_cannot_say_leaves_a_file_without_bounds(tmp_path, value):
    lake = Lake(tmp_path / "t", "delta")
    lake.write(f"select 1 as id, {value} as v union all select 2, null")
    assert lake.stats() == {"numRecords": 2, "nullCount": {"id": 0, "v": 1}}


@pytest.mark.parametrize(
    "value", ["'infinity'::date", "date '0044-03-15 (BC)'", "timestamp '20000-01-01'"]
)
def test_a_date_that_python_does_not_have_is_held(lake, value):
    for _ in range(2):
        lake.write(f"select 1 as id, {value} as c", unique_key="id")
    assert lake.version == 0
    assert lake.cursor.execute(f"select c = {value} from ({lake.files()})").fetchall() == [(True,)]


def test_a_number_that_does_not_fit_is_told(lake):
    with pytest.raises((LakehouseError, duckdb.Error), match=r"DECIMAL\(38,0\)"):
        lake.write("select 1 as id, 170141183460469231731687303715884105727::hugeint as n")
    assert list(lake.folder.rglob("*.parquet")) == []


@pytest.mark.parametrize(
    "value",
    [
        *("time '01:02:03'", "interval 1 day", "'101'::bit", "'01:02:03+01'::timetz"),
        *("'2026-01-02 03:04:05.123456789'::timestamp_ns", "union_value(a := 1)"),
        *("1::bignum", "{'a': 1}::variant", "time_ns '01:02:03.123456789'"),
        *("[time '01:02:03']", "{'a': interval 1 day}"),
    ],
)
def test_other_types_are_refused_by_column(lake, value):
    with pytest.raises(ConfigError, match=r"- odd one \(.*\): .*(cast|store|build) it"):
        lake.write(f'select {value} as "odd one", 1 as b')
    assert not lake.folder.exists()


@pytest.mark.parametrize("change", ["ignore", "fail", "append_new_columns", "sync_all_columns"])
def test_a_new_column(lake, change):
    lake.write(THREE, unique_key="id")
    config = {"unique_key": "id", "on_schema_change": change}
    query = "select 1::bigint as id, 'v1' as v, 5 as extra"
    if change == "fail":
        with pytest.raises(SchemaChangeError, match=r"new extra \(INTEGER\)"):
            lake.write(query, **config)
        return
    rows = lake.write(query, **config)
    if change == "ignore":
        assert rows == [(0, "v0"), (1, "v1"), (2, "v2")]
    else:
        assert rows == [(0, "v0", None), (1, "v1", 5), (2, "v2", None)]


@pytest.mark.parametrize("change", ["ignore", "fail", "append_new_columns", "sync_all_columns"])
def test_a_column_that_is_gone(lake, change):
    lake.write("select i as id, 'v' || i as v, 0 as old from range(3) t(i)", unique_key="id")
    config = {"unique_key": "id", "on_schema_change": change}
    query = "select 1::bigint as id, 'new' as v"
    if change in {"ignore", "fail"}:
        with pytest.raises(SchemaChangeError, match=r"gone old \(INTEGER\)"):
            lake.write(query, **config)
        return
    rows = lake.write(query, **config)
    if change == "append_new_columns":
        assert rows == [(0, "v0", 0), (1, "new", 0), (2, "v2", 0)]
    else:
        assert rows == [(0, "v0"), (1, "new"), (2, "v2")]


def test_sync_changes_a_type(lake):
    lake.write("select i::integer as id, '1' as v from range(2) t(i)", unique_key="id")
    rows = lake.write(
        "select 5 as id, 2 as v", unique_key="id", on_schema_change="sync_all_columns"
    )
    assert rows == [(0, 1), (1, 1), (5, 2)]


def test_full_refresh_replaces_columns_and_partitions(lake):
    lake.write(THREE, unique_key="id")
    rows = lake.write("select 'p' as p, 1 as n", full_refresh=True, partition_by="p")
    assert rows == [("p", 1)]
    assert lake.state().partition_by == ("p",)


PARTITIONED = (
    "select * from (values (1, 'a'), (2, 'b c/%'), (3, null), (4, 'a'), (5, 'é')) t(id, p)"
)


def test_partitions(lake):
    rows = lake.write(PARTITIONED, partition_by="p", unique_key="id")
    assert {row[0]: row[1] for row in rows} == {1: "a", 2: "b c/%", 3: None, 4: "a", 5: "é"}
    assert {file.partition for file in lake.state().files} == {("a",), ("b c/%",), (None,), ("é",)}
    lake.write(PARTITIONED, partition_by="p", unique_key="id")
    assert lake.version == 0
    rows = lake.write("select 1 as id, 'z' as p", partition_by="p", unique_key="id")
    assert {row[0]: row[1] for row in rows}[1] == "z"
    with pytest.raises(ConfigError, match="--full-refresh"):
        lake.write(PARTITIONED, unique_key="id")


def test_an_empty_partition_value_is_refused(lake):
    with pytest.raises(LakehouseError, match="partition column p holds ''"):
        lake.write("select '' as p, 1 as n", partition_by="p")
    assert list(lake.folder.rglob("*.parquet")) == []


def test_many_small_files_are_put_together(lake, monkeypatch):
    monkeypatch.setattr("dbt_llm.lakehouse._MANY_SMALL", 5)
    for number in range(12):
        lake.write(f"select {number}::bigint as id, 'x' as v", unique_key="id")
    assert len(lake.rows()) == 12
    assert len(lake.state().files) <= 5


def test_all_problems_of_a_config_come_together():
    with pytest.raises(ConfigError) as caught:
        load_model_config("m", {"format": "orc", "location": 3, "on_schema_change": "no"})
    assert [key in str(caught.value) for key in ("format", "location", "on_schema_change")] == [
        True
    ] * 3
    with pytest.raises(ConfigError, match="merge needs a unique_key"):
        load_model_config("m", {"incremental_strategy": "merge"})


def test_docs_go_into_the_delta_metadata_once(tmp_path):
    from deltalake import DeltaTable

    lake = Lake(tmp_path / "t", "delta")
    docs = Docs("What it is.", {"v": "A value."})
    for _ in range(2):
        lake.write(THREE, unique_key="id", docs=docs)
    table = DeltaTable(str(lake.folder))
    assert (table.version(), table.metadata().description) == (0, "What it is.")
    assert {f.name: f.metadata for f in table.schema().fields}["v"] == {"comment": "A value."}


def test_statistics_are_those_of_the_rows(tmp_path):
    lake = Lake(tmp_path / "t", "delta")
    lake.write("select i as id, case when i > 0 then 'k' || i end as k from range(3) t(i)")
    assert lake.stats() == {
        "numRecords": 3,
        "minValues": {"id": 0, "k": "k1"},
        "maxValues": {"id": 2, "k": "k2"},
        "nullCount": {"id": 0, "k": 1},
    }


def come_between(monkeypatch, other, **config):
    """Have another writer commit a row once somebody has written files, before these count."""
    real = lake_files.FileWriter.write
    raced = []

    def write(self, cursor, query):
        files = real(self, cursor, query)
        if not raced:
            raced.append(True)
            other.write("select 7::bigint as id, 'other' as v", **config)
        return files

    monkeypatch.setattr(lake_files.FileWriter, "write", write)


@FORMATS
def test_a_second_writer_works_on_what_the_first_left(tmp_path, monkeypatch, format_):
    lake = Lake(tmp_path / "t", format_)
    lake.write(THREE, unique_key="id")
    come_between(monkeypatch, Lake(lake.folder, format_), unique_key="id")
    rows = lake.write("select 7::bigint as id, 'mine' as v", unique_key="id")
    assert rows == [(0, "v0"), (1, "v1"), (2, "v2"), (7, "mine")]
    listed = {Path(file.address) for file in lake.state().files}
    assert listed <= set(lake.folder.rglob("*.parquet"))


def test_old_parquet_files_are_removed_after_the_grace_time(tmp_path, monkeypatch):
    lake = Lake(tmp_path / "t", "parquet")
    lake.write(THREE)
    lake.write("select 1 as id, 'x' as v")
    assert len(list(lake.folder.rglob("*.parquet"))) == 2
    monkeypatch.setattr("dbt_llm.lake_parquet.GRACE_S", -1)
    lake.write("select 2 as id, 'y' as v")
    assert len(list(lake.folder.rglob("*.parquet"))) == 1


def test_the_delta_types_are_those_of_arrow(tmp_path):
    from deltalake import DeltaTable

    lake = Lake(tmp_path / "t", "delta")
    lake.write("select now()::timestamp as a, now() as b, [1] as c")
    schema = pa.schema(DeltaTable(str(lake.folder)).schema().to_arrow())
    assert [schema.field(name).type for name in "abc"] == [
        pa.timestamp("us"),
        pa.timestamp("us", tz="UTC"),
        pa.list_(pa.int32()),
    ]


class Explaining:
    """A cursor that keeps the plans of the queries that look for changes."""

    def __init__(self, cursor):
        self._cursor = cursor
        self.plans = []

    def __getattr__(self, name):
        return getattr(self._cursor, name)

    def execute(self, query):
        if " join " in query:
            self.plans.append(self._cursor.execute(f"explain {query}").fetchall()[0][1])
        return self._cursor.execute(query)

    def sql(self, query):
        if " join " in query:
            self.plans.append(self._cursor.execute(f"explain {query}").fetchall()[0][1])
        return self._cursor.sql(query)


@pytest.mark.parametrize("key", ["id", ["id", "part"]])
@pytest.mark.parametrize("strategy", ["merge", "delete+insert", "overwrite"])
def test_changes_are_found_by_hash_joins(tmp_path, strategy, key):
    lake = Lake(tmp_path / "t", "parquet")
    config = {"unique_key": key, "incremental_strategy": strategy}
    lake.write("select i as id, i % 3 as part, i as v from range(5000) t(i)", **config)
    lake.cursor = Explaining(lake.cursor)
    extra = "" if strategy == "overwrite" else ", 1 as extra"
    lake.write(
        f"select i as id, i % 3 as part, -i as v{extra} from range(4000, 6000) t(i)",
        on_schema_change="append_new_columns",
        **config,
    )
    assert len(lake.cursor.plans) >= 2
    for plan in lake.cursor.plans:
        # DuckDB 1.5 writes HASH_JOIN, 2.0 Hash Join.
        plain = plan.upper().replace("_", " ")
        assert "HASH JOIN" in plain, plan
        assert not re.search("LOOP|NL JOIN|CROSS PRODUCT|MERGE JOIN|IE JOIN|DELIM", plain), plan


def readers(lake):
    """Return what reads `v` of all rows, as strangers do."""
    if lake.format == "parquet":

        def by_manifest():
            newest = json.loads(max(lake.folder.glob("_manifests/*.json")).read_text())
            files = [lake.folder / file["path"] for file in newest["files"]]
            return pq.ParquetDataset(files).read(["v"])["v"].to_pylist()

        return [by_manifest]
    from deltalake import DeltaTable

    def by_delta_rs():
        return DeltaTable(str(lake.folder)).to_pyarrow_table(columns=["v"])["v"].to_pylist()

    found = [by_delta_rs]
    connection = duckdb.connect()
    if load_delta_extension(connection):
        query = f"select v from delta_scan({sql.literal(str(lake.folder))})"
        found.append(lambda: [v for (v,) in connection.execute(query).fetchall()])
    return found


@pytest.mark.parametrize("strategy", ["merge", "overwrite", "replace"])
def test_a_reader_sees_one_version_at_any_time(lake, strategy, monkeypatch):
    monkeypatch.setattr("dbt_llm.lake_files.TARGET_BYTES", 1)
    monkeypatch.setattr("dbt_llm.lake_files._BATCH_ROWS", 2048)
    rows, runs = 6000, 6
    keys = {} if strategy == "replace" else {"unique_key": "id"}
    if strategy == "overwrite":
        keys["incremental_strategy"] = strategy
    seen, done, failures = [], threading.Event(), []

    def run(number):
        lake.write(f"select i as id, {number} as v from range({rows}) t(i)", **keys)

    def look():
        try:
            while not done.is_set():
                for read in readers(lake):
                    values = read()
                    seen.append((len(values), min(values), max(values)))
        except Exception as error:
            failures.append(error)

    run(0)
    assert len(lake.state().files) > 1
    looking = threading.Thread(target=look)
    looking.start()
    for number in range(1, runs):
        run(number)
    done.set()
    looking.join()
    assert failures == []
    assert {(rows, v, v) for _, v, _ in seen} == set(seen)
    versions = [v for _, v, _ in seen]
    assert versions == sorted(versions)
    assert len(versions) > 1


MERGER = """
import sys
from pathlib import Path
from tests.unit.test_lakehouse import Lake
lake = Lake(Path(sys.argv[1]), sys.argv[2])
lake.cursor.execute("select 1")
print("ready", flush=True)
sys.stdin.readline()
for number in range(6):
    lake.write(
        f"select {number} * 40 + i as id, '{sys.argv[3]}' as who from range(60) t(i)",
        unique_key="id",
    )
"""


@FORMATS
def test_two_processes_merge_at_once_and_have_every_key_once(tmp_path, format_):
    lake = Lake(tmp_path / "t", format_)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MERGER, str(lake.folder), format_, who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for who in ("one", "two")
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    ids = [row[0] for row in lake.rows()]
    assert ids == list(range(260))
    assert {row[1] for row in lake.rows()} <= {"one", "two"}
    named_files = {file.address for file in lake.state().files}
    assert named_files <= {str(path) for path in lake.folder.rglob("*.parquet")}


def test_what_other_programs_do_to_a_delta_table_is_taken_up(tmp_path):
    """History, time travel, restore and upkeep, as docs/lakehouse.md shows them."""
    from deltalake import DeltaTable

    lake = Lake(tmp_path / "a table", "delta")
    config = {"unique_key": "id", "partition_by": "p"}
    rows = "select i as id, 'p ' || i % 2 as p, {v} as v from range(6) t(i)"
    for v in range(3):
        lake.write(rows.format(v=v), **config)
    table = DeltaTable(str(lake.folder))
    assert [entry["version"] for entry in table.history()] == [2, 1, 0]
    old = DeltaTable(str(lake.folder), version=1).to_pyarrow_table()
    assert old["v"].to_pylist() == [1] * 6
    connection = duckdb.connect()
    if load_delta_extension(connection):
        query = f"select distinct v from delta_scan('{lake.folder}', version => 1)"
        assert connection.execute(query).fetchall() == [(1,)]
    table.restore(1)
    assert {v for _, _, v in lake.rows()} == {1}
    lake.write("select 0::bigint as id, 'p 0' as p, 5 as v", **config)
    table = DeltaTable(str(lake.folder))
    table.optimize.compact()
    table.delete("id = 3")
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    assert len(list(lake.folder.rglob("*.parquet"))) == len(lake.state().files)
    found = lake.write("select unnest([1, 3])::bigint as id, 'p 1' as p, 9 as v", **config)
    assert found == [
        *((0, "p 0", 5), (1, "p 1", 9), (2, "p 0", 1)),
        *((3, "p 1", 9), (4, "p 0", 1), (5, "p 1", 1)),
    ]


@pytest.mark.parametrize("feature", ["deletionVectors", "columnMapping"])
def test_a_table_with_features_that_are_not_known_is_refused(tmp_path, feature):
    lake = Lake(tmp_path / "t", "delta")
    lake.write(THREE, unique_key="id")
    features = {"readerFeatures": [feature], "writerFeatures": [feature]}
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, **features}
    log = lake.folder / "_delta_log" / f"{1:020d}.json"
    log.write_text(json.dumps({"protocol": protocol}))
    with pytest.raises(LakehouseError, match=f"uses {feature}, which dbt-llm cannot rewrite"):
        lake.write(THREE, unique_key="id")


def test_a_change_of_any_type_is_seen():
    cursor = duckdb.connect()
    cursor.execute(f"create temp table old as {' union all '.join(TYPED_ROWS[:2])}")
    key, *columns = columns_of(cursor, "from old")
    old = f"select *, 'f' || id as {FILE} from old"
    for find in (lake_changes.find_changed_rows, lake_changes.find_changed_groups):
        options = {"delete": False} if find is lake_changes.find_changed_rows else {}
        for column in columns:
            if "null" in column.name:
                continue
            # The row 0 gets this one value of the row 1.
            new = (
                f"select * replace ((select {column.quoted} from old where id = 1) "
                f"as {column.quoted}) from old where id = 0 "
                "union all select * from old where id = 1"
            )
            find(cursor, new, old, [key], [key, *columns], **options)
            assert lake_changes.changes(cursor) == (1, {"f0"}), (find, column.name)


def test_the_fields_of_a_struct_are_matched_by_name(lake):
    lake.write("select 1 as id, {'a': 'x', 'b': 'y'} as s", unique_key="id")
    lake.write("select 1 as id, {'b': 'y', 'a': 'x'} as s", unique_key="id")
    assert lake.version == 0
    rows = lake.write("select 2 as id, {'b': 'y', 'a': 'x'} as s", unique_key="id")
    assert rows == [(number, {"a": "x", "b": "y"}) for number in (1, 2)]


def test_other_files_in_the_folder_stay(tmp_path, monkeypatch):
    lake = Lake(tmp_path / "t", "parquet")
    other = lake.folder / "other" / "part-0.parquet"
    other.parent.mkdir(parents=True)
    other.write_text("of somebody else")
    monkeypatch.setattr("dbt_llm.lake_parquet.GRACE_S", -1)
    for number in range(3):
        lake.write(f"select {number} as id")
    assert set(lake.folder.rglob("*.parquet")) - {other} == {
        Path(file.address) for file in lake.state().files
    }
    assert other.exists()


def test_many_partitions_are_not_many_small_files(lake):
    config = {"unique_key": "id", "partition_by": "p"}
    lake.write("select i as id, i as p, 0 as v from range(25) t(i)", **config)
    before = {file.path for file in lake.state().files}
    lake.write("select 3::bigint as id, 3::bigint as p, 1 as v", **config)
    assert len(before - {file.path for file in lake.state().files}) == 1


def test_keys_that_the_cast_makes_one_are_refused(lake):
    lake.write("select date '2026-01-01' as d, 1 as v", unique_key="d")
    query = (
        "select unnest([timestamp '2026-01-02 10:00', timestamp '2026-01-02 11:00']) as d, 2 as v"
    )
    with pytest.raises(LakehouseError, match="2 rows with the same unique_key: d = 2026-01-02"):
        lake.write(query, unique_key="d")


def test_statistics_of_early_times_and_of_names_that_meet(tmp_path):
    lake = Lake(tmp_path / "t", "delta")
    lake.write("select timestamptz '0900-01-01 00:00:00+00' as ts")
    assert lake.stats()["minValues"] == {"ts": "0900-01-01T00:00:00.000000Z"}
    lake = Lake(tmp_path / "u", "delta")
    lake.write("""select 2 as "a.b", {'b': 1} as a""")
    assert "minValues" not in lake.stats()


@pytest.mark.parametrize("value", ["infinity", "0044-03-15 (BC)", "12000-01-01"])
def test_a_partition_date_that_no_reader_takes_is_refused(lake, value):
    with pytest.raises(LakehouseError, match="partition column p holds the date"):
        lake.write(f"select date '{value}' as p, 1 as n", partition_by="p")
    assert lake.state() is None


def test_the_view_of_a_folder_that_is_not_ascii_reads_its_rows(tmp_path):
    lake = Lake(tmp_path / "中", "delta")
    lake.write(THREE)
    assert len(lake.cursor.execute(lake.select).fetchall()) == 3


def test_appending_by_an_old_view_is_refused(tmp_path):
    lake = Lake(tmp_path / "lake", "parquet")
    lake.cursor = duckdb.connect(str(tmp_path / "own.duckdb"))
    names = ("own", "main", "m")

    def append(query):
        lake.cursor.execute(f"create or replace temp table rows_of_test as {query}")
        config = load_model_config("m", {"format": "parquet", "incremental_strategy": "append"})
        model = Model("m", "rows_of_test", config, str(lake.folder), True, False, Docs(), names)
        return write_model(lake.cursor, model)

    lake.cursor.execute(f"create view m as {append(THREE)}")
    view = append(THREE)
    # A post-hook fails now, and dbt rolls the new view back.
    with pytest.raises(LakehouseError, match="shows an older version of its table"):
        append(THREE)
    lake.cursor.execute(f"create or replace view m as {view}")
    append(THREE)
    assert len(lake.rows()) == 9


@FORMATS
def test_an_append_that_comes_second_fails_and_adds_nothing(tmp_path, monkeypatch, format_):
    lake = Lake(tmp_path / "t", format_)
    lake.write(THREE, incremental_strategy="append", incremental=False)
    come_between(monkeypatch, Lake(lake.folder, format_), incremental_strategy="append")
    with pytest.raises(LakehouseError, match="run dbt again"):
        lake.write("select 7::bigint as id, 'mine' as v", incremental_strategy="append")
    assert lake.rows() == [(0, "v0"), (1, "v1"), (2, "v2"), (7, "other")]
    assert len(list(lake.folder.rglob("part-*.parquet"))) == 2
