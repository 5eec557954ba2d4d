"""A Ray cluster of three nodes, one of which dies with its engine while a job runs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.endpoint import MODEL, Endpoint, echo, latency
from tests.project import Project

ROWS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Cluster"]:
    with pytest.MonkeyPatch.context() as patch:
        # As dbt's process has it: else the two do not speak the same protocol.
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        cluster = Cluster()
        yield cluster
        cluster.stop()


class Cluster:
    """Three nodes of one CPU each, as processes of this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        self._cluster = RayCluster()
        node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 100 * 2**20}
        self._cluster.add_node(**node, include_dashboard=False)
        self.workers = [self._cluster.add_node(**node) for _ in range(2)]
        self._cluster.wait_for_nodes()
        self.address: str = self._cluster.address

    def stop(self) -> None:
        self._cluster.shutdown()

    def kill(self, node: Any) -> None:
        """Kill all of a node at once, as when its machine loses power."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [*raylet.children(recursive=True), raylet]:
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)


def engines_of(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [p for p in raylet.children(recursive=True) if p.name().startswith("ray::Engine")]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "a project")
    project.config["commit_interval_s"] = 0.5
    project.model("answers", f"select i, llm_generate('x' || i) as r from range({ROWS}) t(i)")
    return project


def use(project: Project, endpoint: Endpoint) -> None:
    project.llms = {
        "default": {
            "engine": "openai",
            "base_url": endpoint.base_url,
            "model": MODEL,
            "api_key": "none",
            "max_concurrency": 4,
            "replicas": 3,
        }
    }


def assert_exact(project: Project) -> None:
    rows = project.query("select i, r from answers order by i")
    assert rows == [(i, echo(f"x{i}")) for i in range(ROWS)]
    good = project.generations("count(distinct prompt_hash)", "status = 'ok'")
    assert good == [(ROWS,)]


def test_a_node_dies_with_its_engine(project: Project, cluster: Cluster, tmp_path: Path) -> None:
    project.config["ray"] = {"address": cluster.address}
    with Endpoint(latency(0.2)) as endpoint:
        use(project, endpoint)
        log = tmp_path / "run.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                project.command("run"), cwd=project.folder, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            endpoint.wait_until(lambda seen: seen.count(200) >= ROWS // 4, timeout_s=120)
            node = max(cluster.workers, key=lambda node: len(engines_of(node)))
            assert 1 <= len(engines_of(node)) <= 2
            cluster.workers.remove(node)
            cluster.kill(node)
            assert process.wait(timeout=180) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
        assert_exact(project)
        asked_again = [request for request in endpoint.requests if request.attempt]
        # What the engine had answered and not written, and what it had in flight.
        assert len(asked_again) <= ROWS // 2
        before = len(endpoint.requests)
        assert project.dbt_process("run").success
        assert len(endpoint.requests) == before


def test_the_cluster_of_this_machine_is_found_and_left_running(
    project: Project, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.config["ray"] = {"address": "auto"}
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with Endpoint() as endpoint:
        use(project, endpoint)
        outcome = project.dbt_process("run")
        assert outcome.success, outcome.log
        assert_exact(project)
    program = "import ray; ray.init('auto', log_to_driver=False); print(len(ray.nodes()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
