import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbt_llm.feeder import Feeder
from tests.virtual_engines import VirtualEngines


def fed(feeder, engine, now=0.0):
    """Hand an engine all that it may have; return the sizes of the units."""
    sizes = []
    while rows := feeder.rows_for(engine):
        feeder.handed(engine, rows, now)
        sizes.append(rows)
    return sizes


def feeder_of(rows, *concurrency, unit_rows=4000, **options):
    feeder = Feeder(rows, unit_rows, **options)
    for engine, slots in enumerate(concurrency):
        feeder.add(engine, slots)
    return feeder


# What an engine holds


@settings(max_examples=30)
@given(
    rows=st.integers(0, 2000),
    slots=st.integers(1, 100),
    unit_rows=st.integers(1, 500),
    replicas=st.integers(1, 5),
    seconds=st.lists(st.floats(0, 30), min_size=1, max_size=20),
)
def test_every_request_is_handed_out_once(rows, slots, unit_rows, replicas, seconds):
    order = list(itertools.islice(itertools.cycle(seconds), rows))
    engines = VirtualEngines(order, replicas, slots, unit_rows)
    engines.run()
    assert sum(size for _, size in engines.units) == rows
    assert all(1 <= size <= unit_rows for _, size in engines.units)


def test_an_engine_gets_its_slots_full_and_a_little_more():
    feeder = feeder_of(100_000, 64)
    assert sum(fed(feeder, 0)) == 66
    assert feeder.left == 100_000 - 66


def test_more_is_held_in_reserve_the_faster_an_engine_answers():
    feeder = feeder_of(100_000, 64)
    fed(feeder, 0)
    feeder.answered(0, 60, now=0.1)
    # 600 answers a second, and half a second's worth beside the slots.
    assert sum(fed(feeder, 0)) == 64 + 300 - 6


def test_the_reserve_is_at_most_two_units():
    feeder = feeder_of(100_000, 64, unit_rows=1000)
    fed(feeder, 0)
    feeder.answered(0, 66, now=0.001)
    assert fed(feeder, 0) == [1000, 1000]


def test_no_driver_is_called_for_every_answer():
    feeder = feeder_of(100_000, 64)
    fed(feeder, 0)
    feeder.answered(0, 60, now=0.1)
    fed(feeder, 0)
    wanted = feeder.report_at(0)
    assert wanted == 60 + 150
    feeder.answered(0, wanted - 1, now=0.35)
    assert fed(feeder, 0) == []
    feeder.answered(0, wanted, now=0.35)
    assert sum(fed(feeder, 0)) >= 150


def test_stragglers_do_not_keep_an_engine_from_work():
    # One request of each unit takes long; the others must not wait for it.
    order = [50.0 if number % 64 == 0 else 0.5 for number in range(6400)]
    engines = VirtualEngines(order, replicas=1, slots=128, unit_rows=64)
    assert engines.run() < sum(order) / 128 + 50.0 + 1.0
    assert engines.dry_s < 0.02 * sum(order)


def test_fast_engines_are_given_large_units():
    engines = VirtualEngines([0.001] * 200_000, replicas=2, slots=64, unit_rows=4000)
    engines.run()
    assert len(engines.units) < 300


def test_no_engine_has_more_units_than_its_actor_has_calls_for():
    feeder = feeder_of(100_000, 5000, unit_rows=1)
    assert len(fed(feeder, 0)) == 800
    feeder.returned(0, 1, now=1.0)
    assert len(fed(feeder, 0)) == 1


# The end


@pytest.mark.parametrize(
    ("rows", "concurrency", "expected"),
    [
        (10, (64, 64, 64, 64), [3, 3, 2, 2]),
        (3, (64, 64, 64, 64), [1, 1, 1, 0]),
        (256, (64, 64, 64, 64), [64, 64, 64, 64]),
        (90, (100, 200), [30, 60]),
    ],
)
def test_what_fits_into_the_slots_is_spread_evenly(rows, concurrency, expected):
    feeder = feeder_of(rows, *concurrency)
    assert [sum(fed(feeder, engine)) for engine in range(len(concurrency))] == expected


def test_an_engine_that_is_about_to_come_keeps_its_share():
    feeder = feeder_of(40, 64)
    feeder.awaited = 3
    assert fed(feeder, 0) == [10]
    assert fed(feeder, 0) == []
    feeder.awaited = 0
    feeder.add(1, 64)
    assert (fed(feeder, 0), fed(feeder, 1)) == ([10], [20])


def test_near_the_end_portions_shrink():
    engines = VirtualEngines([0.01] * 40_000, replicas=4, slots=64, unit_rows=1250)
    engines.run()
    sizes = [rows for _, rows in engines.units]
    assert max(sizes[:-40]) > 10 * max(sizes[-8:])


@pytest.mark.parametrize("replicas", [1, 4, 16])
@pytest.mark.parametrize("seed", range(2))
def test_no_engine_idles_while_another_has_work_waiting(replicas, seed):
    # Heavy-tailed, in a random order: list scheduling ends within one request of the best.
    chance = random.Random(seed)
    order = [min(80.0, chance.lognormvariate(1.0, 1.2)) for _ in range(1000 * replicas)]
    engines = VirtualEngines(order, replicas, slots=32, unit_rows=125)
    best = sum(order) / (32 * replicas)
    assert engines.run() < best + max(order) + 1.0
    assert engines.dry_s < 0.02 * sum(order)


def test_with_the_longest_first_the_makespan_is_the_best_there_is():
    chance = random.Random(0)
    order = [min(80.0, chance.lognormvariate(1.0, 1.2)) for _ in range(20_000)]
    order.sort(reverse=True)
    best = sum(order) / (32 * 4)
    assert VirtualEngines(order, 4, slots=32, unit_rows=625).run() < 1.02 * best


def test_engines_that_start_late_are_used():
    order = [1.0] * 12_800
    engines = VirtualEngines(order, replicas=4, slots=32, unit_rows=400)
    # Three engines alone for the first 20 s; after that the best is that all end together.
    assert engines.run(starts=[0.0, 0.0, 0.0, 20.0]) < 1.03 * (20 + (12_800 - 20 * 96) / 128)


# Engines that die, and care


def test_what_a_dead_engine_held_counts_no_more():
    feeder = feeder_of(100, 10, 10)
    fed(feeder, 0)
    fed(feeder, 1)
    feeder.remove(0)
    assert feeder.under_way
    assert not feeder.knows(0)
    feeder.answered(0, 5, now=1.0)
    feeder.returned(0, 5, now=1.0)
    feeder.remove(1)
    assert not feeder.under_way


def test_a_unit_that_came_to_nothing_leaves_its_slots():
    feeder = feeder_of(1000, 10)
    held = fed(feeder, 0)
    feeder.lost(0, held[0])
    assert sum(fed(feeder, 0)) == held[0]
    assert feeder.left == 1000 - 2 * held[0]


def test_a_careful_feeder_gives_one_unit_at_a_time():
    feeder = feeder_of(20, 64, 64, unit_rows=8, careful=True)
    assert (fed(feeder, 0), fed(feeder, 1)) == ([8], [8])
    assert feeder.report_at(0) is None
    feeder.answered(0, 7, now=1.0)
    assert fed(feeder, 0) == []
    feeder.returned(0, 8, now=1.0)
    assert fed(feeder, 0) == [4]
    assert feeder.left == 0
