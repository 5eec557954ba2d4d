"""Full, read-only and vanishing disks, neighbours, wrong clocks, few descriptors, little memory.

In every case: a clear error that says what to do, or success; and a rerun on a healthy machine
completes and asks only for what was not answered.
"""

import os
import re
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dbt_llm.engine_replay import made_up_answer
from dbt_llm.store import DeltaStore
from tests.endpoint import Endpoint, latency
from tests.project import Outcome, Project

ROWS = 300
SLOW = {"default": {"engine": "replay", "latency_s": 0.1, "concurrency": 8}}
FAST = {"default": {"engine": "replay"}}
FORMATS = pytest.mark.parametrize("store_format", ["delta", "parquet"])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "a project")
    project.config["commit_interval_s"] = 0.2
    project.model("answers", f"select i, llm_generate('x' || i) as r from range({ROWS}) t(i)")
    return project


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Yield a function that runs `mount` on a folder, which it creates."""
    mounted: list[Path] = []

    def mount(folder: Path, *arguments: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", *arguments, str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"mount is not permitted: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def small_disk(mount: Callable[..., Path], folder: Path, size: str) -> Path:
    return mount(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")


def fill(folder: Path) -> Path:
    """Leave no space in a file system; removing the returned file frees it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (64 * 1024, 4096, 1):
            try:
                while True:
                    file.write(b"0" * size)
            except OSError:
                continue
    return filler


def wait_until(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s"
        time.sleep(0.02)


class During:
    """Does something in a thread once a run has stored a few answers."""

    def __init__(self, project: Project, act: Callable[[], Any]) -> None:
        self.result: Any = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(project, act))

    def _work(self, project: Project, act: Callable[[], Any]) -> None:
        try:
            wait_until(lambda: stored(project) >= 8 or self._over.is_set())
            assert not self._over.is_set(), "the run was over before it had stored a few answers"
            self.result = act()
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> "During":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure


def stored(project: Project) -> int:
    """Return the number of committed rows."""
    is_delta = project.config["store"].get("format", "delta") == "delta"
    if is_delta and not list((project.store / "_delta_log").glob("*[1-9].json")):
        return 0
    if not list(project.store.glob("part-*.parquet")):
        return 0
    return int(project.generations("count(*)")[0][0])


def good(project: Project) -> int:
    """Return how many prompts have a committed answer, and check that it is the right one."""
    if stored(project) == 0:
        return 0
    rows = project.generations("prompt, output")
    assert all(output == made_up_answer(prompt) for prompt, output in rows)
    return len({prompt for prompt, _ in rows})


def assert_exact(project: Project, rows: int = ROWS) -> None:
    assert project.query(
        "select count(*), count(distinct i), count(*) filter (r = made_up('x' || i)) from answers"
    ) == [(rows, rows, rows)]


def assert_rerun_completes(project: Project, at_least_stored: int) -> None:
    """A healthy run has exact rows, asks for the rest alone, and the next one for nothing."""
    project.llms = FAST
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    found = re.match(r"(\d+) prompts, (\d+) stored, (\d+) generated", outcome.summary("answers"))
    assert found is not None, outcome.summary("answers")
    prompts, before, generated = map(int, found.groups())
    assert (prompts, before + generated) == (ROWS, ROWS)
    assert before >= at_least_stored
    assert_exact(project)
    again = project.dbt("run").summary("answers")
    assert again.startswith(f"{ROWS} prompts, {ROWS} stored, 0 generated")


def assert_failed(outcome: Outcome, *words: str) -> None:
    assert not outcome.success, outcome.log
    message = outcome.log[outcome.log.rindex("Error in model") :]
    for word in words:
        assert word in message, outcome.log
    assert "Traceback" not in message


# Full disks


@FORMATS
def test_the_stores_disk_runs_full(
    project: Project, tmp_path: Path, mount: Callable[..., Path], store_format: str
) -> None:
    disk = small_disk(mount, tmp_path / "disk", "2m")
    project.config["store"] = {"path": str(disk / "llm"), "format": store_format}
    project.llms = SLOW
    with During(project, lambda: fill(disk)) as filled:
        outcome = project.dbt("run")
    assert_failed(outcome, str(project.store), "No space left on device")
    before = good(project)
    assert 0 < before < ROWS

    # While it is full, nothing is asked.
    outcome = project.dbt("run")
    assert_failed(outcome, str(project.store), "cannot be written", "Nothing was asked", "space")
    assert "asking" not in outcome.log

    filled.result.unlink()
    assert_rerun_completes(project, before)


LONG = "(select string_agg(md5(i || '-' || j), '') from range(100) s(j))"


@pytest.mark.parametrize("size", ["1m", "3m"], ids=["collecting", "arranging"])
def test_the_disk_of_the_spool_runs_full(
    project: Project, mount: Callable[..., Path], size: str
) -> None:
    # 3.2 MB of prompts, of which half is left when they are compressed.
    project.model(
        "answers",
        f"select i, llm_generate(p) as r, p from (select i, {LONG} as p from range(1000) t(i))",
    )
    folder = project.folder / "target" / "llm"
    small_disk(mount, folder, size)
    outcome = project.dbt("run")
    assert_failed(outcome, str(folder), "No space left on device", "target")
    subprocess.run(["umount", str(folder)], check=True)
    outcome = project.dbt("run")
    assert outcome.summary("answers").startswith("1,000 prompts, 0 stored, 1,000 generated")
    assert project.query("select count(*), count(*) filter (r = made_up(p)) from answers") == [
        (1000, 1000)
    ]


def test_the_disk_of_the_database_runs_full(
    project: Project, tmp_path: Path, mount: Callable[..., Path]
) -> None:
    disk = small_disk(mount, tmp_path / "disk", "4m")
    project.database = str(disk / "dev.duckdb")
    project.model(
        "answers",
        f"select i, llm_generate('x' || i) as r, {LONG} as pad from range({ROWS * 10}) t(i)",
    )
    outcome = project.dbt("run")
    assert not outcome.success
    assert "No space left on device" in outcome.log
    assert project.generations("count(*)") == [(ROWS * 10,)]
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    outcome = project.dbt("run")
    assert outcome.success, outcome.log
    assert outcome.summary("answers").startswith("3,000 prompts, 3,000 stored, 0 generated")
    assert_exact(project, ROWS * 10)


# Stores that cannot be written


@FORMATS
def test_a_read_only_store(project: Project, mount: Callable[..., Path], store_format: str) -> None:
    project.config["store"]["format"] = store_format
    assert project.dbt("run").success
    lake = mount(project.store.parent, "--bind", str(project.store.parent))
    remount = ["mount", "-o", "remount,bind,ro", str(lake)]
    if subprocess.run(remount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a read-only mount is not permitted")
    model = f"select i, llm_generate('x' || i) as r from range({ROWS}) t(i)"
    project.model("answers", f"{model} union all select -1, llm_generate('new')")
    outcome = project.dbt("run")
    assert_failed(outcome, str(project.store), "Read-only file system", "Nothing was asked")
    assert "asking" not in outcome.log

    # What is stored can be used all the same.
    project.model("answers", model)
    assert project.dbt("run", llm_mode="cached").success
    assert_exact(project)
    subprocess.run(["mount", "-o", "remount,bind,rw", str(lake)], check=True)
    assert_rerun_completes(project, ROWS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@FORMATS
def test_a_store_without_permission(project: Project, store_format: str) -> None:
    project.config["store"]["format"] = store_format
    project.store.mkdir(parents=True)
    project.store.chmod(0o500)
    outcome = project.dbt("run")
    assert_failed(outcome, str(project.store), "Permission denied", "Nothing was asked")
    assert "asking" not in outcome.log
    project.store.chmod(0o700)
    assert_rerun_completes(project, 0)


# Stores that somebody else works on


@FORMATS
def test_the_store_is_removed_during_a_run(project: Project, store_format: str) -> None:
    project.config["store"]["format"] = store_format
    project.llms = SLOW

    def remove() -> None:
        # A worker may put a part into the folder meanwhile.
        wait_until(lambda: shutil.rmtree(project.store, True) or not project.store.exists())

    with During(project, remove):
        outcome = project.dbt("run")
    assert_failed(outcome, str(project.store), "removed")
    assert not project.store.exists()
    assert_rerun_completes(project, 0)


def test_the_log_of_the_store_is_removed_during_a_run(project: Project) -> None:
    project.llms = SLOW
    log = project.store / "_delta_log"
    with During(project, lambda: shutil.rmtree(log)):
        outcome = project.dbt("run")
    assert_failed(outcome, str(project.store), "is gone", "Run dbt again")
    assert_rerun_completes(project, 8)


def vacuum(project: Project) -> list[str]:
    from deltalake import DeltaTable

    return DeltaTable(str(project.store)).vacuum(
        retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True
    )


def assert_all_files_are_there(project: Project) -> None:
    from deltalake import DeltaTable

    names = [Path(uri).name for uri in DeltaTable(str(project.store)).file_uris()]
    assert [name for name in names if not (project.store / name).exists()] == []


def test_parts_that_somebody_removes_before_they_are_committed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.llms = SLOW
    commit = DeltaStore.commit
    removed: list[str] = []

    def late(self: DeltaStore, parts: list[Any]) -> None:
        if parts and stored(project) >= 8 and not removed:
            removed.extend(vacuum(project))
        commit(self, parts)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaStore, "commit", late)
        outcome = project.dbt("run")
    assert removed
    assert_failed(
        outcome, str(project.store / removed[0]), "is gone", "asked again by the next run"
    )
    assert_all_files_are_there(project)
    assert_rerun_completes(project, good(project))


def test_a_file_of_the_table_is_gone(project: Project) -> None:
    from deltalake import DeltaTable

    project.config["store"]["compact"] = False
    project.llms = SLOW
    assert project.dbt("run").success
    names = [Path(uri).name for uri in DeltaTable(str(project.store)).file_uris()]
    assert len(names) > 1
    (project.store / names[0]).unlink()
    project.llms = FAST
    outcome = project.dbt("run")
    assert "1 file of the generation store" in outcome.log
    assert outcome.success, outcome.log
    assert_all_files_are_there(project)
    assert_exact(project)
    # More than ten would be taken for a store that is half there.
    for name in names[1:10]:
        (project.store / name).unlink()
    assert_rerun_completes(project, 1)
    shutil.move(project.store / "_delta_log", project.folder / "log")
    for part in project.store.glob("part-*"):
        part.unlink()
    shutil.move(project.folder / "log", project.store / "_delta_log")
    assert_failed(
        project.dbt("run"), "files of the generation store", "are gone", "Bring them back"
    )


def test_somebody_keeps_the_table_in_order_all_the_time(project: Project) -> None:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    project.llms = SLOW
    done = threading.Event()
    times = 0

    def tidy() -> None:
        nonlocal times
        while not done.is_set():
            try:
                table = DeltaTable(str(project.store))
                table.create_checkpoint()
                table.optimize.compact()
                vacuum(project)
                times += 1
            except (DeltaError, OSError):
                # It met a vacuum of its own, or a commit was faster.
                continue

    thread = threading.Thread(target=lambda: (wait_until(lambda: stored(project) >= 8), tidy()))
    thread.start()
    try:
        outcome = project.dbt("run")
    finally:
        done.set()
        thread.join()
    assert times > 3
    if outcome.success:
        assert_exact(project)
    else:
        # Either a part was taken away before its commit, or a file while DuckDB was reading.
        assert re.search(r"is gone|No such file|No files found|does not exist", outcome.log)
    assert_rerun_completes(project, 1)
    assert_all_files_are_there(project)


def test_what_was_compacted_or_deleted_does_not_come_back(project: Project) -> None:
    from deltalake import DeltaTable

    project.config["store"]["compact"] = False
    project.llms = SLOW
    assert project.dbt("run").success
    assert len(DeltaTable(str(project.store)).file_uris()) > 1
    DeltaTable(str(project.store)).optimize.compact()
    assert len(DeltaTable(str(project.store)).file_uris()) == 1
    assert_rerun_completes(project, ROWS)
    assert stored(project) == ROWS
    DeltaTable(str(project.store)).delete("prompt in ('x17', 'x18')")
    assert_rerun_completes(project, ROWS - 2)
    assert stored(project) == ROWS


# Clocks

CLOCK = """
import os, time
_now, _now_ns = time.time, time.time_ns
def _offset():
    try:
        with open(os.environ["CLOCK_FILE"]) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0
# Functions with names, for Ray pickles some.
def wrong_time():
    return _now() + _offset()
def wrong_time_ns():
    return _now_ns() + int(_offset() * 1e9)
time.time, time.time_ns = wrong_time, wrong_time_ns
"""


def test_the_clock_is_set_back_in_a_run_and_between_two(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = tmp_path / "clock"
    clock.write_text(str(3 * 24 * 3600))
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(CLOCK)
    before = time.time()
    # Commits are taken back below, and a checkpoint would keep them.
    project.config["store"]["compact"] = False
    project.llms = {"default": {**SLOW["default"], "rules": [{"contains": "x", "output": "old"}]}}

    def set_back() -> None:
        unfinished = tmp_path / "clock.new"
        unfinished.write_text("0")
        unfinished.replace(clock)

    with monkeypatch.context() as patch:
        patch.setenv("CLOCK_FILE", str(clock))
        path = os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", path)
        with During(project, set_back):
            outcome = project.dbt_process("run")
    assert outcome.success, outcome.log
    assert project.query("select count(*), count(distinct r) from answers") == [(ROWS, 1)]
    first, last = project.generations("epoch(min(created_at)), epoch(max(created_at))")[0]
    assert before - 1 < first < time.time()
    assert last > before + 2 * 24 * 3600

    # As if that run had been killed before its last commits.
    for commit in sorted((project.store / "_delta_log").glob("*.json"))[2:]:
        commit.unlink()
    assert 0 < stored(project) < ROWS
    project.llms = FAST
    outcome = project.dbt("run")
    assert outcome.summary("answers").startswith(f"{ROWS} prompts, {ROWS} stored, 0 generated")
    assert project.query("select distinct r from answers") == [("old",)]

    # The new answers are made earlier than the old ones, by the clock, and they count.
    outcome = project.dbt("run", llm_refresh=True)
    assert outcome.success, outcome.log
    assert_exact(project)
    assert_rerun_completes(project, ROWS)


# Descriptors

FEW = ("bash", "-c", 'ulimit -n 256; exec "$@"', "bash")


def test_256_descriptors_are_enough(project: Project) -> None:
    calls = ", ".join(
        f"llm_generate('x' || i, system := 'system {number}') as r{number}" for number in range(4)
    )
    project.model("answers", f"select i, {calls} from range(1000) t(i)")
    outcome = project.dbt_process("run", prefix=FEW)
    assert outcome.success, outcome.log
    right = " and ".join(f"r{number} = made_up('x' || i)" for number in range(4))
    assert project.query(f"select count(*), count(*) filter ({right}) from answers") == [
        (1000, 1000)
    ]


def test_256_descriptors_and_256_connections(project: Project) -> None:
    project.model("answers", "select i, llm_generate('x' || i) as r from range(1500) t(i)")
    with Endpoint(latency(0.3)) as endpoint:
        entry = {"engine": "openai", "model": "m", "base_url": endpoint.base_url}
        project.llms = {"default": {**entry, "max_concurrency": 400}}
        outcome = project.dbt_process("run", prefix=FEW)
        assert outcome.success, outcome.log
        assert len({request.prompt for request in endpoint.requests}) == 1500
        assert endpoint.count(200) == 1500
    assert project.query("select count(*), count(distinct r) from answers") == [(1500, 1500)]


# Memory


class Watched:
    """One dbt run in a process of its own, and the most memory that it and its workers took."""

    def __init__(self, project: Project, memory_limit: str, timeout_s: float) -> None:
        prepare = project._prepare

        def limited() -> None:
            prepare()
            profile = project.folder / "profiles.yml"
            options = f"{{memory_limit: {memory_limit}, temp_directory: '{project.folder}/tmp'}}"
            text = profile.read_text()
            profile.write_text(
                text.replace(
                    "      type: duckdb", f"      type: duckdb\n      config_options: {options}"
                )
            )

        project._prepare = limited  # type: ignore[method-assign]
        self.peaks: dict[str, int] = {}
        log = project.folder / "log.txt"
        started = time.monotonic()
        with log.open("wb") as file:
            process = subprocess.Popen(
                project.command("run"), cwd=project.folder, stdout=file, stderr=subprocess.STDOUT
            )
            while process.poll() is None:
                assert time.monotonic() - started < timeout_s, log.read_text()
                self._sample(psutil.Process(process.pid))
                time.sleep(0.1)
        project._prepare = prepare  # type: ignore[method-assign]
        self.outcome = Outcome(process.returncode == 0, log.read_text())
        mib = {name: peak >> 20 for name, peak in sorted(self.peaks.items())}
        print(f"\n{time.monotonic() - started:.0f} s, peak MiB per process: {mib}")

    def _sample(self, root: psutil.Process) -> None:
        try:
            family = [("dbt", root), *((child.name(), child) for child in root.children(True))]
            for name, process in family:
                memory = process.memory_info()
                # Ray's object store is shared memory, and has a size of its own.
                own = memory.rss - memory.shared
                self.peaks[name] = max(self.peaks.get(name, 0), own)
        except psutil.Error:
            pass


def many_bytes(project: Project, rows: int, size: int) -> None:
    project.config["store"]["keep_prompts"] = True
    prompt = f"i || repeat(' word', {size // 5})"
    project.model(
        "answers",
        f"select i, sha256({prompt}) as h, llm_generate({prompt}) as r from range({rows}) t(i)",
    )


def assert_right(project: Project, rows: int) -> None:
    assert project.query(
        "select count(*), count(*) filter (r = 'replay ' || left(h, 12)) from answers"
    ) == [(rows, rows)]


def test_more_bytes_of_prompts_than_memory(project: Project) -> None:
    many_bytes(project, 150_000, 4000)
    run = Watched(project, "320MB", 300)
    assert run.outcome.success, run.outcome.log
    assert_right(project, 150_000)
    assert run.peaks["dbt"] < 2000 << 20
    assert max(peak for name, peak in run.peaks.items() if name.startswith("ray::")) < 1500 << 20


@pytest.mark.long
def test_five_gib_of_prompts_in_one_gib(project: Project) -> None:
    many_bytes(project, 650_000, 8260)
    run = Watched(project, "1GB", 3600)
    assert run.outcome.success, run.outcome.log
    assert_right(project, 650_000)
    assert run.peaks["dbt"] < 4000 << 20
    assert max(peak for name, peak in run.peaks.items() if name.startswith("ray::")) < 2500 << 20


@pytest.mark.long
def test_three_thousand_prompts_of_a_megabyte(project: Project) -> None:
    many_bytes(project, 3000, 1_000_000)
    # DuckDB itself has 2,048 of them in its hands at a time, some six times.
    run = Watched(project, "8GB", 1800)
    assert run.outcome.success, run.outcome.log
    assert_right(project, 3000)
    assert max(peak for name, peak in run.peaks.items() if name.startswith("ray::")) < 1500 << 20


# Modes


def test_with_a_umask_of_nothing_prompts_are_still_the_owners_alone(project: Project) -> None:
    project.llms = SLOW
    open_to_others: dict[str, str] = {}
    folder = project.folder / "target" / "llm"

    def look() -> None:
        # The spool holds prompts, and is gone after the run.
        assert list((folder / "spool").glob("*/*/requests-*.parquet"))
        for root, folders, files in os.walk(folder):
            if stat.S_IMODE(Path(root).stat().st_mode) & 0o077 == 0:
                # Nobody comes in here.
                folders.clear()
                continue
            for name in files:
                mode = stat.S_IMODE((Path(root) / name).stat().st_mode)
                if mode & 0o077:
                    open_to_others[name] = oct(mode)

    before = os.umask(0)
    try:
        with During(project, look):
            outcome = project.dbt("run")
    finally:
        os.umask(before)
    assert outcome.success, outcome.log
    assert open_to_others == {}
