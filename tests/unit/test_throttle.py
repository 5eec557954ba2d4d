"""The throttle against simulated servers, in virtual time."""

import asyncio
import math
import random

import pytest

from dbt_llm.throttle import Dismissed, Throttle
from tests.endpoint import FixedWindow, SeenRequest, SlidingWindow, Slots, TokenBucket
from tests.virtual_time import run_virtual

START = 1000.0
"""When `run_virtual` begins."""
WORKERS = 600


class Simulation:
    """Workers that send all they may to one server; times count from the start."""

    def __init__(self, limit, latency_s, *, pause="exact", kind="refused", **throttle):
        self._limit = limit
        self._latency_s = latency_s
        self._pause = pause
        self._kind = kind
        self._throttle_options = {"max_concurrency": 256, "slow_s": 30.0, **throttle}
        self.accepted, self.refused, self.sizes = [], [], []

    def run(self, seconds):
        random.seed(1)
        run_virtual(self._run(seconds))
        return self

    async def _run(self, seconds):
        self._loop = asyncio.get_running_loop()
        self.throttle = Throttle(**self._throttle_options)
        self._in_flight = 0
        workers = [asyncio.ensure_future(self._work()) for _ in range(WORKERS)]
        for _ in range(seconds):
            await asyncio.sleep(1)
            self.sizes.append(self.throttle.window.size)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert self.throttle.window.in_flight == 0

    async def _work(self):
        while True:
            retry = False
            while not await self._attempt(retry):
                retry = True

    async def _attempt(self, retry):
        ticket = await self.throttle.enter(0, first=retry)
        try:
            await asyncio.sleep(random.uniform(0.001, 0.003))
        except asyncio.CancelledError:
            self.throttle.failed(ticket)
            raise
        self._in_flight += 1
        now = self._loop.time()
        # A fixed window's minutes are to begin where the simulation does.
        wait_s = self._limit.wait_s(
            SeenRequest("POST", "", time=now - START, in_flight=self._in_flight)
        )
        try:
            if wait_s <= 0:
                self.accepted.append(now - START)
                await asyncio.sleep(self._latency_s * random.uniform(0.8, 1.2))
            else:
                self.refused.append(now - START)
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.throttle.failed(ticket)
            raise
        finally:
            self._in_flight -= 1
        if wait_s <= 0:
            self.throttle.succeeded(ticket, self._loop.time() - now)
            return True
        seconds = {"exact": wait_s, "whole": float(math.ceil(wait_s)), None: None}[self._pause]
        getattr(self.throttle, self._kind)(ticket, seconds)
        return False

    def refused_share(self, after_s):
        refused = sum(at >= after_s for at in self.refused)
        accepted = sum(at >= after_s for at in self.accepted)
        return refused / (refused + accepted)


@pytest.mark.parametrize("pause", [None, "whole"])
@pytest.mark.parametrize("burst_minutes", [1 / 6, 1])
@pytest.mark.parametrize(
    ("per_minute", "latency_s"), [(600, 0.02), (600, 1.0), (6000, 0.02), (6000, 1.0)]
)
def test_a_bucket_is_used_to_the_full(per_minute, latency_s, burst_minutes, pause):
    bucket = TokenBucket(per_minute, burst=int(per_minute * burst_minutes))
    result = Simulation(bucket, latency_s, pause=pause).run(240)
    assert len(result.accepted) >= 0.95 * 4 * per_minute
    assert result.refused_share(after_s=30) < 0.02


@pytest.mark.parametrize("pause", [None, "exact"])
@pytest.mark.parametrize("kind", [SlidingWindow, FixedWindow])
@pytest.mark.parametrize(
    ("per_minute", "latency_s"), [(600, 0.02), (600, 1.0), (6000, 0.02), (6000, 1.0)]
)
def test_a_window_of_a_minute_is_used_to_the_full(kind, per_minute, latency_s, pause):
    result = Simulation(kind(per_minute), latency_s, pause=pause).run(240)
    assert len(result.accepted) >= 0.95 * 4 * per_minute
    assert result.refused_share(after_s=60) < 0.02


@pytest.mark.parametrize(
    ("per_minute", "latency_s", "pause", "share"),
    [
        (60, 0.02, None, 0.90),
        (60, 1.0, "whole", 0.92),
        (600, 0.02, None, 0.95),
        (600, 1.0, None, 0.93),
        (600, 1.0, "exact", 0.93),
        (600, 0.02, "whole", 0.89),
        (600, 1.0, "whole", 0.88),
        # The network's jitter is a fifth of what is between two requests.
        (6000, 0.02, None, 0.75),
        (6000, 1.0, "whole", 0.55),
    ],
)
def test_a_server_that_allows_no_burst_is_used_well(per_minute, latency_s, pause, share):
    bucket = TokenBucket(per_minute, burst=1)
    result = Simulation(bucket, latency_s, pause=pause).run(240)
    assert len(result.accepted) >= share * 4 * per_minute
    assert result.refused_share(after_s=30) < 0.025


@pytest.mark.parametrize("latency_s", [0.05, 1.0])
def test_a_server_of_eight_slots_is_kept_busy(latency_s):
    slots = Slots(8, status=503)
    result = Simulation(slots, latency_s, pause=None, kind="overloaded").run(180)
    assert len([at for at in result.accepted if at >= 30]) >= 0.9 * 150 * 8 / latency_s
    assert result.refused_share(after_s=30) < 0.02
    assert all(7 <= size <= 11 for size in result.sizes[30:])


class Free:
    """A server that refuses nothing."""

    def wait_s(self, request):
        return 0.0


def test_a_configured_rate_is_held_exactly():
    result = Simulation(Free(), 1.0, requests_per_minute=300).run(240)
    # The first goes at once.
    assert len(result.accepted) == pytest.approx(1200, abs=2)
    for at in range(0, 180, 7):
        assert sum(at <= one < at + 60 for one in result.accepted) <= 301
    assert result.refused == []


def test_several_throttles_share_a_rate():
    # As replicas do: each has its part.
    total = sum(
        len(Simulation(Free(), 0.1, requests_per_minute=600 / parts).run(60).accepted)
        for parts in [3] * 3
    )
    assert total == pytest.approx(600, abs=6)


def test_configured_tokens_are_held_exactly():
    sent = []

    async def one(throttle, number):
        # A thousand are expected, and 400 to 600 are used.
        ticket = await throttle.enter(1000)
        used = 400 + 50 * (number % 5)
        sent.append((asyncio.get_running_loop().time() - START, used))
        await asyncio.sleep(0.5)
        throttle.succeeded(ticket, 0.5, used)

    async def work():
        throttle = Throttle(256, tokens_per_minute=60_000)
        jobs = [asyncio.gather(*(one(throttle, n) for n in range(200))) for _ in range(3)]
        await asyncio.gather(*jobs)

    run_virtual(work())
    assert sum(used for _, used in sent) == 600 * 500
    last = max(at for at, _ in sent)
    assert last == pytest.approx(300, abs=5)
    for start in range(0, 240, 11):
        within = sum(used for at, used in sent if start <= at < start + 60)
        assert 58_000 <= within <= 61_500


def test_an_absurd_number_of_tokens_costs_a_minute_at_most():
    async def main():
        loop = asyncio.get_running_loop()
        throttle = Throttle(8, tokens_per_minute=600)
        ticket = await throttle.enter(10)
        throttle.succeeded(ticket, 0.0, 10**9)
        await throttle.enter(10)
        return loop.time() - START

    assert run_virtual(main()) == pytest.approx(60, abs=1.5)


def test_a_retry_after_pauses_everything():
    async def work():
        loop, throttle = asyncio.get_running_loop(), Throttle(4)
        tickets = [await throttle.enter() for _ in range(3)]
        throttle.refused(tickets[0], 20.0)
        waiting = [asyncio.ensure_future(throttle.enter()) for _ in range(3)]
        throttle.succeeded(tickets[1], 0.1)
        throttle.refused(tickets[2], 5.0)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        passed_at = loop.time() - START
        for task in waiting:
            task.cancel()
        return len(done), passed_at

    assert run_virtual(work()) == (1, pytest.approx(20.0, abs=0.01))


def test_requests_go_in_order_and_retries_first():
    async def work():
        throttle, order = Throttle(1), []

        async def one(name, first=False):
            ticket = await throttle.enter(first=first)
            order.append(name)
            await asyncio.sleep(0.1)
            throttle.succeeded(ticket, 0.1)

        held = await throttle.enter()
        tasks = [asyncio.ensure_future(one(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(one("retry", first=True)))
        await asyncio.sleep(0)
        throttle.failed(held)
        await asyncio.gather(*tasks)
        return order

    assert run_virtual(work()) == ["retry", "a", "b", "c"]


@pytest.mark.parametrize("moment", ["while waiting", "when passed"])
def test_a_cancelled_request_holds_no_slot(moment):
    async def work():
        throttle = Throttle(1)
        held = await throttle.enter()
        waiting = [asyncio.ensure_future(throttle.enter()) for _ in range(2)]
        await asyncio.sleep(0)
        if moment == "while waiting":
            waiting[0].cancel()
            await asyncio.sleep(0)
            throttle.succeeded(held, 0.1)
        else:
            # It has its turn, but did not take it yet.
            throttle.succeeded(held, 0.1)
            waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        ticket = await asyncio.wait_for(waiting[1], 1.0)
        in_flight = throttle.window.in_flight
        throttle.succeeded(ticket, 0.1)
        return in_flight, throttle.window.in_flight

    assert run_virtual(work()) == (1, 0)


def test_a_request_that_was_not_sent_is_not_counted():
    async def work():
        loop, throttle = asyncio.get_running_loop(), Throttle(4, 6, 600)
        throttle.give_back(await throttle.enter(100))
        await throttle.enter(100)
        first = loop.time() - START
        await throttle.enter(100)
        return first, loop.time() - START

    assert run_virtual(work()) == (pytest.approx(0, abs=0.01), pytest.approx(10, abs=0.01))


def test_a_group_is_dismissed_at_once():
    async def work():
        throttle, group, other = Throttle(1, 1), object(), object()
        held = await throttle.enter(group=group)
        gone = [asyncio.ensure_future(throttle.enter(group=group)) for _ in range(3)]
        kept = asyncio.ensure_future(throttle.enter(group=other))
        await asyncio.sleep(0)
        throttle.dismiss(group)
        results = await asyncio.gather(*gone, return_exceptions=True)
        throttle.succeeded(held, 0.1)
        await kept
        return [type(result) for result in results], throttle.window.in_flight

    assert run_virtual(work()) == ([Dismissed] * 3, 1)


def test_a_server_that_stalls_is_given_no_more():
    async def work():
        throttle = Throttle(256, slow_s=30.0)
        for _ in range(50):
            tickets = [await throttle.enter() for _ in range(throttle.window.size)]
            await asyncio.sleep(40)
            for ticket in tickets:
                throttle.succeeded(ticket, 40.0)
        return throttle.window.size

    assert run_virtual(work()) == 4


def test_one_at_a_time_finds_out_whether_a_server_is_back():
    async def work():
        loop, throttle, sent = asyncio.get_running_loop(), Throttle(64), []

        async def one():
            while True:
                ticket = await throttle.enter(first=True)
                sent.append(loop.time() - START)
                await asyncio.sleep(0.001)
                if loop.time() > START + 60:
                    throttle.succeeded(ticket, 0.001)
                    return
                throttle.overloaded(ticket)

        await asyncio.gather(*(one() for _ in range(50)))
        return sent

    sent = run_virtual(work())
    down = [at for at in sent if at < 60]
    # Four at first, then one after each pause of up to six seconds.
    assert 60 / 6 <= len(down) <= 30
    assert max(sent) < 60 + 6 + 2


def test_errors_of_the_server_alone_are_an_overload_and_some_are_not():
    async def rate(every):
        loop, throttle = asyncio.get_running_loop(), Throttle(4)
        sent = 0
        while loop.time() < START + 20:
            ticket = await throttle.enter()
            sent += 1
            await asyncio.sleep(0.1)
            if sent % every:
                throttle.succeeded(ticket, 0.1)
            else:
                throttle.stumbled(ticket)
        return sent

    assert run_virtual(rate(2)) == pytest.approx(200, abs=2)
    assert run_virtual(rate(1)) <= 20
