"""The generation store: a folder of part files that all models share, as Delta or as Parquet.

Both formats are append-only and keyed by prompt hash. In a Delta store a part counts once a commit
names it; in a Parquet store once it lies there, since a part appears whole or not at all.
"""

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from dbt_llm import sql
from dbt_llm.config import StoreConfig
from dbt_llm.credentials import is_url, without_secrets
from dbt_llm.errors import ConfigError, StoreError
from dbt_llm.parts import PART_PATTERN, Part
from dbt_llm.replaced import never_adopted, read_records, superseded
from dbt_llm.schema import GENERATIONS
from dbt_llm.storage import Folder, open_folder, reason

_COMMIT_RETRIES = 100
# A Parquet store has no log; to know its rows, the footer of every file has to be read.
_COUNT_UP_TO_FILES = 200
_FEW_FILES = 10
_FEW_ROWS = 10_000
# After so long a compaction is over, and its commit in the log.
_SETTLED_S = 3600
_AT_ONCE = 16
# With any other one, the data files by themselves do not tell which rows there are.
_READER_FEATURES = {"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
# delta-rs reads a path as a URL once too often, and takes a backslash for a slash.
NOT_IN_DELTA_PATHS = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")


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

    files: Folder
    """Where the table lies."""

    @property
    def folder(self) -> Path:
        """Return where it lies on the disk.

        Raises:
            StoreError: it lies in an object store.
        """

    def create(self) -> None:
        """Create the store where there is none; prove that it can be written."""

    def snapshot(self) -> Snapshot:
        """Return the newest state."""

    def relation(self, snapshot: Snapshot, delta_scan: bool, root: str | None = None) -> str | None:
        """Return a SQL expression for FROM that reads exactly the snapshot; None when empty.

        `delta_scan` says whether DuckDB's Delta extension is loaded, and `root` how DuckDB is to
        name the folder, where that is not its own name.
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
    if is_url(config.path):
        files = open_folder(f"{config.path}/{table}", config.options())
    else:
        files = open_folder(str((Path(config.path).absolute() / table).resolve()), {})
    if config.format == "parquet":
        return ParquetStore(files)
    if found := NOT_IN_DELTA_PATHS.search(str(files)):
        raise ConfigError(
            f"The store's folder {str(files)!r} has {found[0]!r} in its path, which the Delta "
            "library takes for something else. Use another store.path, or store.format: parquet."
        )
    return DeltaStore(files)


class ParquetStore:
    """Part files in a folder; what lies there counts."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        # A part is never written again.
        self._rows: dict[str, int] = {}

    @property
    def folder(self) -> Path:
        """See `Store`."""
        return self.files.local

    def create(self) -> None:
        """Create the folder."""
        self.files.make_writable(atomic=False)

    def snapshot(self) -> Snapshot:
        """List the part files, less those that a compaction replaced."""
        # A record may come or go while the files are listed.
        records = {record.file: record for record in read_records(self.files)}
        names = _part_files(self.files)
        records.update((record.file, record) for record in read_records(self.files))
        gone = superseded(names, (records[file] for file in sorted(records)))
        names = [name for name in names if name not in gone]
        rows = None
        if len(names) <= _COUNT_UP_TO_FILES:
            new = [name for name in names if name not in self._rows]
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                counted = threads.map(lambda name: _rows(self.files, name), new)
                self._rows.update(zip(new, counted, strict=True))
            rows = sum(self._rows[name] for name in names)
        return Snapshot(None, tuple(map(self.files.address, names)), rows)

    def relation(self, snapshot: Snapshot, delta_scan: bool, root: str | None = None) -> str | None:
        """Read the listed files."""
        return _read_parquet(self.files, snapshot, root)

    def commit(self, parts: list[Part]) -> None:
        """Check that the parts are there; there is nothing more to do."""
        _check(self.files, parts)

    def adopt(self) -> int:
        """Adopt nothing: a part counts from the moment it is there."""
        return 0

    def forget_lost(self) -> int:
        """Forget nothing: a part counts as long as it is there."""
        return 0


class DeltaStore:
    """A Delta table whose data files the workers write themselves."""

    def __init__(self, files: Folder) -> None:
        self.files = files
        self._table: Any = None
        # dbt's threads share the store; a table handle shows one version at a time.
        self._lock = threading.RLock()

    @property
    def folder(self) -> Path:
        """See `Store`."""
        return self.files.local

    def create(self) -> None:
        """Create the table, unless another process was faster."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        self.files.make_writable(atomic=True)
        if self._open() is not None:
            return
        try:
            DeltaTable.create(
                str(self.files),
                GENERATIONS,
                mode="ignore",
                name="generations",
                description="Answers of LLMs, one row per prompt hash (dbt-llm).",
                storage_options=self._options,
            )
        except (DeltaError, OSError) as error:
            if not self.files.is_table():
                raise self._failure("cannot be created", error) from error
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
        self.files.check_names(names)
        files = tuple(map(self.files.address, names))
        return Snapshot(version, files, None if None in rows else sum(rows))

    def relation(self, snapshot: Snapshot, delta_scan: bool, root: str | None = None) -> str | None:
        """Read the version through the extension, or its files without."""
        if not snapshot.files:
            return None
        if delta_scan:
            return f"delta_scan({sql.literal(str(self.files))}, version => {snapshot.version})"
        return _read_parquet(self.files, snapshot, root)

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
                _check(self.files, [part])
                sound.append(part)
            except StoreError as error:
                problem = problem or error
        if sound:
            self._add(sound)
        if problem is not None:
            raise problem

    def _add(self, parts: list[Part]) -> None:
        from deltalake import PostCommitHookProperties
        from deltalake.exceptions import CommitFailedError, DeltaError
        from deltalake.transaction import AddAction, CommitProperties

        now = int(time.time() * 1000)
        table = self._open()
        if table is None:
            raise StoreError(
                f"The generation store {self.files} is gone; the answers lie in "
                f"{len(parts)} part files there. Run dbt again to take them in."
            )
        for attempt in range(_COMMIT_RETRIES):
            try:
                if attempt:
                    table.update_incremental()
                # Another process may have adopted and compacted what this one had just written.
                known = self._never_adopted([file_of(part.path) for part in parts])
                actions = [
                    AddAction(file_of(part.path), part.size, {}, now, True, part.stats())
                    for part in parts
                    if file_of(part.path) not in known
                ]
                if not actions:
                    return
                table.create_write_transaction(
                    actions,
                    "append",
                    GENERATIONS,
                    commit_properties=CommitProperties(max_commit_retries=_COMMIT_RETRIES),
                    # To look for old commits takes as long as to commit; see store_upkeep.py.
                    post_commithook_properties=PostCommitHookProperties(
                        create_checkpoint=True, cleanup_expired_logs=False
                    ),
                )
                return
            except CommitFailedError as error:
                if attempt == _COMMIT_RETRIES - 1:
                    raise StoreError(
                        f"The generation store {self.files} refused a commit "
                        f"{_COMMIT_RETRIES} times: {error}. Run dbt again: the answers are there "
                        "and will be taken in."
                    ) from error
                time.sleep(min(0.01 * 2**attempt, 1.0))
            except (DeltaError, OSError) as error:
                raise self._failure(
                    "refused a commit",
                    error,
                    " Run dbt again: the answers are there and will be taken in.",
                ) from error

    def adopt(self) -> int:
        """Commit the part files that no version names, and that none has named and removed."""
        names = self.uncommitted()
        # What somebody cleans up just now is gone.
        gone = set(self.files.missing(names))
        parts = [_read_part(self.files, name) for name in names if name not in gone]
        self.commit(parts)
        return sum(part.rows for part in parts)

    def uncommitted(self) -> list[str]:
        """Return the names of the part files that `adopt` would commit."""
        # Listed first: what is compacted meanwhile is then in the newer version, or in a record.
        names = _part_files(self.files)
        snapshot = self.snapshot()
        if snapshot.version is None:
            return []
        known = {file_of(file) for file in snapshot.files}
        known |= self._never_adopted(names)
        names = [name for name in names if name not in known]
        if names:
            removed = self._removed()
            names = [name for name in names if name not in removed]
        return names

    def forget_lost(self) -> int:
        """Take the files that are gone out of the table; a vacuum may have been too eager."""
        from deltalake.exceptions import DeltaError

        lost: list[str] = []
        for _ in range(2):
            # Somebody may have compacted the table after the first look.
            files = self.snapshot().files
            lost = self.files.missing(map(file_of, files))
            if not lost:
                return 0
        rows = self._rows_of(lost)
        many = len(lost) > max(_FEW_FILES, len(files) // 100)
        if len(lost) == len(files) or many or rows > _FEW_ROWS:
            raise StoreError(
                f"{len(lost)} of {len(files)} files of the generation store {self.files} are "
                f"gone, with {rows:,} answers, and its log names them. Nothing was asked. Bring "
                "them back (is the folder still being copied or mounted?), or remove the log "
                "(_delta_log): the files that are there are then taken in, and what the others "
                "held is asked again."
            )
        with self._lock:
            try:
                self._open().repair()
            except DeltaError as error:
                raise StoreError(
                    f"{len(lost)} files of the generation store {self.files} are gone, and its "
                    f"log cannot be put right: {error}"
                ) from error
        return len(lost)

    def _never_adopted(self, names: Iterable[str]) -> set[str]:
        """Return which of the files a compaction wrote or replaced; the log says what counts."""
        records = read_records(self.files)
        if not records:
            return set()
        with self._lock:
            own = self._table.metadata().id
            found = never_adopted(names, records, own)
            if found.isdisjoint(names):
                return found
            # A log that was taken from a backup does not know of the latest compactions; nor does
            # any log of one that is under way.
            self._table.update_incremental()
            log = self._removed() | set(self._table.get_add_actions()["path"].to_pylist())
        now = time.time()
        for number, one in enumerate(records):
            lost = one.replaced - log
            if one.table == own and one.file not in log and lost and one.age_s(now) > _SETTLED_S:
                whole = not self.files.missing(lost)
                records[number] = (
                    replace(one, replaced=one.replaced & log) if whole else replace(one, table=None)
                )
        return never_adopted(names, records, own)

    def _rows_of(self, names: list[str]) -> int:
        """Return how many rows files have, as the log says."""
        with self._lock:
            actions = self._open().get_add_actions()
        rows = dict(
            zip(actions["path"].to_pylist(), actions["num_records"].to_pylist(), strict=True)
        )
        return sum(rows.get(name) or 0 for name in names)

    def _removed(self) -> set[str]:
        """Return the files that lie there although a compaction or a delete replaced them."""
        with self._lock:
            names = self._open().vacuum(
                retention_hours=0, dry_run=True, enforce_retention_duration=False
            )
        return {unquote(name) for name in names}

    def _open(self) -> Any:
        """Return the table as it is now, or None."""
        if not self.files.is_table():
            self._table = None
            return None
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        if self._table is not None:
            try:
                self._table.update_incremental()
            except (DeltaError, OSError):
                # Another table lies there now: open that one.
                self._table = None
        if self._table is None:
            try:
                self._table = DeltaTable(str(self.files), storage_options=self._options)
            except (DeltaError, OSError) as error:
                raise self._failure("cannot be read", error) from error
        self._check_features(self._table.protocol())
        return self._table

    def _check_features(self, protocol: Any) -> None:
        used = sorted(set(protocol.reader_features or ()) - _READER_FEATURES)
        # Before features had names, the second version stood for column mapping.
        if protocol.reader_features is None and protocol.min_reader_version > 1:
            used = ["columnMapping"]
        if used:
            raise StoreError(
                f"The generation store {self.files} uses {', '.join(used)}, so its files alone do "
                "not tell which answers there are. Another program has turned it on. Turn it off "
                "(in Spark: ALTER TABLE ... DROP FEATURE), or set store.path to another folder."
            )

    @property
    def _options(self) -> dict[str, str] | None:
        return dict(self.files.options) or None

    def _failure(self, what: str, error: BaseException, advice: str = "") -> StoreError:
        words = without_secrets(reason(str(error)), self.files.options)
        return StoreError(f"The generation store {self.files} {what}: {words}.{advice}")


def file_of(address: str) -> str:
    """Return a file's name in its folder, from its path or URL."""
    return address.replace(os.sep, "/").rpartition("/")[2]


def _read_parquet(files: Folder, snapshot: Snapshot, root: str | None) -> str | None:
    if not snapshot.files:
        return None
    if root is None or root == str(files):
        return sql.parquet(list(snapshot.files))
    return sql.parquet([f"{root}/{file_of(file)}" for file in snapshot.files])


def _part_files(files: Folder) -> list[str]:
    names = files.names(PART_PATTERN)
    files.check_names(names)
    return names


def _check(files: Folder, parts: list[Part]) -> None:
    for part in parts:
        name = file_of(part.path)
        size = files.size(name)
        # An object that is there is whole; to read its end would take two requests more.
        if size != part.size or (not is_url(str(files)) and _rows(files, name) != part.rows):
            raise StoreError(
                f"The part file {part.path} should have {part.size} bytes and "
                f"{'is gone' if size is None else f'has {size}'}; it was not committed. "
                "Its prompts will be asked again by the next run."
            )


def _rows(files: Folder, name: str) -> int:
    import pyarrow.parquet as pq

    with _readable(files, name):
        return int(pq.read_metadata(files.source(name)).num_rows)


@contextmanager
def _readable(files: Folder, name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and is_url(str(files)):
            raise StoreError(
                f"The part file {files.address(name)} cannot be read: {error} Run dbt again."
            ) from None
        raise StoreError(
            f"The part file {files.address(name)} is damaged: {error}. Remove it; its prompts will "
            "be asked again."
        ) from error


def _read_part(files: Folder, name: str) -> Part:
    from dbt_llm.part_writer import read_part

    with _readable(files, name):
        return read_part(files, name)
