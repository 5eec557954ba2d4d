import duckdb
import pytest

from dbt_llm.call import sha256_hex
from dbt_llm.config import StoreConfig
from dbt_llm.lookup import lasting, show_answers
from dbt_llm.store import open_store
from dbt_llm.unique_keys import UniqueKeys
from tests.unit.generations import call_of, failing, good, write_part

CALL = call_of()
FILES = ["part-1.parquet", "part-2.parquet"]


@pytest.fixture
def unique_keys(tmp_path):
    return UniqueKeys(tmp_path / "target" / "llm" / "unique_keys.json")


def test_what_was_noted_holds_of_these_files_and_calls_alone(unique_keys):
    assert not unique_keys.hold(FILES, ["a"])
    unique_keys.note(FILES, ["a", "b"])
    assert unique_keys.hold(reversed(FILES), ["b"])
    assert not unique_keys.hold(FILES, ["b", "c"])
    assert not unique_keys.hold([*FILES, "part-3.parquet"], ["a"])
    assert not unique_keys.hold(FILES[:1], ["a"])


def test_calls_are_added_while_the_files_stay(unique_keys):
    unique_keys.note(FILES, ["a"])
    unique_keys.note(FILES, ["b"])
    assert unique_keys.hold(FILES, ["a", "b"])
    unique_keys.note(FILES[:1], ["c"])
    assert not unique_keys.hold(FILES, ["a"])
    assert not unique_keys.hold(FILES[:1], ["a"])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"files": "x"}', f'{{"files": "{sha256_hex("")}"}}']
)
def test_a_damaged_file_is_as_none(unique_keys, content):
    unique_keys.note([], ["a"])
    unique_keys.path.write_text(content)
    assert not unique_keys.hold([], ["a"])


def test_what_cannot_be_written_is_found_out_again(tmp_path):
    (tmp_path / "target").write_text("a file")
    unique_keys = UniqueKeys(tmp_path / "target" / "unique_keys.json")
    unique_keys.note(FILES, ["a"])
    assert not unique_keys.hold(FILES, ["a"])


@pytest.fixture(params=["delta", "parquet"])
def store(request, tmp_path):
    store = open_store(StoreConfig(path=str(tmp_path / "lake"), format=request.param))
    store.create()
    return store


def test_a_store_is_looked_at_once_and_again_when_it_has_changed(store, unique_keys, looked):
    with duckdb.connect() as connection:

        def shown():
            show_answers(connection, store, lasting(), [CALL.call_hash], unique_keys)
            return connection.execute(
                "select output from dbt_llm_generations order by 1"
            ).fetchall()

        store.commit([write_part(store.files, ["p", "q"], good, CALL)])
        assert shown() == shown() == [("<p>",), ("<q>",)]
        assert len(looked) == 1
        again = write_part(store.files, ["p"], newer, CALL, after_us=2 * 10**15)
        store.commit([again])
        # What has repeats is looked at each time.
        assert shown() == shown() == [("<newer p>",), ("<q>",)]
        assert len(looked) == 3


def test_a_run_looks_at_its_own_failures_whatever_others_noted(store, unique_keys, looked):
    store.commit([write_part(store.files, ["p"], good, CALL)])
    failed = failing("timeout")
    store.commit([write_part(store.files, ["p"], failed, CALL, run_id="mine", after_us=2 * 10**15)])
    with duckdb.connect() as connection:

        def shown(visible, **options):
            calls = [CALL.call_hash]
            show_answers(connection, store, visible, calls, unique_keys, **options)
            return connection.execute("select output from dbt_llm_generations").fetchall()

        assert shown(lasting()) == [("<p>",)]
        assert shown(f"run_id = 'mine' or {lasting()}", look=True) == [("<p>",)]
        assert len(looked) == 2


def newer(prompt_hash, prompt):
    return good(prompt_hash, f"newer {prompt}")
