import threading

import pyarrow as pa
import pytest

from dbt_llm.collector import SeenKeys


def test_keys_are_counted_once(monkeypatch):
    monkeypatch.setattr("dbt_llm.collector._REPEATED_ROWS", 5)
    seen = SeenKeys()
    for type_ in (pa.string(), pa.large_string()):
        for start in range(10):
            seen.add(pa.array([f"k{start % 3}", None, f"k{start}"], type_))
            assert len(seen) == (start + 1 if type_ == pa.string() else 10)
    seen.clear()
    assert len(seen) == 0


@pytest.mark.parametrize("repeated", [1, 1000])
def test_no_more_keys_are_kept_than_needed(monkeypatch, repeated):
    monkeypatch.setattr("dbt_llm.collector.MAX_SEEN", 100)
    monkeypatch.setattr("dbt_llm.collector._REPEATED_ROWS", 10)
    seen = SeenKeys()
    for start in range(0, 1000, 10):
        for _ in range(repeated // 100 + 1):
            seen.add(pa.array([f"k{n}" for n in range(start, start + 10)]))
    assert 100 <= len(seen) < 300


def test_many_threads_may_add():
    seen = SeenKeys()

    def add(first: int) -> None:
        for n in range(first, first + 500):
            seen.add(pa.array([f"k{n}"]))
            len(seen)

    threads = [threading.Thread(target=add, args=(first,)) for first in range(0, 1000, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1250
