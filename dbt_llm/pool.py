"""Engine actors that outlive a job: one start per LLM and process, however many models use it."""

import itertools
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbt_llm.call import canonical_json, sha256_hex
from dbt_llm.engine_actor import EngineActor
from dbt_llm.errors import EngineError
from dbt_llm.files import file_name

_CONCURRENT_METHODS = 1000

_lock = threading.Lock()
_pools: dict[str, "Pool"] = {}
_numbers = itertools.count(1)


@dataclass(eq=False)
class Replica:
    """One engine actor, as the driver sees it."""

    actor: Any
    log_path: str
    concurrency: int | None = None
    """None until the engine has started."""
    version: str = ""
    """That of the engine."""
    dead: bool = False
    flush_sent: float = 0.0
    """When it was last told to write, on the monotonic clock."""


@dataclass
class Pool:
    """The replicas of one LLM."""

    config: dict[str, Any]
    log_folder: str
    size: int
    secrets: dict[str, Any] = field(repr=False)
    replicas: list[Replica] = field(default_factory=list)
    deaths: int = 0
    """Deaths in a row; a unit that comes back sets it to zero."""
    last_words: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def alive(self, most_deaths: int) -> list[Replica]:
        """Return the replicas, and start those that are missing.

        Raises:
            EngineError: engines died too often without finishing any unit in between.
        """
        with self.lock:
            self.replicas = [replica for replica in self.replicas if not replica.dead]
            if len(self.replicas) < self.size and self.deaths >= most_deaths:
                words = self.last_words.rstrip(".")
                raise EngineError(
                    f"The engine of {self.config['model']} died {self.deaths} times without "
                    f"finishing anything in between: {words}. Its logs are in "
                    f"{self.log_folder}. What was answered before is stored."
                )
            while len(self.replicas) < self.size:
                self.replicas.append(self._start_replica())
            return list(self.replicas)

    def bury(self, replica: Replica, reason: str) -> None:
        """Note that a replica died, and make sure that it did."""
        import ray

        with self.lock:
            if replica.dead:
                return
            replica.dead = True
            self.deaths += 1
            self.last_words = reason
        ray.kill(replica.actor)

    def _start_replica(self) -> Replica:
        import ray

        number = next(_numbers)
        log_path = str(
            Path(self.log_folder) / f"{file_name(Path(self.config['model']).name)}-{number}.log"
        )
        actor_class = ray.remote(EngineActor).options(
            num_cpus=0,
            num_gpus=_gpus(self.config),
            # Ray spreads only what asks for something; an actor that asks for nothing it puts
            # anywhere, so that all might start on one machine of a cluster. One byte will do.
            memory=1,
            scheduling_strategy="SPREAD",
            max_concurrency=_CONCURRENT_METHODS,
            max_restarts=0,
            max_task_retries=0,
        )
        return Replica(actor_class.remote(self.config, log_path), log_path)


def get_pool(config: dict[str, Any], secrets: dict[str, Any], size: int, log_folder: str) -> Pool:
    """Return this process's pool for an LLM; equal configs share one."""
    key = sha256_hex(canonical_json([config, secrets]))
    with _lock:
        if key not in _pools:
            _pools[key] = Pool(config, log_folder, size, secrets)
        return _pools[key]


def close_pools(keep: int = 0) -> None:
    """End the engines of this process, but for those of the first `keep` pools."""
    import ray

    with _lock:
        for key in list(_pools)[keep:]:
            for replica in _pools.pop(key).replicas:
                ray.kill(replica.actor)


def _gpus(config: dict[str, Any]) -> int:
    import ray

    if config["engine"] != "vllm" or ray.cluster_resources().get("GPU", 0) == 0:
        return 0
    arguments = config["engine_args"]
    return int(
        arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    )
