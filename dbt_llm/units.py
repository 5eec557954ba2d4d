"""Units of requests: parts of the blocks that Ray Data reads from the request files.

A block lies in Ray's object store, and a part of it is a reference, an offset and a length; so the
driver cuts units of any size and never touches a row.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dbt_llm.spool import RequestFile

# An engine on another machine fetches the whole block of which it gets a part.
_BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Unit:
    """Some requests of one file, as a part of a block in Ray's object store."""

    file: RequestFile
    block: Any
    offset: int
    rows: int


class Units:
    """Cuts units of the files' requests, in their order."""

    def __init__(self, files: list[RequestFile]) -> None:
        self._blocks = _blocks(files)
        self._rest: Unit | None = None

    def cut(self, rows: int) -> Unit | None:
        """Return the next `rows` requests, fewer where a block ends; None after the last."""
        block = self._rest or next(self._blocks, None)
        if block is None:
            return None
        rows = min(rows, block.rows)
        left = block.rows - rows
        self._rest = replace(block, offset=block.offset + rows, rows=left) if left else None
        return replace(block, rows=rows)

    def close(self) -> None:
        """End the reading of the files."""
        self._blocks.close()


def _blocks(files: list[RequestFile]) -> Generator[Unit, None, None]:
    """Yield references to blocks of some megabytes, in the files' order."""
    import ray.data
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # With Ray 2.60 the second reader takes seconds to begin, the first a fifth of one.
    context.use_datasource_v2 = False
    context.execution_options.preserve_order = True
    # Each block is there as soon as it is read. A repartition() would cut them as well, and takes
    # 30 times as long.
    context.target_max_block_size = _BLOCK_BYTES
    context.read_op_min_num_blocks = 1
    for file in files:
        # Ray would take a path for a URL, and a folder named `a=b` for a column `a`.
        path = Path(file.path)
        dataset = ray.data.read_parquet(
            path.name,
            filesystem=SubTreeFileSystem(str(path.parent), LocalFileSystem()),
            partitioning=None,
        )
        bundles = dataset.iter_internal_ref_bundles()
        left = file.rows
        for bundle in bundles:
            units = []
            for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
                rows = part.num_rows if part else entry.metadata.num_rows
                if rows:
                    units.append(Unit(file, entry.ref, part.start_offset if part else 0, rows))
                    left -= rows
            if left <= 0:
                # Until its end is seen, Ray Data polls many times a second, which costs an engine
                # on a small machine some percent of its speed.
                for _ in bundles:
                    pass
            yield from units
