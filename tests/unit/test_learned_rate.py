import pytest

from dbt_llm.learned_rate import LearnedRate


def drive(rate, server, until, now=100.0):
    """Send as fast as allowed to a server that accepts or refuses at once; return both lists."""
    accepted, refused = [], []
    while now < until:
        now += rate.wait_s(now) + 1e-6
        cycle = rate.send(now)
        if server(now):
            rate.accepted(cycle)
            accepted.append(now)
            now += 0 if rate.per_second else 0.001
        else:
            cycle.refused += 1
            refused.append(now)
            now += 0.5
            rate.refused(now - 0.5, now)
    return accepted, refused


def bucket(per_second, burst):
    state = {"tokens": burst, "at": 100.0}

    def server(now):
        tokens = state["tokens"] + (now - state["at"]) * per_second
        state["tokens"], state["at"] = min(burst, tokens), now
        if state["tokens"] < 1:
            return False
        state["tokens"] -= 1
        return True

    return server


def test_nothing_is_held_back_before_the_first_refusal():
    rate = LearnedRate(100.0)
    for number in range(1000):
        now = 100 + number / 1000
        assert rate.wait_s(now) == 0
        rate.accepted(rate.send(now))
    assert rate.per_second is None


@pytest.mark.parametrize("per_second", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("burst_s", [10.0, 60.0])
def test_the_rate_of_a_bucket_is_found(per_second, burst_s):
    rate = LearnedRate(100.0)
    server = bucket(per_second, per_second * burst_s)
    accepted, refused = drive(rate, server, until=1300.0)
    late = [at for at in accepted if at > 700]
    assert len(late) / 600 == pytest.approx(per_second, rel=0.03)
    assert rate.per_second == pytest.approx(per_second, rel=0.1)
    assert sum(at > 700 for at in refused) <= max(10, 0.02 * len(late))


def test_a_rate_that_rises_is_found_again():
    rate = LearnedRate(100.0)
    slow, fast = bucket(10.0, 100.0), bucket(20.0, 100.0)
    accepted, _ = drive(rate, lambda now: (slow if now < 400 else fast)(now), until=1000.0)
    assert sum(at > 700 for at in accepted) / 300 == pytest.approx(20.0, rel=0.05)


def test_a_rate_that_falls_is_found_again():
    rate = LearnedRate(100.0)
    slow, fast = bucket(10.0, 100.0), bucket(20.0, 100.0)
    accepted, refused = drive(rate, lambda now: (fast if now < 400 else slow)(now), until=1000.0)
    assert sum(at > 700 for at in accepted) / 300 == pytest.approx(10.0, rel=0.05)
    assert sum(at > 700 for at in refused) <= 60


def test_a_request_given_back_leaves_no_trace():
    rate = LearnedRate(100.0)
    cycle = rate.send(100.0)
    cycle.sent -= 1
    assert cycle.accepted == 0
