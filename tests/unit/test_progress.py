import io
import logging
import re

import pytest

from dbt_llm.job_spec import JobResult
from dbt_llm.parts import Part
from dbt_llm.progress import Progress, failure_lines, summary_line
from dbt_llm.resolve_loop import Summary
from dbt_llm.status_lines import StatusLines, is_watched
from dbt_llm.tally import Tally
from tests.terminal import drawn
from tests.unit.generations import failing, good, key, write_part


def part(rows, **fields):
    return Part("p", rows, 1, "c", "a", "b", **fields)


def job(*parts, asked=None, seconds=10.0, since=None):
    asked = sum(one.rows for one in parts) if asked is None else asked
    return JobResult(
        asked=asked,
        parts=list(parts),
        engine_start_s=99.0,
        generating_since=since,
        generating_s=seconds,
    )


def line(prompts, *jobs, left_null=0):
    summary = Summary(calls={}, prompts=prompts, jobs=list(jobs), left_null=left_null)
    return summary_line("tickets", summary)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (line(0), "0 prompts, 0 stored, 0 generated"),
        (line(1), "1 prompt, 1 stored, 0 generated"),
        (line(1000), "1,000 prompts, 1,000 stored, 0 generated"),
        (line(None), "all prompts stored, 0 generated"),
        (
            line(
                1000,
                job(
                    part(100, prompt_tokens=20_000, completion_tokens=21_000),
                    part(88, errors={"timeout": 3}),
                    seconds=5.5,
                ),
            ),
            "1,000 prompts, 812 stored, 185 generated, 3 failed, 41k tokens, 34 rows/s",
        ),
        (
            line(5, job(part(2), seconds=4), left_null=3),
            "5 prompts, 0 stored, 2 generated, 3 left NULL, 0 tokens, 0.5 rows/s",
        ),
        (line(5, left_null=3), "5 prompts, 2 stored, 0 generated, 3 left NULL"),
        (
            line(None, job(part(20_000, prompt_tokens=1_234_567, cost_usd=1234.5))),
            "all other prompts stored, 20,000 generated, 1.23M tokens, 2,000 rows/s, "
            "1,234.5000 USD",
        ),
        (
            line(3, job(part(1, prompt_tokens=999)), job(part(2, prompt_tokens=1, cost_usd=2e-4))),
            "3 prompts, 0 stored, 3 generated, 1k tokens, 0.1 rows/s, 0.0002 USD",
        ),
    ],
)
def test_the_summary_line_says_exactly(found, expected):
    assert found == f"llm: tickets: {expected}"


def test_a_refresh_does_not_count_below_zero_stored():
    assert line(2, job(part(3))).startswith("llm: tickets: 2 prompts, 0 stored, 3 generated")


def test_failures_are_one_line_per_code_with_an_example():
    parts = [
        part(
            5,
            errors={"timeout": 1},
            example_hashes={"timeout": "h1"},
            example_errors={"timeout": "no answer within 9 s"},
        ),
        part(
            2000,
            errors={"timeout": 1, "context_length": 1999},
            example_hashes={"timeout": "h2", "context_length": "h3"},
            example_errors={"timeout": "other", "context_length": "too long"},
        ),
    ]
    assert failure_lines("tickets", job(*parts)) == [
        "llm: tickets: 1,999 rows failed with context_length, for example prompt_hash h3: too long",
        "llm: tickets: 2 rows failed with timeout, "
        "for example prompt_hash h1: no answer within 9 s",
    ]


def test_one_failed_row_is_singular():
    one = part(
        1, errors={"unknown": 1}, example_hashes={"unknown": "h"}, example_errors={"unknown": "?"}
    )
    assert failure_lines("t", job(one)) == [
        "llm: t: 1 row failed with unknown, for example prompt_hash h: ?"
    ]


def test_no_failures_no_lines(tmp_path):
    assert failure_lines("t", job(write_part(tmp_path, ["a"], good))) == []


def test_failure_lines_hold_no_prompt_and_no_output(tmp_path):
    written = write_part(tmp_path, ["my secret prompt"], failing("timeout"))
    (text,) = failure_lines("t", job(written))
    assert "secret" not in text
    assert text == (
        "llm: t: 1 row failed with timeout, "
        f"for example prompt_hash {key('my secret prompt')}: timeout happened"
    )


@pytest.fixture
def clock(monkeypatch):
    """A list that holds what the monotonic clock says."""
    now = [0.0]
    monkeypatch.setattr("dbt_llm.progress.time.monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then(clock):
    lines = []
    progress = Progress("tickets", lines.append)
    for second in range(0, 240, 5):
        clock[0] = float(second)
        result = job(asked=1000) if second < 20 else job(asked=1000, since=20.0)
        if second > 30:
            rows = 4 * (second - 20)
            tokens = {"prompt_tokens": 10 * rows, "completion_tokens": 5 * rows}
            result.parts = [part(rows, errors={"timeout": 1}, cost_usd=rows / 1e4, **tokens)]
        progress(result)
    progress.close()
    assert lines == [
        "llm: tickets: starting the engine, 1,000 to ask",
        "llm: tickets: 100/1,000, 1 failed, 4.0 rows/s, 60 tokens/s, 0.0100 USD",
        "llm: tickets: 340/1,000, 1 failed, 4.0 rows/s, 60 tokens/s, 3 min left, 0.0340 USD",
        "llm: tickets: 580/1,000, 1 failed, 4.0 rows/s, 60 tokens/s, 2 min left, 0.0580 USD",
        "llm: tickets: 820/1,000, 1 failed, 4.0 rows/s, 60 tokens/s, 45 s left, 0.0820 USD",
    ]


def test_there_is_no_forecast_from_the_first_rows(clock):
    lines = []
    progress = Progress("tickets", lines.append)
    clock[0] = 15.0
    progress(job(part(249), asked=1000, since=6.0))
    assert lines == ["llm: tickets: 249/1,000, 28 rows/s"]


def test_what_an_engine_told_of_counts_before_it_is_written(clock):
    lines = []
    progress = Progress("tickets", lines.append)
    clock[0] = 15.0
    result = job(part(10), asked=1000, since=5.0)
    result.told = Tally(50, 600, 400)
    progress(result)
    clock[0] = 50.0
    result.parts.append(part(90))
    progress(result)
    assert lines == [
        "llm: tickets: 50/1,000, 5.0 rows/s, 100 tokens/s",
        "llm: tickets: 100/1,000, 2.2 rows/s",
    ]


@pytest.fixture
def screen(monkeypatch):
    """What is written to a terminal."""
    written = io.StringIO()
    written.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    return written


def shown(screen):
    """Return what a person sees of it, without the bar's colours and their halves."""
    lines = drawn(crlf(screen.getvalue()))
    return [re.sub(" [━╺╸]+", "", line) for line in lines]


def crlf(text):
    return text.replace("\n", "\r\n")


def test_a_terminal_shows_a_line_for_each_model_until_it_is_done(clock, screen):
    lines = StatusLines(terminal=screen)
    first, second = (Progress(name, pytest.fail, lines) for name in ("tickets", "other"))
    clock[0] = 20.0
    first(job(part(500), asked=1000, since=10.0))
    second(job(asked=6))
    lines.refresh()
    assert shown(screen) == [
        "tickets 500/1,000, 50 rows/s, 10 s left",
        "other   starting the engine, 6 to ask",
    ]
    first.close()
    lines.refresh()
    assert shown(screen) == ["other starting the engine, 6 to ask"]
    second.close()
    assert shown(screen) == []


def test_a_line_is_never_wider_than_the_terminal(clock, screen):
    lines = StatusLines(terminal=screen)
    bar = Progress("a_model_with_a_very_long_name_that_goes_on_and_on", pytest.fail, lines)
    clock[0] = 1e6
    tokens = {"prompt_tokens": 10**12, "cost_usd": 1e6}
    bar(job(part(10**9, errors={"timeout": 10**8}, **tokens), asked=10**10, since=0.0))
    lines.refresh()
    found = drawn(crlf(screen.getvalue()))
    bar.close()
    assert len(found) == 1
    assert len(found[0]) <= 110
    assert "1,000,000,000/10,000,000,000, 100,000,000 failed" in found[0]


def test_what_a_logger_prints_goes_above_the_lines_and_its_stream_comes_back(screen):
    handler = logging.StreamHandler(screen)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.Logger("of dbt")
    logger.addHandler(handler)
    lines = StatusLines(lambda: logger.handlers, screen)
    progress = Progress("tickets", pytest.fail, lines)
    progress(job(asked=5))
    logger.info("10:00:00  1 of 2 OK \x1b[32mcreated\x1b[0m [kept as it is]")
    lines.refresh()
    assert shown(screen) == [
        "10:00:00  1 of 2 OK created [kept as it is]",
        "tickets starting the engine, 5 to ask",
    ]
    progress.close()
    assert handler.stream is screen
    logger.info("10:00:01  done")
    assert shown(screen) == ["10:00:00  1 of 2 OK created [kept as it is]", "10:00:01  done"]


def test_a_long_line_is_broken_by_the_terminal_alone(screen):
    handler = logging.StreamHandler(screen)
    progress = Progress("tickets", pytest.fail, StatusLines(lambda: [handler], screen))
    progress(job(asked=5))
    long = "12:00:00  1 of 39 START test " + "accepted_values_and_more_" * 4 + " [RUN]"
    handler.emit(logging.makeLogRecord({"msg": long}))
    progress.close()
    assert drawn(crlf(screen.getvalue())) == [long[:110], long[110:]]


def test_a_file_gets_its_lines_itself(screen, tmp_path):
    handler = logging.FileHandler(tmp_path / "log")
    progress = Progress("tickets", pytest.fail, StatusLines(lambda: [handler], screen))
    progress(job(asked=5))
    handler.emit(logging.makeLogRecord({"msg": "kept"}))
    progress.close()
    assert (tmp_path / "log").read_text() == "kept\n"
    assert "kept" not in screen.getvalue()


@pytest.mark.parametrize(("term", "expected"), [("xterm", True), ("dumb", False), ("", False)])
def test_lines_move_where_the_terminal_can(screen, monkeypatch, term, expected):
    monkeypatch.setenv("TERM", term)
    assert is_watched(screen) is expected
    assert not is_watched(io.StringIO())
