"""What a person sees who runs dbt on a terminal, and what a log and a machine get instead."""

import json
import re

import pytest

from tests.project import Project
from tests.terminal import watched

SLOW = {"default": {"engine": "replay", "latency_s": 0.5, "concurrency": 8, "price": {"prompt": 9}}}


@pytest.fixture
def slow(project: Project) -> Project:
    """A project with two models that take some seconds each, side by side."""
    project.llms = SLOW
    for name in ("tickets", "letters"):
        project.model(name, f"select llm_generate('{name} ' || i) as r from range(64) t(i)")
    return project


def test_each_model_has_a_line_while_it_asks_and_dbt_prints_above_them(slow: Project) -> None:
    slow.model("quick", "select 1 as i")
    slow.threads = 3
    code, seen = watched(slow.command("run"), slow.folder)
    assert code == 0
    bar = r"{} +[━╸╺ ]+ \d+/64, [\d.]+ rows/s, [\d.k]+ tokens/s.*"
    both = [
        screen
        for screen in seen
        if re.fullmatch(bar.format("(tickets|letters)"), screen[-1])
        and re.fullmatch(bar.format("(tickets|letters)"), screen[-2])
    ]
    assert both
    assert any(re.search(r"\d s left, 0\.\d+ USD$", screen[-1]) for screen in both)
    # All that stays is what dbt prints, whole and in order.
    last = seen[-1]
    assert not [line for line in last if "━" in line]
    assert all(re.match(r"\d\d:\d\d:\d\d(  |$)", line) for line in last), last
    assert last[-1][10:].startswith("Done. PASS=3 WARN=0 ERROR=0")
    for name in ("tickets", "letters"):
        (line,) = [line for line in last if f"llm: {name}: 64 prompts" in line]
        assert "0 stored, 64 generated" in line


@pytest.mark.parametrize(
    ("options", "environment"),
    [(("--quiet",), {}), (("--log-format", "json"), {}), ((), {"TERM": "dumb"})],
)
def test_nothing_moves_where_nobody_wants_it(project: Project, options, environment) -> None:
    project.model("tickets", "select llm_generate('ticket ' || i) as r from range(3) t(i)")
    code, seen = watched(project.command(*options, "run"), project.folder, environment)
    assert code == 0
    assert not [screen for screen in seen for line in screen if "━" in line]
    if options == ("--quiet",):
        assert not any(seen)


def test_a_machine_gets_json_alone(project: Project) -> None:
    project.model("tickets", "select llm_generate('ticket ' || i) as r from range(3) t(i)")
    outcome = project.dbt_process("--log-format", "json", "run")
    messages = [json.loads(line)["info"]["msg"] for line in outcome.log.splitlines()]
    assert [one for one in messages if one.startswith("llm: tickets: 3 prompts")]
