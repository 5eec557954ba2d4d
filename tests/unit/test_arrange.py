import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm import arrange
from dbt_llm.arrange import write_in_order
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrange, "_BUCKET_BYTES", bucket_bytes)
        patch.setattr(arrange, "_BATCH_BYTES", 300)
        patch.setattr(arrange, "_MOST_BUCKETS", 8)
        assert write_in_order(source, rows, target) == len(rows)
    if not len(rows):
        assert not target.exists()
        return
    found = pq.read_table(target)
    assert found.schema.remove_metadata() == REQUESTS
    assert found.to_pylist() == table.take(rows).to_pylist()
    assert sorted(path.name for path in folder.iterdir()) == ["source.parquet", "target.parquet"]
