"""The snippets of docs/endpoints.md are configs that load, and its table has every key."""

import re
from pathlib import Path

import pytest
import yaml

from dbt_llm.config import OpenAILLM, load_config

PAGE = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_there_is_a_snippet_for_every_server() -> None:
    entries = [llm for text in SNIPPETS for llm in yaml.safe_load(text)["llms"].values()]
    assert sum(llm["engine"] == "openai" for llm in entries) >= 12


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_snippet_is_a_valid_config(text: str) -> None:
    raw = yaml.safe_load(text)
    assert list(raw) == ["llms"]
    assert set(load_config(raw).llms) == set(raw["llms"])


def test_the_table_has_every_key_of_an_openai_entry_and_no_other() -> None:
    table = PAGE.partition("## All keys")[2]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}
    shared = {
        "engine",
        "system",
        "price",
        "budget",
        "replicas",
        "on_long_prompt",
        "start_timeout_s",
    }
    assert named == set(OpenAILLM.model_fields) - shared
