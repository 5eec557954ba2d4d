"""Part files of the store, as those know them who do not read them: names, counts, provenance."""

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbt_llm.storage import Folder

PART_PATTERN = "part-*.parquet"
"""All parts; their names are part-TIME-RUN-RANDOM.parquet."""


@dataclass(frozen=True)
class Provenance:
    """Where a generation comes from; the same for all generations of a job."""

    llm: str
    model: str
    engine: str
    pipeline_version: str
    node_id: str
    invocation_id: str
    run_id: str
    trace_id: str
    git_sha: str | None = None
    price_prompt: float = 0.0
    """USD per million prompt tokens."""
    price_completion: float = 0.0
    keep_prompts: bool = True
    after_us: int = 0
    """No generation is dated earlier, in µs since 1970: the newest one of a key has to win."""

    def cost_usd(self, prompt_tokens: float, completion_tokens: float) -> float:
        """Return what tokens cost."""
        return (
            prompt_tokens * self.price_prompt + completion_tokens * self.price_completion
        ) / 1_000_000


@dataclass(frozen=True)
class Part:
    """What the driver knows of a part file: enough to commit and to count, no rows."""

    path: str
    rows: int
    size: int
    call_hash: str
    min_hash: str
    max_hash: str
    prompt_tokens: int = 0
    """Of the rows for which something was generated."""
    completion_tokens: int = 0
    cost_usd: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    """Rows per error code."""
    example_hashes: dict[str, str] = field(default_factory=dict)
    """One prompt hash per error code, to look the row up."""
    example_errors: dict[str, str] = field(default_factory=dict)

    def stats(self) -> str:
        """Return the file statistics as Delta's log keeps them."""
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {"prompt_hash": self.min_hash, "call_hash": self.call_hash},
                "maxValues": {"prompt_hash": self.max_hash, "call_hash": self.call_hash},
                "nullCount": {"prompt_hash": 0, "call_hash": 0},
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the part as plain data."""
        return asdict(self)


def parts_of_run(folder: "Folder", run_id: str) -> list[str]:
    """Return the names of the part files that a run wrote, committed or not."""
    return folder.names(f"part-*-{run_id}-*.parquet")
