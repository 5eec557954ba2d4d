"""Looks at all that a run needs, and says of each thing whether it is there and what to do.

Each check is a function that returns what it saw, or raises a `Problem`. None stops another one.
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import duckdb
import yaml

from dbt_llm.config import Config, StoreConfig
from dbt_llm.credentials import is_url
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.doctor_llm import checks_of_llm
from dbt_llm.errors import StoreError
from dbt_llm.finding import Check, Problem, State, Unknown
from dbt_llm.object_scan import make_readable, reads_itself
from dbt_llm.version import __version__

if TYPE_CHECKING:
    from dbt_llm.dbt_project import Project
    from dbt_llm.store import Store

_GIB = 1024**3
_LITTLE_SPACE = 2 * _GIB

T = TypeVar("T")


def checks(arguments: list[str], with_ray: bool) -> list[Check]:
    """Parse the project; return all that is to be looked at, what is quick first.

    Args:
        arguments: dbt's options.
        with_ray: whether to start Ray, which takes some seconds.

    Raises:
        UnknownOptionError: dbt does not know an option.
    """
    from dbt_llm.dbt_project import UnknownOptionError, parsed_project

    project = _attempt(lambda: parsed_project(arguments))
    config = _attempt(lambda: project().config())
    found = [
        Check("dbt project", lambda: _project(project())),
        Check("dispatch", lambda: _dispatch(_project_file(arguments, project))),
        Check("dbt package", lambda: _package(_needed(project, "dbt project"))),
        Check("profile", lambda: _profile(_needed(project, "dbt project"), config)),
        Check("store", lambda: _store(_needed(config, "profile").store)),
        Check("disk", lambda: _disk(_folders(project, config))),
        Check("Delta extension", _extension),
    ]
    try:
        known = config()
    except UnknownOptionError:
        raise
    except Exception:
        known = None
    if known is not None:
        for name, llm in known.llms.items():
            found += checks_of_llm(name, llm)
    address = None if known is None else known.ray.address
    found.append(Check("Ray", partial(_ray, address) if with_ray else _no_ray))
    return found


def _attempt(get: Callable[[], T]) -> Callable[[], T]:
    """Return what gets a value once, and raises the same error each time."""

    @cache
    def outcome() -> tuple[T | None, Exception | None]:
        try:
            return get(), None
        except Exception as error:
            return None, error

    def attempt() -> T:
        value, error = outcome()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return attempt


def _needed(get: Callable[[], T], name: str) -> T:
    try:
        return get()
    except Exception:
        raise Unknown(f"see {name}") from None


def _project(project: "Project") -> str:
    return f"{project.name} in {project.root}, which dbt can parse"


def _project_file(
    arguments: list[str], project: "Callable[[], Project]"
) -> tuple[Path, Mapping[str, Any]]:
    """Read `dbt_project.yml`, also where dbt cannot make anything of the project."""
    try:
        root = project().root
    except Exception:
        root = _project_folder(arguments)
    path = root / "dbt_project.yml"
    if not path.is_file():
        raise Unknown(f"there is no {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        raise Unknown(f"{path} is no YAML") from None
    return path, content if isinstance(content, dict) else {}


def _project_folder(arguments: list[str]) -> Path:
    """Return the folder of the project as dbt finds it, as far as dbt does not say."""
    found = os.environ.get("DBT_PROJECT_DIR", ".")
    for index, argument in enumerate(arguments):
        if argument == "--project-dir" and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith("--project-dir="):
            found = argument.removeprefix("--project-dir=")
    return Path(found).absolute()


def _dispatch(file: tuple[Path, Mapping[str, Any]]) -> str:
    path, content = file
    for entry in content.get("dispatch") or []:
        if entry.get("macro_namespace") == "dbt":
            order = entry.get("search_order") or []
            if "dbt_llm" in order and order.index("dbt_llm") < [*order, "dbt"].index("dbt"):
                return f"dbt looks its macros up in {', '.join(order)}"
    name = content.get("name", "my_project")
    raise Problem(
        f"{path.name} does not let dbt-llm build tables.",
        "Run `dbt-llm init`, or have this in it:\n"
        "    dispatch:\n"
        "      - macro_namespace: dbt\n"
        f"        search_order: ['{name}', 'dbt_llm', 'dbt']",
    )


def _package(project: "Project") -> str:
    path = project.packages_folder / "dbt_llm" / "dbt_project.yml"
    if not path.is_file():
        raise Problem(
            f"dbt_llm is not in {project.packages_folder}.",
            "Run `dbt-llm init`, which writes packages.yml, then `dbt deps`.",
        )
    found = str(yaml.safe_load(path.read_text(encoding="utf-8")).get("version"))
    if found != __version__:
        raise Problem(
            f"dbt_llm has the version {found}, the Python package dbt-llm {__version__}.",
            "Install the same version of both, then run `dbt deps`.",
        )
    return f"dbt_llm {found}, as the Python package"


def _profile(project: "Project", config: Callable[[], Config]) -> str:
    where = f"target {project.target} of {project.profile}"
    if project.plugin is None:
        raise Problem(
            f"{where} has no plugin with the module dbt_llm and no alias.",
            "`dbt-llm init --dry-run` prints one to paste; docs/configuration.md has all keys.",
        )
    return f"{where}; LLMs: {', '.join(config().llms)}"


def _store(config: StoreConfig) -> str:
    """Write what a run writes, beside the store, and read what the store has."""
    from dbt_llm.store import open_store

    store = open_store(config)
    if is_url(config.path):
        try:
            store.files.make_writable(atomic=config.format == "delta")
        except StoreError as error:
            what, _, advice = str(error).partition(" Nothing was asked. ")
            raise Problem(what, advice) from None
        with duckdb.connect() as connection:
            itself = reads_itself(make_readable(connection, store.files))
        how = "with httpfs" if itself else "through Python"
        return f"{_seen(config, store)}; DuckDB reads it {how}"
    folder = Path(config.path).absolute()
    near = _nearest(folder)
    advice = "Check the folder's permissions, or change store.path in the profile."
    if not near.is_dir():
        raise Problem(f"{near} is no folder, and the store {folder} is to be one.", advice)
    for table in (folder / "generations", folder / "runs"):
        if os.path.lexists(table) and not (table.is_dir() and os.access(table, os.W_OK | os.X_OK)):
            raise Problem(f"{table} is no folder that can be written.", advice)
    try:
        _try_to_write(near, config.format)
    except (OSError, StoreError) as error:
        cause = error.__cause__ or error
        reason = cause.strerror if isinstance(cause, OSError) else cause
        raise Problem(f"{near} cannot be written: {reason or cause}.", advice) from None
    return _seen(config, store)


def _seen(config: StoreConfig, store: "Store") -> str:
    held = store.snapshot()
    if not held.files:
        rows = "no answers yet"
    else:
        rows = "some answers" if held.rows is None else f"{held.rows:,} answers"
    commits = ", two commits at once do not pass" if config.format == "delta" else ""
    return f"{config.path} ({config.format}) can be written{commits}; it holds {rows}"


def _nearest(path: Path) -> Path:
    """Return the path itself or the first folder above it that is there."""
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def _try_to_write(near: Path, form: Any) -> None:
    """Make a store in a folder of its own, and a commit that has to be refused."""
    from dbt_llm.store import open_store

    # A folder that is not there yet will lie on the same disk as the one above it.
    probe = Path(tempfile.mkdtemp(prefix=".dbt-llm-doctor-", dir=near))
    try:
        table = open_store(StoreConfig(path=str(probe), format=form))
        table.create()
        if form == "delta" and not _refuses_a_second_commit(table.folder):
            raise Problem(
                f"{near} takes the same commit twice, so two runs at a time would lose answers.",
                "Keep the store on another file system, or use store.format: parquet.",
            )
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _refuses_a_second_commit(folder: Path) -> bool:
    """Commit the first version again, as the Delta library does: by a hard link."""
    again = folder / "again.json"
    again.write_text("{}")
    try:
        os.link(again, folder / "_delta_log" / f"{0:020d}.json")
    except FileExistsError:
        return True
    return False


def _extension() -> str:
    with duckdb.connect() as connection:
        if load_delta_extension(connection):
            return f"DuckDB {duckdb.__version__} loads it"
    raise Problem(
        f"DuckDB {duckdb.__version__} has none, and reads a Delta store through its list of files, "
        "with the same result.",
        "pip install duckdb-extension-delta brings it for DuckDB 1.5.",
        State.NOTE,
    )


def _folders(project: "Callable[[], Project]", config: Callable[[], Config]) -> dict[str, Path]:
    folders = {"the target folder": _needed(project, "dbt project").target_folder}
    with contextlib.suppress(Exception):
        if not is_url(path := config().store.path):
            folders["the store"] = Path(path)
    return folders


def _disk(folders: dict[str, Path]) -> str:
    there = {
        name: next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
        for name, path in folders.items()
    }
    free = {name: shutil.disk_usage(path).free for name, path in there.items()}
    words = ", ".join(f"{space / _GIB:,.1f} GiB free for {name}" for name, space in free.items())
    if min(free.values()) < _LITTLE_SPACE:
        raise Problem(
            words,
            "That is little: requests lie in the target folder and answers in the store. Free "
            "space, or choose others with --target-path and store.path.",
            State.NOTE,
        )
    return words


def _ray(address: str | None) -> str:
    from dbt_llm.ray_session import connect, describe_cluster

    connect(address)
    if address is None:
        return f"{describe_cluster()}, a private one"
    return f"{describe_cluster()}, at {address}; its nodes need the weights and packages too"


def _no_ray() -> str:
    raise Unknown("--no-ray")


def wants_colour() -> bool:
    """Return whether standard output is a terminal that may show colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
