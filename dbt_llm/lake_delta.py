"""A lakehouse table in the Delta format: its log, read and written through delta-rs."""

import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from dbt_llm.errors import LakehouseError
from dbt_llm.lake_table import DataFile, Docs, LostRaceError, State
from dbt_llm.lake_types import Column, arrow_schema, plain
from dbt_llm.storage import Folder, open_folder

# What a table may use and still be read by its list of files, and rewritten.
_READER_FEATURES = {"timestampNtz"}
_WRITER_FEATURES = {"timestampNtz", "appendOnly", "invariants", "changeDataFeed"}
_NEWEST_LEGACY_WRITER = 2


class DeltaTable:
    """See `lake_table.Table`."""

    def __init__(self, location: str, options: Mapping[str, str] | None = None) -> None:
        self.location = location
        self._folder = open_folder(location, options or {})
        self._options = dict(options or {}) or None
        self._table: Any = None

    def state(self) -> State | None:
        """Read the newest version."""
        import pyarrow as pa
        from deltalake import DeltaTable as Handle
        from deltalake.exceptions import DeltaError

        # delta-rs makes the folders of a path that it only looks at.
        if not self._folder.is_table():
            self._table = None
            return None
        try:
            table = self._table = Handle(self.location, storage_options=self._options)
            self._check_features()
            schema = pa.schema(table.schema().to_arrow())
            partition_by = tuple(table.metadata().partition_columns)
            actions = table.get_add_actions(flatten=True)
        except (DeltaError, OSError) as error:
            raise LakehouseError(
                f"The lakehouse table {self.location} cannot be read: {error}"
            ) from error
        # The log has them as URLs; what is committed is escaped by delta-rs.
        paths = [unquote(path) for path in actions["path"].to_pylist()]
        sizes = actions["size_bytes"].to_pylist()
        rows = actions["num_records"].to_pylist()
        values = [
            actions[f"partition.{name}"].to_pylist() if paths else [] for name in partition_by
        ]
        files = tuple(
            DataFile(
                path,
                self._folder.address(path),
                size,
                count or 0,
                tuple(_text(column[number]) for column in values),
            )
            for number, (path, size, count) in enumerate(zip(paths, sizes, rows, strict=True))
        )
        columns = tuple(Column(one.name, plain(one.type)) for one in schema)
        return State(table.version(), columns, partition_by, files)

    def replace(
        self,
        before: State | None,
        columns: list[Column],
        partition_by: tuple[str, ...],
        files: list[DataFile],
        docs: Docs,
    ) -> None:
        """Write new content; where columns or partitions changed, the table's metadata with it."""
        from deltalake.transaction import create_table_with_add_actions

        self._folder.make_folder()
        same = before is not None and (list(before.columns), before.partition_by) == (
            columns,
            partition_by,
        )
        with _commits(self._folder, creates=before is None):
            if before is not None and same:
                # It keeps the table's identity, its comments and its properties.
                self._table.create_write_transaction(
                    [_add(file, partition_by) for file in files],
                    "overwrite",
                    self._table.schema(),
                    partition_by=list(partition_by),
                    commit_properties=_no_retry(),
                )
                return
            if before is not None:
                # A replacement takes whatever is there; who came in between is seen here.
                self._table.update_incremental()
                if self._table.version() != before.version:
                    raise LostRaceError("the table has a newer version")
            create_table_with_add_actions(
                self.location,
                _schema(columns, docs),
                [_add(file, partition_by) for file in files],
                mode="error" if before is None else "overwrite",
                partition_by=list(partition_by),
                description=docs.description,
                storage_options=self._options,
                commit_properties=_no_retry(),
            )

    def change(
        self, before: State, columns: list[Column], added: list[DataFile], removed: list[DataFile]
    ) -> None:
        """Commit new columns, if there are any, and then the files."""
        from deltalake.transaction import RemoveAction

        known = {column.name for column in before.columns}
        new = [column for column in columns if column.name not in known]
        now = int(time.time() * 1000)
        names = before.partition_by
        with _commits(self._folder):
            if new:
                fields = _schema(new, Docs()).fields
                self._table.alter.add_columns(fields, commit_properties=_no_retry())
            if added or removed:
                self._table.create_write_transaction(
                    [
                        *(_add(file, names) for file in added),
                        *(
                            RemoveAction(
                                file.path,
                                True,
                                now,
                                size=file.size,
                                partition_values=dict(zip(names, file.partition, strict=True)),
                            )
                            for file in removed
                        ),
                    ],
                    "append",
                    self._table.schema(),
                    partition_by=list(names),
                    commit_properties=_no_retry(),
                )

    def describe(self, docs: Docs) -> None:
        """Write the description and the comments that are not there yet; each is a version."""
        from deltalake import DeltaTable as Handle

        table = Handle(self.location, storage_options=self._options)
        fields = {field.name: field for field in table.schema().fields}
        with _commits(self._folder):
            if docs.description and docs.description != table.metadata().description:
                table.alter.set_table_description(docs.description)
            for name, comment in docs.comments.items():
                field = fields.get(name)
                if field is not None and (field.metadata or {}).get("comment") != comment:
                    table.alter.set_column_metadata(name, {"comment": comment})

    def clean_up(self) -> None:
        """Remove nothing: old versions are the table's history, until somebody vacuums it."""

    def _check_features(self) -> None:
        protocol = self._table.protocol()
        used = set(protocol.reader_features or ()) - _READER_FEATURES
        used |= set(protocol.writer_features or ()) - _WRITER_FEATURES
        legacy = protocol.writer_features is None
        if used or (legacy and protocol.min_writer_version > _NEWEST_LEGACY_WRITER):
            what = ", ".join(sorted(used)) or f"writer version {protocol.min_writer_version}"
            raise LakehouseError(
                f"The Delta table {self.location} uses {what}, which dbt-llm cannot rewrite. "
                "Another program has turned it on. Give the model another location."
            )


class _commits:
    """Turns delta-rs's errors of a commit into ours."""

    def __init__(self, folder: Folder, *, creates: bool = False) -> None:
        self._folder = folder
        self._creates = creates

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from deltalake.exceptions import CommitFailedError, DeltaError

        lost = isinstance(error, CommitFailedError)
        if self._creates and isinstance(error, DeltaError):
            lost = lost or self._folder.is_table()
        if lost:
            raise LostRaceError(str(error)) from error
        if isinstance(error, DeltaError | OSError):
            raise LakehouseError(
                f"The lakehouse table {self._folder} refused a commit: {error}"
            ) from error


def _no_retry() -> Any:
    """Have delta-rs refuse a commit when another one came first.

    Its own check would let two writers add the same new key.
    """
    from deltalake import CommitProperties

    return CommitProperties(max_commit_retries=0)


def _add(file: DataFile, names: tuple[str, ...]) -> Any:
    from deltalake.transaction import AddAction

    values = dict(zip(names, file.partition, strict=True))
    return AddAction(file.path, file.size, values, int(time.time() * 1000), True, file.stats)


def _schema(columns: list[Column], docs: Docs) -> Any:
    """Return Delta's schema with the comments, which delta-rs takes as JSON only."""
    from deltalake import Schema

    content = json.loads(Schema.from_arrow(arrow_schema(columns)).to_json())
    for field in content["fields"]:
        if field["name"] in docs.comments:
            field["metadata"] = {"comment": docs.comments[field["name"]]}
    return Schema.from_json(json.dumps(content))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    # DuckDB and Delta write them small.
    return str(value).lower() if isinstance(value, bool) else str(value)
