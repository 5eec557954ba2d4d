"""A throwaway dbt project for tests, run in this process or in one of its own."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import yaml

from dbt_llm.config import StoreConfig
from dbt_llm.store import open_store

ROOT = Path(__file__).parent.parent

REPLAY = {"default": {"engine": "replay"}}


@dataclass
class Outcome:
    """What one dbt command did."""

    success: bool
    log: str
    """What dbt printed, one message a line."""
    statuses: dict[str, str] = field(default_factory=dict)
    """Status per node name; empty for a command in its own process."""

    def summary(self, name: str) -> str:
        """Return the last line that says what a model asked, without the prefix."""
        prefix = f"llm: {name}: "
        lines = [
            line[line.index(prefix) + len(prefix) :]
            for line in self.log.splitlines()
            if prefix in line
        ]
        return lines[-1]


class Project:
    """A dbt project in a folder of its own."""

    def __init__(self, folder: Path, *, dispatch: bool = True, name: str = "my_project") -> None:
        self.folder = folder
        self.database = "dev.duckdb"
        self.threads = 4
        self.llms: dict[str, Any] = REPLAY
        self.config: dict[str, Any] = {
            "store": {"path": str(folder / "lake" / "llm")},
            "commit_interval_s": 1.0,
        }
        self.schema: str | None = None
        self.output: dict[str, Any] = {}
        """More of the profile's target, such as secrets."""
        (folder / "models").mkdir(parents=True)
        project: dict[str, Any] = {
            "name": name,
            "profile": "test",
            "flags": {"send_anonymous_usage_stats": False},
            "models": {"+materialized": "table"},
        }
        if dispatch:
            project["dispatch"] = [
                {"macro_namespace": "dbt", "search_order": [name, "dbt_llm", "dbt"]}
            ]
        self.write("dbt_project.yml", yaml.safe_dump(project))
        self.write("packages.yml", yaml.safe_dump({"packages": [{"local": str(ROOT)}]}))

    def write(self, path: str, text: str) -> None:
        """Write a file of the project."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def model(self, name: str, sql: str, **config: Any) -> None:
        """Write a model."""
        arguments = ", ".join(f"{key}={value!r}" for key, value in config.items())
        header = f"{{{{ config({arguments}) }}}}\n" if config else ""
        self.write(f"models/{name}.sql", header + sql)

    def dbt(self, *arguments: str, **variables: Any) -> Outcome:
        """Run a dbt command in this process."""
        from dbt.cli.main import dbtRunner

        self._prepare()
        lines: list[str] = []
        runner = dbtRunner(callbacks=[lambda event: lines.append(event.info.msg)])
        before = Path.cwd()
        os.chdir(self.folder)
        try:
            result = runner.invoke(self._arguments(arguments, variables))
        finally:
            os.chdir(before)
            _close_database()
        statuses = {}
        for node in getattr(result.result, "results", None) or []:
            # An operation has no node.
            name = node.node.name if hasattr(node, "node") else "operation"
            statuses[name] = str(node.status)
            if node.message:
                lines.append(f"{name}: {node.message}")
        if result.exception is not None:
            lines.append(str(result.exception))
        return Outcome(bool(result.success), "\n".join(lines), statuses)

    def dbt_llm(self, *arguments: str) -> tuple[int, str]:
        """Run the command `dbt-llm` in this process; return its code and what it printed."""
        from dbt_llm.cli import main

        self._prepare()
        before = Path.cwd()
        os.chdir(self.folder)
        printed, errors = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
                code = main(list(arguments))
        finally:
            os.chdir(before)
            _close_database()
        return code, printed.getvalue() if code == 0 else errors.getvalue()

    def command(self, *arguments: str, **variables: Any) -> list[str]:
        """Return the command line that runs dbt in a process of its own."""
        self._prepare()
        # A shell's background jobs ignore Ctrl-C, and so would dbt where the tests are one.
        program = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from dbt.cli.main import cli; sys.argv[0] = 'dbt'; cli()"
        )
        return [sys.executable, "-c", program, *self._arguments(arguments, variables)]

    def dbt_process(
        self,
        *arguments: str,
        prefix: tuple[str, ...] = (),
        timeout_s: float = 180,
        **variables: Any,
    ) -> Outcome:
        """Run a dbt command in a process of its own."""
        done = subprocess.run(
            [*prefix, *self.command(*arguments, **variables)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Outcome(done.returncode == 0, done.stdout + done.stderr)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Read the database with plain DuckDB, as a stranger would: no plugin, read-only.

        `made_up(prompt)` is what the replay engine answers to a prompt.
        """
        program = (
            "import duckdb, pickle, sys; c = duckdb.connect(sys.argv[1], read_only=True); "
            "c.execute(\"create temp macro made_up(p) as 'replay ' || left(sha256(p), 12)\"); "
            "sys.stdout.buffer.write(pickle.dumps(c.execute(sys.argv[2]).fetchall()))"
        )
        import pickle

        done = subprocess.run(
            [sys.executable, "-c", program, str(self.folder / self.database), sql],
            cwd=self.folder,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        rows: list[tuple[Any, ...]] = pickle.loads(done.stdout)
        return rows

    @property
    def store(self) -> Path:
        """The folder of the generations."""
        return Path(self.config["store"]["path"]) / "generations"

    def generations(self, select: str = "*", where: str = "true") -> list[tuple[Any, ...]]:
        """Read the store's committed rows."""
        if self.config["store"].get("format") == "parquet":
            config = StoreConfig(path=self.config["store"]["path"], format="parquet")
            files = list(open_store(config).snapshot().files)
        else:
            from deltalake import DeltaTable

            names = [Path(uri).name for uri in DeltaTable(str(self.store)).file_uris()]
            files = [str(self.store / name) for name in names]
        connection = duckdb.connect()
        connection.register("generations", pq.ParquetDataset(files).read())
        return connection.execute(f"select {select} from generations where {where}").fetchall()

    def version(self) -> int:
        """Return the store's Delta version."""
        from deltalake import DeltaTable

        return DeltaTable(str(self.store)).version()

    def _arguments(self, arguments: tuple[str, ...], variables: dict[str, Any]) -> list[str]:
        given = ["--vars", yaml.safe_dump(variables)] if variables else []
        return [*arguments, *given, "--no-use-colors"]

    def _prepare(self) -> None:
        output: dict[str, Any] = {
            "type": "duckdb",
            # dbt-duckdb keeps its environment for an equal profile, whatever the folder, so two
            # projects of one test process must differ in it.
            "path": str(self.folder / self.database),
            "threads": self.threads,
            "plugins": [{"module": "dbt_llm", "config": {**self.config, "llms": self.llms}}],
            **self.output,
        }
        if self.schema is not None:
            output["schema"] = self.schema
        profile = {"test": {"target": "dev", "outputs": {"dev": output}}}
        self.write("profiles.yml", yaml.safe_dump(profile))
        packages = self.folder / "dbt_packages"
        if not packages.exists():
            # What dbt deps does with a local package; one test runs dbt deps itself.
            packages.mkdir()
            (packages / "dbt_llm").symlink_to(ROOT)


def _close_database() -> None:
    # dbt-duckdb holds the database open, and so locked, until the process ends, and warns of each
    # thing once until then.
    from dbt.adapters.duckdb.connections import DuckDBConnectionManager

    if DuckDBConnectionManager._ENV is not None:
        DuckDBConnectionManager._ENV.close()
        DuckDBConnectionManager._ENV = None
    DuckDBConnectionManager._LOGGED_MESSAGES.clear()
