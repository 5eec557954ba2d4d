"""A lakehouse table as its writer sees it: a state, its files, and how a new state is committed.

The data files are the same in both formats; `lake_delta.py` and `lake_parquet.py` keep the log.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

from dbt_llm import sql
from dbt_llm.lake_types import Column

FILE = '"dbt_llm_file"'
"""The column of `scan` that names the file of a row."""


class LostRaceError(Exception):
    """Another writer committed first; what was computed from the old state does not hold."""


@dataclass(frozen=True)
class DataFile:
    """A data file of a table."""

    path: str
    """Relative to the table's location."""
    address: str
    """Where it can be read."""
    size: int
    rows: int
    partition: tuple[str | None, ...] = ()
    """The values of the partition columns as text; they are not in the file."""
    stats: str = "{}"
    """Delta's statistics, as JSON; only of files that were written just now."""


@dataclass(frozen=True)
class Docs:
    """What people wrote about a table."""

    description: str | None = None
    comments: dict[str, str] = field(default_factory=dict)
    """Per column."""


@dataclass(frozen=True)
class State:
    """One consistent state of a table."""

    version: int
    columns: tuple[Column, ...]
    partition_by: tuple[str, ...]
    files: tuple[DataFile, ...]


class Table(Protocol):
    """A table at a location."""

    location: str

    def state(self) -> State | None:
        """Return the newest state; None where there is no table."""

    def replace(
        self,
        before: State | None,
        columns: list[Column],
        partition_by: tuple[str, ...],
        files: list[DataFile],
        docs: Docs,
    ) -> None:
        """Create the table, or put new content and columns in place of the old, in one commit.

        Raises:
            LostRaceError: the table is not as `before` any more.
        """

    def change(
        self, before: State, columns: list[Column], added: list[DataFile], removed: list[DataFile]
    ) -> None:
        """Add and remove files in one commit; `columns` may have new ones at the end.

        Raises:
            LostRaceError: the table is not as `before` any more.
        """

    def describe(self, docs: Docs) -> None:
        """Write descriptions where they differ from those that are there."""

    def clean_up(self) -> None:
        """Remove files that no reader can need any more."""


def scan(columns: list[Column], state: State, files: list[DataFile], *, named: bool = False) -> str:
    """Return a SELECT over exactly these files of a state; `named` adds the column `FILE`.

    A column that a file does not have is NULL there. The SELECT needs no extension.
    """
    wanted = ", ".join(f"{one.quoted}::{one.sql_type} as {one.quoted}" for one in columns)
    if named:
        wanted = f"{wanted}, {FILE}"
    types = {one.name: one.sql_type for one in columns}
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for file in files:
        groups.setdefault(file.partition, []).append(file.address)
    # It gives every column its name and type, whichever the files have.
    nulls = [f"null::{one.sql_type} as {one.quoted}" for one in columns]
    template = ", ".join([*nulls, f"null::varchar as {FILE}"] if named else nulls)
    branches = [f"select {template} where false"]
    for partition, addresses in groups.items():
        values = [
            f"{_text(value)}::{types[name]} as {sql.identifier(name)}"
            for name, value in zip(state.partition_by, partition, strict=True)
            if name in types
        ]
        select = ", ".join(["*", *values])
        branches.append(f"select {select} from {_read(addresses, named)}")
    return f"select {wanted} from ({' union all by name '.join(branches)})"


def _read(addresses: list[str], named: bool) -> str:
    plain = sql.parquet(addresses)
    options = ", union_by_name = true" if len(addresses) > 1 else ""
    if named:
        options += ", filename = 'dbt_llm_file'"
    return plain.removesuffix(")") + options + ")"


def _text(value: Any) -> str:
    return "null" if value is None else sql.literal(str(value))
