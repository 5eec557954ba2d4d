"""Engines that break their promises: coded rows or a clear error, never a misplaced answer."""

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dbt_llm import engine_actor, pool
from dbt_llm.call import Call
from dbt_llm.engine import Emit
from dbt_llm.engine_actor import EngineActor
from dbt_llm.engine_replay import made_up_answer
from dbt_llm.errors import DbtLLMError, EngineError
from dbt_llm.process_watch import this_process
from dbt_llm.schema import ANSWERS, Answer, answers_table
from tests.endpoint import Endpoint, Reply, SeenRequest, chat, echo, embed
from tests.project import Outcome, Project
from tests.unit.generations import call_of, provenance, requests_of

PROMPTS = [f"x{number}" for number in range(6)]
MODEL = "select i, llm_generate('x' || i) as r from range(300) t(i)"
ROWS = 300

Behaviour = Callable[[pa.Table, Emit], Awaitable[None]]


class Rogue:
    """An engine that does what a test says."""

    version = "1"
    concurrency = 16

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave

    async def answer(self, requests: pa.Table, call: dict[str, Any], emit: Emit) -> None:
        await self._behave(requests, emit)

    async def close(self) -> None:
        pass


def right(requests: pa.Table) -> list[Answer]:
    """Return the answers to requests, the last one's first."""
    rows = reversed(requests.to_pylist())
    return [Answer(row["prompt_hash"], output=made_up_answer(row["prompt"])) for row in rows]


def raising(error: BaseException, answered: int = 2) -> Behaviour:
    """Return an engine that answers a few requests and then raises."""

    async def behave(requests: pa.Table, emit: Emit) -> None:
        emit(answers_table(right(requests)[:answered]))
        raise error

    return behave


def emitting(*tables: Callable[[pa.Table], Any]) -> Behaviour:
    """Return an engine that emits tables made from its requests."""

    async def behave(requests: pa.Table, emit: Emit) -> None:
        for table in tables:
            emit(table(requests))

    return behave


def changed(**columns: Callable[[int], Any]) -> Callable[[pa.Table], pa.Table]:
    """Return right answers with other columns; each is made from the number of rows."""

    def table(requests: pa.Table) -> pa.Table:
        answers = answers_table(right(requests))
        for name, make in columns.items():
            answers = answers.set_column(
                ANSWERS.get_field_index(name), name, make(answers.num_rows)
            )
        return answers

    return table


class Unit:
    """One unit through an engine actor without Ray, and what the store has of it then."""

    def __init__(self, folder: Path, behave: Behaviour, call: Call | None = None) -> None:
        self.error: DbtLLMError | None = None
        self._folder = folder
        self._call = call or call_of()
        asyncio.run(self._run(behave))

    async def _run(self, behave: Behaviour) -> None:
        engine = Rogue(behave)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_actor, "start_engine", lambda config, secrets: engine)
            patch.setattr(engine_actor, "_redirect_output", lambda path: None)
            actor = EngineActor({"model": "rogue"}, str(self._folder / "engine.log"))
            await actor.start({}, this_process())
        job = {
            "folder": str(self._folder),
            "storage_options": {},
            "provenance": asdict(provenance()),
        }
        requests = requests_of(PROMPTS, self._call)
        call = self._call
        try:
            await actor.answer(requests, 0, None, call.call_hash, call.content, job)
        except DbtLLMError as error:
            self.error = error
        self.parts = await actor.flush("r1")
        # What comes late must come to nothing.
        await asyncio.sleep(0.05)
        assert await actor.flush("r1") == []

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """What is stored, by the prompt; each once."""
        found = [row for part in self.parts for row in pq.read_table(part["path"]).to_pylist()]
        by_prompt = {row["prompt"]: row for row in found}
        assert len(by_prompt) == len(found), "a prompt is stored twice"
        return by_prompt

    @property
    def codes(self) -> dict[str, str | None]:
        return {prompt: row["error_code"] for prompt, row in self.rows.items()}

    def assert_right(self) -> None:
        """All rows that are stored are good and lie beside their own prompt."""
        for prompt, row in self.rows.items():
            assert (row["status"], row["output"]) == ("ok", made_up_answer(prompt))


def test_a_good_engine_is_let_through(tmp_path: Path) -> None:
    unit = Unit(tmp_path, emitting(lambda requests: answers_table(right(requests))))
    assert unit.error is None
    assert set(unit.rows) == set(PROMPTS)
    unit.assert_right()


def first(requests: pa.Table) -> pa.Table:
    return answers_table(right(requests)[:2])


def strange(requests: pa.Table) -> pa.Table:
    return answers_table([Answer("0" * 64, output="strange")])


def test_a_prompt_that_was_not_asked(tmp_path: Path) -> None:
    unit = Unit(tmp_path, emitting(first, strange))
    assert isinstance(unit.error, EngineError)
    assert "a prompt that it was not asked" in str(unit.error)
    assert set(unit.rows) == {"x5", "x4"}
    unit.assert_right()


def test_more_answers_than_were_asked(tmp_path: Path) -> None:
    more = emitting(lambda requests: pa.concat_tables([first(requests), strange(requests)]))
    unit = Unit(tmp_path, more)
    assert "a prompt that it was not asked" in str(unit.error)
    assert unit.rows == {}


@pytest.mark.parametrize(
    "behave",
    [
        emitting(first, lambda requests: answers_table(right(requests)[1:3])),
        emitting(first, lambda requests: answers_table(right(requests)[2:] * 2)),
    ],
    ids=["apart", "at once"],
)
def test_a_prompt_answered_twice(tmp_path: Path, behave: Behaviour) -> None:
    unit = Unit(tmp_path, behave)
    assert isinstance(unit.error, EngineError)
    assert "answered a prompt twice" in str(unit.error)
    assert set(unit.rows) == {"x5", "x4"}
    unit.assert_right()


@pytest.mark.parametrize("answered", [0, 1, 5])
def test_fewer_answers_than_were_asked(tmp_path: Path, answered: int) -> None:
    unit = Unit(tmp_path, emitting(lambda requests: answers_table(right(requests)[:answered])))
    assert unit.error is None
    good = set(PROMPTS[len(PROMPTS) - answered :])
    assert unit.codes == {prompt: None if prompt in good else "unknown" for prompt in PROMPTS}


def test_an_engine_that_hides_its_mistake(tmp_path: Path) -> None:
    async def behave(requests: pa.Table, emit: Emit) -> None:
        for table in (strange(requests), answers_table(right(requests))):
            with contextlib.suppress(EngineError):
                emit(table)

    unit = Unit(tmp_path, behave)
    assert "a prompt that it was not asked" in str(unit.error)
    unit.assert_right()


def test_answers_that_come_after_the_unit_has_ended(tmp_path: Path) -> None:
    refused: list[str] = []

    async def behave(requests: pa.Table, emit: Emit) -> None:
        emit(first(requests))

        def late() -> None:
            try:
                emit(answers_table(right(requests)[2:]))
            except EngineError as error:
                refused.append(str(error))

        asyncio.get_running_loop().call_later(0.02, late)

    unit = Unit(tmp_path, behave)
    assert unit.error is None
    assert unit.codes == {
        prompt: None if prompt in {"x4", "x5"} else "unknown" for prompt in PROMPTS
    }
    assert refused == ["The engine answered a prompt after it had ended the unit."]


WRONG_FORMS = {
    "null hash": changed(prompt_hash=lambda n: pa.nulls(n, pa.string())),
    "null status": changed(status=lambda n: pa.nulls(n, pa.string())),
    "hash of numbers": changed(prompt_hash=lambda n: pa.array(range(n))),
    "no text": changed(output=lambda n: pa.array([b"\xff\xfe"] * n)),
    "lists for texts": changed(output=lambda n: pa.array([["a"]] * n)),
    "words for tokens": changed(prompt_tokens=lambda n: pa.array(["many"] * n)),
    "texts in an embedding": changed(embedding=lambda n: pa.array([["a"]] * n)),
    "an error without a code": changed(status=lambda n: pa.array(["error"] * n)),
    "a status of its own": changed(status=lambda n: pa.array(["fine"] * n)),
    "a code of its own": changed(
        status=lambda n: pa.array(["error"] * n), error_code=lambda n: pa.array(["bad_luck"] * n)
    ),
    "tokens below zero": changed(completion_tokens=lambda n: pa.array([-1] * n)),
    "absurd tokens": changed(prompt_tokens=lambda n: pa.array([2**62] * n)),
    "a column less": lambda requests: answers_table(right(requests)).drop_columns(["status"]),
    "no table": lambda requests: ["x"],
    "nothing": lambda requests: None,
}


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_answers_in_a_wrong_form(tmp_path: Path, form: str) -> None:
    unit = Unit(tmp_path, emitting(first, WRONG_FORMS[form]))
    assert isinstance(unit.error, EngineError)
    assert str(unit.error).startswith("The engine")
    assert set(unit.rows) == {"x5", "x4"}
    unit.assert_right()


class Unpicklable(Exception):
    def __init__(self, *, needed: str) -> None:
        super().__init__(needed)
        self.lock = sys.stdout


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (MemoryError(), "MemoryError"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (TimeoutError(), "TimeoutError"),
        (Unpicklable(needed="this"), "Unpicklable: this"),
        (asyncio.CancelledError(), "broke off its own work"),
        (EngineError("dead"), "dead"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_of_any_kind(tmp_path: Path, error: BaseException, words: str) -> None:
    unit = Unit(tmp_path, raising(error))
    assert isinstance(unit.error, EngineError)
    assert words in str(unit.error)
    assert set(unit.rows) == {"x5", "x4"}
    unit.assert_right()


@pytest.mark.parametrize(
    "text", ["a\0b", "\0", "", "x" * 50_000_000], ids=["nul", "0", "no", "50MB"]
)
def test_answers_of_odd_texts_are_kept_as_they_are(tmp_path: Path, text: str) -> None:
    unit = Unit(
        tmp_path,
        emitting(
            lambda requests: answers_table(
                [Answer(key, output=text) for key in requests["prompt_hash"].to_pylist()[:1]]
            )
        ),
    )
    assert unit.rows["x0"]["output"] == text
    assert unit.codes == {"x0": None} | dict.fromkeys(PROMPTS[1:], "unknown")


def test_half_of_a_surrogate_pair_and_no_text_at_all(tmp_path: Path) -> None:
    def table(requests: pa.Table) -> pa.Table:
        answers = right(requests)[:4]
        hashes = requests["prompt_hash"].to_pylist()
        return answers_table([*answers, Answer(hashes[1]), Answer(hashes[0], output="a\ud800")])

    unit = Unit(tmp_path, emitting(table))
    assert unit.codes == dict.fromkeys(PROMPTS) | {"x0": "invalid_output", "x1": "invalid_output"}
    assert unit.rows["x0"]["output"] == "a?"
    assert unit.rows["x0"]["error"] == "the answer holds half of a surrogate pair"


def test_embeddings_that_are_none(tmp_path: Path) -> None:
    vectors = [[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [], [1.0], [3.0, 4.0]]

    def table(requests: pa.Table) -> pa.Table:
        hashes = requests["prompt_hash"].to_pylist()
        return answers_table(
            [Answer(key, embedding=vector) for key, vector in zip(hashes, vectors, strict=True)]
        )

    unit = Unit(tmp_path, emitting(table), call_of(function="embed"))
    codes = [None, *["invalid_output"] * 3, "server_error", None]
    assert unit.codes == dict(zip(PROMPTS, codes, strict=True))
    assert [unit.rows[prompt]["embedding"] for prompt in ("x0", "x5")] == [vectors[0], vectors[5]]


@pytest.mark.parametrize("error", [ValueError("no weights"), MemoryError("no weights")])
def test_an_engine_that_raises_while_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def start(config: dict[str, Any], secrets: dict[str, Any]) -> Rogue:
        raise error

    monkeypatch.setattr(engine_actor, "start_engine", start)
    monkeypatch.setattr(engine_actor, "_redirect_output", lambda path: None)
    actor = EngineActor({"model": "rogue"}, str(tmp_path / "engine.log"))
    for _ in range(2):
        with pytest.raises(EngineError, match="The engine of rogue did not start: no weights"):
            asyncio.run(actor.start({}, this_process()))


# Whole runs


class RogueActor(EngineActor):
    """Starts an engine that behaves as the LLM's model is named."""

    def __init__(self, config: dict[str, Any], log_path: str) -> None:
        super().__init__(config, log_path)
        began = Path(log_path).with_name("began")
        name, again = config["model"], began.exists()
        began.parent.mkdir(parents=True, exist_ok=True)
        began.touch()

        def start(config: dict[str, Any], secrets: dict[str, Any]) -> Rogue:
            if name == "no start" or (name == "no second start" and again):
                time.sleep(600)
            return Rogue(BEHAVIOURS[name])

        engine_actor.start_engine = start


async def _odd_at_17(requests: pa.Table, emit: Emit) -> None:
    for answer, row in zip(right(requests), reversed(requests.to_pylist()), strict=True):
        if row["prompt"] == "x17":
            raise Unpicklable(needed="a better prompt")
        emit(answers_table([answer]))


async def _twice(requests: pa.Table, emit: Emit) -> None:
    emit(answers_table(right(requests)))
    emit(first(requests))


async def _none(requests: pa.Table, emit: Emit) -> None:
    pass


async def _exits(requests: pa.Table, emit: Emit) -> None:
    emit(first(requests))
    await asyncio.sleep(0.5)
    os._exit(3)


async def _cancels(requests: pa.Table, emit: Emit) -> None:
    raise asyncio.CancelledError


BEHAVIOURS: dict[str, Behaviour] = {
    "odd at 17": _odd_at_17,
    "twice": _twice,
    "none": _none,
    "no second start": _exits,
    "cancels": _cancels,
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "a project")
    project.config["commit_interval_s"] = 0.2
    project.model("answers", MODEL)
    return project


@pytest.fixture
def run_rogue(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that runs dbt with an engine that behaves as it is named."""
    from ray import cloudpickle

    module = sys.modules[__name__]
    # Ray's workers do not find this module.
    cloudpickle.register_pickle_by_value(module)

    def run(name: str, **entry: Any) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setattr(pool, "EngineActor", RogueActor)
            project.llms = {"default": {"engine": "replay", "model": name, **entry}}
            return project.dbt("run")

    yield run
    cloudpickle.unregister_pickle_by_value(module)


def assert_rerun_completes(project: Project, name: str, answered: int) -> None:
    """A healthy engine answers the rest, and nothing that was answered is asked again."""
    # The model's name is part of a prompt's key.
    project.llms = {"default": {"engine": "replay", "model": name}}
    pool.close_pools()
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    # What was written and not yet committed is found as well.
    assert summary_counts(outcome)[1] >= answered
    assert project.generations("count(*)", "status = 'ok'") == [(ROWS,)]
    assert project.query(
        "select count(*), count(distinct i), count(*) filter (r = made_up('x' || i)) from answers"
    ) == [(ROWS, ROWS, ROWS)]


def summary_counts(outcome: Outcome) -> list[int]:
    """Return the prompts, those that were stored, and those that were generated."""
    return [int(number) for number in re.findall(r"\d+", outcome.summary("answers"))[:3]]


def good(project: Project) -> int:
    """Return how many prompts have a good answer, and check that each is the right one."""
    rows = project.generations("prompt, output", "status = 'ok'")
    assert all(output == made_up_answer(prompt) for prompt, output in rows)
    return len({prompt for prompt, _ in rows})


def test_an_exception_about_one_prompt_costs_that_prompt_alone(
    project: Project, run_rogue: Any
) -> None:
    outcome = run_rogue("odd at 17")
    assert outcome.success, outcome.log
    assert project.query("select i from answers where r is null") == [(17,)]
    assert project.generations("prompt, error_code", "status = 'error'") == [("x17", "engine_died")]
    assert good(project) == ROWS - 1
    assert_rerun_completes(project, "odd at 17", ROWS - 1)


@pytest.mark.parametrize(
    ("name", "words"), [("twice", "answered a prompt twice"), ("cancels", "broke off its own work")]
)
def test_an_engine_that_is_always_wrong_ends_the_job(
    project: Project, run_rogue: Any, name: str, words: str
) -> None:
    outcome = run_rogue(name)
    assert not outcome.success
    assert words in outcome.log
    assert "died 3 times without finishing anything in between" in outcome.log
    assert_rerun_completes(project, name, good(project) if name == "twice" else 0)


def test_an_engine_that_answers_nothing(project: Project, run_rogue: Any) -> None:
    outcome = run_rogue("none")
    assert not outcome.success
    assert "300 of 300 prompts failed (unknown: 300)" in outcome.log
    assert_rerun_completes(project, "none", 0)


def test_an_engine_that_never_starts(project: Project, run_rogue: Any) -> None:
    started = time.monotonic()
    outcome = run_rogue("no start", start_timeout_s=2)
    assert not outcome.success
    assert "started within start_timeout_s = 2" in outcome.log
    assert time.monotonic() - started < 60
    assert_rerun_completes(project, "no start", 0)


def test_an_engine_whose_replacement_never_starts(project: Project, run_rogue: Any) -> None:
    outcome = run_rogue("no second start", start_timeout_s=2)
    assert not outcome.success
    assert "started within start_timeout_s = 2" in outcome.log
    stored = good(project)
    assert 0 < stored < ROWS
    assert_rerun_completes(project, "no second start", stored)


# An endpoint

ODD_TEXTS: dict[str, Any] = {
    "nul": "a\0b",
    "surrogate": "a\ud800b",
    "big": "y" * 50_000_000,
}
ODD_USAGE: dict[str, Any] = {
    "negative": {"prompt_tokens": -5, "completion_tokens": -1},
    "absurd": {"prompt_tokens": 10**30, "completion_tokens": 10**18},
    "words": {"prompt_tokens": "many", "completion_tokens": []},
    "nan": {"prompt_tokens": float("nan"), "completion_tokens": float("inf")},
}


def garbage(request: SeenRequest) -> Reply | None:
    prompt = request.prompt
    if prompt in ODD_TEXTS:
        return chat(ODD_TEXTS[prompt])
    if prompt in ODD_USAGE:
        return chat(echo(prompt), usage=ODD_USAGE[prompt])
    if prompt == "bytes":
        text = json.dumps(chat("HERE").body).replace("HERE", "a\udcff\udcfe")
        return Reply(body=text, headers={"content-type": "application/json"})
    if prompt == "half":
        return Reply(body=json.dumps(chat("a").body)[:-20])
    return None


def endpoint_llm(endpoint: Endpoint, **entry: Any) -> dict[str, Any]:
    return {
        "default": {
            "engine": "openai",
            "model": "m",
            "base_url": endpoint.base_url,
            "max_attempts": 2,
            **entry,
        }
    }


def test_garbage_from_an_endpoint(project: Project) -> None:
    odd = [*ODD_TEXTS, *ODD_USAGE, "bytes", "half"]
    prompts = ", ".join(f"('{prompt}')" for prompt in odd)
    project.config["max_error_ratio"] = 0.2
    project.model(
        "answers",
        "select p, llm_generate(p) as r from "
        f"(select 'x' || i as p from range(40) t(i) union all select * from (values {prompts}))",
    )
    with Endpoint(garbage) as endpoint:
        # What an absurd usage says would take a year at this rate.
        project.llms = endpoint_llm(endpoint, tokens_per_minute=200_000_000)
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        failed = dict(project.generations("prompt, error_code", "status = 'error'"))
        assert failed == {
            "surrogate": "invalid_output",
            "bytes": "server_error",
            "half": "server_error",
        }
        answers = dict(project.query("select p, r from answers"))
        assert len(answers) == 40 + len(odd)
        for prompt, answer in answers.items():
            if prompt in failed:
                assert answer is None
            else:
                assert answer == ODD_TEXTS.get(prompt, echo(prompt))
        low, high = project.generations("min(prompt_tokens), max(completion_tokens)")[0]
        assert (low >= 0, high < 2**31) == (True, True)
    with Endpoint() as endpoint:
        project.llms = endpoint_llm(endpoint)
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        # The half of a pair is the model's answer, and stays.
        assert sorted(request.prompt for request in endpoint.requests) == ["bytes", "half"]


def test_garbage_for_embeddings(project: Project) -> None:
    vectors: dict[str, Any] = {
        "nan": [float("nan")] * 8,
        "inf": [float("inf")] * 8,
        "large": [10**60] * 8,
        "huge": [10**400] * 8,
        "empty": [],
        "short": [0.5, 0.25],
        "words": ["a"] * 8,
        "null": [None] * 8,
        "no": None,
    }

    def script(request: SeenRequest) -> Reply | None:
        if request.prompt not in vectors:
            return None
        # Longer prompts are asked first, and these take a moment: the right length is known then.
        data = [{"object": "embedding", "index": 0, "embedding": vectors[request.prompt]}]
        body = {"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": "x"}}
        return Reply(body=body, delay_s=1.0)

    project.config["max_error_ratio"] = 0.5
    prompts = ", ".join(f"('{prompt}')" for prompt in vectors)
    project.model(
        "answers",
        "select p, llm_embed(p) as r from "
        f"(select 'a good prompt ' || i as p from range(20) t(i) "
        f"union all select * from (values {prompts}))",
    )
    with Endpoint(script) as endpoint:
        project.llms = endpoint_llm(endpoint, embedding_batch=1)
        outcome = project.dbt("run")
        assert outcome.success, outcome.log
        failed = dict(project.generations("prompt, error_code", "status = 'error'"))
        lasting = dict.fromkeys(["nan", "inf", "large", "empty"], "invalid_output")
        passing = dict.fromkeys(["short", "words", "null", "no", "huge"], "server_error")
        assert failed == lasting | passing
        for prompt, vector in project.query("select p, r from answers"):
            assert vector == (None if prompt in failed else embed(prompt))
    with Endpoint() as endpoint:
        project.llms = endpoint_llm(endpoint, embedding_batch=1)
        assert project.dbt("run").success
        assert {request.prompt for request in endpoint.requests} == set(passing)
