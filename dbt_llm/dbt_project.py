"""Runs dbt from the command line tool, and uses its connection afterwards."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbt.adapters.factory import get_adapter_by_type
from dbt.cli.exceptions import DbtUsageException
from dbt.cli.main import dbtRunner

from dbt_llm.config import Config, load_config
from dbt_llm.errors import ConfigError
from dbt_llm.plan import Model
from dbt_llm.plugin import Plugin, secrets_of
from dbt_llm.session import Session

_NEVER_ASKS = {"view", "ephemeral"}


def compiled_models(arguments: list[str]) -> list[Model]:
    """Compile the selected models; return those that may ask something, in the order of a run.

    Raises:
        ConfigError: dbt could not compile the project.
    """
    # It would print the code of a single model even with --quiet.
    outcome = _invoke(["compile", *arguments])
    if not outcome.success:
        results = getattr(outcome.result, "results", None) or []
        problems = [result.message for result in results if result.message]
        problem = outcome.exception or "; ".join(problems)
        raise ConfigError(f"dbt cannot compile the selected models: {problem}")
    ancestors = _ancestors(get_adapter_by_type("duckdb").config)
    models = []
    for result in outcome.result.results:
        node = result.node
        if node.resource_type not in {"model", "snapshot"} and not _is_judge(node):
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
                tuple(ancestors(node.unique_id)),
            )
        )
    return models


def _ancestors(runtime: Any) -> Callable[[str], set[str]]:
    """Return what finds all nodes that a node reads, directly or through others."""
    manifest = Path(runtime.project_root) / runtime.project_target_path / "manifest.json"
    parents: dict[str, list[str]] = {}
    if manifest.is_file():
        parents = json.loads(manifest.read_text(encoding="utf-8"))["parent_map"]

    def ancestors(node_id: str) -> set[str]:
        found: set[str] = set()
        waiting = [node_id]
        while waiting:
            new = set(parents.get(waiting.pop(), [])) - found
            found |= new
            waiting += new
        return found

    return ancestors


def _is_judge(node: Any) -> bool:
    """Tell whether a node is the one kind of test that asks, as the macro `_asks` does."""
    test = getattr(node, "test_metadata", None)
    return test is not None and (test.namespace, test.name) == ("dbt_llm", "llm_judge")


class UnknownOptionError(ConfigError):
    """An option is one neither of dbt-llm nor of dbt."""


@dataclass(frozen=True)
class Project:
    """What dbt knows of a project and of the profile's target that it uses."""

    name: str
    root: Path
    target_folder: Path
    packages_folder: Path
    profile: str
    target: str
    plugin: Mapping[str, Any] | None
    """The config of the plugin dbt_llm as it stands in the target; None where there is none."""
    settings: Mapping[str, Any]
    secrets: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """Those that the profile has for DuckDB."""

    def config(self) -> Config:
        """Return the plugin's config, checked.

        Raises:
            ConfigError: the target has no such plugin, or its config is wrong.
        """
        if self.plugin is None:
            raise ConfigError(
                f"The target {self.target} of the profile {self.profile} has no plugin with the "
                "module dbt_llm and no alias; docs/configuration.md shows how to add it."
            )
        return load_config(self.plugin, self.settings, self.secrets)


def parsed_project(arguments: list[str]) -> Project:
    """Parse the project; nothing is compiled and no database opened.

    Raises:
        ConfigError: dbt cannot parse the project.
    """
    outcome = _invoke(["parse", *arguments])
    if not outcome.success:
        raise ConfigError(f"dbt cannot parse the project: {outcome.exception}")
    try:
        runtime = get_adapter_by_type("duckdb").config
    except KeyError:
        raise ConfigError(
            "The profile's target is of another type than duckdb, and dbt-llm works with DuckDB "
            "alone; choose another with --target, or change type in profiles.yml."
        ) from None
    credentials = runtime.credentials
    own = [
        plugin
        for plugin in credentials.plugins or []
        if plugin.module == "dbt_llm" and plugin.alias in {None, "dbt_llm"}
    ]
    root = Path(runtime.project_root)
    return Project(
        name=runtime.project_name,
        root=root,
        target_folder=Path(runtime.project_target_path),
        packages_folder=root / runtime.packages_install_path,
        profile=runtime.profile_name,
        target=runtime.target_name,
        plugin=(own[0].config or {}) if own else None,
        settings=credentials.settings or {},
        secrets=secrets_of(credentials),
    )


def _invoke(arguments: list[str]) -> Any:
    """Run dbt in silence.

    Raises:
        UnknownOptionError: dbt does not know an option.
    """
    outcome = dbtRunner().invoke(["--log-level", "none", *arguments])
    if isinstance(outcome.exception, KeyboardInterrupt):
        raise outcome.exception
    if isinstance(outcome.exception, DbtUsageException):
        raise UnknownOptionError(
            f"{str(outcome.exception).rstrip('.')}. Options that dbt-llm does not know go to dbt "
            f"{arguments[0]}, which does not take this one either."
        )
    return outcome


@contextmanager
def connected() -> Iterator[tuple[Session, Any]]:
    """Open dbt's database as a run would; yield the plugin's session and a cursor."""
    adapter = get_adapter_by_type("duckdb")
    with adapter.connection_named("dbt_llm"):
        cursor = adapter.connections.get_thread_connection().handle.cursor()
        if Plugin.newest is None:
            raise ConfigError("The profile's target has no plugin with the module dbt_llm.")
        yield Plugin.newest.session, cursor
