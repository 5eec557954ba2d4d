"""Joins Ray, or starts a private one, once per process.

The thread that calls `ray.init` must live as long as Ray is used (with Ray 2.60 calls from other
threads hang once it has ended), and dbt's threads come and go, so a thread of ours does it.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

from dbt_llm.errors import EngineError

_PROBE_TIMEOUT_S = 5.0
_INIT_TIMEOUT_S = 120.0
_OBJECT_STORE_BYTES = 512 * 1024 * 1024

_LOGS = "/tmp/ray/session_latest/logs"

_lock = threading.Lock()


def connect(address: str | None) -> None:
    """Make Ray usable from every thread of this process; what is there already is used as it is.

    Args:
        address: None for a private Ray on this machine, `auto`, or `host:port` of a cluster.

    Raises:
        EngineError: Ray does not start, or the cluster does not answer.
    """
    with _lock:
        # Ray reads these when it is imported. Without the first it reports usage to its makers;
        # without the last a private Ray uses the machine's own address, not the loopback one.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DATA_LOG_LEVEL", "ERROR")
        if address is None:
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        import ray

        if ray.is_initialized():
            return
        if address is not None and address != "auto":
            _probe(address)
        _start(address)


def describe_cluster() -> str:
    """Return the version of the Ray that is joined, and what it has."""
    import ray

    have = ray.cluster_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    return (
        f"{ray.__version__}, {have.get('CPU', 0):g} CPUs and {have.get('GPU', 0):g} GPUs "
        f"on {nodes} {'node' if nodes == 1 else 'nodes'}"
    )


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; Ray's errors go on for pages."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def as_engine_error() -> Iterator[None]:
    """Raise Ray's own failures, such as the death of its processes, as an `EngineError`."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise EngineError(
            f"Ray failed: {first_line(error)} Its logs are in {_LOGS}. What was answered "
            "before is stored; run dbt again, which asks for the rest."
        ) from error


def _start(address: str | None) -> None:
    ready = threading.Event()
    failure: list[BaseException] = []

    def live() -> None:
        try:
            _init(address)
        except BaseException as error:
            failure.append(error)
            ready.set()
            return
        ready.set()
        threading.Event().wait()

    threading.Thread(target=live, name="dbt-llm-ray", daemon=True).start()
    if not ready.wait(_INIT_TIMEOUT_S):
        raise EngineError(
            f"Ray did not start within {_INIT_TIMEOUT_S:.0f} s. Its logs are in {_LOGS}."
        )
    if failure:
        raise EngineError(f"Ray did not start: {failure[0]}") from failure[0]


def _init(address: str | None) -> None:
    import ray

    common = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if address is not None:
        ray.init(address=address, **common)
        return
    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=_cpus(),
        object_store_memory=_OBJECT_STORE_BYTES,
        **common,
    )


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _probe(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(
            socket.create_connection((host or "127.0.0.1", int(port)), _PROBE_TIMEOUT_S)
        ):
            pass
    except (OSError, ValueError) as error:
        raise EngineError(
            f"No Ray cluster answers at {address!r} (ray.address in the profile): {error}. "
            "Give HOST:PORT of its head, by default port 6379, or null for a private Ray."
        ) from error
