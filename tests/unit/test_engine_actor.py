import asyncio
from dataclasses import asdict

import pytest

from dbt_llm import engine_actor
from dbt_llm.engine_actor import EngineActor
from dbt_llm.process_watch import this_process
from dbt_llm.schema import Answer, answers_table
from tests.unit.generations import call_of, provenance, requests_of

RUN = provenance().run_id


class OneByOne:
    """An engine that answers a request each time it is let."""

    version = "1"
    concurrency = 16

    def __init__(self):
        self.turns = asyncio.Semaphore(0)

    async def answer(self, requests, call, emit):
        for row in requests.to_pylist():
            await self.turns.acquire()
            emit(answers_table([Answer(row["prompt_hash"], output=row["prompt"])]))

    async def close(self):
        pass


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a test's coroutine with an actor (without Ray), its engine and a unit of ten requests."""

    def run(test):
        async def main():
            engine = OneByOne()
            monkeypatch.setattr(engine_actor, "start_engine", lambda config, secrets: engine)
            monkeypatch.setattr(engine_actor, "_redirect_output", lambda path: None)
            actor = EngineActor({"model": "m"}, str(tmp_path / "engine.log"))
            await actor.start({}, this_process())
            call = call_of()
            job = {
                "folder": str(tmp_path),
                "storage_options": {},
                "provenance": asdict(provenance()),
            }
            requests = requests_of([f"x{number}" for number in range(30)])
            unit = asyncio.ensure_future(
                actor.answer(requests, 5, 10, call.call_hash, call.content, job)
            )
            await test(actor, engine, unit)

        asyncio.run(main())

    return run


async def some_turns():
    for _ in range(20):
        await asyncio.sleep(0)


def test_the_driver_hears_of_answers_before_the_unit_is_done(run):
    async def test(actor, engine, unit):
        heard = asyncio.ensure_future(actor.answered(RUN, 3))
        engine.turns.release()
        engine.turns.release()
        await some_turns()
        assert not heard.done()
        engine.turns.release()
        assert (await asyncio.wait_for(heard, 5)).rows == 3
        assert not unit.done()
        assert (await actor.answered(RUN, 2)).rows == 3
        for _ in range(7):
            engine.turns.release()
        assert (await unit).rows == 10
        assert (await actor.answered(RUN, 10)).rows == 10

    run(test)


@pytest.mark.parametrize("method", ["abandon", "finish"])
def test_who_waits_for_answers_is_told_that_the_run_ends(run, method):
    async def test(actor, engine, unit):
        heard = asyncio.ensure_future(actor.answered(RUN, 3))
        engine.turns.release()
        await some_turns()
        await getattr(actor, method)(RUN)
        await asyncio.wait_for(heard, 5)
        unit.cancel()
        await asyncio.gather(unit, return_exceptions=True)

    run(test)


def test_the_count_of_a_run_begins_anew_after_it_was_finished(run):
    async def test(actor, engine, unit):
        for _ in range(10):
            engine.turns.release()
        await unit
        await actor.finish(RUN)
        assert (await actor.answered(RUN, 0)).rows == 0

    run(test)
