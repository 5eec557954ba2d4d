import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm.budget import Account, Amount, Limit
from dbt_llm.config import Budget

EACH = Amount(1, 100, 0.5)


def account(of_run=None, **of_llms):
    llms = {"a": Budget(), "b": Budget()} | {
        name: Budget(**limits) for name, limits in of_llms.items()
    }
    return Account(Budget(**(of_run or {})), llms)


def meter(one, llm="a", each=EACH):
    return one.open({llm: (each, 1)}, claim=False)[llm]


def claimed(one, **rows):
    """Return the meters of claims, or the limit in their way."""
    return one.open({llm: (EACH, count) for llm, count in rows.items()}, claim=True)


def test_without_limits_everything_fits():
    free = account()
    assert claimed(free, a=10**9)["a"].take(10**6) == 10**6


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
        assert meter(one).take(10) == granted


def test_the_limit_of_a_run_holds_for_all_llms_and_that_of_an_llm_for_it_alone():
    one = account({"max_requests": 5}, a={"max_requests": 2})
    assert meter(one, "a").take(10) == 2
    assert meter(one, "b").take(10) == 3
    limit = claimed(one, b=1)
    assert str(limit) == "budget.max_requests = 5 requests, of which 5 are used"
    other = account(a={"max_tokens": 1000})
    meter(other).take(3)
    limit = claimed(other, a=8)
    assert str(limit) == "llms.a.budget.max_tokens = 1,000 tokens, of which 300 are used"
    assert claimed(other, a=7)["a"].take(7) == 7


def test_llms_together_must_fit_into_the_budget_of_the_run():
    one = account({"max_requests": 10}, a={"max_requests": 6})
    assert claimed(one, a=5, b=6).key == "budget.max_requests"
    assert claimed(one, a=7, b=1).key == "llms.a.budget.max_requests"
    assert set(claimed(one, a=5, b=5)) == {"a", "b"}


def test_what_one_job_claims_no_other_can():
    one = account({"max_requests": 1000})
    first = claimed(one, a=600)["a"]
    assert str(claimed(one, b=600)).endswith("of which 600 are used")
    # Nor does a job that needs more than it has claimed take it away.
    second = claimed(one, b=400)["b"]
    assert second.take(1000) == 400
    assert first.take(1000) == 600
    first.answered(100, 0, 0)
    first.close()
    assert second.take(1000) == 500


def test_answers_that_took_less_than_expected_leave_room():
    one = account({"max_tokens": 1000})
    own = meter(one)
    assert own.take(100) == 10
    assert own.take(100) == 0
    own.answered(10, tokens=200, cost_usd=0)
    # Ten answers of 20 tokens, and what was expected weighs as much.
    assert own.take(100) == 800 // 60
    own.close(Amount(10, 250, 0))
    assert isinstance(one.open({"a": (Amount(0, 750, 0), 1)}, claim=True), dict)
    assert isinstance(one.open({"a": (Amount(0, 1, 0), 1)}, claim=True), Limit)


def test_only_what_answers_took_uses_a_budget_up():
    one = account({"max_tokens": 1000})
    busy, waiting = meter(one, "a"), meter(one, "b")
    assert busy.take(100) == 10
    assert waiting.take(100) == 0
    # The ten in flight may take less.
    assert waiting.used_up() is None
    busy.answered(10, tokens=100, cost_usd=0)
    assert waiting.take(100) == 9
    busy.answered(0, tokens=900, cost_usd=0)
    assert str(waiting.used_up()) == "budget.max_tokens = 1,000 tokens, of which 1,000 are used"


def test_a_request_that_gets_lost_counts_once():
    own = meter(account({"max_requests": 10, "max_tokens": 10_000}), each=Amount(1, 100, 0))
    assert own.take(20) == 10
    own.answered(4, tokens=40, cost_usd=0)
    own.lost(6)
    assert own.take(20) == 6
    own.lost()
    assert own.taken == Amount(4, 40, 0)


def test_an_answer_that_was_told_of_and_not_stored_counts_once_and_is_paid():
    own = meter(account({"max_requests": 10, "max_tokens": 10_000}))
    own.take(10)
    own.answered(10, tokens=1000, cost_usd=0)
    own.stored(4)
    assert own.used == Amount(4, 1000, 0)
    assert own.take(20) == 6


def test_a_request_that_costs_something_is_paid_although_it_got_lost():
    own = meter(account({"max_requests": 10, "max_cost_usd": 100}))
    assert own.take(4) == 4
    own.lost(3)
    assert own.used == Amount(0, 300, 1.5)
    assert own.taken == Amount(1, 400, 2.0)
    assert own.take(20) == 9


def test_answers_that_were_told_of_and_not_stored_stay_paid():
    one = account({"max_tokens": 1000})
    own = meter(one)
    own.take(5)
    own.answered(5, tokens=500, cost_usd=0)
    own.close(Amount(2, 200, 0))
    own.close(Amount(2, 200, 0))
    assert str(claimed(one, a=6)).endswith("of which 500 are used")


def test_a_limit_in_dollars_does_not_stop_what_costs_nothing():
    one = account({"max_cost_usd": 0}, b={"max_cost_usd": 1})
    free = one.open({"a": (Amount(1, 100, 0), 5)}, claim=True)["a"]
    assert free.take(5) == 5
    assert free.used_up() is None
    paid = meter(one, "b")
    assert paid.take(5) == 0
    assert paid.used_up().key == "budget.max_cost_usd"


@given(
    tokens=st.lists(st.integers(0, 400), min_size=1, max_size=200),
    limit=st.integers(0, 20_000),
    slots=st.integers(1, 20),
)
def test_a_limit_is_passed_by_no_more_than_what_is_in_flight(tokens, limit, slots):
    own = meter(account({"max_tokens": limit}))
    draw, waiting, flying, used = random.Random(1), list(tokens), [], 0
    while waiting or flying:
        while len(flying) < slots and waiting and own.take(1):
            flying.append(waiting.pop())
        if not flying:
            break
        taken = flying.pop(draw.randrange(len(flying)))
        used += taken
        own.answered(1, taken, 0)
    assert used <= limit + slots * max(tokens)
    assert not waiting or used >= limit


@given(limit=st.integers(1, 200), seed=st.integers(0, 10**6))
def test_requests_are_never_one_more_than_allowed(limit, seed):
    own = meter(account({"max_requests": limit}))
    draw, flying, sent = random.Random(seed), 0, 0
    for _ in range(400):
        taken = own.take(draw.randint(1, 13))
        unused = draw.randint(0, taken)
        own.give_back(unused)
        flying, sent = flying + taken - unused, sent + taken - unused
        answered = draw.randint(0, flying)
        own.answered(answered, draw.random() * 100, 0.1)
        flying -= answered
    assert sent == limit


def test_threads_together_take_no_more_than_there_is():
    one = account({"max_requests": 1000})
    taken = []

    def take():
        own = meter(one)
        while count := own.take(7):
            taken.append(count)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 1000
