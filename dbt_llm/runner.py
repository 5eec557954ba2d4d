"""Turns request files into jobs, one per LLM, and keeps each job's spec where people can look."""

import json
import subprocess
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbt_llm.budget import Account, Amount, Limit, Meter
from dbt_llm.config import Config, LLMConfig, OpenAILLM
from dbt_llm.errors import BudgetError, CancelledError
from dbt_llm.files import file_name, write_private
from dbt_llm.job_spec import JobResult, JobSpec
from dbt_llm.parts import Provenance
from dbt_llm.progress import Progress, failure_lines
from dbt_llm.unique_keys import UniqueKeys
from dbt_llm.version import __version__

if TYPE_CHECKING:
    from dbt_llm.spool import RequestFile
    from dbt_llm.status_lines import StatusLines
    from dbt_llm.store import Store

_PATHS = {"vllm": ("model",), "replay": ("answers",), "openai": ("ca_file",)}
"""The settings of an engine that may be paths."""


@dataclass(frozen=True)
class Run:
    """One build of one dbt node."""

    run_id: str
    node_id: str
    invocation_id: str
    target_folder: Path
    """Where dbt writes its artifacts; specs and engine logs go to `llm/` in it."""
    spool_folder: Path
    dbt_version: str | None = None
    target: str | None = None
    """The name of dbt's target."""
    max_cost_usd: float | None = None
    """The dbt variable `llm_max_cost_usd`, for all models of the invocation."""
    after_us: int = 0
    """No generation is dated earlier, in µs since 1970."""

    @property
    def name(self) -> str:
        """See `node_name`."""
        return node_name(self.node_id)

    @property
    def unique_keys(self) -> UniqueKeys:
        """What runs of this target folder know of the keys of stores."""
        return UniqueKeys((self.target_folder / "llm" / "store" / "unique_keys.json").absolute())


def node_name(node_id: str) -> str:
    """Return a node's name without its project; a version stays, and the hash of a test goes."""
    name = node_id.split(".", 2)[-1]
    return name.rpartition(".")[0] or name if node_id.startswith("test.") else name


def new_run(node_id: str, invocation_id: str, target_folder: Path) -> Run:
    """Return a run with an id of its own."""
    run_id = uuid.uuid4().hex
    spool = (target_folder / "llm" / "spool" / run_id).absolute()
    return Run(run_id, node_id, invocation_id, target_folder, spool)


@dataclass(frozen=True)
class Output:
    """Where a run says what it does."""

    info: Callable[[str], None]
    warn: Callable[[str], None]
    terminal: "StatusLines | None" = None
    """Where a person watches."""


class Runner:
    """Runs the jobs of one build; an instance is the `run_jobs` of a resolve."""

    def __init__(
        self,
        config: Config,
        store: "Store",
        account: Account,
        run: Run,
        output: Output,
        cancelled: threading.Event,
    ) -> None:
        self._config = config
        self._account = account
        self._store = store
        self._run = run
        self._output = output
        self._cancelled = cancelled
        self.jobs: list[tuple[Provenance, JobResult]] = []
        """All jobs so far, those that failed included."""

    def __call__(self, files: "list[RequestFile]") -> list[JobResult]:
        """Ask for the answers to all files.

        Raises:
            DbtLLMError: see `run_job`.
        """
        by_llm: dict[str, list[RequestFile]] = {}
        for file in files:
            by_llm.setdefault(file.call.llm, []).append(file)
        meters = self._open_meters(by_llm)
        try:
            return [self._run_one(llm, own, meters[llm]) for llm, own in sorted(by_llm.items())]
        finally:
            for meter in meters.values():
                meter.close()

    def _open_meters(self, by_llm: "dict[str, list[RequestFile]]") -> dict[str, Meter]:
        """Refuse what is over the budget before the first request, where the profile says so."""
        rows = {llm: sum(file.rows for file in files) for llm, files in by_llm.items()}
        amounts = {llm: self._expected(llm, files) for llm, files in by_llm.items()}
        meters = self._account.open(
            {llm: (amount * (1 / rows[llm]), rows[llm]) for llm, amount in amounts.items()},
            claim=self._config.budget.on_exceeded == "error",
        )
        if isinstance(meters, Limit):
            total = sum(amounts.values(), Amount())
            raise BudgetError(
                f"{self._run.name} would ask {total.requests:,.0f} requests, of about "
                f"{total.tokens:,.0f} tokens and {total.cost_usd:,.4f} USD, and the budget is "
                f"{meters} or claimed by other models in this run. Nothing was asked for it. Raise "
                "the budget, set budget.on_exceeded to partial to ask as much as it allows, or try "
                "the model with llm_limit."
            )
        return meters

    def _expected(self, llm: str, files: "list[RequestFile]") -> Amount:
        price = self._config.llms[llm].price
        total = Amount()
        for file in files:
            tokens = file.prompt_tokens + file.completion_tokens
            cost = price.of(file.prompt_tokens, file.completion_tokens)
            total += Amount(1, tokens, cost) * file.rows
        return total

    def origin(self) -> dict[str, Any]:
        """Return whose run it is, as columns of the run log."""
        run = self._run
        return {
            "run_id": run.run_id,
            "node_id": run.node_id,
            "invocation_id": run.invocation_id,
            "trace_id": _trace_id(run),
            "pipeline_version": __version__,
            "git_sha": _git_sha(),
            "dbt_version": run.dbt_version,
            "target": run.target,
        }

    def _run_one(self, llm: str, files: "list[RequestFile]", meter: Meter) -> JobResult:
        from dbt_llm.job import run_job

        secrets = self._config.llms[llm].secrets()
        spec = self._spec(llm, files)
        name = file_name(self._run.node_id)
        path = self._run.target_folder / "llm" / f"{name}.json"
        write_private(path, json.dumps(spec.as_dict(), indent=2))
        progress = Progress(self._run.name, self._output.info, self._output.terminal)
        self._output.info(
            f"llm: {self._run.name}: asking {llm} ({spec.provenance.model}) for "
            f"{spec.rows:,} {'answer' if spec.rows == 1 else 'answers'}"
        )
        result = JobResult(asked=spec.rows)
        self.jobs.append((spec.provenance, result))
        try:
            if meter.used_up() is None:
                run_job(spec, secrets, self._store, self._cancelled, progress, result, meter)
            else:
                result.left_out = spec.rows
        except CancelledError as error:
            # dbt shows no errors of nodes that the user interrupted.
            self._output.warn(f"llm: {self._run.name}: {error}")
            raise
        finally:
            limit = meter.used_up()
            meter.close(Amount(result.answered, result.tokens, result.cost_usd))
            progress.close()
        if result.left_out:
            self._tell_left_out(result, limit)
        for line in failure_lines(self._run.name, result):
            self._output.warn(line)
        return result

    def _tell_left_out(self, result: JobResult, limit: Limit | None) -> None:
        words = (
            f"{result.left_out:,} of {result.asked:,} prompts were not asked, because "
            f"{limit or 'the budget is used up'} in this run"
        )
        if self._config.budget.on_exceeded == "error":
            raise BudgetError(
                f"{words}: the answers took more than was expected. What was answered is stored; "
                "the next run asks for the rest."
            )
        self._output.warn(
            f"llm: {self._run.name}: {words}; the next run asks for them, and until then they are "
            "NULL or what they were"
        )

    def _spec(self, llm: str, files: "list[RequestFile]") -> JobSpec:
        entry = self._config.llms[llm]
        return JobSpec(
            llm=llm,
            engine=engine_settings(entry),
            replicas=entry.replicas,
            requests=files,
            store_folder=str(self._store.files),
            provenance=Provenance(
                llm=llm,
                model=entry.model,
                engine=entry.engine,
                pipeline_version=__version__,
                node_id=self._run.node_id,
                invocation_id=self._run.invocation_id,
                run_id=self._run.run_id,
                trace_id=_trace_id(self._run),
                git_sha=_git_sha(),
                price_prompt=entry.price.prompt,
                price_completion=entry.price.completion,
                keep_prompts=self._config.store.keep_prompts,
                after_us=self._run.after_us,
            ),
            ray_address=self._config.ray.address,
            log_folder=str((self._run.target_folder / "llm" / "logs").absolute()),
            work_folder=str(self._run.spool_folder),
            commit_interval_s=self._config.commit_interval_s,
        )


def engine_settings(entry: LLMConfig) -> dict[str, Any]:
    """Return what an engine is started with, as plain data without secrets."""
    # Sampling, system prompt and price belong to calls, so they do not make another engine.
    apart = {
        "sampling",
        "system",
        "price",
        "budget",
        "replicas",
        "api_key",
        "headers",
        "query",
        "proxy",
    }
    settings = entry.model_dump(mode="json", exclude=apart)
    if isinstance(entry, OpenAILLM):
        # The limits hold for all replicas together.
        for limit in ("requests_per_minute", "tokens_per_minute"):
            if settings[limit] is not None:
                settings[limit] /= entry.replicas
    # Workers may run in another folder; a model of a relative path becomes absolute for them.
    for key in _PATHS[entry.engine]:
        if settings[key] is not None and Path(settings[key]).expanduser().exists():
            settings[key] = str(Path(settings[key]).expanduser().absolute())
    return settings


def _trace_id(run: Run) -> str:
    return run.invocation_id.replace("-", "")


@cache
def _git_sha() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
