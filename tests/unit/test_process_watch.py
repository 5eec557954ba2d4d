import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from dbt_llm.process_watch import ProcessId, call_when_gone, this_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")


def seen_to_end(process: ProcessId, end, timeout_s: float) -> bool:
    """Return whether the end of a process is seen; `end` is called once it is watched."""

    async def watch() -> bool:
        gone = asyncio.Event()
        call_when_gone(process, gone.set)
        end()
        try:
            async with asyncio.timeout(timeout_s):
                await gone.wait()
        except TimeoutError:
            return False
        return True

    return asyncio.run(watch())


@pytest.fixture
def other():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.wait()


def test_the_end_of_another_process_is_seen(other):
    assert seen_to_end(replace(this_process(), pid=other.pid), other.kill, 30)


def test_one_that_is_gone_already_is_seen(other):
    other.kill()
    other.wait()
    assert seen_to_end(replace(this_process(), pid=other.pid), lambda: None, 30)


def test_one_that_lives_is_not(other):
    assert not seen_to_end(replace(this_process(), pid=other.pid), lambda: None, 0.2)


def test_one_of_another_machine_is_not_watched(other):
    elsewhere = ProcessId("another boot", other.pid)
    assert not seen_to_end(elsewhere, other.kill, 0.2)
    assert not seen_to_end(ProcessId("", other.pid), lambda: None, 0.2)


def test_this_process_names_itself():
    assert this_process().pid == os.getpid()
    assert this_process().space


def test_others_end_with_a_process_that_is_killed(other):
    code = (
        "from dbt_llm.process_watch import end_with_this_process\n"
        f"end_with_this_process([{other.pid}])\n"
        "print('ready', flush=True)\n"
        "input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as watched:
        assert watched.stdout.readline() == b"ready\n"
        assert other.poll() is None
        watched.kill()
    assert other.wait(timeout=30) == -signal.SIGKILL
