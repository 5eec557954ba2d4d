"""Kills a process at a named step; Python imports this at start where it lies on PYTHONPATH.

`DBT_LLM_FAULT` holds JSON: `step` ("module:attribute", within the package), `after` (whether the
step is done first), `nth` (which time in a process), `target` (see `_TARGETS`) and `marker` (a
file that is there once it happened, so that it happens once). The first process that sees the
variable is the root of all others.
"""

import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

_TARGETS = {
    "engine": "ray::EngineActor",
    "engine core": "VLLM::EngineCore",
    "raylet": "raylet",
    "gcs": "gcs_server",
}
"""What the processes' names begin with; the target `dbt` is the root."""


def find_target(root: int, target: str) -> list[psutil.Process]:
    """Return the processes that a fault kills, of those that `root` started and itself."""
    if target == "dbt":
        return [psutil.Process(root)]
    # Linux keeps fifteen characters of a name.
    name = _TARGETS[target][:15]
    children = psutil.Process(root).children(recursive=True)
    return [child for child in children if child.name().startswith(name)]


class _Fault:
    def __init__(self, step: str, after: bool, nth: int, target: str, marker: str) -> None:
        self.module, _, attribute = step.partition(":")
        self._path = attribute.split(".")
        self._after = after
        self._left = nth
        self._target = target
        self._marker = Path(marker)

    def install(self, module: ModuleType) -> None:
        """Wrap the step."""
        owner: Any = module
        for name in self._path[:-1]:
            owner = getattr(owner, name)
        setattr(owner, self._path[-1], self._wrap(getattr(owner, self._path[-1])))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if arguments and arguments[-1] == []:
                # A commit of nothing.
                return function(*arguments, **options)
            self._left -= 1
            if not self._after:
                self._strike()
            result = function(*arguments, **options)
            if self._after:
                self._strike()
            return result

        return step

    def _strike(self) -> None:
        if self._left != 0:
            return
        try:
            with self._marker.open("x") as marker:
                marker.write(str(time.monotonic()))
        except FileExistsError:
            return
        for process in find_target(int(os.environ["DBT_LLM_FAULT_ROOT"]), self._target):
            process.kill()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, fault: _Fault) -> None:
        self._fault = fault

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._fault.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._fault.install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "DBT_LLM_FAULT" in os.environ:
    os.environ.setdefault("DBT_LLM_FAULT_ROOT", str(os.getpid()))
    sys.meta_path.insert(0, _Finder(_Fault(**json.loads(os.environ["DBT_LLM_FAULT"]))))
