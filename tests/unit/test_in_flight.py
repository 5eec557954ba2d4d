import threading

import pytest

from dbt_llm.errors import CancelledError
from dbt_llm.in_flight import InFlight, wait_for
from dbt_llm.spool import Prepared, RequestFile
from tests.unit.generations import call_of


def file(name):
    return RequestFile(path=name, rows=1, call=call_of())


def test_a_first_claim_has_nobody_to_wait_for():
    in_flight = InFlight()
    seen = []

    def prepare(others):
        seen.append(others)
        return Prepared([file("a")])

    assert in_flight.claim("r1", prepare) == (Prepared([file("a")]), [])
    assert seen == [[]]


def test_a_second_claim_hears_of_the_first_ones_files():
    in_flight = InFlight()
    in_flight.claim("r1", lambda _: Prepared([file("a"), file("b")]))
    seen = []

    def prepare(others):
        seen.extend(others)
        return Prepared([file("c")])

    assert in_flight.claim("r2", prepare) == (Prepared([file("c")]), [])
    assert seen == [file("a"), file("b")]


def test_who_leaves_requests_to_another_waits_until_that_one_is_done():
    in_flight = InFlight()
    in_flight.claim("r1", lambda _: Prepared([file("a")]))
    _, (done,) = in_flight.claim("r2", lambda _: Prepared([], left_to_others=1))
    assert not done.is_set()
    in_flight.release("r1")
    assert done.is_set()
    wait_for([done], threading.Event())


def test_a_released_claim_is_forgotten():
    in_flight = InFlight()
    in_flight.claim("r1", lambda _: Prepared([file("a")]))
    in_flight.release("r1")
    seen = []
    in_flight.claim("r2", lambda others: Prepared(seen.extend(others) or []))
    assert seen == []


def test_a_run_that_claimed_nothing_may_be_released():
    in_flight = InFlight()
    in_flight.claim("r1", lambda _: Prepared([]))
    in_flight.release("r1")
    assert in_flight.claim("r2", Prepared) == (Prepared([]), [])


def test_a_failed_preparation_claims_nothing():
    in_flight = InFlight()

    def fail(_):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        in_flight.claim("r1", fail)
    assert in_flight.claim("r2", Prepared) == (Prepared([]), [])


def test_an_interrupt_ends_the_wait():
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError, match="Interrupted while waiting"):
        wait_for([threading.Event()], cancelled)
