"""A store of many commits against one of few with the same rows: is it read as quickly?

Every tenth commit is the end of a run, at which the store is tidied as a run does it.
"""

import tempfile
from pathlib import Path

import duckdb

from bench.figures import Figure, alternate, timed
from dbt_llm.config import StoreConfig
from dbt_llm.lookup import lasting, show_answers
from dbt_llm.store import Store, open_store
from dbt_llm.store_upkeep import tidy
from tests.unit.generations import call_of, good, write_part

MANY, FEW = 400, 10
COMMITS_OF_A_RUN = 10
COMMITS_AT_A_TIME = 5


def upkeep(rows: int, runs: int) -> list[Figure]:
    """Snapshot and lookup of all answers, and a commit: 400 commits against 10."""
    figures = []
    for format_ in ("delta", "parquet"):
        many, few = (_filled(rows, commits, format_) for commits in (MANY, FEW))
        untidied = _filled(rows, MANY, format_, compact=False)
        baseline = lambda few=few: _lookup(few, rows)  # noqa: E731
        label = f"{format_}: lookup of {rows:,} answers, {MANY} commits against {FEW}"
        result = alternate(runs, lambda many=many: _lookup(many, rows), baseline)
        figures.append(Figure(label, *result, target="≤ 1.2"))
        result = alternate(runs, lambda untidied=untidied: _lookup(untidied, rows), baseline)
        figures.append(Figure(f"{label}, store.compact: false", *result))
        label = f"{format_}: {COMMITS_AT_A_TIME} commits, after {MANY} against {FEW}"
        result = alternate(runs, _Commits(many), _Commits(few))
        figures.append(Figure(label, *result, target="≤ 1.2"))
    return figures


def _filled(rows: int, commits: int, format_: str, compact: bool = True) -> StoreConfig:
    folder = tempfile.mkdtemp(prefix="dbt-llm-bench-")
    config = StoreConfig(path=folder, format=format_, compact=compact)
    store = open_store(config)
    store.create()
    for number in range(commits):
        prompts = [f"prompt {row} of {number}" for row in range(rows // commits)]
        store.commit([write_part(store.folder, prompts, good)])
        if number % COMMITS_OF_A_RUN == COMMITS_OF_A_RUN - 1:
            tidy(config, "generations")
    return config


def _lookup(config: StoreConfig, rows: int) -> float:
    def look_up() -> None:
        show_answers(connection, open_store(config), lasting(), [call_of().call_hash])
        (found,) = connection.execute("select count(output) from dbt_llm_generations").fetchall()
        assert found[0] >= rows

    with duckdb.connect() as connection:
        # A run loads the extension once.
        look_up()
        return timed(look_up)


class _Commits:
    """Commits some parts, and tidies up as the run does that they are of."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._store: Store = open_store(config)
        self._store.snapshot()
        self._number = 0

    def __call__(self) -> float:
        folder = Path(self._store.folder)
        parts = []
        for _ in range(COMMITS_AT_A_TIME):
            self._number += 1
            parts.append(write_part(folder, [f"new {self._number}"], good))
        seconds = timed(lambda: [self._store.commit([part]) for part in parts])
        tidy(self._config, "generations")
        return seconds
