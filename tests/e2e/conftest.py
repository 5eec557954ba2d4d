"""The small real LLM of the end-to-end tests, and a project that uses it through vLLM."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dbt_llm import pool
from tests.project import ROOT, Project

WEIGHTS = Path(
    os.environ.get(
        "DBT_LLM_TEST_WEIGHTS", ROOT / "example_project" / "weights" / "SmolLM2-135M-Instruct"
    )
)


@pytest.fixture(scope="session")
def weights() -> None:
    assert (WEIGHTS / "model.safetensors").exists(), (
        f"no weights in {WEIGHTS}: run `make weights`, or set DBT_LLM_TEST_WEIGHTS"
    )


@pytest.fixture(autouse=True)
def one_engine() -> Iterator[None]:
    """Free what engines of one test alone hold, some 3 GiB each; most tests share the first."""
    yield
    pool.close_pools(keep=1)


@pytest.fixture
def vllm_project(tmp_path: Path) -> Callable[[int], Project]:
    """Make a project whose default LLM answers with at most `max_tokens` tokens."""

    def make(max_tokens: int) -> Project:
        project = Project(tmp_path / "a project")
        project.llms = {
            "default": {
                "engine": "vllm",
                "model": str(WEIGHTS),
                "engine_args": {"max_model_len": 1024},
                "sampling": {"max_tokens": max_tokens},
            }
        }
        return project

    return make
