"""Runs dbt from the command line tool, and uses its connection afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from dbt.adapters.factory import get_adapter_by_type
from dbt.cli.main import dbtRunner
from dbt.flags import get_flags

from dbt_llm.config import Config, load_config
from dbt_llm.errors import ConfigError
from dbt_llm.plan import Model
from dbt_llm.plugin import Plugin
from dbt_llm.session import Session

_NEVER_ASKS = {"view", "ephemeral"}


def compiled_models(arguments: list[str]) -> list[Model]:
    """Compile the selected models; return those that may ask something, in the order of a run.

    Raises:
        ConfigError: dbt could not compile the project.
    """
    # It would print the code of a single model even with --quiet.
    outcome = dbtRunner().invoke(["--log-level", "none", "compile", *arguments])
    if not outcome.success:
        results = getattr(outcome.result, "results", None) or []
        problems = [result.message for result in results if result.message]
        problem = outcome.exception or "; ".join(problems)
        raise ConfigError(f"dbt cannot compile the selected models: {problem}")
    models = []
    for result in outcome.result.results:
        node = result.node
        if node.resource_type not in {"model", "snapshot"}:
            continue
        if node.config.materialized in _NEVER_ASKS:
            continue
        unknown = None if node.language == "sql" else "it is a Python model"
        models.append(
            Model(
                node.unique_id,
                node.compiled_code or "",
                node.config.get("sql_header") or "",
                unknown,
                tuple(node.depends_on.nodes),
            )
        )
    return models


def parsed_project(arguments: list[str]) -> tuple[Config, dict[str, Any], Path]:
    """Parse the project; return the plugin's config, `dbt_project.yml` and the target folder.

    Raises:
        ConfigError: dbt cannot parse the project, or the profile is wrong.
    """
    outcome = dbtRunner().invoke(["--log-level", "none", "parse", *arguments])
    if not outcome.success:
        raise ConfigError(f"dbt cannot parse the project: {outcome.exception}")
    runtime = get_adapter_by_type("duckdb").config
    credentials = runtime.credentials
    for plugin in credentials.plugins or []:
        if plugin.module == "dbt_llm":
            config = load_config(plugin.config or {}, ignore=credentials.settings or {})
            project = yaml.safe_load((Path(runtime.project_root) / "dbt_project.yml").read_text())
            return config, project, Path(runtime.project_target_path)
    raise ConfigError(
        f"The target {runtime.target_name} of the profile {runtime.profile_name} has no plugin "
        "with the module dbt_llm; docs/configuration.md shows how to add it."
    )


def dbt_variable(name: str) -> Any:
    """Return a variable of dbt's command line; None where it is not given."""
    return (get_flags().VARS or {}).get(name)


@contextmanager
def connected() -> Iterator[tuple[Session, Any]]:
    """Open dbt's database as a run would; yield the plugin's session and a cursor."""
    adapter = get_adapter_by_type("duckdb")
    with adapter.connection_named("dbt_llm"):
        cursor = adapter.connections.get_thread_connection().handle.cursor()
        if Plugin.newest is None:
            raise ConfigError("The profile's target has no plugin with the module dbt_llm.")
        yield Plugin.newest.session, cursor
