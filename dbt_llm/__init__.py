"""Call an LLM from a dbt model: `llm_generate(prompt)` in SQL, answers in a table.

dbt-duckdb loads this module by its name in the profile and takes `Plugin` from it. `Plugin` is
imported on first use, so that `import dbt_llm` stays light: no dbt, Ray, vLLM or Delta.
"""

from typing import TYPE_CHECKING, Any

from dbt_llm.version import __version__

if TYPE_CHECKING:
    from dbt_llm.plugin import Plugin
    from dbt_llm.python_models import resolve

__all__ = ["Plugin", "__version__", "resolve"]


def __getattr__(name: str) -> Any:
    if name == "Plugin":
        from dbt_llm.plugin import Plugin

        return Plugin
    if name == "resolve":
        from dbt_llm.python_models import resolve

        return resolve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
