"""The command `dbt-llm`: its help, its errors, how it ends, and that its page has all of it."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dbt_llm import commands
from dbt_llm.cli import main, new_parser
from dbt_llm.version import __version__
from tests.project import ROOT, Project

PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def all_commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (
        action.choices
        for action in new_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(found)


def test_every_command_and_option_is_on_its_page() -> None:
    sections = dict(re.findall(r"^## dbt-llm (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.M))
    assert list(sections) == list(all_commands())
    for name, parser in all_commands().items():
        for action in parser._actions:
            for option in action.option_strings:
                if option not in {"-h", "--help"}:
                    assert f"`{option}" in sections[name], (name, option)


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"^    (\w+) ", text, re.MULTILINE) == list(all_commands())
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "COMMAND" in capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dbt_llm.cli", "--version"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == (f"dbt-llm {__version__}\n", "")


@pytest.mark.parametrize("name", ["doctor", "plan", "report"])
def test_an_unknown_option_is_said(
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    project.command("run")
    monkeypatch.chdir(project.folder)
    assert main([name, "--no-such-option"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    text = " ".join(err.split())
    verb = "compile" if name == "plan" else "parse"
    assert "No such option '--no-such-option'" in text
    assert f"go to dbt {verb}, which does not take this one either" in text
    assert "Traceback" not in text


def test_init_knows_its_own_options_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["init", "--project-dir", str(tmp_path), "--target", "dev"])
    assert "init does not know --target dev" in capsys.readouterr().err
    assert main(["init", "--project-dir", str(tmp_path)]) == 1
    assert "Run this in a dbt project" in capsys.readouterr().err


@pytest.mark.parametrize("runs", ["0", "-1", "x", "1.5"])
def test_a_wrong_number_of_runs(runs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", f"--runs={runs}"])
    assert "give 1 or more" in capsys.readouterr().err


def test_an_interrupt_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "report", interrupted)
    assert main(["report"]) == 130
    assert capsys.readouterr() == ("", "dbt-llm: interrupted\n")


@pytest.mark.parametrize("moment", ["compiling", "evaluating"])
def test_ctrl_c_ends_a_plan(project: Project, moment: str) -> None:
    # The query takes hours.
    project.model(
        "slow",
        "select llm_generate('p' || sum(hash(i)) % 2) as r from range(1_000_000_000_000) t(i)",
    )
    project.command("run")
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from dbt_llm.cli import main; sys.exit(main(['plan']))"
    )
    started = psutil.Popen(
        [sys.executable, "-c", program],
        cwd=project.folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    target = project.folder / "target"
    try:
        if moment == "compiling":
            wait_for((target / "compiled").exists)
        else:
            wait_for((target / "run_results.json").exists)
            before = started.cpu_times().user
            wait_for(lambda: started.cpu_times().user > before + 1)
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=60)
    finally:
        if started.poll() is None:
            started.kill()
    assert (out, err) == ("", "dbt-llm: interrupted\n")
    assert started.returncode == 130


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("arguments", [["report"], ["doctor", "--no-ray"], ["plan", "--json"]])
def test_a_closed_pipe_is_quiet(project: Project, arguments: list[str]) -> None:
    project.command("run")
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dbt_llm.cli", *arguments],
            cwd=project.folder,
            env=ENVIRONMENT,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
