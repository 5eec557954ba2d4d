"""Writes a model as a lakehouse table: how each strategy turns a query's rows into a commit.

The rows lie in a table of the connection. Whatever the strategy, new data files are written first,
and then one commit makes them visible. Where another writer was faster, the work is done again on
what that one left.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dbt_llm import lake_changes as changes
from dbt_llm import sql
from dbt_llm.credentials import is_url
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import ConfigError, LakehouseError
from dbt_llm.lake_config import ModelConfig, check_columns
from dbt_llm.lake_delta import DeltaTable
from dbt_llm.lake_files import TARGET_BYTES, FileWriter
from dbt_llm.lake_parquet import MANIFESTS, ParquetTable
from dbt_llm.lake_table import DataFile, Docs, LostRaceError, State, Table, scan
from dbt_llm.lake_types import Column, columns_of
from dbt_llm.object_scan import make_readable, reads_itself
from dbt_llm.storage import Folder, open_folder
from dbt_llm.store import NOT_IN_DELTA_PATHS

_TRIES = 20
_SMALL_BYTES = TARGET_BYTES // 4
_MANY_SMALL = 20
_UPLOADS = 8


@dataclass(frozen=True)
class Model:
    """A model whose rows are there and are to be written."""

    node_id: str
    relation: str
    """The table with its rows, as SQL."""
    config: ModelConfig
    location: str
    is_incremental: bool
    """What `is_incremental()` was while its query was compiled."""
    full_refresh: bool
    docs: Docs
    names: tuple[str, str, str] = ("", "", "")
    """Database, schema and name of its view."""
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What opens the object store where it lies in one."""

    @property
    def folder(self) -> Folder:
        """Where its table lies."""
        return open_folder(self.location, self.storage_options)


def write_model(cursor: Any, model: Model) -> str:
    """Write a model's rows into its table; return a SELECT that reads the table.

    Raises:
        ConfigError: the config is wrong, or a column has a type that no table can hold.
        SchemaChangeError: the columns changed, and `on_schema_change` forbids it.
        LakehouseError: the rows do not fit, or the table cannot be read or written.
    """
    table = _open(cursor, model)
    new = columns_of(cursor, f"select * from {model.relation}")
    config = check_columns(model.node_id, model.config, new)
    work = _Work(cursor, model, config, table, new)
    for attempt in range(_TRIES):
        try:
            work.write()
            break
        except LostRaceError as error:
            if config.strategy == "append" and model.is_incremental:
                raise LakehouseError(
                    f"Another writer added to the lakehouse table {model.location} meanwhile, and "
                    "the rows of this run may have been chosen by what was there before. Nothing "
                    "was written; run dbt again."
                ) from error
            if attempt == _TRIES - 1:
                raise LakehouseError(
                    f"Other writers were faster {_TRIES} times on the lakehouse table "
                    f"{model.location}: {error}. Nothing was written; run dbt again."
                ) from error
            time.sleep(min(0.05 * 2**attempt, 2.0))
    _retry(lambda: table.describe(model.docs))
    table.clean_up()
    state = table.state()
    if state is None:
        raise LakehouseError(f"The lakehouse table {model.location} is gone again.")
    return _view(cursor, model, state)


def table_exists(config: ModelConfig, location: str, options: Mapping[str, str]) -> bool:
    """Tell whether there is a table at a location, without reading it."""
    if config.format == "delta":
        return open_folder(location, options).is_table()
    return any((Path(location) / MANIFESTS).glob("[0-9]*.json"))


def _retry(do: Callable[[], None]) -> None:
    """Do it again where another writer was faster; descriptions are not worth a failure."""
    for attempt in range(_TRIES):
        try:
            return do()
        except LostRaceError:
            time.sleep(min(0.05 * 2**attempt, 2.0))


def check_place(location: str, options: Mapping[str, str]) -> None:
    """Prove that a table can be written in an object store, before anything is asked for it.

    Raises:
        StoreError: it cannot; the text says what to do.
    """
    if is_url(location):
        open_folder(location, options).make_writable(atomic=True)


def _open(cursor: Any, model: Model) -> Table:
    if is_url(model.location):
        if not reads_itself(make_readable(cursor, model.folder)):
            raise LakehouseError(
                f"The table of {model.node_id} lies in an object store, and a view over it needs "
                "DuckDB's extension httpfs and keys of S3: pip install duckdb-extension-httpfs "
                "(for DuckDB 1.5)."
            )
        return DeltaTable(model.location, model.storage_options)
    folder = Path(model.location)
    is_delta = (folder / "_delta_log").is_dir()
    if model.config.format == "parquet":
        if is_delta:
            raise ConfigError(
                f"{model.node_id} has format: parquet, and {folder} holds a Delta table. Use "
                "another location, or remove the folder."
            )
        return ParquetTable(model.location, lambda query: columns_of(cursor, query))
    if found := NOT_IN_DELTA_PATHS.search(model.location):
        raise ConfigError(
            f"The location {model.location!r} of {model.node_id} has {found[0]!r} in it, which the "
            "Delta library takes for something else. Use another location, or format: parquet."
        )
    if (folder / MANIFESTS).is_dir() and not is_delta:
        raise ConfigError(
            f"{model.node_id} has format: delta, and {folder} holds a Parquet table. Use another "
            "location, or remove the folder."
        )
    return DeltaTable(model.location, model.storage_options)


def _view(cursor: Any, model: Model, state: State) -> str:
    columns = list(state.columns)
    # The extension looks for the files of a folder like `größe` beside it.
    plain = Path(model.location).name.isascii()
    if model.config.format == "delta" and plain and load_delta_extension(cursor):
        names = ", ".join(one.quoted for one in columns)
        return f"select {names} from delta_scan({sql.literal(model.location)})"
    return scan(columns, state, list(state.files))


@dataclass
class _Work:
    """One write; `write` may be called again after a lost race."""

    cursor: Any
    model: Model
    config: ModelConfig
    table: Table
    new: list[Column]

    def write(self) -> None:
        state = self.table.state()
        self._check_keys()
        if state is None or self.model.full_refresh:
            self._replace(state)
            return
        if self.config.strategy == "append" and not self.model.is_incremental:
            raise LakehouseError(
                f"The table of {self.model.node_id} is at {self.model.location}, but this database "
                "has no view of it, so is_incremental() was false and the query may hold rows that "
                "the table has. Run with --full-refresh to write it anew, or use unique_key."
            )
        if self.config.strategy == "append" and _is_stale(self.cursor, self.model.names, state):
            raise LakehouseError(
                f"The view of {self.model.node_id} shows an older version of its table "
                f"{self.model.location}: a run has failed after it wrote the table, or another "
                "database writes it. So is_incremental() may have let rows pass that the table "
                "has. Nothing was written; run with --full-refresh, or use unique_key."
            )
        names = self.config.partition_by
        if self.config.strategy == "overwrite":
            if self.config.on_schema_change == "fail":
                changes.new_columns(self.model.node_id, state.columns, self.new, "fail")
            same = (list(state.columns), state.partition_by) == (self.new, names)
            if not self.config.unique_key or not same:
                self._replace(state)
                return
        elif [name.lower() for name in names] != [name.lower() for name in state.partition_by]:
            raise ConfigError(
                f"The table of {self.model.node_id} is partitioned by "
                f"{', '.join(state.partition_by) or 'nothing'}, its config says "
                f"{', '.join(names) or 'nothing'}. Run with --full-refresh to change it."
            )
        self._update(state)

    def _check_keys(self) -> None:
        # A strategy that replaces all rows of a key lets it have several.
        if self.config.unique_key and self.config.strategy != "delete+insert":
            changes.check_unique(self.cursor, self._rows(self.new), self._keys(self.new))

    def _keys(self, columns: list[Column]) -> list[Column]:
        by_name = {one.name.lower(): one for one in columns}
        return [by_name[name.lower()] for name in self.config.unique_key]

    def _rows(self, columns: list[Column]) -> str:
        given = {one.name.lower() for one in self.new}
        return changes.select_new(self.model.relation, columns, given)

    def _replace(self, state: State | None) -> None:
        self._commit(
            self._rows(self.new),
            self.new,
            self.config.partition_by,
            lambda files: self.table.replace(
                state, self.new, self.config.partition_by, files, self.model.docs
            ),
        )

    def _update(self, state: State) -> None:
        columns, rewrite = changes.new_columns(
            self.model.node_id, state.columns, self.new, self.config.on_schema_change
        )
        keys = self._keys(columns)
        rows = self._rows(columns)
        if self.config.strategy != "delete+insert" and keys != self._keys(self.new):
            # Cast to the table's types, two keys may be one.
            changes.check_unique(self.cursor, rows, keys)
        if rewrite:
            old = scan(columns, state, list(state.files))
            self._commit(
                changes.all_content(rows, old, keys, columns),
                columns,
                state.partition_by,
                lambda files: self.table.replace(
                    state, columns, state.partition_by, files, self.model.docs
                ),
            )
        elif keys:
            self._update_keys(state, columns, keys, rows)
        else:
            if not sql.scalar(self.cursor, f"select count(*) from {self.model.relation}"):
                self._add_columns(state, columns)
                return
            small = _many_small(state, set())
            content = f"{scan(columns, state, small)} union all {rows}" if small else rows
            self._change(state, columns, content, small)

    def _update_keys(
        self, state: State, columns: list[Column], keys: list[Column], rows: str
    ) -> None:
        old = scan(columns, state, list(state.files), named=True)
        given = {one.name.lower() for one in self.new}
        missing = [one for one in columns if one.name.lower() not in given]
        if self.config.strategy == "delete+insert":
            old = changes.in_range(self.cursor, rows, old, keys[0])
            changes.find_changed_groups(self.cursor, rows, old, keys, columns)
        else:
            delete = self.config.strategy == "overwrite"
            if not delete:
                old = changes.in_range(self.cursor, rows, old, keys[0])
            if missing:
                rows = changes.with_old_values(rows, old, keys, columns, missing)
            compared = [one for one in columns if one not in missing]
            changes.find_changed_rows(self.cursor, rows, old, keys, compared, delete=delete)
        changed, touched = changes.changes(self.cursor)
        if not changed:
            self._add_columns(state, columns)
            return
        removed = [file for file in state.files if file.address in touched]
        if len(removed) != len(touched):
            raise LakehouseError(
                f"DuckDB names files of {self.model.location} otherwise than the table's log does."
            )
        removed += _many_small(state, touched)
        content = changes.changed_content(rows, scan(columns, state, removed), keys, columns)
        self._change(state, columns, content, removed)

    def _add_columns(self, state: State, columns: list[Column]) -> None:
        if len(columns) != len(state.columns):
            self.table.change(state, columns, [], [])

    def _change(
        self, state: State, columns: list[Column], content: str, removed: list[DataFile]
    ) -> None:
        self._commit(
            content,
            columns,
            state.partition_by,
            lambda files: self.table.change(state, columns, files, removed),
        )

    def _commit(
        self,
        rows: str,
        columns: list[Column],
        partition_by: tuple[str, ...],
        commit: Callable[[list[DataFile]], None],
    ) -> None:
        query = changes.for_files(rows, columns, partition_by)
        if is_url(self.model.location):
            self._commit_objects(query, columns, partition_by, commit)
            return
        writer = FileWriter(self.model.location, columns, partition_by)
        files = writer.write(self.cursor, query)
        try:
            commit(files)
        except LostRaceError:
            writer.discard()
            raise

    def _commit_objects(
        self,
        query: str,
        columns: list[Column],
        partition_by: tuple[str, ...],
        commit: Callable[[list[DataFile]], None],
    ) -> None:
        """Write files to the disk, and from there into the object store."""
        folder = self.model.folder
        with tempfile.TemporaryDirectory(prefix="dbt-llm-") as near:
            files = FileWriter(near, columns, partition_by).write(self.cursor, query)

            def upload(file: DataFile) -> DataFile:
                content = Path(file.address).read_bytes()
                folder.put(file.path, lambda target: target.write(content))
                return replace(file, address=folder.address(file.path))

            try:
                with ThreadPoolExecutor(_UPLOADS) as threads:
                    files = list(threads.map(upload, files))
            except OSError as error:
                raise LakehouseError(
                    f"The lakehouse table {folder} cannot be written: {error} Nothing of this run "
                    "is visible in it."
                ) from error
        try:
            commit(files)
        except LostRaceError:
            for file in files:
                folder.delete(file.path)
            raise


def _is_stale(cursor: Any, names: tuple[str, str, str], state: State) -> bool:
    """Tell whether a view names the files of an older version; one by delta_scan never does."""
    found = cursor.execute(
        "select sql from duckdb_views() where database_name = ? and schema_name = ? and "
        "view_name = ?",
        names,
    ).fetchall()
    if not found or "delta_scan(" in found[0][0]:
        return False
    return any(sql.literal(file.address) not in found[0][0] for file in state.files)


def _many_small(state: State, touched: set[str]) -> list[DataFile]:
    """Return the small files, once they are many: they are put together with what is written."""
    small = [
        file for file in state.files if file.size < _SMALL_BYTES and file.address not in touched
    ]
    # A partition has one file at least, however many partitions there are.
    counts = Counter(file.partition for file in small)
    return [file for file in small if counts[file.partition] >= _MANY_SMALL]
