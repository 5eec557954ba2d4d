import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm import arrange
from dbt_llm.arrange import largest_row_bytes, write_in_order
from dbt_llm.schema import REQUESTS
from tests.unit.generations import requests_of


@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
@given(data=st.data(), prompts=st.lists(st.text(max_size=40), min_size=1, unique=True))
def test_rows_come_in_the_order_asked_for(tmp_path_factory, bucket_bytes, data, prompts):
    folder = tmp_path_factory.mktemp("arranged")
    source, target = folder / "source.parquet", folder / "target.parquet"
    table = requests_of(prompts)
    pq.write_table(table, source, row_group_size=3)
    order = data.draw(st.permutations(range(len(prompts))))
    rows = np.array(order[: data.draw(st.integers(0, len(order)))], np.int64)
    lengths = np.array([len(prompts[row].encode()) for row in rows], np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrange, "_BUCKET_BYTES", bucket_bytes)
        patch.setattr(arrange, "_IN_MEMORY_BYTES", data.draw(st.sampled_from([0, 10**9])))
        patch.setattr(arrange, "_BATCH_BYTES", 300)
        patch.setattr(arrange, "_MOST_BUCKETS", 8)
        assert write_in_order(source, rows, lengths, target) == len(rows)
    if not len(rows):
        assert not target.exists()
        return
    found = pq.read_table(target)
    assert found.schema.remove_metadata() == REQUESTS
    assert found.to_pylist() == table.take(rows).to_pylist()
    assert sorted(path.name for path in folder.iterdir()) == ["source.parquet", "target.parquet"]


def test_buckets_and_row_groups_are_bounded_in_bytes_where_lengths_differ(tmp_path, monkeypatch):
    # The long ones come first, as they do in a job; by their mean they would share one bucket.
    prompts = [f"{n} " + "x" * 20_000 for n in range(30)] + [f"{n} short" for n in range(3_000)]
    source, target = tmp_path / "source.parquet", tmp_path / "target.parquet"
    table = requests_of(prompts)
    pq.write_table(table, source)
    seen: list[int] = []
    gather = arrange._gather

    def watched(*arguments):
        for bucket in gather(*arguments):
            seen.append(bucket.nbytes)
            yield bucket

    monkeypatch.setattr(arrange, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(arrange, "_BUCKET_BYTES", 100_000)
    monkeypatch.setattr(arrange, "_BATCH_BYTES", 50_000)
    monkeypatch.setattr(arrange, "_gather", watched)
    rows = np.arange(len(prompts))
    lengths = np.array([len(prompt) for prompt in prompts])
    assert write_in_order(source, rows, lengths, target) == len(prompts)
    monkeypatch.undo()
    assert pq.read_table(target).to_pylist() == table.to_pylist()
    # One prompt more than fits, at most.
    assert max(seen) < 100_000 + 2 * 20_100
    metadata = pq.read_metadata(target)
    sizes = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
    assert max(sizes) < 70_000
    assert largest_row_bytes(str(target)) > 20_000
