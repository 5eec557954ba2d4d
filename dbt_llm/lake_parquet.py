"""A lakehouse table in the Parquet format: data files, and a numbered manifest that names them.

The manifest with the highest number is the table. It appears whole or not at all, and no number
twice, so a reader sees all of a run or nothing, and a writer that comes second notices.
"""

import contextlib
import itertools
import json
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dbt_llm import sql
from dbt_llm.errors import LakehouseError
from dbt_llm.lake_table import DataFile, Docs, LostRaceError, State
from dbt_llm.lake_types import Column

MANIFESTS = "_manifests"
"""The folder of the manifests."""
GRACE_S = 24 * 3600
"""How long what a newer run replaced stays, for those who read it just now."""


class ParquetTable:
    """See `lake_table.Table`."""

    def __init__(self, location: str, columns_of: Callable[[str], list[Column]]) -> None:
        """`columns_of` returns the columns of a query."""
        self.location = location
        self._columns_of = columns_of
        self._manifests = Path(location) / MANIFESTS
        self._content: dict[str, Any] = {}

    def state(self) -> State | None:
        """Read the newest manifest."""
        found = self._list()
        if not found:
            return None
        content = self._content = self._load(found[-1])
        nulls = ", ".join(
            f"null::{one['type']} as {sql.identifier(one['name'])}" for one in content["columns"]
        )
        columns = tuple(self._columns_of(f"select {nulls}"))
        files = tuple(
            DataFile(
                file["path"],
                str(Path(self.location) / file["path"]),
                file["size"],
                file["rows"],
                tuple(file["partition"]),
            )
            for file in content["files"]
        )
        return State(int(found[-1].stem), columns, tuple(content["partition_by"]), files)

    def replace(
        self,
        before: State | None,
        columns: list[Column],
        partition_by: tuple[str, ...],
        files: list[DataFile],
        docs: Docs,
    ) -> None:
        """Write a manifest of these files alone."""
        self._commit(before, columns, partition_by, files, docs)

    def change(
        self, before: State, columns: list[Column], added: list[DataFile], removed: list[DataFile]
    ) -> None:
        """Write a manifest with these changes."""
        gone = {file.path for file in removed}
        kept = [file for file in before.files if file.path not in gone]
        self._commit(before, columns, before.partition_by, [*kept, *added], self._docs())

    def describe(self, docs: Docs) -> None:
        """Write a manifest with other descriptions, where they differ."""
        state = self.state()
        if state is None:
            return
        now = self._docs()
        new = Docs(docs.description or now.description, {**now.comments, **docs.comments})
        if new != now:
            self._commit(state, list(state.columns), state.partition_by, list(state.files), new)

    def clean_up(self) -> None:
        """Remove manifests that were replaced long ago, and the files that only they name."""
        # Another run may clean up at the same time.
        with contextlib.suppress(OSError, LakehouseError):
            self._clean_up()

    def _clean_up(self) -> None:
        found = self._list()
        if not found:
            return
        before = time.time() - GRACE_S
        # A manifest was current until the next one came.
        old = [
            one
            for one, following in itertools.pairwise(found)
            if following.stat().st_mtime < before
        ]
        kept = found[len(old) :]
        named = {file["path"] for one in kept for file in self._load(one)["files"]}
        gone = {file["path"] for one in old for file in self._load(one)["files"]}
        # What no manifest has named may be another table's.
        for path in gone - named:
            (Path(self.location) / path).unlink(missing_ok=True)
        for one in old:
            one.unlink(missing_ok=True)

    def _docs(self) -> Docs:
        return Docs(self._content.get("description"), self._content.get("comments", {}))

    def _list(self) -> list[Path]:
        return sorted(self._manifests.glob("[0-9]*.json"))

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LakehouseError(f"The manifest {path} cannot be read: {error}") from error
        return content

    def _commit(
        self,
        before: State | None,
        columns: list[Column],
        partition_by: tuple[str, ...],
        files: list[DataFile],
        docs: Docs,
    ) -> None:
        number = 0 if before is None else before.version + 1
        content = {
            "version": number,
            "description": docs.description,
            "comments": docs.comments,
            "columns": [{"name": one.name, "type": one.sql_type} for one in columns],
            "partition_by": list(partition_by),
            "files": [
                {
                    "path": file.path,
                    "size": file.size,
                    "rows": file.rows,
                    "partition": list(file.partition),
                }
                for file in files
            ],
        }
        hidden = self._manifests / f".{uuid.uuid4().hex}.tmp"
        try:
            self._manifests.mkdir(parents=True, exist_ok=True)
            with hidden.open("w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            # A link, unlike a rename, fails where the number is taken.
            os.link(hidden, self._manifests / f"{number:020d}.json")
        except FileExistsError as error:
            raise LostRaceError(str(error)) from error
        except OSError as error:
            raise LakehouseError(
                f"The lakehouse table {self.location} cannot be written: {error}"
            ) from error
        finally:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
