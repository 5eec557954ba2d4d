"""Remembers in which state of the store no key occurs twice, so that a rerun need not look again.

Looking at every key takes a tenth of a rerun. Files of a store never change, so what was found of
some files stays true of them.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident

from dbt_llm.call import sha256_hex
from dbt_llm.files import write_private


@dataclass(frozen=True)
class UniqueKeys:
    """What is remembered, in a file that may be lost at any time."""

    path: Path

    def hold(self, files: Iterable[str], calls: Iterable[str]) -> bool:
        """Return whether it is known that no key of some calls occurs twice in some files."""
        return set(calls) <= self._known(_state(files))

    def note(self, files: Iterable[str], calls: Iterable[str]) -> None:
        """Remember that none does; of other files than these everything is forgotten."""
        state = _state(files)
        known = {"files": state, "calls": sorted(self._known(state) | set(calls))}
        hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}-{get_ident()}")
        # To look again is no harm.
        with contextlib.suppress(OSError):
            write_private(hidden, json.dumps(known))
            hidden.replace(self.path)

    def _known(self, state: str) -> set[str]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self.path.read_text(encoding="utf-8"))
            if known["files"] == state:
                return set(known["calls"])
        return set()


def _state(files: Iterable[str]) -> str:
    return sha256_hex("\n".join(sorted(files)))
