import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import dbt_llm
from dbt_llm import errors

ROOT = Path(__file__).parents[2]
HEAVY = [
    *("ray", "vllm", "deltalake", "obstore", "dbt", "duckdb", "torch", "pydantic", "rich"),
    *("pyarrow", "pyarrow.compute", "pyarrow.parquet"),
]


def loaded_after(code):
    """Run code in a fresh process; return which heavy modules it loaded."""
    script = (
        f"{code}\nimport sys, json\nprint(json.dumps(sorted(set(sys.modules) & set({HEAVY})))) "
    )
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    return json.loads(output)


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import dbt_llm") == []


def test_importing_what_a_run_without_questions_needs_loads_little():
    code = "import dbt_llm.session, dbt_llm.resolve_loop, dbt_llm.runner"
    assert set(loaded_after(code)) <= {"duckdb", "pydantic", "pyarrow"}


def test_the_public_names_are_these():
    assert dbt_llm.__all__ == ["Plugin", "__version__", "resolve"]


def test_the_plugin_comes_on_first_use():
    from dbt_llm.plugin import Plugin

    assert dbt_llm.Plugin is Plugin


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'dbt_llm' has no attribute 'Plugins'"):
        dbt_llm.Plugins  # noqa: B018


def test_one_version_everywhere():
    (macro,) = re.findall(r"return\('(.+?)'\)", (ROOT / "macros" / "_version.sql").read_text())
    project = yaml.safe_load((ROOT / "dbt_project.yml").read_text())
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert [macro, project["version"], package["project"]["version"]] == [dbt_llm.__version__] * 3


def test_the_wheel_ships_the_macros():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert package["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"] == {
        "macros": "dbt_llm/include/macros",
        "dbt_project.yml": "dbt_llm/include/dbt_project.yml",
    }


def test_the_drawn_tree_of_errors_is_the_real_one():
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    children = [error.__name__ for error in errors.DbtLLMError.__subclasses__()]
    assert drawn == [name for name in children if hasattr(errors, name)]
    assert all(getattr(errors, name).__doc__ for name in drawn)


def test_every_module_says_its_job_in_its_first_line():
    for path in sorted((ROOT / "dbt_llm").glob("*.py")):
        assert path.read_text().startswith('"""'), path


def test_every_module_is_in_the_map_of_the_code():
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    modules = {path.name for path in (ROOT / "dbt_llm").glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(modules) if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("module", "users"),
    [
        ("dbt", {"dbt_project", "plugin"}),
        ("vllm", {"engine_vllm"}),
        ("deltalake", {"lake_delta", "run_log", "store", "store_upkeep"}),
        ("obstore", {"object_store"}),
        ("ray", {"job_pass", "pool", "ray_session", "units"}),
    ],
)
def test_only_these_modules_import_it(module, users):
    pattern = re.compile(rf"^\s*(from|import) {module}[. \n]", re.MULTILINE)
    found = {
        path.stem for path in (ROOT / "dbt_llm").glob("*.py") if pattern.search(path.read_text())
    }
    assert found == users
