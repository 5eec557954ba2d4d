"""The config of a model of the materialization `lakehouse`: all problems are reported together."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from dbt_llm.credentials import is_url
from dbt_llm.errors import ConfigError
from dbt_llm.files import file_name
from dbt_llm.lake_types import Column

_PARTITION_TYPES = {"VARCHAR", "BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "DATE"}


class ModelConfig(BaseModel):
    """What a model's config says; None and '' stand for what is not said."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["delta", "parquet"] = "delta"
    location: str | None = None
    unique_key: tuple[str, ...] = ()
    incremental_strategy: Literal["append", "merge", "delete+insert", "overwrite"] | None = None
    partition_by: tuple[str, ...] = ()
    on_schema_change: Literal["ignore", "fail", "append_new_columns", "sync_all_columns"] = "ignore"

    @field_validator("unique_key", "partition_by", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_a_key(self) -> Self:
        if self.incremental_strategy in {"merge", "delete+insert"} and not self.unique_key:
            raise ValueError(f"incremental_strategy {self.incremental_strategy} needs a unique_key")
        if self.incremental_strategy == "append" and self.unique_key:
            raise ValueError("incremental_strategy append does not look at unique_key; use merge")
        return self

    @property
    def strategy(self) -> str:
        """The strategy: with a unique key merge, else overwrite, where none is given."""
        return self.incremental_strategy or ("merge" if self.unique_key else "overwrite")


def load_model_config(node_id: str, raw: Mapping[str, Any]) -> ModelConfig:
    """Check a model's config.

    Raises:
        ConfigError: with every problem.
    """
    given = {key: value for key, value in raw.items() if value is not None and value != ""}
    try:
        return ModelConfig.model_validate(given)
    except ValidationError as error:
        problems = []
        for one in error.errors():
            key = ".".join(str(part) for part in one["loc"]) or "config"
            got = f" (got {one['input']!r})" if isinstance(one["input"], str) else ""
            text = one["msg"].removeprefix("Value error, ")
            if one["type"] == "extra_forbidden":
                text, got = "a lakehouse table does not have this", ""
            problems.append(f"  - {key}: {text}{got}")
        raise ConfigError(
            f"The config of {node_id} is wrong:\n" + "\n".join(problems) + "\n"
            "See docs/lakehouse.md for all keys."
        ) from None


def location_of(config: ModelConfig, root: str, database: str, schema: str, name: str) -> str:
    """Return where a model's table lies: an absolute path or a URL without an end slash.

    Raises:
        ConfigError: it is a URL that does not lie below the profile's, or has the format parquet.
    """
    parts = [file_name(part) for part in (database, schema, name)]
    if config.location is not None:
        location = config.location.rstrip("/")
    elif is_url(root):
        location = "/".join([root, *(re.sub(r"[^\w.=-]", "_", part, flags=re.A) for part in parts)])
    else:
        location = str(Path(root).joinpath(*parts))
    if not is_url(location):
        return str(Path(location).absolute())
    below = location.removeprefix(f"{root}/")
    if below == location or re.fullmatch(r"[\w.=-]+(/[\w.=-]+)*", below, re.ASCII) is None:
        raise ConfigError(
            f"The location {location!r} does not lie below lakehouse.path of the profile "
            f"({root!r}), whose credentials open it, or has other characters than letters, digits, "
            "- _ . = and /."
        )
    if config.format == "parquet":
        raise ConfigError(
            f"The location {location!r} is in an object store, where a lakehouse table has the "
            "format delta."
        )
    return location


def check_columns(node_id: str, config: ModelConfig, columns: list[Column]) -> ModelConfig:
    """Return the config with the columns' own spelling of names.

    Raises:
        ConfigError: a key or partition column is not there, or cannot be one.
    """
    by_name = {column.name.lower(): column for column in columns}
    problems = []
    all_names = ", ".join(column.name for column in columns)
    for key, names in (("unique_key", config.unique_key), ("partition_by", config.partition_by)):
        problems += [
            f"  - {key}: the query has no column {name}; it has {all_names}"
            for name in names
            if name.lower() not in by_name
        ]
    partitions = [by_name[one.lower()] for one in config.partition_by if one.lower() in by_name]
    problems += [
        f"  - partition_by: {one.name} is {one.sql_type}; use one of "
        f"{', '.join(sorted(_PARTITION_TYPES))}"
        for one in partitions
        if one.sql_type not in _PARTITION_TYPES
    ]
    problems += [
        f"  - partition_by: {one.name} has '/', '=' or '%' in its name, which is a folder's name"
        for one in partitions
        if set(one.name) & set("/=%")
    ]
    if partitions and len(partitions) == len(columns):
        problems.append("  - partition_by: names all columns; one must be left for the files")
    if problems:
        raise ConfigError(f"The config of {node_id} is wrong:\n" + "\n".join(problems))
    return config.model_copy(
        update={
            "unique_key": tuple(by_name[one.lower()].name for one in config.unique_key),
            "partition_by": tuple(by_name[one.lower()].name for one in config.partition_by),
        }
    )
