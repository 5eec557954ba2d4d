import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm.budget import Account, Amount, Meter
from dbt_llm.config import Budget

EACH = Amount(1, 100, 0.5)


def account(of_run=None, **of_llms):
    llms = {"a": Budget(), "b": Budget()} | {
        name: Budget(**limits) for name, limits in of_llms.items()
    }
    return Account(Budget(**(of_run or {})), llms)


def test_without_limits_everything_fits():
    free = account()
    assert free.exceeded({"a": Amount(10**9, 1e15, 1e9)}) is None
    assert free.take("a", EACH, 10**6) == 10**6


@pytest.mark.parametrize(
    ("limits", "granted"),
    [
        ({"max_requests": 3}, 3),
        ({"max_tokens": 450}, 4),
        ({"max_cost_usd": 1.0}, 2),
        ({"max_requests": 7, "max_tokens": 450, "max_cost_usd": 100.0}, 4),
        ({"max_requests": 0}, 0),
        ({"max_tokens": 99}, 1),
    ],
)
def test_the_tightest_limit_decides(limits, granted):
    for one in (account(limits), account(a=limits)):
        assert one.take("a", EACH, 10) == granted


def test_the_limit_of_a_run_holds_for_all_llms_and_that_of_an_llm_for_it_alone():
    one = account({"max_requests": 5}, a={"max_requests": 2})
    assert one.take("a", EACH, 10) == 2
    assert one.take("b", EACH, 10) == 3
    assert str(one.exceeded({"b": EACH})) == "budget.max_requests = 5 requests, of which 5 are used"
    other = account(a={"max_tokens": 1000})
    other.take("a", EACH, 3)
    limit = other.exceeded({"a": EACH * 8})
    assert str(limit) == "llms.a.budget.max_tokens = 1,000 tokens, of which 300 are used"
    assert other.exceeded({"a": EACH * 7}) is None


def test_llms_together_must_fit_into_the_budget_of_the_run():
    one = account({"max_requests": 10}, a={"max_requests": 6})
    assert one.exceeded({"a": EACH * 5, "b": EACH * 5}) is None
    assert one.exceeded({"a": EACH * 5, "b": EACH * 6}).key == "budget.max_requests"
    assert one.exceeded({"a": EACH * 7, "b": EACH}).key == "llms.a.budget.max_requests"
    assert one.reached("a") is None
    one.take("a", EACH, 6)
    assert one.reached("a").key == "llms.a.budget.max_requests"
    assert one.reached("b") is None


def test_answers_that_took_less_than_expected_leave_room():
    one = account({"max_tokens": 1000})
    meter = Meter(one, "a", EACH)
    assert meter.take(100) == 10
    assert meter.take(100) == 0
    meter.answered(10, tokens=200, cost_usd=0)
    # Ten answers of 20 tokens, and what was expected weighs as much.
    assert meter.take(100) == 800 // 60
    meter.close(tokens=250, cost_usd=0)
    assert one.exceeded({"a": Amount(0, 750, 0)}) is None
    assert one.exceeded({"a": Amount(0, 751, 0)}) is not None


@given(
    tokens=st.lists(st.integers(0, 400), min_size=1, max_size=200),
    limit=st.integers(0, 20_000),
    slots=st.integers(1, 20),
)
def test_a_limit_is_passed_by_no_more_than_what_is_in_flight(tokens, limit, slots):
    meter = Meter(account({"max_tokens": limit}), "a", EACH)
    draw, waiting, flying, used = random.Random(1), list(tokens), [], 0
    while waiting or flying:
        while len(flying) < slots and waiting and meter.take(1):
            flying.append(waiting.pop())
        if not flying:
            break
        taken = flying.pop(draw.randrange(len(flying)))
        used += taken
        meter.answered(1, taken, 0)
    assert used <= limit + slots * max(tokens)
    assert not waiting or used >= limit


def test_threads_together_take_no_more_than_there_is():
    one = account({"max_requests": 1000})
    taken = []

    def take():
        while count := one.take("a", EACH, 7):
            taken.append(count)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000
