"""How long answers are expected to be, from those that the store has of the same call.

An engine that begins with the long ones ends with the short ones, and then no slot stays busy while
the others are idle. The length of an answer is not known before, but prompts of one call and of
about one length get answers of about one length. So the mean of each class is learned: a call, and
the power of two below the bytes of a prompt. Where the store has no prompts (`keep_prompts: false`)
there is one class for the call.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dbt_llm import sql
from dbt_llm.call import Call, user_turn
from dbt_llm.credentials import is_url
from dbt_llm.errors import StoreError
from dbt_llm.storage import Folder

EXPECTED = "expected_tokens"
"""The temporary table (call_hash, size, tokens): a size of NULL stands for all other prompts."""
_FITTED = "fitted_prompts"
"""The temporary table (call_hash, per_byte, base, mean) of the tokens of prompts."""
_BYTES_PER_TOKEN = 4
# Of a chat template, beside the texts.
_TEMPLATE_TOKENS = 12

# Enough for a mean, and read in some hundredths of a second however large the store is.
_NEWEST_FILES = 32
_OLDER_FILES = 32
_FILES_PER_CALL = 16
_ROWS_PER_CALL = 32_000
_MOST_PROMPT_BYTES = 48 * 1024 * 1024
_LEAST_ROWS_OF_CLASS = 8
_TOKENS_OF_CHOICE = 4
_TOKENS_OF_JSON = 64
_COLUMNS = ["call_hash", "prompt", "prompt_tokens", "completion_tokens"]
# Of an object store each file takes requests, and its prompts come over a network.
_NEWEST_OBJECTS = 4
_OLDER_OBJECTS = 4


def near_history(files: Folder, history: Sequence[str], folder: Path) -> Sequence[str]:
    """Return the store's part files as they can be read here.

    Of an object store, a few are copied into a folder, less the answers.
    """
    if not is_url(str(files)):
        return history
    # What is gone or damaged since is no reason not to ask.
    with suppress(pa.ArrowException, OSError, StoreError):
        few = _spread(history, _NEWEST_OBJECTS, _OLDER_OBJECTS)
        return files.fetch(few, folder / "history", _COLUMNS)
    return []


def _spread(history: Sequence[str], newest: int, older: int) -> list[str]:
    """Return the newest files and some of the others.

    A job that knows the lengths writes the short answers last, so the newest files do not do.
    """
    # A part's name begins with its time.
    files = sorted(history, key=lambda path: Path(path).name, reverse=True)
    others = files[newest:]
    return files[:newest] + others[:: max(1, -(-len(others) // older))]


def size_class(length: str) -> str:
    """Return the SQL expression of the class of a prompt, from that of its bytes."""
    return f"cast(floor(log2({length} + 1)) as integer)"


def expect_lengths(
    connection: duckdb.DuckDBPyConnection, history: Sequence[str], calls: Mapping[str, Call]
) -> set[str]:
    """Create the table `EXPECTED` for some calls; return the hashes of those that are learned.

    `history` is the store's part files, in any order; a bounded sample of them is read.
    """
    connection.execute(
        f"create or replace temp table {EXPECTED} (call_hash varchar, size integer, tokens double)"
    )
    connection.execute(
        f"create or replace temp table {_FITTED} "
        "(call_hash varchar, per_byte double, base double, mean double)"
    )
    wanted = {key for key, call in calls.items() if call.content["output"]["type"] != "embedding"}
    samples = _samples(history, wanted)
    if samples:
        # What is gone or damaged since is no reason not to ask.
        with suppress(duckdb.Error):
            _learn(connection, samples)
    known = connection.execute(f"select call_hash from {EXPECTED} where size is null").fetchall()
    learned = {call_hash for (call_hash,) in known}
    others = ", ".join(
        f"({sql.literal(call_hash)}, null, {usual_tokens(calls[call_hash]):d})"
        for call_hash in calls.keys() - learned
    )
    if others:
        connection.execute(f"insert into {EXPECTED} values {others}")
    return learned


def prompt_tokens(connection: duckdb.DuckDBPyConnection, call: Call, mean_bytes: float) -> float:
    """Return how many tokens a request of a call has on average, its texts and template included.

    What the store has of the call is fitted by a line over the bytes of the prompt. Without any, a
    token stands for four bytes.
    """
    found = connection.execute(
        f"select per_byte, base, mean from {_FITTED} "
        f"where call_hash = {sql.literal(call.call_hash)}"
    ).fetchall()
    if not found:
        if call.content["output"]["type"] == "embedding":
            return 1 + mean_bytes / _BYTES_PER_TOKEN
        texts = (call.content.get("system") or "") + user_turn(call.content, "")
        return _TEMPLATE_TOKENS + (len(texts.encode()) + mean_bytes) / _BYTES_PER_TOKEN
    ((per_byte, base, mean),) = found
    return float(mean if per_byte is None else max(1.0, base + per_byte * mean_bytes))


def usual_tokens(call: Call) -> int:
    """Return what to expect of a call without any history."""
    content = call.content
    match content["output"]["type"]:
        case "embedding":
            return 0
        case "choice":
            return _TOKENS_OF_CHOICE
        case "json":
            return _TOKENS_OF_JSON
    return int(content["sampling"]["max_tokens"])


@dataclass(frozen=True)
class _Sample:
    """Some rows of a part file."""

    file: str
    call_hash: str
    rows: int


def _samples(history: Sequence[str], wanted: set[str]) -> list[_Sample]:
    """Choose what is read of the store."""
    looked_at = _spread(history, _NEWEST_FILES, _OLDER_FILES)
    found: dict[str, list[tuple[str, int, float]]] = {key: [] for key in wanted}
    for file in looked_at if wanted else []:
        with suppress(pa.ArrowException, OSError):
            rows, prompt_bytes, held = _look_at(file, wanted)
            for call_hash in held:
                found[call_hash].append((file, rows, prompt_bytes / max(1, rows)))
    samples = []
    for call_hash, holding in found.items():
        chosen = holding[:: max(1, -(-len(holding) // _FILES_PER_CALL))]
        bytes_per_file = _MOST_PROMPT_BYTES / max(1, len(wanted) * len(chosen))
        for file, rows, row_bytes in chosen:
            fitting = int(min(_ROWS_PER_CALL // len(chosen), bytes_per_file / max(1.0, row_bytes)))
            samples.append(_Sample(file, call_hash, max(1, min(rows, fitting))))
    return samples


def _look_at(file: str, wanted: set[str]) -> tuple[int, int, set[str]]:
    """Return a file's rows, the bytes of its prompts and the calls that it may hold."""
    metadata = pq.read_metadata(file)
    call_hash, prompt = map(metadata.schema.names.index, ("call_hash", "prompt"))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    held = set()
    for group in groups:
        found = group.column(call_hash).statistics
        held |= {key for key in wanted if found is None or found.min <= key <= found.max}
    prompt_bytes = sum(group.column(prompt).total_uncompressed_size for group in groups)
    return metadata.num_rows, prompt_bytes, held


def _learn(connection: duckdb.DuckDBPyConnection, samples: list[_Sample]) -> None:
    parts = " union all ".join(
        "(select call_hash, strlen(prompt) as bytes, prompt_tokens, completion_tokens "
        f"from {sql.parquet([sample.file])} where call_hash = {sql.literal(sample.call_hash)} "
        f"and completion_tokens is not null limit {sample.rows:d})"
        for sample in samples
    )
    connection.execute(f"create or replace temp table sampled as {parts}")
    connection.execute(f"""
        insert into {_FITTED}
        select
            call_hash,
            if(isfinite(slope), slope, null) as per_byte, mean - mean_bytes * slope as base, mean
        from (
            select
                call_hash, regr_slope(prompt_tokens, bytes) as slope, avg(prompt_tokens) as mean,
                avg(bytes) filter (prompt_tokens is not null) as mean_bytes
            from sampled group by call_hash
        )
        where mean is not null""")
    connection.execute(f"""
        insert into {EXPECTED}
        select call_hash, size, avg(completion_tokens) as tokens
        from (select call_hash, {size_class("bytes")} as size, completion_tokens from sampled)
        group by grouping sets ((call_hash, size), (call_hash))
        having grouping(size) = 1 or (size is not null and count(*) >= {_LEAST_ROWS_OF_CLASS})""")
