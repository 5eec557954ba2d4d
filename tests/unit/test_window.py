from dbt_llm.window import Window


def answers(window, count, now=0.0, latency_s=0.1):
    """Let a full window have this many answers."""
    for _ in range(count):
        window.in_flight = window.size
        window.grow(now, latency_s, filled=True)


def test_it_starts_small_and_doubles_per_round():
    window = Window(256)
    assert window.size == 4
    sizes = []
    for _ in range(7):
        answers(window, window.size)
        sizes.append(window.size)
    assert sizes == [8, 16, 32, 64, 128, 256, 256]


def test_it_is_never_larger_than_allowed():
    assert Window(2).size == 2
    window = Window(5)
    answers(window, 100)
    assert window.size == 5


def test_it_is_full_when_so_many_are_under_way():
    window = Window(256)
    window.in_flight = 3
    assert not window.full
    window.in_flight = 4
    assert window.full


def test_it_does_not_grow_where_it_is_not_used():
    window = Window(256)
    window.in_flight = 2
    for _ in range(100):
        window.grow(0.0, 0.1, filled=False)
    assert window.size == 4


def test_slow_answers_do_not_make_it_grow():
    window = Window(256, slow_s=30.0)
    answers(window, 100, latency_s=30.1)
    assert window.size == 4
    answers(window, 4, latency_s=30.0)
    assert window.size == 8


def test_a_refusal_makes_it_fall_back_to_what_was_accepted():
    window = Window(256)
    answers(window, 12)
    window.in_flight = 9
    window.shrink(0.0, again=False, rate=False)
    assert window.size == 8
    # No more is tried before ten seconds are over.
    answers(window, 1000, now=9.9)
    assert window.size == 8
    answers(window, 60, now=10.0)
    assert window.size > 8


def test_a_second_refusal_halves_it_down_to_one():
    window = Window(256)
    answers(window, 60)
    sizes = []
    for _ in range(8):
        window.in_flight = window.size
        window.shrink(0.0, again=True, rate=False)
        sizes.append(window.size)
    assert sizes == [32, 16, 8, 4, 2, 1, 1, 1]


def test_it_grows_back_to_what_was_refused_by_one_per_round():
    window = Window(256)
    answers(window, 12)
    window.in_flight = 16
    window.shrink(0.0, again=True, rate=False)
    assert window.size == 8
    answers(window, 9)
    assert window.size == 9
    answers(window, 1000)
    assert window.size == 15


def test_what_is_refused_again_is_tried_ever_more_rarely():
    window = Window(256)
    answers(window, 4)
    tries, now, refused_at = [], 0.0, 0.0
    while len(tries) < 7:
        answers(window, 1, now=now)
        if window.size > 8:
            window.in_flight = 9
            window.shrink(now, again=False, rate=False)
            tries.append(now - refused_at)
            refused_at = now
        now += 0.5
    assert [round(wait_s / 10) for wait_s in tries[1:]] == [1, 2, 4, 8, 12, 12]
