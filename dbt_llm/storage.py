"""Where the files of a table lie: a folder on a disk, or a prefix of an object store's bucket.

Both take whole files only: a reader finds a file complete, or not at all.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from dbt_llm.credentials import is_url
from dbt_llm.errors import StoreError
from dbt_llm.files import is_abandoned

_PROBE_BYTES = 64 * 1024
_HALF_PATTERN = ".*.tmp"


class Folder(Protocol):
    """What the store does with files; `str(folder)` is how people and libraries name the folder.

    Whatever looks what is there may raise a StoreError, where an object store does not answer.
    """

    options: Mapping[str, str]
    """What delta-rs is to know of the object store; may hold secrets."""

    @property
    def local(self) -> Path:
        """Return the folder on the disk.

        Raises:
            StoreError: it lies on no disk.
        """

    def address(self, name: str) -> str:
        """Return how a file is named outside of the folder."""

    def inside(self, name: str) -> "Folder":
        """Return a folder of this folder."""

    def names(self, pattern: str) -> list[str]:
        """List the files whose names fit a pattern, in order."""

    def sizes(self, pattern: str) -> dict[str, int]:
        """List them with their bytes; links are no files."""

    def modified(self, name: str) -> float | None:
        """Return when a file was written, in seconds since 1970; None where there is none."""

    def size(self, name: str) -> int | None:
        """Return a file's bytes; None where there is no such file."""

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the files that are not there."""

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse names that lead out of the folder.

        Raises:
            StoreError: one does; nothing was read there.
        """

    def source(self, name: str) -> Any:
        """Return what pyarrow reads a file from."""

    def content(self, name: str) -> bytes:
        """Return what a file holds.

        Raises:
            OSError: it cannot be read, or is not there.
        """

    def put(self, name: str, write: Callable[[Any], Any]) -> int:
        """Write a file; `write` gets a binary file. Return its size.

        Raises:
            OSError: it cannot be written; then there is no such file.
        """

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error.

        Raises:
            OSError: it cannot be removed.
        """

    def fetch(self, addresses: Sequence[str], into: Path, columns: list[str]) -> list[str]:
        """Return Parquet files on the disk with some columns of files of this folder.

        Where these lie elsewhere, the columns are copied into the folder `into`; what is gone since
        is left out.
        """

    def is_table(self) -> bool:
        """Tell whether a Delta log lies here."""

    def make_folder(self) -> None:
        """Create the folder where there is none."""

    def make_writable(self, atomic: bool) -> None:
        """Create the folder, and prove by writing that files can be written to it.

        `atomic`: also that of two writers of one name the second one is refused.

        Raises:
            StoreError: it cannot be used; the text says what to do.
        """


def open_folder(path: str, options: Mapping[str, str]) -> Folder:
    """Return a folder by its path or URL; nothing is read or written yet.

    Raises:
        ConfigError: an option is wrong, or the package `obstore` is missing.
    """
    if is_url(path):
        from dbt_llm.object_store import ObjectFolder

        return ObjectFolder(path, options)
    return LocalFolder(Path(path))


class LocalFolder:
    """A folder on a disk. A file is written under a hidden name and renamed when it is whole."""

    def __init__(self, path: Path) -> None:
        self.local = path
        self.options: Mapping[str, str] = {}

    def __str__(self) -> str:
        return str(self.local)

    def address(self, name: str) -> str:
        """See `Folder`."""
        return f"{self.local}{os.sep}{name}"

    def names(self, pattern: str) -> list[str]:
        """See `Folder`."""
        try:
            # Path.glob() takes several times as long, which readers of many files would notice.
            with os.scandir(self.local) as entries:
                return fitting((entry.name for entry in entries), pattern)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def inside(self, name: str) -> "LocalFolder":
        """See `Folder`."""
        return LocalFolder(self.local / name)

    def sizes(self, pattern: str) -> dict[str, int]:
        """See `Folder`."""
        try:
            with os.scandir(self.local) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in sorted(entries, key=lambda entry: entry.name)
                    if fnmatch(entry.name, pattern) and entry.is_file(follow_symlinks=False)
                }
        except FileNotFoundError:
            return {}

    def modified(self, name: str) -> float | None:
        """See `Folder`."""
        try:
            return (self.local / name).stat().st_mtime
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """See `Folder`."""
        try:
            return (self.local / name).stat().st_size
        except FileNotFoundError:
            return None

    def missing(self, names: Iterable[str]) -> list[str]:
        """See `Folder`."""
        return [name for name in names if not (self.local / name).exists()]

    def check_names(self, names: Iterable[str]) -> None:
        """See `Folder`; whoever may write there need not choose what is read."""
        names = list(names)
        if not names:
            return
        with os.scandir(self.local) as entries:
            links = {entry.name for entry in entries if entry.is_symlink()}
        for name in names:
            if name in links or leads_out(name):
                raise not_of_folder(self, name)

    def source(self, name: str) -> Any:
        """See `Folder`."""
        return self.local / name

    def content(self, name: str) -> bytes:
        """See `Folder`."""
        return (self.local / name).read_bytes()

    def put(self, name: str, write: Callable[[Any], Any]) -> int:
        """See `Folder`."""
        hidden = self.local / f".{Path(name).stem.removeprefix('part-')}.tmp"
        path = self.local / name
        try:
            with hidden.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            hidden.rename(path)
            _sync(self.local)
        finally:
            with contextlib.suppress(OSError):
                hidden.unlink(missing_ok=True)
        return path.stat().st_size

    def delete(self, name: str) -> None:
        """See `Folder`."""
        (self.local / name).unlink(missing_ok=True)

    def fetch(self, addresses: Sequence[str], into: Path, columns: list[str]) -> list[str]:
        """See `Folder`."""
        return [address for address in addresses if Path(address).exists()]

    def is_table(self) -> bool:
        """See `Folder`."""
        # delta-rs would look at every file of the log to say whether there is one.
        try:
            with os.scandir(self.local / "_delta_log") as entries:
                return any(entry.name[0].isdecimal() for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def make_folder(self) -> None:
        """See `Folder`."""
        self.local.mkdir(parents=True, exist_ok=True)

    def make_writable(self, atomic: bool) -> None:
        """See `Folder`; a disk refuses the second writer, so that is not looked at."""
        try:
            self.make_folder()
            probe = self.local / f".write-test-{time.time_ns()}"
            try:
                # A disk may be full and still take an empty file.
                probe.write_bytes(b"0" * _PROBE_BYTES)
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"The generation store {self} cannot be written: {error.strerror}. Nothing was "
                "asked. Check the folder's permissions and the space on its disk, or change "
                "store.path in the profile."
            ) from error
        remove_half_files(self.local)


def _sync(folder: Path) -> None:
    """Have a rename outlive the machine: what the file replaces may be removed later."""
    # Some file systems cannot do it; the file is there all the same.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_half_files(folder: Path) -> None:
    """Remove what processes that were killed more than a day ago had begun to write."""
    for path in folder.glob(_HALF_PATTERN):
        with contextlib.suppress(OSError):
            if is_abandoned(path):
                path.unlink()


def leads_out(name: str) -> bool:
    """Tell whether a name is that of a file in another folder."""
    return "/" in name or name in {".", ".."}


def not_of_folder(folder: Folder, name: str) -> StoreError:
    """Return the error about such a name."""
    return StoreError(
        f"The generation store {folder} names {name!r}, which is no file of its folder (a link, "
        "or another path). Nothing is read there. Remove the link, or take the store from a backup."
    )


def fitting(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that fit a pattern, in order."""
    return sorted(name for name in names if fnmatch(name, pattern))


_CODE = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)


def answer_code(text: str) -> str | None:
    """Return the code in what an object store answered, such as NoSuchBucket."""
    found = _CODE.search(text)
    return None if found is None else found[1]


def reason(text: str) -> str:
    """Return the gist of an error of delta-rs or obstore: what was tried, and the answer to it."""
    plain = re.sub(r"\x1b\[[0-9;]*m|↳", "", text.partition("Debug source:")[0])
    head = plain.partition("<?xml")[0].partition("<Error>")[0]
    head = " ".join(head.split()).rstrip(":.")
    if (code := _CODE.search(plain)) is not None:
        head = f"{head}: {code[1]}" + (f", {code[2].rstrip('.')}" if code[2] else "")
    return head[:500]
