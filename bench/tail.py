"""The end of a job whose answers have very uneven lengths, in virtual time.

The requests are put in order by the real code, with a store that teaches the lengths and with none,
and shared out by the real feeder. The engines are simulated: each has slots, a request keeps one
for the time of its answer, and what engine and driver tell each other takes its way.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.figures import Figure
from dbt_llm.call import Call, prompt_hash
from dbt_llm.feeder import roomy_unit_rows
from dbt_llm.schema import Answer
from dbt_llm.spool import RawSpool, prepare_requests
from tests.unit.generations import call_of, write_part
from tests.virtual_engines import VirtualEngines

SLOTS = 64
REPLICAS = (1, 4, 16)
MOST_TOKENS = 4096
TOKEN_S = 0.02
WAY_S = 0.005
"""What a message between driver and engine takes."""
CALLS = 4
SIZES = (60, 120, 250, 500, 1000)
"""Characters of the prompts."""
HISTORY_ROWS = 4000
MOST_DRAWS = 3


def tail(rows: int, runs: int) -> list[Figure]:
    """Makespan against the larger of work / rate and the longest request; the worst of some draws.

    `rows` is per replica. With 10,000 the work of a replica takes 7 to 14 times as long as the
    longest request (`MOST_TOKENS`). Who does not know the lengths may begin the longest request at
    the very end, so without them nobody can promise less than 1 + 1/7.
    """
    figures = []
    for replicas in REPLICAS:
        for learned in (True, False):
            pairs = [
                _pair(rows * replicas, replicas, seed, learned)
                for seed in range(min(runs, MOST_DRAWS))
            ]
            ours, best = max(pairs, key=lambda pair: pair[0] / pair[1])
            label = (
                f"tail, {replicas} {'replica' if replicas == 1 else 'replicas'}, "
                f"{rows * replicas:,} rows, lengths {'learned' if learned else 'unknown'}"
            )
            target = "≤ 1.05" if learned else "≤ 1.15"
            figures.append(Figure(label, ours, best, target=target))
    return figures


def _pair(rows: int, replicas: int, seed: int, learned: bool) -> tuple[float, float]:
    """Return the makespan and what no schedule can beat."""
    order = _order(rows, seed, learned)
    unit_rows = roomy_unit_rows(rows, replicas)
    ours = VirtualEngines(order, replicas, SLOTS, unit_rows, WAY_S).run()
    return ours, max(sum(order) / (replicas * SLOTS), *order)


@dataclass(frozen=True)
class Request:
    """A prompt, its call and how long its answer is."""

    call: Call
    prompt: str
    tokens: int


def _requests(count: int, seed: int, part: str) -> list[Request]:
    """Make requests of several calls: each call and size has a mean of its own, heavy-tailed."""
    # What the means are is the same for the history and the job: the store has to teach them.
    means = random.Random(seed)
    mean_of = {
        (number, size): means.lognormvariate(5.0, 1.0) for number in range(CALLS) for size in SIZES
    }
    chance = random.Random(f"{seed} {part}")
    calls = [call_of(system=f"call {number}", max_tokens=MOST_TOKENS) for number in range(CALLS)]
    requests = []
    for number in range(count):
        which, size = chance.randrange(CALLS), chance.choice(SIZES)
        tokens = mean_of[which, size] * chance.lognormvariate(-0.125, 0.5)
        prompt = f"{chance.randrange(10**9)} {part} {number} ".ljust(size, "x")
        requests.append(Request(calls[which], prompt, max(1, min(MOST_TOKENS, round(tokens)))))
    return requests


def _order(rows: int, seed: int, learned: bool) -> list[float]:
    """Return the seconds of the requests, as the real code puts them in order."""
    requests = _requests(rows, seed, "new")
    with tempfile.TemporaryDirectory(prefix="dbt-llm-bench-") as name:
        folder = Path(name)
        history = _history(folder / "store", seed) if learned else []
        spool = RawSpool(folder / "raw")
        hashes = [prompt_hash(request.call.call_hash, request.prompt) for request in requests]
        spool.add(
            pa.record_batch(
                {
                    "prompt_hash": hashes,
                    "call_hash": [request.call.call_hash for request in requests],
                    "prompt": [request.prompt for request in requests],
                }
            )
        )
        raw = spool.take()
        assert raw is not None
        calls = {request.call.call_hash: request.call for request in requests}
        prepared = prepare_requests(
            raw, calls, folder / "requests", asked=[], others=[], limit=None, history=history
        )
        seconds = {
            key: request.tokens * TOKEN_S for key, request in zip(hashes, requests, strict=True)
        }
        order = [
            seconds[key]
            for file in prepared.files
            for key in pq.read_table(file.path)["prompt_hash"].to_pylist()
        ]
        assert len(order) == len(requests)
        return order


def _history(folder: Path, seed: int) -> list[str]:
    """Write part files of other prompts of the same calls."""
    requests = _requests(HISTORY_ROWS, seed, "old")
    files = []
    for call in {request.call for request in requests}:
        tokens = {r.prompt: r.tokens for r in requests if r.call == call}
        part = write_part(
            folder,
            tokens,
            lambda key, prompt, tokens=tokens: Answer(  # type: ignore[misc]
                key, output="", completion_tokens=tokens[prompt]
            ),
            call=call,
        )
        files.append(part.path)
    return files
