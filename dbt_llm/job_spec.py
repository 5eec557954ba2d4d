"""What a job is told and what it did: plain data."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dbt_llm.parts import Part, Provenance
from dbt_llm.tally import Tally

if TYPE_CHECKING:
    from dbt_llm.spool import RequestFile


@dataclass(frozen=True)
class JobSpec:
    """All that a job needs to know; written to `target/llm/` to be looked at."""

    llm: str
    engine: dict[str, Any]
    replicas: int
    requests: "list[RequestFile]"
    store_folder: str
    provenance: Provenance
    ray_address: str | None
    log_folder: str
    work_folder: str
    commit_interval_s: float

    @property
    def rows(self) -> int:
        """Requests in all."""
        return sum(file.rows for file in self.requests)

    def as_dict(self) -> dict[str, Any]:
        """Return the spec as plain data."""
        return asdict(self)


@dataclass
class JobResult:
    """What a job did so far."""

    asked: int = 0
    left_out: int = 0
    """Requests that were not sent, for want of budget."""
    engine_version: str | None = None
    """None until an engine has started."""
    parts: list[Part] = field(default_factory=list)
    engine_start_s: float = 0.0
    """From the job's start until the first unit went to an engine."""
    generating_since: float | None = None
    """When that was, on the monotonic clock."""
    generating_s: float = 0.0
    """All the rest, commits included."""
    committing_s: float = 0.0
    engine_deaths: int = 0
    told: Tally = field(default_factory=Tally)
    """What the engines say that they answered, written or not."""

    @property
    def heard(self) -> Tally:
        """What is answered, as far as it is known here."""
        written = Tally(self.answered, self.prompt_tokens, self.completion_tokens)
        return written if written.rows >= self.told.rows else self.told

    @property
    def answered(self) -> int:
        """Generations written, failed ones included."""
        return sum(part.rows for part in self.parts)

    @property
    def errors(self) -> dict[str, int]:
        """Failed rows per error code."""
        total: dict[str, int] = {}
        for part in self.parts:
            for code, rows in part.errors.items():
                total[code] = total.get(code, 0) + rows
        return total

    @property
    def failed(self) -> int:
        """Failed rows."""
        return sum(self.errors.values())

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens."""
        return sum(part.prompt_tokens for part in self.parts)

    @property
    def completion_tokens(self) -> int:
        """Completion tokens."""
        return sum(part.completion_tokens for part in self.parts)

    @property
    def cost_usd(self) -> float:
        """What the generations cost by the LLM's price."""
        return sum(part.cost_usd for part in self.parts)
