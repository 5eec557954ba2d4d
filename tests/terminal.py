"""What a person sees on a terminal: a program's output, drawn by a terminal emulator."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Mapping
from pathlib import Path

import pyte

COLUMNS = 110
LINES = 60


def drawn(text: str, columns: int = COLUMNS) -> list[str]:
    """Return the lines that a terminal shows after it got a text."""
    screen = pyte.Screen(columns, LINES)
    pyte.Stream(screen).feed(text)
    return [line.rstrip() for line in screen.display if line.strip()]


def watched(
    command: list[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, list[list[str]]]:
    """Run a program on a terminal of its own; return its code and all that was to be seen.

    A list of lines is taken whenever the program has printed something.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
        start_new_session=True,
    )
    os.close(theirs)
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    seen: list[list[str]] = []
    while True:
        readable, _, _ = select.select([ours], [], [], 180)
        assert readable, "the program printed nothing for three minutes"
        try:
            data = os.read(ours, 65536)
        except OSError:
            # So Linux tells the end of the last process that had the terminal.
            break
        if not data:
            break
        stream.feed(data)
        seen.append([line.rstrip() for line in screen.display if line.strip()])
    os.close(ours)
    return process.wait(60), seen
