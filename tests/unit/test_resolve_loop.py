import itertools
import random
import threading

import duckdb
import pyarrow.parquet as pq
import pytest

from dbt_llm.collector import Mode
from dbt_llm.config import StoreConfig
from dbt_llm.errors import (
    CallError,
    CancelledError,
    NotSettledError,
    StoreError,
    TooManyErrorsError,
    UnresolvedError,
)
from dbt_llm.functions import register_macros
from dbt_llm.in_flight import InFlight
from dbt_llm.job_spec import JobResult
from dbt_llm.lookup import show_store
from dbt_llm.part_writer import PartWriter
from dbt_llm.resolve_loop import Build, Settings, resolve
from dbt_llm.schema import LASTING_ERRORS, PASSING_ERRORS, answers_table
from dbt_llm.store import open_store
from dbt_llm.unique_keys import UniqueKeys
from tests.unit.generations import failing, good, key, provenance, write_part

ALL = "select i, llm_generate(prompt) as x from t order by i"
RUNS = itertools.count(1)


class Jobs:
    """Answers request files at once, without Ray; notes what it was asked."""

    def __init__(self, store, answer=good):
        self.store = store
        self.answer = answer
        self.run_id = None
        self.rounds = []

    @property
    def asked(self):
        return sorted(itertools.chain.from_iterable(self.rounds))

    def __call__(self, files):
        results = []
        asked = []
        for file in files:
            requests = pq.read_table(file.path)
            rows = requests.to_pylist()
            asked += [row["prompt"] for row in rows]
            answers = [self.answer(row["prompt_hash"], row["prompt"]) for row in rows]
            random.Random(2).shuffle(answers)
            call = file.call
            where = provenance(run_id=self.run_id, llm=call.llm)
            writer = PartWriter(self.store.files, call.call_hash, call.text, where, "1")
            writer.add(answers_table(answers), requests)
            parts = writer.flush()
            self.store.commit(parts)
            results.append(JobResult(asked=file.rows, parts=parts))
        self.rounds.append(sorted(asked))
        return results


class Warehouse:
    """A store, and a DuckDB database in which models are built as dbt does it."""

    def __init__(self, connection, collector, folder, format_="delta"):
        self.connection = connection
        self.collector = collector
        self.folder = folder
        self.store = open_store(StoreConfig(path=str(folder / "lake"), format=format_))
        self.in_flight = InFlight()
        self.connection.execute("""
            create or replace table t as
            select i, 'p' || i as prompt, i % 2 as g from range(4) as r(i)""")

    def cursor(self):
        cursor = self.connection.cursor()
        register_macros(cursor)
        return cursor

    def build(self, query, jobs=None, *, header="", cursor=None, **settings):
        """Build a model in a transaction; return the summary and the rows."""
        run_id = f"run{next(RUNS)}"
        jobs = jobs or Jobs(self.store)
        jobs.run_id = run_id
        cursor = cursor or self.cursor()
        build = Build(query, f"create temporary table built as ({query});", "built", header)
        settings = Settings(run_id, self.folder / "spool" / run_id, **settings)
        cursor.execute("begin")
        try:
            summary = resolve(
                cursor, build, self.collector, self.store, self.in_flight, jobs, settings
            )
            rows = None if summary is None else cursor.execute("from built").fetchall()
        except BaseException:
            cursor.execute("rollback")
            raise
        finally:
            assert not settings.spool_folder.exists()
        if summary is not None:
            cursor.execute("drop table built")
        cursor.execute("commit")
        return summary, rows

    def jobs(self, answer=good):
        return Jobs(self.store, answer)


@pytest.fixture
def warehouse(database, tmp_path):
    return Warehouse(*database, tmp_path)


@pytest.fixture(params=["delta", "parquet"])
def warehouse_of_any_format(database, tmp_path, request):
    return Warehouse(*database, tmp_path, request.param)


def outputs(rows):
    return [row[-1] for row in rows]


# Settling


def test_a_flat_query_settles_in_one_round_and_a_rerun_in_none(warehouse_of_any_format):
    warehouse = warehouse_of_any_format
    jobs = warehouse.jobs()
    summary, rows = warehouse.build(ALL, jobs)
    assert rows == [(i, f"<p{i}>") for i in range(4)]
    assert jobs.rounds == [["p0", "p1", "p2", "p3"]]
    assert (summary.prompts, summary.generated, summary.failed, summary.left_null) == (4, 4, 0, 0)

    again = warehouse.jobs()
    summary, rows = warehouse.build(ALL, again)
    assert rows == [(i, f"<p{i}>") for i in range(4)]
    assert again.rounds == []
    assert (summary.prompts, summary.generated, summary.jobs) == (4, 0, [])


def test_a_rerun_does_not_look_for_repeated_keys_again(warehouse_of_any_format, tmp_path, looked):
    warehouse, unique_keys = warehouse_of_any_format, UniqueKeys(tmp_path / "unique_keys.json")
    for _ in range(3):
        _, rows = warehouse.build(ALL, unique_keys=unique_keys)
        assert rows == [(i, f"<p{i}>") for i in range(4)]
        assert len(looked) == 1
    warehouse.connection.execute("update t set prompt = 'new' where i = 2")
    for _ in range(2):
        _, rows = warehouse.build(ALL, unique_keys=unique_keys)
        assert outputs(rows) == ["<p0>", "<p1>", "<new>", "<p3>"]
        assert len(looked) == 2


def test_a_large_store_is_not_counted(warehouse_of_any_format, monkeypatch):
    monkeypatch.setattr("dbt_llm.resolve_loop._COUNT_UP_TO_ROWS", 3)
    warehouse_of_any_format.build(ALL)
    summary, _ = warehouse_of_any_format.build(ALL)
    assert (summary.prompts, summary.generated) == (None, 0)


@pytest.mark.parametrize("most", [3, 100])
def test_prompts_that_are_all_new_are_counted_as_they_are_asked(warehouse, monkeypatch, most):
    monkeypatch.setattr("dbt_llm.resolve_loop._COUNT_UP_TO_ROWS", most)
    nested = "select llm_generate('g' || g), llm_generate(llm_generate('g' || g)) from t"
    summary, _ = warehouse.build(nested)
    assert (summary.prompts, summary.generated) == (4, 4)
    assert summary.counts()["stored"] == 0


def test_a_query_without_any_prompt_has_none(warehouse):
    summary, _ = warehouse.build("select llm_generate(prompt) from t where false")
    assert summary.prompts == 0


def test_a_changed_row_alone_is_asked(warehouse):
    warehouse.build(ALL)
    warehouse.connection.execute("update t set prompt = 'new' where i = 2")
    jobs = warehouse.jobs()
    _, rows = warehouse.build(ALL, jobs)
    assert outputs(rows) == ["<p0>", "<p1>", "<new>", "<p3>"]
    assert jobs.rounds == [["new"]]


def test_repeated_prompts_are_asked_once(warehouse):
    jobs = warehouse.jobs()
    query = "select llm_generate('g' || g), llm_generate('g' || g) from t"
    summary, rows = warehouse.build(query, jobs)
    assert sorted(rows) == [("<g0>", "<g0>")] * 2 + [("<g1>", "<g1>")] * 2
    assert jobs.rounds == [["g0", "g1"]]
    assert (summary.prompts, summary.generated) == (2, 2)


def test_a_call_within_a_call_settles_in_two_rounds(warehouse):
    jobs = warehouse.jobs()
    query = "select i, llm_generate('say ' || llm_generate(prompt)) from t where i < 2 order by i"
    summary, rows = warehouse.build(query, jobs)
    assert outputs(rows) == ["<say <p0>>", "<say <p1>>"]
    assert jobs.rounds == [["p0", "p1"], ["say <p0>", "say <p1>"]]
    assert (summary.prompts, summary.generated) == (4, 4)


def test_a_condition_on_an_answer_asks_only_for_the_rows_that_it_keeps(warehouse):
    jobs = warehouse.jobs()
    query = """
        with first as (select i, llm_generate(prompt) as a from t)
        select i, llm_generate('more ' || i) from first where a in ('<p1>', '<p2>') order by i"""
    _, rows = warehouse.build(query, jobs)
    assert rows == [(1, "<more 1>"), (2, "<more 2>")]
    assert jobs.rounds[0] == ["p0", "p1", "p2", "p3"]
    assert jobs.asked == ["more 1", "more 2", "p0", "p1", "p2", "p3"]


def test_a_recursive_query_may_take_many_rounds(warehouse):
    jobs = warehouse.jobs()
    query = """
        with recursive r as (
            select 'a' as x, 0 as n union all select llm_generate(x), n + 1 from r where n < 4
        )
        select n, x from r where x is not null order by n"""
    _, rows = warehouse.build(query, jobs)
    assert outputs(rows) == ["a", "<a>", "<<a>>", "<<<a>>>", "<<<<a>>>>"]
    assert len(jobs.rounds) == 4


def test_each_llm_is_asked_for_its_own_calls(warehouse):
    jobs = warehouse.jobs()
    query = "select llm_generate('a'), llm_generate('a', model := 'other'), llm_generate('b')"
    summary, rows = warehouse.build(query, jobs)
    assert rows == [("<a>", "<a>", "<b>")]
    assert jobs.rounds == [["a", "a", "b"]]
    assert sorted(call.llm for call in summary.calls.values()) == ["default", "other"]


@pytest.mark.parametrize("volatile", ["random()", "uuid()", "nextval('s')"])
def test_prompts_that_differ_every_time_are_asked_once_and_then_refused(warehouse, volatile):
    warehouse.connection.execute("create or replace sequence s")
    jobs = warehouse.jobs()
    with pytest.raises(NotSettledError, match=r"After 1 round\(s\) of questions"):
        warehouse.build(f"select llm_generate(prompt || {volatile}) from t", jobs)
    assert [len(asked) for asked in jobs.rounds] == [4]


def test_a_recursive_query_that_never_settles_is_refused_after_a_fixed_number(
    warehouse, monkeypatch
):
    monkeypatch.setattr("dbt_llm.resolve_loop._MAX_ROUNDS_OF_RECURSION", 3)
    jobs = warehouse.jobs()
    query = """
        with recursive r as (select 1 as n union all select n + 1 from r where n < 2)
        select llm_generate('x' || n || random()) from r"""
    with pytest.raises(NotSettledError, match=r"After 3 round\(s\)"):
        warehouse.build(query, jobs)
    assert [len(asked) for asked in jobs.rounds] == [2, 2, 2]


# Each further round would be paid for.
def test_the_word_recursive_in_a_prompt_allows_no_further_round(warehouse, monkeypatch):
    monkeypatch.setattr("dbt_llm.resolve_loop._MAX_ROUNDS_OF_RECURSION", 3)
    jobs = warehouse.jobs()
    with pytest.raises(NotSettledError):
        warehouse.build("select llm_generate('explain recursive sql ' || random())", jobs)
    assert len(jobs.rounds) == 1


def test_any_text_comes_back_to_its_own_row(warehouse):
    texts = ["", "a\0b", "👩‍👩‍👧", "e\u0301", "\u00e9", "it's", "\\n", "\n", "x" * 5000]
    warehouse.connection.execute("create or replace table texts (i integer, text varchar)")
    warehouse.connection.executemany("insert into texts values (?, ?)", list(enumerate(texts)))
    query = "select i, text, llm_generate(text) as x from texts order by i"
    _, rows = warehouse.build(query)
    assert rows == [(i, text, f"<{text}>") for i, text in enumerate(texts)]


# Queries without calls, and wrong ones


def test_a_query_without_calls_is_left_alone(warehouse):
    jobs = warehouse.jobs()
    assert warehouse.build("select * from t", jobs) == (None, None)
    assert jobs.rounds == []
    assert not warehouse.store.folder.exists()


def test_a_query_without_calls_runs_its_header_once(warehouse):
    warehouse.connection.execute("create or replace table log (x integer)")
    assert warehouse.build("select 1", header="insert into log values (1)") == (None, None)
    assert warehouse.connection.execute("from log").fetchall() == [(1,)]


def test_a_header_runs_once_and_before_the_query(warehouse):
    warehouse.connection.execute("create or replace table log (x integer)")
    header = """
        insert into log values (1);
        create or replace temp macro ask(x) as llm_generate('ask ' || x);"""
    _, rows = warehouse.build("select ask(prompt) from t where i = 0", header=header)
    assert rows == [("<ask p0>",)]
    assert warehouse.connection.execute("from log").fetchall() == [(1,)]


def test_a_view_that_calls_is_noticed(warehouse):
    cursor = warehouse.cursor()
    cursor.execute("create temp view v as select llm_generate(prompt) as x from t where i = 1")
    _, rows = warehouse.build("select * from v", cursor=cursor)
    assert rows == [("<p1>",)]


@pytest.mark.parametrize("source", ["", "from t", "from t where i = 9"])
def test_a_wrong_option_is_refused_and_nothing_is_asked(warehouse, source):
    jobs = warehouse.jobs()
    query = f"select llm_generate('fine'), llm_generate('p', temperature := -1) as x {source}"
    with pytest.raises(CallError) as raised:
        warehouse.build(query, jobs)
    assert str(raised.value) == (
        "A call of an LLM function has a wrong option: temperature: Input should be greater "
        "than or equal to 0 (got -1.0)."
    )
    assert jobs.rounds == []


@pytest.mark.parametrize("source", ["", "from t", "from t where i = 9"])
def test_a_query_whose_only_call_is_wrong_is_refused(warehouse, source):
    with pytest.raises(CallError, match="names the model 'gpt'"):
        warehouse.build(f"select llm_generate('p', model := 'gpt') as x {source}")


def test_a_column_as_an_option_is_refused_with_what_to_do(warehouse):
    with pytest.raises(CallError, match="must be constants"):
        warehouse.build("select llm_generate(i, i) from t")


@pytest.mark.parametrize("query", ["select nope from t", "selec 1"])
def test_other_errors_of_a_query_stay_duckdbs(warehouse, query):
    with pytest.raises(duckdb.Error):
        warehouse.build(query)


def test_an_error_within_the_rows_stays_duckdbs_and_nothing_is_asked(warehouse):
    jobs = warehouse.jobs()
    with pytest.raises(duckdb.ConversionException):
        warehouse.build("select llm_generate(prompt), prompt::integer from t", jobs)
    assert jobs.rounds == []


# Limit


@pytest.mark.parametrize(("limit", "asked"), [(0, 0), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_a_limit_is_exact_and_the_rest_stays_null(warehouse, limit, asked):
    jobs = warehouse.jobs()
    summary, rows = warehouse.build(ALL, jobs, limit=limit)
    answered = {f"p{i}": x for i, x in rows if x is not None}
    assert answered == {prompt: f"<{prompt}>" for prompt in jobs.asked}
    assert len(jobs.asked) == asked
    assert (summary.generated, summary.left_null) == (asked, 4 - asked)


def test_a_limit_grows_the_store_run_by_run(warehouse):
    found = []
    for _ in range(3):
        jobs = warehouse.jobs()
        _, rows = warehouse.build(ALL, jobs, limit=2)
        found.append((len(jobs.asked), sum(x is not None for x in outputs(rows))))
    assert found == [(2, 2), (2, 4), (0, 4)]


def test_a_limit_counts_over_all_rounds(warehouse):
    jobs = warehouse.jobs()
    query = "select i, llm_generate('say ' || llm_generate(prompt)) from t where i < 2 order by i"
    summary, rows = warehouse.build(query, jobs, limit=3)
    assert [len(asked) for asked in jobs.rounds] == [2, 1]
    assert sum(x is None for x in outputs(rows)) == 1
    assert summary.left_null == 1


def test_a_limit_may_be_used_up_by_failures(warehouse):
    jobs = warehouse.jobs(failing("timeout"))
    summary, rows = warehouse.build(ALL, jobs, limit=2)
    assert outputs(rows) == [None] * 4
    assert (summary.failed, summary.left_null) == (2, 2)


# Modes


def test_cached_mode_fails_on_a_missing_prompt_and_asks_nothing(warehouse):
    warehouse.build("select llm_generate(prompt) as x from t where i < 2")
    jobs = warehouse.jobs()
    with pytest.raises(UnresolvedError) as raised:
        warehouse.build(ALL, jobs, mode=Mode.CACHED)
    assert str(raised.value) == (
        "llm_mode is cached and 2 prompt(s) have no stored answer, for example "
        f"{min(key('p2'), key('p3'))}. Run once with llm_mode: generate, or point the profile at "
        "a store that has them."
    )
    assert jobs.rounds == []


def test_cached_mode_builds_from_the_store(warehouse):
    warehouse.build(ALL)
    jobs = warehouse.jobs()
    _, rows = warehouse.build(ALL, jobs, mode=Mode.CACHED)
    assert outputs(rows) == ["<p0>", "<p1>", "<p2>", "<p3>"]
    assert jobs.rounds == []


def test_null_mode_leaves_what_is_missing_null(warehouse):
    warehouse.build("select llm_generate(prompt) as x from t where i < 2")
    jobs = warehouse.jobs()
    summary, rows = warehouse.build(ALL, jobs, mode=Mode.NULL)
    assert outputs(rows) == ["<p0>", "<p1>", None, None]
    assert (summary.left_null, summary.prompts, jobs.rounds) == (2, 4, [])


@pytest.mark.parametrize("mode", [Mode.CACHED, Mode.NULL])
def test_a_mode_that_asks_nothing_creates_no_store(warehouse, mode):
    try:
        warehouse.build(ALL, mode=mode)
    except UnresolvedError:
        assert mode is Mode.CACHED
    assert not warehouse.store.folder.exists()


# Refresh


def again(prompt_hash, prompt):
    return good(prompt_hash, f"again {prompt}")


def test_a_refresh_asks_again_and_the_newest_good_answer_wins(warehouse):
    warehouse.build(ALL)
    jobs = warehouse.jobs(again)
    _, rows = warehouse.build(ALL, jobs, refresh=True)
    assert jobs.rounds == [["p0", "p1", "p2", "p3"]]
    assert outputs(rows) == [f"<again p{i}>" for i in range(4)]
    _, rows = warehouse.build(ALL)
    assert outputs(rows) == [f"<again p{i}>" for i in range(4)]


@pytest.mark.parametrize("code", ["timeout", "truncated"])
def test_a_failed_refresh_keeps_the_old_answer(warehouse, code):
    def half(prompt_hash, prompt):
        return (failing(code) if prompt in {"p1", "p2"} else again)(prompt_hash, prompt)

    warehouse.build(ALL)
    summary, rows = warehouse.build(ALL, warehouse.jobs(half), refresh=True)
    assert outputs(rows) == ["<again p0>", "<p1>", "<p2>", "<again p3>"]
    assert (summary.generated, summary.failed, summary.left_null) == (2, 2, 0)
    jobs = warehouse.jobs()
    _, rows = warehouse.build(ALL, jobs)
    assert outputs(rows) == ["<again p0>", "<p1>", "<p2>", "<again p3>"]
    assert jobs.rounds == []


# The old inner answer comes back, and with it an outer prompt that nobody ever asked.
def test_a_failed_refresh_of_an_inner_call_still_answers_the_outer_one(warehouse):
    warehouse.build("select llm_generate('a')")
    nested = "select llm_generate('say ' || llm_generate('a'))"

    def refuse_inner(prompt_hash, prompt):
        return (failing("timeout") if prompt == "a" else good)(prompt_hash, prompt)

    jobs = warehouse.jobs(refuse_inner)
    _, rows = warehouse.build(nested, jobs, refresh=True)
    assert rows == [("<say <a>>",)]
    assert jobs.rounds == [["a"], ["say <a>"]]


def test_a_limited_refresh_keeps_the_old_answers_of_the_rest(warehouse):
    warehouse.build(ALL)
    jobs = warehouse.jobs(again)
    summary, rows = warehouse.build(ALL, jobs, refresh=True, limit=1)
    (asked,) = jobs.asked
    assert outputs(rows) == [f"<again p{i}>" if f"p{i}" == asked else f"<p{i}>" for i in range(4)]
    assert summary.left_null == 0


# Errors of earlier runs


@pytest.mark.parametrize("code", PASSING_ERRORS)
def test_an_error_that_may_pass_is_asked_again_by_the_next_run(warehouse, code):
    summary, rows = warehouse.build(ALL, warehouse.jobs(failing(code)))
    assert outputs(rows) == [None] * 4
    assert (summary.failed, summary.left_null) == (4, 0)
    jobs = warehouse.jobs()
    _, rows = warehouse.build(ALL, jobs)
    assert jobs.rounds == [["p0", "p1", "p2", "p3"]]
    assert outputs(rows) == ["<p0>", "<p1>", "<p2>", "<p3>"]


@pytest.mark.parametrize("code", LASTING_ERRORS)
def test_an_error_that_lasts_is_not_asked_again(warehouse, code):
    warehouse.build(ALL, warehouse.jobs(failing(code)))
    jobs = warehouse.jobs()
    query = "select llm_generate(prompt), llm_details(prompt).error_code from t"
    _, rows = warehouse.build(query, jobs)
    assert rows == [(None, code)] * 4
    assert jobs.rounds == []


def test_an_error_that_lasts_is_asked_again_by_a_refresh(warehouse):
    warehouse.build(ALL, warehouse.jobs(failing("truncated")))
    _, rows = warehouse.build(ALL, refresh=True)
    assert outputs(rows) == ["<p0>", "<p1>", "<p2>", "<p3>"]


def test_details_of_a_failure_of_this_run_are_seen(warehouse):
    query = """
        select d.status, d.error_code, d.error, d.prompt_hash, d.output
        from (select llm_details(prompt) as d from t where i = 0)"""
    _, rows = warehouse.build(query, warehouse.jobs(failing("timeout")))
    assert rows == [("error", "timeout", "timeout happened", key("p0"), None)]


# Several generations of one key


def store_row(warehouse, moment, output=None, code=None):
    """Commit one generation of the prompt p0, made at that second."""
    answer = (lambda h, _: good(h, output)) if code is None else failing(code)
    warehouse.store.create()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dbt_llm.part_writer.time.time", lambda: moment)
        part = write_part(warehouse.store.folder, ["p0"], answer, run_id="old")
    warehouse.store.commit([part])


@pytest.mark.parametrize("order", list(itertools.permutations([0, 1, 2])))
def test_of_several_generations_a_good_one_counts_first_and_then_the_newest(warehouse, order):
    rows = [(10, "old", None), (20, "new", None), (30, None, "truncated")]
    for number in order:
        store_row(warehouse, *rows[number])
    jobs = warehouse.jobs()
    query = "select llm_generate(prompt), llm_details(prompt).status from t where i = 0"
    _, found = warehouse.build(query, jobs)
    assert found == [("<new>", "ok")]
    assert jobs.rounds == []


def test_a_store_with_repeated_keys_gives_no_repeated_rows(warehouse):
    for moment in (10, 20, 30):
        store_row(warehouse, moment, f"at {moment}")
    _, rows = warehouse.build(ALL)
    assert outputs(rows) == ["<at 30>", "<p1>", "<p2>", "<p3>"]
    _, rows = warehouse.build("select count(*), count(llm_generate(prompt)) from t")
    assert rows == [(4, 4)]


def test_show_store_shows_good_rows_and_lasting_errors_once_each(warehouse):
    store_row(warehouse, 10, "old")
    store_row(warehouse, 20, "new")
    store_row(warehouse, 30, code="timeout")
    warehouse.build("select llm_generate('late')", warehouse.jobs(failing("timeout")))
    warehouse.build("select llm_generate('long')", warehouse.jobs(failing("context_length")))
    cursor = warehouse.cursor()
    show_store(cursor, warehouse.store)
    rows = cursor.execute(
        "select prompt_hash, output, error_code from temp.main.dbt_llm_generations"
    ).fetchall()
    assert sorted(rows) == sorted(
        [(key("p0"), "<new>", None), (key("long"), None, "context_length")]
    )


def test_show_store_of_a_store_that_is_not_there_is_empty(warehouse_of_any_format):
    cursor = warehouse_of_any_format.cursor()
    show_store(cursor, warehouse_of_any_format.store)
    assert cursor.execute("from temp.main.dbt_llm_generations").fetchall() == []


# What an earlier run left


def test_answers_that_were_not_committed_are_taken_in_first(warehouse):
    warehouse.store.create()
    write_part(warehouse.store.folder, ["p0", "p1"], good, run_id="killed")
    jobs = warehouse.jobs()
    _, rows = warehouse.build(ALL, jobs)
    assert outputs(rows) == ["<p0>", "<p1>", "<p2>", "<p3>"]
    assert jobs.rounds == [["p2", "p3"]]


def test_a_store_that_gives_nothing_back_is_an_error(warehouse):
    class Forgetful(Jobs):
        def __call__(self, files):
            self.rounds.append([file.rows for file in files])
            return [JobResult(asked=file.rows) for file in files]

    jobs = Forgetful(warehouse.store)
    query = "select llm_generate(llm_generate(prompt)) from t"
    with pytest.raises(StoreError, match="the store does not give them back"):
        warehouse.build(query, jobs)
    assert jobs.rounds == [[4]]


def test_an_error_of_a_job_is_raised_and_what_it_stored_stays(warehouse):
    class Failing(Jobs):
        def __call__(self, files):
            super().__call__(files)
            raise TooManyErrorsError("too many")

    with pytest.raises(TooManyErrorsError, match="too many"):
        warehouse.build(ALL, Failing(warehouse.store))
    jobs = warehouse.jobs()
    _, rows = warehouse.build(ALL, jobs)
    assert outputs(rows) == ["<p0>", "<p1>", "<p2>", "<p3>"]
    assert jobs.rounds == []


# Several models at once


class Slow(Jobs):
    """Waits before it answers until it is told to go on."""

    def __init__(self, store):
        super().__init__(store)
        self.started = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, files):
        self.started.set()
        assert self.go_on.wait(10)
        return super().__call__(files)


def test_two_models_at_once_ask_a_shared_prompt_once(warehouse):
    first, second = Slow(warehouse.store), warehouse.jobs()
    results = {}

    def build(name, query, jobs):
        results[name] = warehouse.build(query, jobs)[1]

    one = threading.Thread(
        target=build, args=("one", "select llm_generate(prompt) from t where i < 3", first)
    )
    one.start()
    assert first.started.wait(10)
    two = threading.Thread(
        target=build, args=("two", "select llm_generate(prompt) from t where i > 0", second)
    )
    two.start()
    while not second.rounds and two.is_alive():
        two.join(0.01)
    first.go_on.set()
    one.join()
    two.join()
    assert sorted(results["one"]) == [("<p0>",), ("<p1>",), ("<p2>",)]
    assert sorted(results["two"]) == [("<p1>",), ("<p2>",), ("<p3>",)]
    assert first.rounds == [["p0", "p1", "p2"]]
    assert second.rounds == [["p3"]]


def test_who_waits_for_another_model_asks_itself_when_that_one_fails(warehouse):
    class Broken(Slow):
        def __call__(self, files):
            self.started.set()
            assert self.go_on.wait(10)
            raise StoreError("disk full")

    first, second = Broken(warehouse.store), warehouse.jobs()
    failures, results = [], []

    def build_first():
        try:
            warehouse.build(ALL, first)
        except StoreError as error:
            failures.append(str(error))

    one = threading.Thread(target=build_first)
    one.start()
    assert first.started.wait(10)
    two = threading.Thread(target=lambda: results.append(warehouse.build(ALL, second)[1]))
    two.start()
    first.go_on.set()
    one.join()
    two.join()
    assert failures == ["disk full"]
    assert outputs(results[0]) == ["<p0>", "<p1>", "<p2>", "<p3>"]
    assert second.rounds == [["p0", "p1", "p2", "p3"]]


def test_an_interrupt_ends_the_wait_for_another_model(warehouse):
    first = Slow(warehouse.store)
    one = threading.Thread(target=warehouse.build, args=(ALL, first))
    one.start()
    assert first.started.wait(10)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        warehouse.build(ALL, cancelled=cancelled)
    first.go_on.set()
    one.join()
    assert first.rounds == [["p0", "p1", "p2", "p3"]]
