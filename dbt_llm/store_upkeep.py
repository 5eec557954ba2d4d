"""Keeps a table of the store fast: merges small files, writes checkpoints, removes what is old.

Each step may be the last one of its process. A merge writes the record of what it replaces, the new
file, and then the change of the log; what it replaced stays for those who read it just now, until a
vacuum. One process at a time does this to a table.
"""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dbt_llm.config import StoreConfig
from dbt_llm.credentials import without_secrets
from dbt_llm.errors import StoreError
from dbt_llm.parts import PART_PATTERN
from dbt_llm.replaced import Record, read_records, superseded
from dbt_llm.storage import Folder, LocalFolder, reason, remove_half_files
from dbt_llm.store import DeltaStore, file_of, open_store

if TYPE_CHECKING:
    from dbt_llm.compaction import Layout, Merged, SmallFile

TABLES = ("generations", "runs")
RETENTION_HOURS = 168
"""How long a file that was replaced stays, in hours: a week, as Delta has it."""

# A table with so many files more than it needs is merged, and one with so many commits since its
# last checkpoint gets one.
_DUE_FILES = 8
_DUE_COMMITS = 10
# The most that a run rewrites in passing; the next one goes on.
_MOST_BYTES_IN_PASSING = 256 * 1024 * 1024
_MERGES_PER_COMMIT = 16
_COMMIT_TRIES = 100
# A file that no log names yet is left alone for so long.
_UNDER_WAY_S = 24 * 3600
_PLAIN_NAME = re.compile(r"[\w.=+-]+")


@dataclass(frozen=True)
class Compacted:
    """What a compaction did."""

    files: int = 0
    """How many were replaced."""
    bytes: int = 0
    into_files: int = 0
    into_bytes: int = 0


@dataclass(frozen=True)
class Vacuumed:
    """What a vacuum removed, or would remove."""

    files: int
    bytes: int


def compact(config: StoreConfig, table: str) -> Compacted:
    """Merge all small files of a table.

    Raises:
        StoreError: the table cannot be read or written, or another process is at it.
    """
    with _claimed(config, table) as upkeep:
        return Compacted() if upkeep is None else upkeep.compact(thorough=True)


def vacuum(config: StoreConfig, table: str, retention_hours: int, *, dry_run: bool) -> Vacuumed:
    """Remove files that were replaced longer ago than the retention, and what killed merges left.

    A part that is not committed yet stays, for the next run takes it in.

    Raises:
        StoreError: the table cannot be read or written, or another process is at it.
    """
    with _claimed(config, table) as upkeep:
        if upkeep is None:
            return Vacuumed(0, 0)
        return upkeep.vacuum(retention_hours, dry_run=dry_run)


def tidy(config: StoreConfig, table: str) -> None:
    """Do what is due; quick where nothing is, and where another process is at it.

    Raises:
        StoreError: the table cannot be read or written.
    """
    if not config.compact:
        return
    upkeep = _open(config, table)
    if not upkeep.may_be_due():
        return
    with _errors(upkeep.files), _alone(upkeep.files) as alone:
        if alone:
            upkeep.tidy()


@contextmanager
def _claimed(config: StoreConfig, table: str) -> "Iterator[_Upkeep | None]":
    """Keep others from it meanwhile; yield None where there is no such table yet."""
    upkeep = _open(config, table)
    if not upkeep.is_there():
        yield None
        return
    with _errors(upkeep.files), _alone(upkeep.files) as alone:
        if not alone:
            raise StoreError(
                f"Another process compacts or vacuums {upkeep.files} just now. Try again when it "
                "is done."
            )
        yield upkeep


def _open(config: StoreConfig, table: str) -> "_Upkeep":
    store = open_store(config, table)
    return _DeltaUpkeep(store) if isinstance(store, DeltaStore) else _Upkeep(store)


@contextmanager
def _errors(files: Folder) -> Iterator[None]:
    import pyarrow as pa
    from deltalake.exceptions import DeltaError

    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as error:
        words = without_secrets(reason(str(error)), files.options)
        raise StoreError(
            f"{files} cannot be compacted or cleaned up: {words}. No answer is lost."
        ) from None


@contextmanager
def _alone(files: Folder) -> Iterator[bool]:
    """Tell whether no other process, or thread, does this just now; and keep them from it.

    Where there are no file locks it keeps threads apart alone; two processes then do it at once,
    which takes time and loses nothing.
    """
    key = str(files)
    with _busy_lock:
        alone = key not in _busy
        _busy.add(key)
    if not alone:
        yield False
        return
    try:
        with _file_lock(files) as alone:
            yield alone
    finally:
        with _busy_lock:
            _busy.discard(key)


_busy: set[str] = set()
_busy_lock = threading.Lock()


@contextmanager
def _file_lock(files: Folder) -> Iterator[bool]:
    try:
        import fcntl
    except ImportError:
        yield True
        return
    if not isinstance(files, LocalFolder):
        yield True
        return
    path = files.local / ".upkeep.lock"
    try:
        file = path.open("a")
    except PermissionError:
        # Another user of the store has made it.
        file = path.open("r")
    with file:
        try:
            # It ends with the process, however that ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            # A file system that knows no locks.
            yield True
            return
        yield True


class _Upkeep:
    """Upkeep of a Parquet table: what lies there counts, less what the records name."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.files: Folder = store.files

    @property
    def _layout(self) -> "Layout":
        from dbt_llm.compaction import LAYOUTS

        return LAYOUTS[file_of(str(self.files))]

    def is_there(self) -> bool:
        """Tell whether there is such a table."""
        return bool(self.files.names(PART_PATTERN))

    def may_be_due(self) -> bool:
        """Tell from names alone whether it is worth a closer look."""
        parts = set(self.files.names(PART_PATTERN))
        records = read_records(self.files)
        for record in records:
            parts -= record.replaced
        return len(parts) > _DUE_FILES or self._has_old(records)

    def tidy(self) -> None:
        """Do what is due."""
        self.compact(thorough=False)
        if self._has_old(read_records(self.files)):
            self.vacuum(RETENTION_HOURS, dry_run=False)

    def _has_old(self, records: list[Record]) -> bool:
        # The oldest comes first.
        return bool(records) and records[0].age_s(time.time()) > RETENTION_HOURS * 3600

    def compact(self, *, thorough: bool) -> Compacted:
        """Merge small files: all of them, or where it is due."""
        from dbt_llm.compaction import plan_merges, saved_files

        merges = plan_merges(self._small_files(), thorough=thorough)
        if not thorough:
            if saved_files(merges) < _DUE_FILES:
                return Compacted()
            merges = _up_to(merges, _MOST_BYTES_IN_PASSING)
        done: list[Merged] = []
        for start in range(0, len(merges), _MERGES_PER_COMMIT):
            done += self._merge(merges[start : start + _MERGES_PER_COMMIT])
        old = [file for merged in done for file in merged.replaced]
        return Compacted(
            len(old),
            sum(file.size for file in old),
            len(done),
            sum(merged.size for merged in done),
        )

    def _merge(self, merges: "list[list[SmallFile]]") -> "list[Merged]":
        from dbt_llm.compaction import merge_files

        table = self._table_id()
        written: list[Merged] = []
        done: list[Merged] = []
        try:
            for merge in merges:
                written += merge_files(self.files, merge, self._layout, table)
        finally:
            # Also where a file cannot be read: the others need not wait for it.
            done = self._publish(written)
        return done

    def _table_id(self) -> str | None:
        return None

    def _publish(self, written: "list[Merged]") -> "list[Merged]":
        """Have files count in place of those that they replace; return those that do."""
        return written

    def _small_files(self) -> "list[SmallFile]":
        from dbt_llm.compaction import SMALL_BYTES, SmallFile, group_of

        found = []
        sizes = self.files.sizes(PART_PATTERN)
        for name in map(file_of, self._store.snapshot().files):
            size = sizes.get(name, SMALL_BYTES)
            if size < SMALL_BYTES:
                group = group_of(self.files, name, self._layout)
                if group is not None or self._layout.group is None:
                    found.append(SmallFile(name, size, group))
        return found

    def vacuum(self, retention_hours: int, *, dry_run: bool) -> Vacuumed:
        """Remove what is not needed any more."""
        # The log and the records hold names; nothing but a file of the folder is removed.
        there = self.files.sizes("*")
        records = read_records(self.files)
        now = time.time()
        ages = {one.file: one.age_s(now) for one in records}
        old = [one for one in records if ages[one.file] >= retention_hours * 3600]
        names = self._unneeded(set(there), records, old, retention_hours) & there.keys()
        if recent := [one for one in records if ages[one.file] < _UNDER_WAY_S]:
            # What another process compacts just now counts a moment later.
            known = self._ever_counted(set(there))
            names -= self._kept_for([one for one in recent if one.file not in known], records)
        if not dry_run:
            # The oldest first: what a file replaced must not outlive it.
            for name in sorted(names):
                self.files.delete(name)
            for record in old:
                # One whose files were there until just now may be read just now.
                if record.replaced.isdisjoint(there) and record.file not in names:
                    record.remove()
            if isinstance(self.files, LocalFolder):
                remove_half_files(self.files.local)
        return Vacuumed(len(names), sum(there[name] for name in names))

    def _unneeded(
        self, there: set[str], records: list[Record], old: list[Record], retention_hours: int
    ) -> set[str]:
        return superseded(there, records) & _named(old) - _replaced_lately(records, old)

    def _ever_counted(self, there: set[str]) -> set[str]:
        """Return the files that count, or did until they were replaced."""
        return there

    def _kept_for(self, under_way: list[Record], records: list[Record]) -> set[str]:
        """Return what compactions need that are under way.

        Once one of them ends, a later one that replaced some of its files counts no more, and then
        all files of that one count again.
        """
        taken = {name for one in under_way for name in one.replaced}
        return _named(under_way) | _named(
            one for one in records if not taken.isdisjoint(one.replaced)
        )


class _DeltaUpkeep(_Upkeep):
    """Upkeep of a Delta table: what its log names counts."""

    def is_there(self) -> bool:
        """See there."""
        return self.files.is_table()

    def may_be_due(self) -> bool:
        """See there; it also looks for commits since the last checkpoint."""
        return super().may_be_due() or commits_since_checkpoint(self.files) >= _DUE_COMMITS

    def tidy(self) -> None:
        """Do what is due."""
        if self._handle() is None:
            return
        super().tidy()
        self.write_checkpoint(_DUE_COMMITS)

    def compact(self, *, thorough: bool) -> Compacted:
        """See there."""
        self._drop_doubles()
        done = super().compact(thorough=thorough)
        if thorough:
            self.write_checkpoint(1)
        return done

    def write_checkpoint(self, due_commits: int) -> None:
        """Write one where the last one is so many commits old."""
        table = self._handle()
        if table is None or commits_since_checkpoint(self.files) < due_commits:
            return
        table.create_checkpoint()
        # Of the log goes only what is older than its retention, a month unless the table says so.
        table.cleanup_metadata()

    def _drop_doubles(self) -> None:
        """Take out what counts twice: a writer may commit a part that was just replaced."""
        from deltalake.exceptions import CommitFailedError

        table = self._handle()
        records = read_records(self.files)
        if table is None or not records:
            return
        actions = table.get_add_actions()
        sizes = dict(
            zip(actions["path"].to_pylist(), actions["size_bytes"].to_pylist(), strict=True)
        )
        own = table.metadata().id
        doubles = {
            name
            for one in records
            if one.table == own and one.file in sizes
            for name in one.replaced & sizes.keys()
        }
        if doubles:
            # Whoever comes first: the next upkeep looks again.
            with suppress(CommitFailedError):
                _commit(table, [_remove(name, sizes[name]) for name in sorted(doubles)])

    def _handle(self) -> Any:
        """Return a handle of its own; None where there is no table.

        One that shows an older version would take committed files for abandoned ones.
        """
        from deltalake import DeltaTable

        if not self.files.is_table():
            return None
        return DeltaTable(str(self.files), storage_options=dict(self.files.options) or None)

    def _table_id(self) -> str | None:
        return str(self._handle().metadata().id)

    def _small_files(self) -> "list[SmallFile]":
        from dbt_llm.compaction import SMALL_BYTES, SmallFile

        table = self._handle()
        if table is None:
            return []
        # It refuses links, and names that lead out of the folder.
        self._store.snapshot()
        actions = table.get_add_actions(flatten=True)
        names = actions["path"].to_pylist()
        sizes = actions["size_bytes"].to_pylist()
        groups: list[str | None] = [None] * len(names)
        if (column := self._layout.group) is not None:
            if f"min.{column}" not in actions.schema.names:
                return []
            least, most = (actions[f"{end}.{column}"].to_pylist() for end in ("min", "max"))
            groups = [low if low == high else None for low, high in zip(least, most, strict=True)]
        return [
            SmallFile(name, size, group)
            for name, size, group in zip(names, sizes, groups, strict=True)
            if size < SMALL_BYTES
            and _PLAIN_NAME.fullmatch(name)
            and (group is not None or column is None)
        ]

    def _publish(self, written: "list[Merged]") -> "list[Merged]":
        """Change the log in one commit, which leaves out what somebody else replaced meanwhile."""
        from deltalake.exceptions import CommitFailedError, DeltaError
        from deltalake.transaction import AddAction

        from dbt_llm.compaction import discard

        table = self._handle()
        done: list[Merged] = []
        for attempt in range(_COMMIT_TRIES):
            there = set(table.get_add_actions()["path"].to_pylist()) if table is not None else set()
            # A commit may land although its answer is lost.
            done += [one for one in written if one.name in there]
            written = [one for one in written if one.name not in there]
            gone = set(self.files.missing(one.name for one in written))
            kept = [
                one
                for one in written
                if one.name not in gone and all(old.name in there for old in one.replaced)
            ]
            for merged in written:
                if merged not in kept:
                    discard(self.files, merged)
            written = kept
            if not written:
                return done
            now = int(time.time() * 1000)
            actions = [
                *(AddAction(one.name, one.size, {}, now, False, one.stats) for one in written),
                *(_remove(old.name, old.size) for one in written for old in one.replaced),
            ]
            try:
                _commit(table, actions)
                return done + written
            except CommitFailedError:
                time.sleep(min(0.005 * 2**attempt, 0.2))
                table.update_incremental()
            except DeltaError:
                # The table takes no such commit, say for a feature that another program turned on.
                there = set(self._handle().get_add_actions()["path"].to_pylist())
                for merged in written:
                    if merged.name not in there:
                        discard(self.files, merged)
                raise
        for merged in written:
            discard(self.files, merged)
        raise StoreError(
            f"{self.files} could not be compacted: others committed {_COMMIT_TRIES} times first. "
            "No answer is lost. Try again when fewer runs are under way."
        )

    def _ever_counted(self, there: set[str]) -> set[str]:
        """See there."""
        table = self._handle()
        if table is None:
            return set()
        replaced = table.vacuum(0, dry_run=True, enforce_retention_duration=False)
        return {*table.get_add_actions()["path"].to_pylist(), *replaced}

    def _kept_for(self, under_way: list[Record], records: list[Record]) -> set[str]:
        """See there; the log refuses one whose files another one replaced."""
        return {one.file for one in under_way}

    def _unneeded(
        self, there: set[str], records: list[Record], old: list[Record], retention_hours: int
    ) -> set[str]:
        table = self._handle()
        if table is None:
            return set()
        needed = set(map(file_of, self._store.snapshot().files))
        own = table.metadata().id
        # Under a log that was lost and made anew, what a file replaced goes if the file counted.
        counted = needed.union(*(one.replaced for one in records if one.table == own))
        found = _named(one for one in old if one.table == own) | {
            name for one in old if one.table != own and one.file in counted for name in one.replaced
        }
        long_ago, ever = (
            set(table.vacuum(hours, dry_run=True, enforce_retention_duration=False))
            for hours in (retention_hours, 0)
        )
        recent = (ever - long_ago) | _replaced_lately(records, old)
        return (found | long_ago) - recent - needed


def _remove(name: str, size: int) -> Any:
    from deltalake.transaction import RemoveAction

    return RemoveAction(name, False, int(time.time() * 1000), size=size, partition_values={})


def _commit(table: Any, actions: list[Any]) -> None:
    """Commit on top of exactly the version that a handle shows.

    Raises:
        deltalake.exceptions.CommitFailedError: somebody else came first. With retries delta-rs
            would let two removals of one file pass.
    """
    from deltalake import CommitProperties

    table.create_write_transaction(
        actions,
        "append",
        table.schema(),
        commit_properties=CommitProperties(max_commit_retries=0),
    )


def commits_since_checkpoint(files: Folder) -> int:
    """Count the versions of a Delta table after its last checkpoint, by the names of its log."""
    log = files.inside("_delta_log")
    stems = (name.removesuffix(".json") for name in log.names("[0-9]*.json"))
    return max((int(stem) for stem in stems if stem.isdecimal()), default=-1) - last_checkpoint(log)


def last_checkpoint(log: Folder) -> int:
    """Return the version of a Delta log's last checkpoint; -1 where there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(log.content("_last_checkpoint"))["version"])
    return -1


def _up_to(merges: "list[list[SmallFile]]", most: int) -> "list[list[SmallFile]]":
    chosen: list[list[SmallFile]] = []
    for merge in merges:
        most -= sum(file.size for file in merge)
        if chosen and most < 0:
            break
        chosen.append(merge)
    return chosen


def _replaced_lately(records: list[Record], old: list[Record]) -> set[str]:
    return {name for one in records if one not in old for name in one.replaced}


def _named(records: Iterable[Record]) -> set[str]:
    return {name for one in records for name in (one.file, *one.replaced)}
