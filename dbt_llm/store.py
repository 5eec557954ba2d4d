"""The generation store: a folder of part files that all models share, as Delta or as Parquet.

Both formats are append-only and keyed by prompt hash. In a Delta store a part counts once a commit
names it; in a Parquet store once it lies there, since a part appears whole or not at all.
"""

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from dbt_llm import sql
from dbt_llm.config import StoreConfig
from dbt_llm.errors import ConfigError, StoreError
from dbt_llm.parts import PART_PATTERN, Part, remove_half_parts
from dbt_llm.schema import GENERATIONS

_COMMIT_RETRIES = 100
_PROBE_BYTES = 64 * 1024
# A Parquet store has no log; to know its rows, the footer of every file has to be read.
_COUNT_UP_TO_FILES = 200
_FEW_FILES = 10
# delta-rs reads a path as a URL once too often, and takes a backslash for a slash.
_NOT_IN_DELTA_PATHS = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Snapshot:
    """One consistent state of the store."""

    version: int | None
    """The Delta version; None for a Parquet store, and where there is no store yet."""
    files: tuple[str, ...]
    rows: int | None
    """Rows in all; None where it is not known without reading."""


class Store(Protocol):
    """What the rest of the package may do with a store."""

    folder: Path

    def create(self) -> None:
        """Create the store where there is none; prove that it can be written."""

    def snapshot(self) -> Snapshot:
        """Return the newest state."""

    def relation(self, snapshot: Snapshot, delta_scan: bool) -> str | None:
        """Return a SQL expression for FROM that reads exactly the snapshot; None when empty.

        `delta_scan` says whether DuckDB's Delta extension is loaded.
        """

    def commit(self, parts: list[Part]) -> None:
        """Make parts visible; a part that is visible already stays so.

        Raises:
            StoreError: a part is not there as it was written, or the store refuses the commit.
        """

    def adopt(self) -> int:
        """Commit what earlier runs wrote and did not commit; return the number of rows."""

    def forget_lost(self) -> int:
        """Forget the files that somebody removed; return how many."""


def open_store(config: StoreConfig, table: str = "generations") -> Store:
    """Return a table of a profile's store; nothing is read or written yet.

    Raises:
        ConfigError: no Delta table can lie there.
    """
    folder = (Path(config.path).absolute() / table).resolve()
    if config.format == "parquet":
        return ParquetStore(folder)
    if found := _NOT_IN_DELTA_PATHS.search(str(folder)):
        raise ConfigError(
            f"The store's folder {str(folder)!r} has {found[0]!r} in its path, which the Delta "
            "library takes for something else. Use another store.path, or store.format: parquet."
        )
    return DeltaStore(folder)


class ParquetStore:
    """Part files in a folder; what lies there counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self) -> None:
        """Create the folder."""
        _make_writable(self.folder)
        remove_half_parts(self.folder)

    def snapshot(self) -> Snapshot:
        """List the part files."""
        files = _part_files(self.folder)
        rows = None
        if len(files) <= _COUNT_UP_TO_FILES:
            rows = sum(_rows(file) for file in files)
        return Snapshot(None, tuple(map(str, files)), rows)

    def relation(self, snapshot: Snapshot, delta_scan: bool) -> str | None:
        """Read the listed files."""
        return _read_parquet(snapshot)

    def commit(self, parts: list[Part]) -> None:
        """Check that the parts are there; there is nothing more to do."""
        _check(parts)

    def adopt(self) -> int:
        """Adopt nothing: a part counts from the moment it is there."""
        return 0

    def forget_lost(self) -> int:
        """Forget nothing: a part counts as long as it is there."""
        return 0


class DeltaStore:
    """A Delta table whose data files the workers write themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._table: Any = None
        # dbt's threads share the store; a table handle shows one version at a time.
        self._lock = threading.RLock()

    def create(self) -> None:
        """Create the table, unless another process was faster."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        _make_writable(self.folder)
        remove_half_parts(self.folder)
        if self._open() is not None:
            return
        try:
            DeltaTable.create(
                str(self.folder),
                GENERATIONS,
                mode="ignore",
                name="generations",
                description="Answers of LLMs, one row per prompt hash (dbt-llm).",
            )
        except (DeltaError, OSError) as error:
            if not DeltaTable.is_deltatable(str(self.folder)):
                raise StoreError(
                    f"The generation store {self.folder} cannot be created: {error}"
                ) from error
        self._open()

    def snapshot(self) -> Snapshot:
        """Return the newest version with its files."""
        with self._lock:
            table = self._open()
            if table is None:
                return Snapshot(None, (), 0)
            version, actions = table.version(), table.get_add_actions(flatten=True)
        rows = actions["num_records"].to_pylist()
        # Delta keeps paths as relative URLs; file_uris() would leave them escaped.
        names = [unquote(path) for path in actions["path"].to_pylist()]
        _check_names(self.folder, names)
        files = tuple(str(self.folder / name) for name in names)
        return Snapshot(version, files, None if None in rows else sum(rows))

    def relation(self, snapshot: Snapshot, delta_scan: bool) -> str | None:
        """Read the version through the extension, or its files without."""
        if not snapshot.files:
            return None
        if delta_scan:
            return f"delta_scan({sql.literal(str(self.folder))}, version => {snapshot.version})"
        return _read_parquet(snapshot)

    def commit(self, parts: list[Part]) -> None:
        """Add the parts to the table in one transaction; lost races are tried again."""
        with self._lock:
            self._commit(parts)

    def _commit(self, parts: list[Part]) -> None:
        if not parts:
            return
        problem: StoreError | None = None
        sound = []
        for part in parts:
            try:
                _check([part])
                sound.append(part)
            except StoreError as error:
                problem = problem or error
        if sound:
            self._add(sound)
        if problem is not None:
            raise problem

    def _add(self, parts: list[Part]) -> None:
        from deltalake.exceptions import CommitFailedError, DeltaError
        from deltalake.transaction import AddAction, CommitProperties

        now = int(time.time() * 1000)
        actions = [
            AddAction(Path(part.path).name, part.size, {}, now, True, part.stats())
            for part in parts
        ]
        table = self._open()
        if table is None:
            raise StoreError(
                f"The generation store {self.folder} is gone; the answers lie in "
                f"{len(parts)} part files there. Run dbt again to take them in."
            )
        for attempt in range(_COMMIT_RETRIES):
            try:
                table.update_incremental()
                table.create_write_transaction(
                    actions,
                    "append",
                    GENERATIONS,
                    commit_properties=CommitProperties(max_commit_retries=_COMMIT_RETRIES),
                )
                return
            except CommitFailedError as error:
                if attempt == _COMMIT_RETRIES - 1:
                    raise StoreError(
                        f"The generation store {self.folder} refused a commit "
                        f"{_COMMIT_RETRIES} times: {error}. Run dbt again: the answers are on "
                        "disk and will be taken in."
                    ) from error
                time.sleep(min(0.01 * 2**attempt, 1.0))
            except DeltaError as error:
                raise StoreError(
                    f"The generation store {self.folder} refused a commit: {error}. Run dbt "
                    "again: the answers are on disk and will be taken in."
                ) from error

    def adopt(self) -> int:
        """Commit the part files that no version names, and that none has named and removed."""
        snapshot = self.snapshot()
        if snapshot.version is None:
            return 0
        known = {Path(file).name for file in snapshot.files}
        paths = [path for path in _part_files(self.folder) if path.name not in known]
        if paths:
            removed = self._removed()
            paths = [path for path in paths if path.name not in removed]
        # What somebody cleans up just now is gone.
        parts = [_read_part(path) for path in paths if path.exists()]
        self.commit(parts)
        return sum(part.rows for part in parts)

    def forget_lost(self) -> int:
        """Take the files that are gone out of the table; a vacuum may have been too eager."""
        from deltalake.exceptions import DeltaError

        lost: list[str] = []
        for _ in range(2):
            # Somebody may have compacted the table after the first look.
            files = self.snapshot().files
            lost = [file for file in files if not Path(file).exists()]
            if not lost:
                return 0
        if len(lost) == len(files) or len(lost) > max(_FEW_FILES, len(files) // 100):
            raise StoreError(
                f"{len(lost)} of {len(files)} files of the generation store {self.folder} are "
                "gone, and its log names them. Nothing was asked. Bring them back (is the folder "
                "still being copied or mounted?), or remove the log (_delta_log): the files that "
                "are there are then taken in, and what the others held is asked again."
            )
        with self._lock:
            try:
                self._open().repair()
            except DeltaError as error:
                raise StoreError(
                    f"{len(lost)} files of the generation store {self.folder} are gone, and its "
                    f"log cannot be put right: {error}"
                ) from error
        return len(lost)

    def _removed(self) -> set[str]:
        """Return the files that lie there although a compaction or a delete replaced them."""
        with self._lock:
            names = self._open().vacuum(
                retention_hours=0, dry_run=True, enforce_retention_duration=False
            )
        return {unquote(name) for name in names}

    def _open(self) -> Any:
        """Return the table as it is now, or None."""
        if not (self.folder / "_delta_log").is_dir():
            self._table = None
            return None
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if self._table is not None:
            try:
                self._table.update_incremental()
                return self._table
            except DeltaError:
                # Another table lies there now: open that one.
                self._table = None
        try:
            if DeltaTable.is_deltatable(str(self.folder)):
                self._table = DeltaTable(str(self.folder))
        except DeltaError as error:
            raise StoreError(
                f"The generation store {self.folder} cannot be read: {error}"
            ) from error
        return self._table


def _read_parquet(snapshot: Snapshot) -> str | None:
    if not snapshot.files:
        return None
    return sql.parquet(list(snapshot.files))


def _part_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob(PART_PATTERN))
    _check_names(folder, [file.name for file in files])
    return files


def _check_names(folder: Path, names: list[str]) -> None:
    """Refuse what would lead out of the folder: whoever may write there need not choose it."""
    if not names:
        return
    with os.scandir(folder) as entries:
        links = {entry.name for entry in entries if entry.is_symlink()}
    for name in names:
        if name in links or "/" in name or name in {".", ".."}:
            raise StoreError(
                f"The generation store {folder} names {name!r}, which is no file of its folder "
                "(a link, or another path). Nothing is read there. Remove the link, or take the "
                "store from a backup."
            )


def _check(parts: list[Part]) -> None:
    for part in parts:
        path = Path(part.path)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            size = None
        if size != part.size or _rows(path) != part.rows:
            raise StoreError(
                f"The part file {path} should have {part.size} bytes and "
                f"{'is gone' if size is None else f'has {size}'}; it was not committed. "
                "Its prompts will be asked again by the next run."
            )


def _rows(path: Path) -> int:
    import pyarrow.parquet as pq

    with _readable(path):
        return int(pq.read_metadata(path).num_rows)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise StoreError(
            f"The part file {path} is damaged: {error}. Remove it; its prompts will be asked again."
        ) from error


def _read_part(path: Path) -> Part:
    from dbt_llm.part_writer import read_part

    with _readable(path):
        return read_part(path)


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{time.time_ns()}"
        try:
            # A disk may be full and still take an empty file.
            probe.write_bytes(b"0" * _PROBE_BYTES)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"The generation store {folder} cannot be written: {error.strerror}. Nothing was "
            "asked. Check the folder's permissions and the space on its disk, or change store.path "
            "in the profile."
        ) from error
