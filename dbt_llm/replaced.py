"""What compactions replaced: for each file that one wrote, the files whose rows it holds.

A compaction leaves the files that it replaced where they are, for those who read them just now.
A record beside the table, `_replaced/NAME.json` for the file NAME, keeps them from counting twice.
It is there before the file that it is about, and is removed after the files that it names.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dbt_llm.errors import StoreError
from dbt_llm.storage import Folder

_FOLDER = "_replaced"
_MOST_KNOWN = 4096
_AT_ONCE = 16


@dataclass(frozen=True)
class Record:
    """What one compaction wrote."""

    file: str
    """The name of the file that it wrote, or was about to write."""
    table: str | None
    """The id of the Delta table whose log decides whether it counts; None without a log."""
    replaced: frozenset[str]
    folder: Folder = field(repr=False, compare=False)
    """Where the record lies."""

    def age_s(self, now: float) -> float:
        """Return how long ago it was written; 0 where it is gone."""
        written = self.folder.modified(_name(self.file))
        return 0.0 if written is None else now - written

    def remove(self) -> None:
        """Remove it; the file that it is about must be gone, or those that it replaced."""
        self.folder.delete(_name(self.file))


_known: dict[str, Record | None] = {}


def read_records(files: Folder) -> list[Record]:
    """Return the records of a table's folder, the oldest first.

    Raises:
        StoreError: they cannot be read.
    """
    folder = files.inside(_FOLDER)
    try:
        names = folder.names("*.json")
        if len(names) > 1 and any(folder.address(name) not in _known for name in names):
            with ThreadPoolExecutor(_AT_ONCE) as threads:
                records = list(threads.map(lambda name: _read(folder, name), names))
        else:
            records = [_read(folder, name) for name in names]
    except OSError as error:
        raise StoreError(f"The records of {files} cannot be read: {error}") from None
    return [record for record in records if record is not None]


def _read(folder: Folder, name: str) -> Record | None:
    """Read a record, which never changes; None where somebody else wrote the file."""
    address = folder.address(name)
    if address not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        try:
            content = json.loads(folder.content(name))
            table, names = content["table"], content["replaced"]
            table = None if table is None else str(table)
            file = name.removesuffix(".json")
            _known[address] = Record(file, table, frozenset(names), folder)
        except FileNotFoundError:
            # A vacuum removes it just now.
            return None
        except (ValueError, KeyError, TypeError):
            _known[address] = None
    return _known.get(address)


def write_record(files: Folder, file: str, table: str | None, replaced: Iterable[str]) -> Record:
    """Record what a file is about to replace.

    Raises:
        OSError: the folder takes no file.
    """
    folder = files.inside(_FOLDER)
    folder.make_folder()
    names = frozenset(replaced)
    content = json.dumps({"table": table, "replaced": sorted(names)}, indent=1).encode()
    folder.put(_name(file), lambda stream: stream.write(content))
    return Record(file, table, names, folder)


def _name(file: str) -> str:
    return f"{file}.json"


def superseded(names: Iterable[str], records: Iterable[Record]) -> set[str]:
    """Return which files another one stands for, where no log says what counts.

    Args:
        names: the files that lie there.
        records: the oldest first.
    """
    there, gone = set(names), set[str]()
    for record in records:
        if record.file not in there:
            continue
        if gone.isdisjoint(record.replaced):
            gone |= record.replaced
        else:
            # Somebody compacted the same files at the same time, and the first one counts.
            gone.add(record.file)
    return gone


def never_adopted(names: Iterable[str], records: Iterable[Record], table: str) -> set[str]:
    """Return what a Delta table must not take in.

    What a compaction of this table wrote or replaced was in its log, or was never to be. The
    records of another table, whose log is lost, say what is there twice.
    """
    own = [record for record in records if record.table == table]
    others = [record for record in records if record.table != table]
    found = superseded(names, others)
    for record in own:
        found |= {record.file, *record.replaced}
    return found
