"""Tells a process at once that another one on the same machine has ended, or ends it then.

Ray needs a second or more to end the actors of a driver that was killed. Until then an actor that
does not know would go on to ask, and nobody would ever see the answers.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_REAPER = """
import contextlib, os, select, signal, sys
watched, *others = map(int, sys.argv[1:])
descriptors = []
for other in others:
    with contextlib.suppress(ProcessLookupError):
        descriptors.append(os.pidfd_open(other))
with contextlib.suppress(ProcessLookupError):
    select.select([os.pidfd_open(watched)], [], [])
for descriptor in descriptors:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
"""


@dataclass(frozen=True)
class ProcessId:
    """A process id, and where it holds."""

    space: str
    """The boot and the pid namespace; empty where a process cannot be watched."""
    pid: int


def this_process() -> ProcessId:
    """Return the id of the calling process."""
    return ProcessId(_space(), os.getpid())


def call_when_gone(process: ProcessId, gone: Callable[[], None]) -> None:
    """Have the running event loop call `gone` once when a process has ended.

    Where that cannot be seen, which is on another machine and on systems other than Linux, nothing
    happens.
    """
    if sys.platform != "linux" or not process.space or process.space != _space():
        return
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        loop.call_soon(gone)
        return
    except OSError:  # An old kernel, or a sandbox that forbids it.
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        gone()

    loop.add_reader(descriptor, ended)


def end_with_this_process(pids: list[int]) -> None:
    """Have other processes killed once the calling one has ended, in whatever way.

    A small process of its own waits for that, since one that is killed does nothing any more. On
    systems other than Linux nothing happens.
    """
    if sys.platform != "linux":
        return
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REAPER, *map(str, [os.getpid(), *pids])],
        # Neither Ctrl-C nor the end of a terminal may reach it.
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )


def _space() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""
