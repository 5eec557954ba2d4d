import pytest

from dbt_llm.job_spec import JobResult
from dbt_llm.parts import Part
from dbt_llm.progress import Progress, failure_lines, summary_line
from dbt_llm.resolve_loop import Summary
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
    progress = Progress("tickets", lines.append, terminal=False)
    for second in range(0, 240, 5):
        clock[0] = float(second)
        result = job(asked=1000) if second < 20 else job(asked=1000, since=20.0)
        if second > 30:
            result.parts = [part(4 * (second - 20), errors={"timeout": 1})]
        progress(result)
    progress.close()
    assert lines == [
        "llm: tickets: starting the engine, 1,000 to ask",
        "llm: tickets: 100/1,000, 1 failed",
        "llm: tickets: 340/1,000, 1 failed, 4.0 rows/s, 3 min left",
        "llm: tickets: 580/1,000, 1 failed, 4.0 rows/s, 2 min left",
        "llm: tickets: 820/1,000, 1 failed, 4.0 rows/s, 45 s left",
    ]


def test_there_is_no_forecast_from_the_first_rows(clock):
    lines = []
    progress = Progress("tickets", lines.append, terminal=False)
    clock[0] = 15.0
    progress(job(part(249), asked=1000, since=6.0))
    assert lines == ["llm: tickets: 249/1,000"]


def test_a_terminal_gets_a_bar_that_goes_away(capsys, clock):
    progress = Progress("tickets", lambda _: None, terminal=True)
    clock[0] = 20.0
    progress(job(part(500), asked=1000, since=10.0))
    shown = capsys.readouterr().err
    progress.close()
    assert shown.strip() == "tickets          ██████████░░░░░░░░░░ 500/1,000, 50 rows/s, 10 s left"
    assert capsys.readouterr().err.strip() == ""


def test_a_terminal_shows_one_model_and_how_many_more_there_are(capsys):
    first, second = (Progress(name, lambda _: None, terminal=True) for name in ("one", "two"))
    first(job(asked=5))
    second(job(asked=6))
    shown = capsys.readouterr().err.split("\r")[-2]
    assert shown.startswith("two              ░")
    assert shown.rstrip().endswith("starting the engine, 6 to ask (+1)")
    first.close()
    second.close()


def test_a_status_line_is_never_wider_than_a_terminal(capsys, clock):
    names = ["a_model_with_a_very_long_name", "another"]
    bars = [Progress(name, lambda _: None, terminal=True) for name in names]
    clock[0] = 1e6
    for bar in bars:
        bar(job(part(10**9, errors={"timeout": 10**8}), asked=10**10, since=0.0))
        bar.close()
    assert {len(text) for text in capsys.readouterr().err.split("\r") if text} == {78}
