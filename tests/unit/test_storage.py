import io
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dbt_llm import object_scan, part_writer
from dbt_llm.config import StoreConfig, load_config
from dbt_llm.credentials import storage_options, without_secrets
from dbt_llm.errors import ConfigError, StoreError
from dbt_llm.lookup import read_newest, read_table, show_store
from dbt_llm.part_writer import PartWriter, read_part
from dbt_llm.parts import parts_of_run
from dbt_llm.run_log import RunLog
from dbt_llm.schema import GENERATIONS, RUNS, answers_table
from dbt_llm.storage import LocalFolder, open_folder
from dbt_llm.store import open_store
from tests.s3_server import Careless, S3Server
from tests.unit.generations import call_of, good, provenance, requests_of, write_part

AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION")
KEYS = {"AWS_ACCESS_KEY_ID": "env-id", "AWS_SECRET_ACCESS_KEY": "env-secret"}
SECRET = {"type": "s3", "key_id": "id", "secret": "hush", "region": "eu-north-1"}
OF_SECRET = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "AWS_REGION": "eu-north-1",
}
FORMATS = pytest.mark.parametrize("format_", ["delta", "parquet"])


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        yield server


@pytest.fixture
def url(server, request):
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    return f"s3://{server.bucket}/{name}"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in (*AWS, "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


def store_at(url, server, format_="delta"):
    return open_store(StoreConfig(path=url, format=format_, storage_options=server.options))


def created(url, server, format_="delta"):
    store = store_at(url, server, format_)
    store.create()
    return store


def prompts(store):
    with duckdb.connect() as connection:
        _, relation = read_newest(connection, store)
        found = connection.execute(f"select prompt from {relation}").fetchall() if relation else []
    return sorted(prompt for (prompt,) in found)


def test_options_with_credentials_count_alone(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-key")
    own = {"aws_access_key_id": "own", "aws_secret_access_key": "own-secret"}
    assert storage_options("s3://lake/x", own, [SECRET]) == own


def test_the_environment_gives_the_region_to_credentials_of_the_profile(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-another-key")
    own = {"aws_access_key_id": "own", "aws_secret_access_key": "own-secret"}
    region = {"AWS_REGION": "eu-central-1"}
    assert storage_options("s3://lake/x", own) == own | region
    # What the profile says counts.
    assert storage_options("s3://lake/x", {}, [SECRET]) == OF_SECRET
    assert storage_options("s3://lake/x", own | {"region": "x"}) == own | {"region": "x"}


def test_a_scope_that_ends_with_a_slash_covers_the_store():
    secrets = [
        SECRET | {"key_id": "wide", "scope": "s3://lake/"},
        SECRET | {"scope": "s3://lake/x/"},
    ]
    assert storage_options("s3://lake/x", {}, secrets) == OF_SECRET


def test_other_options_are_added_to_what_a_secret_gives():
    own = {"timeout": "5s", "AWS_REGION": "us-west-2"}
    assert storage_options("s3://lake/x", own, [SECRET]) == {**OF_SECRET, **own}


def test_the_secret_of_the_longest_scope_is_taken():
    secrets = [
        SECRET | {"key_id": "other", "scope": "s3://other"},
        SECRET | {"key_id": "all"},
        SECRET | {"scope": ["s3://a", "s3://lake/x"]},
        SECRET | {"key_id": "bucket", "scope": "s3://lake"},
        {"type": "gcs", "key_id": "gcs", "secret": "x", "scope": "s3://lake/x"},
    ]
    assert storage_options("s3://lake/x/y", {}, secrets) == OF_SECRET
    assert storage_options("s3://lake/z", {}, secrets)["AWS_ACCESS_KEY_ID"] == "bucket"
    assert storage_options("s3://b/z", {}, secrets)["AWS_ACCESS_KEY_ID"] == "all"


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (
            {"endpoint": "localhost:9000", "use_ssl": False},
            {"AWS_ENDPOINT_URL": "http://localhost:9000", "AWS_ALLOW_HTTP": "true"},
        ),
        (
            {"endpoint": "minio.test", "url_style": "path"},
            {"AWS_ENDPOINT_URL": "https://minio.test"},
        ),
        (
            {"endpoint": "s3.test", "url_style": "vhost"},
            {
                "AWS_ENDPOINT_URL": "https://lake.s3.test",
                "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
            },
        ),
        ({"session_token": "t"}, {"AWS_SESSION_TOKEN": "t"}),
        ({"endpoint": "s3.amazonaws.com"}, {}),
    ],
)
def test_a_secret_is_translated(given, options):
    assert storage_options("s3://lake/x", {}, [SECRET | given]) == OF_SECRET | options


def test_a_secret_that_finds_its_credentials_itself_leaves_them_to_the_chain(monkeypatch):
    chain = {"type": "s3", "provider": "credential_chain", "region": "eu-north-1"}
    assert storage_options("s3://lake/x", {}, [chain]) == {"AWS_REGION": "eu-north-1"}
    for name, value in {**KEYS, "AWS_REGION": "us-west-2"}.items():
        monkeypatch.setenv(name, value)
    assert storage_options("s3://lake/x", {}, [chain]) == KEYS | {"AWS_REGION": "eu-north-1"}


def test_the_old_settings_of_duckdb_count_as_a_secret():
    settings = {
        "s3_access_key_id": "id",
        "s3_secret_access_key": "hush",
        "s3_region": "eu-north-1",
        "threads": 2,
    }
    assert storage_options("s3://lake/x", {}, [], settings) == OF_SECRET


def test_other_clouds_are_opened_with_their_own(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-aws")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "key.json")
    assert storage_options("gs://lake/x", {}, [SECRET]) == {
        "GOOGLE_APPLICATION_CREDENTIALS": "key.json"
    }
    text = "DefaultEndpointsProtocol=https;AccountName=shop;AccountKey=a2V5==;EndpointSuffix=x"
    azure = {"type": "azure", "connection_string": text}
    assert storage_options("az://lake/x", {}, [azure]) == {
        "AZURE_STORAGE_ACCOUNT_NAME": "shop",
        "AZURE_STORAGE_ACCOUNT_KEY": "a2V5==",
    }


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gs://lake/x", {"GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az://lake/x", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
        ("abfss://lake@shop.dfs.core.windows.net/x", {"AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}),
        ("s3a://lake/x", {**KEYS, "max_retries": "2", "AWS_S3_LOCKING_PROVIDER": "dynamodb"}),
    ],
)
def test_every_kind_of_url_can_be_opened(url, options):
    folder = open_folder(url, options)
    assert str(folder) == url
    assert folder.address("part-1.parquet") == f"{url}/part-1.parquet"


def test_no_secret_is_left_in_a_text():
    options = {"AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_REGION": "eu-north-1"}
    text = "very-secret in eu-north-1"
    assert without_secrets(text, options) == "*** in eu-north-1"


def problem_of(**store):
    with pytest.raises(ConfigError) as raised:
        load_config({"store": store, "llms": {"default": {"engine": "replay"}}})
    return str(raised.value)


@pytest.mark.parametrize(
    "path", ["s3://", "s3:///x", "s3://lake//x", "s3://lake/../x", "s3://lake/a%20b", "http://x/y"]
)
def test_a_wrong_url_is_refused(path):
    assert "store.path: " in problem_of(path=path)


def test_wrong_options_are_refused_without_repeating_them():
    assert "which needs none" in problem_of(storage_options={"AWS_REGION": "x"})
    text = problem_of(path="s3://lake", storage_options={"AWS_SECRET_ACCESS_KEY": ["very-secret"]})
    assert "storage_options.AWS_SECRET_ACCESS_KEY" in text
    assert "very-secret" not in text
    with pytest.raises(ConfigError, match="'aws_regoin' is not valid"):
        open_folder("s3://lake/x", {**KEYS, "AWS_REGOIN": "x"})
    with pytest.raises(ConfigError, match="two runs at a time would lose answers"):
        open_folder("s3://lake/x", {**KEYS, "AWS_S3_ALLOW_UNSAFE_RENAME": "true"})


def test_a_config_does_not_show_its_options():
    config = load_config(
        {
            "store": {"path": "s3://lake", "storage_options": {"AWS_SECRET_ACCESS_KEY": "hush"}},
            "llms": {"default": {"engine": "replay"}},
        }
    )
    assert "hush" not in repr(config)
    assert config.store.options() == {"AWS_SECRET_ACCESS_KEY": "hush"}


def test_numbers_and_booleans_of_yaml_become_text():
    options = {"AWS_ALLOW_HTTP": True, "max_retries": 3}
    config = StoreConfig(path="s3://lake/x/", storage_options=options)
    assert config.path == "s3://lake/x"
    assert config.options() == {"AWS_ALLOW_HTTP": "true", "max_retries": "3"}


@pytest.fixture(params=["disk", "object store"])
def folder(request, tmp_path, url, server):
    if request.param == "disk":
        return LocalFolder(tmp_path / "table")
    return open_folder(url, server.options)


def test_both_kinds_of_folder_do_the_same(folder, tmp_path):
    folder.make_writable(atomic=True)
    assert folder.names("*") == []
    assert not folder.is_table()
    table = pa.table({"a": range(1000), "b": ["x" * 100] * 1000})
    names = ["part-2-r1-b.parquet", "part-1-r1-a.parquet", "part-3-r2-c.parquet"]
    sizes = {name: folder.put(name, lambda file: pq.write_table(table, file)) for name in names}
    folder.put("other.txt", lambda file: file.write(b"other"))
    assert folder.names("part-*.parquet") == sorted(names)
    assert parts_of_run(folder, "r1") == sorted(names[:2])
    assert {name: folder.size(name) for name in names} == sizes
    assert folder.sizes("part-*.parquet") == sizes
    assert folder.size("none") is None
    assert folder.sizes("part-*") == sizes
    assert folder.content("other.txt") == b"other"
    assert abs(folder.modified("other.txt") - time.time()) < 3600
    assert folder.modified("none") is None
    inside = folder.inside("inner")
    assert inside.names("*") == [] and inside.sizes("*") == {}
    inside.make_folder()
    inside.put("x.json", lambda file: file.write(b"{}"))
    assert inside.sizes("*.json") == {"x.json": 2} and "x.json" not in folder.names("*")
    inside.delete("x.json")
    inside.delete("x.json")
    assert inside.names("*") == []
    assert folder.missing([*names, "none"]) == ["none"]
    assert pq.read_table(folder.source(names[0])) == table
    with pytest.raises(FileNotFoundError):
        pq.read_metadata(folder.source("none"))
    addresses = [folder.address(name) for name in [*names, "none"]]
    fetched = folder.fetch(addresses, tmp_path / "copies", ["a"])
    assert [Path(path).name for path in fetched] == names
    assert pq.read_table(fetched[0], columns=["a"])["a"].to_pylist() == list(range(1000))
    for name in ("../x", "sub/x", ".."):
        with pytest.raises(StoreError, match="no file of its folder"):
            folder.check_names([name])


def test_an_object_is_read_at_any_position(url, server):
    folder = open_folder(url, server.options)
    content = bytes(number * 7 % 251 for number in range(200_000))
    folder.put("x", lambda file: file.write(content))
    file = folder.source("x")
    for start, length in [(0, 10), (100_000, 90_000), (199_990, 50), (150_000, 1), (5, 0)]:
        assert file.seek(start) == start
        assert file.read(length) == content[start : start + length]
    assert file.seek(-3, io.SEEK_END) == 199_997
    assert file.read() == content[-3:]
    assert file.read() == b""
    file.seek(0)
    assert file.readall() == content


@pytest.mark.parametrize("extension", [True, False])
@FORMATS
def test_duckdb_reads_it_with_and_without_httpfs(url, server, format_, extension, monkeypatch):
    if not extension:
        monkeypatch.setattr(object_scan, "load_extension", lambda *_: False)
    store = created(url, server, format_)
    store.commit([write_part(store.files, ["a", "b\0c", "é"], good)])
    store.commit([write_part(store.files, ["d"], good)])
    assert prompts(store) == ["a", "b\0c", "d", "é"]
    assert store.snapshot().rows == 4


def test_a_look_within_a_transaction_sees_it(url, server):
    store = created(url, server)
    with duckdb.connect() as connection:
        read_table(connection, store, GENERATIONS)
        connection.execute("begin")
        store.commit([write_part(store.files, ["a"], good)])
        relation = read_table(connection, store, GENERATIONS)
        assert connection.execute(f"select prompt from {relation}").fetchall() == [("a",)]
        with connection.cursor() as cursor:
            relation = read_table(cursor, store, GENERATIONS)
            assert cursor.execute(f"select prompt from {relation}").fetchall() == [("a",)]


def test_duckdb_reads_with_new_credentials_once_they_are_given(url, server):
    store = created(url, server)
    store.commit([write_part(store.files, ["a"], good)])
    with duckdb.connect() as connection:
        for options in ({**server.options, "timeout": "9s"}, server.options):
            config = StoreConfig(path=url, storage_options=options)
            relation = read_table(connection, open_store(config), GENERATIONS)
            assert connection.execute(f"select prompt from {relation}").fetchall() == [("a",)]


def test_two_handles_see_each_other(url, server):
    one, two = created(url, server), created(url, server)
    one.commit([write_part(one.files, ["a"], good)])
    assert prompts(two) == ["a"]
    two.commit([write_part(two.files, ["b"], good)])
    assert prompts(one) == ["a", "b"]
    assert one.snapshot().version == 2


def test_writers_at_the_same_time_lose_nothing(url, server):
    stores = [created(url, server) for _ in range(4)]

    def write(number):
        for step in range(3):
            store = stores[number]
            store.commit([write_part(store.files, [f"{number}-{step}"], good)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sorted(f"{number}-{step}" for number in range(4) for step in range(3))
    assert prompts(stores[0]) == expected
    assert stores[0].snapshot().version == 12


def test_what_was_not_committed_is_adopted_once(url, server):
    store = created(url, server)
    part = write_part(store.files, ["a", "b"], good)
    name = part.path.rsplit("/", 1)[-1]
    assert read_part(store.files, name) == part
    assert prompts(store) == []
    assert (store.adopt(), store.adopt()) == (2, 0)
    assert prompts(store) == ["a", "b"]


def test_a_file_that_somebody_removed_is_forgotten(url, server):
    store = created(url, server)
    parts = [write_part(store.files, [prompt], good) for prompt in ("a", "b", "c")]
    store.commit(parts)
    server.delete(urlsplit(parts[1].path).path.lstrip("/"))
    assert (store.forget_lost(), store.forget_lost()) == (1, 0)
    assert prompts(store) == ["a", "c"]


def test_queries_outside_of_builds_do_without_the_first_file(url, server):
    store = created(url, server)
    store.commit([write_part(store.files, [prompt], good) for prompt in ("a", "b", "c")])
    # Of a list of objects, DuckDB looks for the first one.
    server.delete(urlsplit(store.snapshot().files[0]).path.lstrip("/"))
    with duckdb.connect() as connection:
        show_store(connection, store)
        shown = connection.execute("select count(*) from dbt_llm_generations")
        assert shown.fetchone() == (2,)


def test_a_part_that_is_gone_or_cut_is_not_committed(url, server):
    store = created(url, server)
    parts = [write_part(store.files, [prompt], good) for prompt in ("a", "b", "c")]
    server.delete(urlsplit(parts[0].path).path.lstrip("/"))
    store.files.put(parts[1].path.rsplit("/", 1)[-1], lambda file: file.write(b"cut"))
    with pytest.raises(StoreError, match="is gone; it was not committed"):
        store.commit(parts)
    assert prompts(store) == ["c"]


def test_a_store_that_was_removed_is_made_anew(url, server):
    store = created(url, server)
    store.commit([write_part(store.files, ["a"], good)])
    for key in server.keys(urlsplit(url).path.lstrip("/")):
        server.delete(key)
    assert store.snapshot().files == ()
    store.create()
    store.commit([write_part(store.files, ["b"], good)])
    assert prompts(store) == ["b"]


@FORMATS
def test_the_run_log_lies_beside_it(url, server, format_):
    log = RunLog(StoreConfig(path=url, format=format_, storage_options=server.options))
    row = {"node_id": "n", "invocation_id": "i", "status": "ok", "started_at": datetime.now(UTC)}
    for run in ("r1", "r2"):
        log.append({**row, "run_id": run})
    with duckdb.connect() as connection:
        relation = read_table(connection, log.table, RUNS)
        found = connection.execute(f"select run_id from {relation} order by all").fetchall()
    assert found == [("r1",), ("r2",)]


def test_parquet_needs_no_conditional_puts(server):
    with Careless() as careless:
        options = {**server.options, "AWS_ENDPOINT_URL": careless.url}
        folder = open_folder("s3://lake/x", options)
        folder.make_writable(atomic=False)
        with pytest.raises(StoreError, match="does not know conditional puts"):
            folder.make_writable(atomic=True)
        assert careless.objects == {}


def test_a_place_is_proven_once_in_a_process(url, server, monkeypatch):
    created(url, server)
    monkeypatch.setattr("dbt_llm.object_store.ObjectFolder._prove", None)
    created(url, server)


def test_an_engine_does_not_wait_for_an_upload(url, server, monkeypatch):
    monkeypatch.setattr(part_writer, "_FLUSH_ROWS", 2)
    folder = open_folder(url, server.options)
    go_on = threading.Event()
    put = folder.put

    def slow_put(name, write):
        assert go_on.wait(60)
        return put(name, write)

    monkeypatch.setattr(folder, "put", slow_put)
    call = call_of()
    writer = PartWriter(folder, call.call_hash, call.text, provenance(), "1")
    for prompt in ("a", "b", "c", "d", "e"):
        requests = requests_of([prompt])
        answers = answers_table([good(requests["prompt_hash"][0].as_py(), prompt)])
        writer.add(answers, requests)
    assert writer.take() == []
    go_on.set()
    assert sum(part.rows for part in writer.flush()) == 5


def test_what_delta_rs_compacted_is_read_and_not_taken_in_again(url, server):
    store = created(url, server)
    for prompt in ("a", "b", "c"):
        store.commit([write_part(store.files, [prompt], good)])
    table = DeltaTable(str(store.files), storage_options=server.options)
    table.optimize.compact()
    assert len(store.snapshot().files) == 1
    assert store.adopt() == 0
    assert prompts(store) == ["a", "b", "c"]
    table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert (store.forget_lost(), store.adopt()) == (0, 0)
    assert prompts(store) == ["a", "b", "c"]
