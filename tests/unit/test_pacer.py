import pytest

from dbt_llm.pacer import Pacer


def passed(pacer, until, late_s=0.0, start=100.0):
    """Return when amounts of 1 passed, each `late_s` after it was due."""
    now, times = start, []
    while now < until:
        pacer.take(now)
        times.append(now)
        now += pacer.wait_s(now) + late_s
    return times


def test_amounts_pass_at_the_rate():
    times = passed(Pacer(4.0), 110.0)
    assert times == [100 + number / 4 for number in range(40)]


@pytest.mark.parametrize("per_second", [10.0, 100.0, 1000.0])
def test_timers_that_are_late_do_not_slow_it_down(per_second):
    times = passed(Pacer(per_second), 110.0, late_s=0.001)
    assert len(times) == pytest.approx(10 * per_second, abs=2)


def test_a_pause_is_not_made_up_for():
    pacer = Pacer(100.0)
    pacer.take(100.0)
    pacer.take(103.0)
    assert pacer.wait_s(103.0) == pytest.approx(0.01)
    assert pacer.wait_s(104.0) == 0


def test_what_comes_after_a_hold_is_not_late():
    pacer = Pacer(100.0)
    pacer.take(100.0)
    pacer.hold(100.03)
    assert pacer.wait_s(100.0) == pytest.approx(0.03)
    pacer.take(100.03)
    assert pacer.wait_s(100.03) == pytest.approx(0.01)


def test_amounts_of_any_size_wait_in_proportion():
    pacer = Pacer(100.0)
    pacer.take(50.0, 250.0)
    assert pacer.wait_s(50.0) == pytest.approx(2.5)
    pacer.correct(-200.0)
    assert pacer.wait_s(50.0) == pytest.approx(0.5)
    pacer.correct(100.0)
    assert pacer.wait_s(50.0) == pytest.approx(1.5)
