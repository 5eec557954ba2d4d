"""Sets a dbt project up for LLM calls, by inserting lines; nothing else of a file changes.

The YAML is only parsed to find where a line belongs, so comments, order and style stay as they are.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dbt_llm.errors import ConfigError

PROFILE = """\
{profile}:
  target: dev
  outputs:
    dev:
      type: duckdb
      path: dev.duckdb
      threads: 4
      plugins:
        - module: dbt_llm
          config:
            store: {{path: lake/llm}}
            llms:
              default:
                engine: vllm                             # or openai, or replay
                model: ./weights/SmolLM2-135M-Instruct   # a folder, or a model id of a hub
                engine_args: {{max_model_len: 2048}}
                sampling: {{temperature: 0, max_tokens: 128}}
"""


IS_INCREMENTAL = """\
{# Lets is_incremental() be true in lakehouse models, too; dbt takes it from here alone. #}
{% macro is_incremental() -%}
  {{ return(dbt_llm.is_incremental()) }}
{%- endmacro %}
"""


@dataclass(frozen=True)
class Change:
    """What became of one file."""

    path: Path
    words: str
    text: str | None = None
    """The new text; None where nothing is to be done."""


def set_up(project: Path, package: Path) -> tuple[list[Change], str]:
    """Return what has to be written into a project, and the profile to paste.

    `package` is the folder of the dbt package. Nothing is written yet.

    Raises:
        ConfigError: the project's files cannot be understood.
    """
    path = project / "dbt_project.yml"
    if not path.is_file():
        raise ConfigError(f"{path} is not there. Run this in a dbt project, or give --project-dir.")
    text = _read(path)
    root = _compose(path, text)
    content = yaml.safe_load(text) or {}
    name = content.get("name")
    if not name:
        raise ConfigError(f"{path} has no name.")
    if root.flow_style or root.start_mark.column:
        raise ConfigError(
            f"{path} is written in another way than others. Put this into it by hand:\n"
            f"dispatch:\n  - macro_namespace: dbt\n    search_order: {_order(str(name))}"
        )
    changes = [_dispatch(path, str(name)), _packages(project, package)]
    for change in changes:
        _check(change)
    folders = content.get("macro-paths") or ["macros"]
    changes.append(_is_incremental(project, [str(folder) for folder in folders]))
    return changes, PROFILE.format(profile=content.get("profile", name))


def write(changes: list[Change]) -> None:
    """Write the files that change."""
    for change in changes:
        if change.text is not None:
            change.path.parent.mkdir(parents=True, exist_ok=True)
            change.path.write_text(change.text, encoding="utf-8", newline="")


def _read(path: Path) -> str:
    """Read a file; its ends of lines stay what they are."""
    with path.open(encoding="utf-8", newline="") as file:
        return file.read()


def _check(change: Change) -> None:
    """Refuse a change that would touch more than it should."""
    if change.text is None:
        return
    before = yaml.safe_load(_read(change.path)) if change.path.is_file() else None
    after = yaml.safe_load(change.text)
    for content in (before or {}, after):
        content.pop("dispatch", None)
        content.pop("packages", None)
    if after != (before or {}):
        raise ConfigError(
            f"{change.path} is written in another way than others, and cannot be changed without "
            f"harm. By hand: {change.words}; see docs/command-line.md."
        )


def _dispatch(path: Path, name: str) -> Change:
    text = _read(path)
    found = _value(_compose(path, text), "dispatch")
    if found is None:
        block = (
            "\n# Lets dbt-llm build the tables of models that call an LLM.\n"
            "dispatch:\n"
            "  - macro_namespace: dbt\n"
            f"    search_order: {_order(name)}\n"
        )
        return Change(path, "the dispatch block is added at its end", _appended(text, block))
    for entry in found.value:
        if _plain(entry, "macro_namespace") != "dbt":
            continue
        order = _value(entry, "search_order")
        items = [] if order is None else [item.value for item in order.value]
        if "dbt_llm" in items and items.index("dbt_llm") < [*items, "dbt"].index("dbt"):
            return Change(path, "dbt_llm is in the search order already")
        if order is None or "dbt" not in items or "dbt_llm" in items:
            break
        at = order.value[items.index("dbt")]
        return Change(path, "dbt_llm is put into the search order", _before(text, order, at))
    else:
        if found.value and not found.flow_style:
            first = found.value[0].start_mark
            dash = " " * text.split("\n")[first.line].index("-")
            lines = f"{dash}- macro_namespace: dbt\n{dash}  search_order: {_order(name)}"
            return Change(path, "dispatch gets an entry", _insert_line(text, first.line, lines))
    raise ConfigError(
        f"{path} has a dispatch block that is not like others. Put 'dbt_llm' before 'dbt' in the "
        "search_order of macro_namespace dbt by hand."
    )


def _order(name: str) -> str:
    return f"[{_quoted(name)}, 'dbt_llm', 'dbt']"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _packages(project: Path, package: Path) -> Change:
    entry = f"local: {_quoted(str(package))}"
    names = ("packages.yml", "dependencies.yml")
    for path in (project / name for name in names):
        if not path.is_file():
            continue
        text = _read(path)
        found = _value(_compose(path, text), "packages")
        if found is None:
            continue
        if not found.value:
            raise ConfigError(f"{path} has an empty list of packages. Put {{{entry}}} into it.")
        for known in found.value:
            where = str(_plain(known, "local") or _plain(known, "git") or "")
            if where == str(package) or _names_it(where):
                return Change(path, f"the package is there already ({where})")
        first = found.value[0].start_mark
        if found.flow_style:
            raise ConfigError(f"{path} has its packages in one line. Add {{{entry}}} by hand.")
        dash = text.split("\n")[first.line].index("-")
        line = " " * dash + f"- {entry}"
        return Change(path, "the package is added", _insert_line(text, first.line, line))
    path = project / "packages.yml"
    before = _read(path) if path.is_file() else ""
    return Change(path, "is written", _appended(before, f"packages:\n  - {entry}\n"))


def _names_it(where: str) -> bool:
    """Tell whether a folder or an address is that of a copy of this package."""
    last = where.rstrip("/").removesuffix("/include").removesuffix(".git")
    return re.split(r"[/:]", last)[-1] in {"dbt-llm", "dbt_llm"}


def _is_incremental(project: Path, folders: list[str]) -> Change:
    for folder in folders:
        for path in sorted((project / folder).rglob("*.sql")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if re.search(r"macro\s+is_incremental\s*\(", text):
                if "dbt_llm.is_incremental" in text:
                    return Change(path, "the macro is_incremental is there already")
                words = "stays; for lakehouse models, have it call dbt_llm.is_incremental()"
                return Change(path, words)
    path = project / folders[0] / "is_incremental.sql"
    if path.exists():
        path = path.with_name("dbt_llm_is_incremental.sql")
    return Change(path, "is written", IS_INCREMENTAL)


def _compose(path: Path, text: str) -> Any:
    try:
        return yaml.compose(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None


def _pairs(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, yaml.MappingNode):
        yield from node.value


def _value(node: Any, key: str) -> Any:
    return next((value for name, value in _pairs(node) if name.value == key), None)


def _plain(node: Any, key: str) -> Any:
    value = _value(node, key)
    return value.value if isinstance(value, yaml.ScalarNode) else None


def _before(text: str, order: Any, item: Any) -> str:
    """Return the text with `dbt_llm` before an item of a list."""
    if order.flow_style:
        at = item.start_mark.index
        return f"{text[:at]}'dbt_llm', {text[at:]}"
    line = text.split("\n")[item.start_mark.line]
    return _insert_line(text, item.start_mark.line, line[: line.index("-")] + "- dbt_llm")


def _insert_line(text: str, number: int, line: str) -> str:
    lines = text.split("\n")
    added = line.replace("\n", _end_of_line(text))
    if _end_of_line(text) == "\r\n":
        added += "\r"
    return "\n".join([*lines[:number], added, *lines[number:]])


def _appended(text: str, block: str) -> str:
    end = _end_of_line(text)
    gap = "" if not text or text.endswith("\n") else end
    return text + gap + block.replace("\n", end)


def _end_of_line(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
