"""Lines at the bottom of a terminal, one for each model that asks just now."""

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_BAR_WIDTH = 20
_PER_SECOND = 4


def is_watched(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal on which lines can move."""
    return stream.isatty() and os.environ.get("TERM", "") not in {"", "dumb", "unknown"}


class StatusLines:
    """Shows them with rich; what dbt prints meanwhile goes above them."""

    def __init__(
        self,
        handlers: Callable[[], Iterable[logging.Handler]] = tuple,
        terminal: TextIO | None = None,
    ) -> None:
        """`handlers` finds those of loggers that may write to the same terminal, else stderr."""
        self._handlers = handlers
        self._terminal = terminal
        self._lock = threading.Lock()
        self._lines: dict[object, TaskID] = {}
        self._shown: Progress | None = None
        self._streams: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []

    def show(self, key: object, name: str, words: str, done: int, total: int) -> None:
        """Show the line of `key`, or change it."""
        with self._lock:
            if self._shown is None:
                self._begin()
            assert self._shown is not None
            if key not in self._lines:
                self._lines[key] = self._shown.add_task(name, words="", total=total)
            self._shown.update(self._lines[key], completed=done, total=total, words=words)

    def remove(self, key: object) -> None:
        """Take the line of `key` away, if there is one."""
        with self._lock:
            line = self._lines.pop(key, None)
            if self._shown is not None and line is not None:
                self._shown.remove_task(line)
            if not self._lines:
                self._end()

    def refresh(self) -> None:
        """Draw them now; they are drawn several times a second anyway."""
        if self._shown is not None:
            self._shown.refresh()

    def _end(self) -> None:
        shown, self._shown = self._shown, None
        try:
            if shown is not None:
                shown.stop()
        finally:
            for handler, stream in self._streams:
                handler.setStream(stream)
            self._streams = []

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # The terminal itself breaks long lines of dbt, so that they can be copied whole.
        console = Console(file=self._terminal, stderr=self._terminal is None, soft_wrap=True)
        self._shown = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=30)),
            BarColumn(_BAR_WIDTH),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            refresh_per_second=_PER_SECOND,
        )
        self._move_above(console)
        self._shown.start()

    def _move_above(self, console: "Console") -> None:
        from rich.file_proxy import FileProxy

        for handler in self._handlers():
            stream = getattr(handler, "stream", None)
            if isinstance(handler, logging.StreamHandler) and stream and stream.isatty():
                self._streams.append((handler, handler.stream))
                handler.setStream(FileProxy(console, handler.stream))
