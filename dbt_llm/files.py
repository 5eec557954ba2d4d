"""Names of files that follow names of people's choosing, and files that only their owner reads."""

import os
import re
import time
from pathlib import Path

from dbt_llm.call import sha256_hex

_LONGEST_BYTES = 150
_ABANDONED_AFTER_S = 24 * 3600


def file_name(name: str) -> str:
    """Return a file name, without its suffix, for a name that may hold any text.

    A name of letters, digits, `-`, `_` and `.` stays as it is. Every other one, or a long one, gets
    a part of its hash, so that two names never share a file.
    """
    plain = re.sub(r"[^\w.-]", "_", name).encode()[:_LONGEST_BYTES].decode(errors="ignore")
    if plain == name and name.strip("."):
        return name
    return f"{plain.strip('.')}-{sha256_hex(name)[:8]}".lstrip("-")


def is_abandoned(path: Path) -> bool:
    """Tell whether nobody has written there for a day, so that who made it was killed.

    Raises:
        OSError: it is gone, for example.
    """
    return time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S


def private_folder(folder: Path) -> Path:
    """Create a folder that only its owner can read, for it holds prompts."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, and the folders to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if hasattr(os, "fchmod"):
            # The file may be an older one that everybody could read.
            os.fchmod(descriptor, 0o600)
        file.write(text)
