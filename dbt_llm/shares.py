"""Which requests go into which file, so that a job asks for the longest answers first.

A file holds requests of one call, in classes of a power of two of the tokens that are expected.
Files follow each other, so a call whose answers are partly longer and partly shorter than those of
another call has several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb

from dbt_llm import sql
from dbt_llm.call import Call
from dbt_llm.lengths import EXPECTED, expect_lengths, size_class, usual_tokens

FRESH = "fresh"
"""The temporary table of what is to be asked: call_hash, row, beginning and length of a prompt."""

# Prompts that begin alike share the engine's prefix cache, as far as they lie together. So many
# of them stay together whatever the length of their answers, where they are a small part.
_GROUP_ROWS = 512
_GROUP_SHARE = 16
# Where answers of other calls lie between, a call has several files: one for answers of 1 to 3
# tokens, one for those to 15, and so on. To open one takes Ray a fifth of a second.
_CLASSES_PER_FILE = 2
_LEAST_FILE_ROWS = 64


@dataclass(frozen=True)
class Share:
    """What goes into one file."""

    call: Call
    requests: str
    """A SQL expression for FROM with the columns row, length, beginning and class."""
    rows: int
    highest: int
    """The class of its longest answers: the logarithm to base 2 of their tokens."""
    tokens: float
    """The mean that is expected."""


def share_out(
    connection: duckdb.DuckDBPyConnection, calls: Mapping[str, Call], history: Sequence[str]
) -> list[Share]:
    """Share the requests of the table `FRESH` out to files, the longest answers first."""
    found = connection.execute(
        f"select call_hash, count(*) from {FRESH} group by call_hash order by call_hash"
    ).fetchall()
    asked = {call_hash: calls[call_hash] for call_hash, _ in found}
    learned = expect_lengths(connection, history, asked)
    llms = [call.llm for call in asked.values()]
    shares = []
    for number, (call_hash, rows) in enumerate(found):
        call = asked[call_hash]
        if call_hash in learned:
            table = f"classed_{number:d}"
            _classify(connection, call_hash, table)
            shares += _bands(connection, call, table, alone=llms.count(call.llm) == 1)
        else:
            tokens = usual_tokens(call)
            requests = (
                f"(select row, length, beginning, 0 as class from {FRESH} "
                f"where call_hash = {sql.literal(call_hash)})"
            )
            shares.append(Share(call, requests, rows, tokens.bit_length() - 1, tokens))
    return sorted(
        shares,
        key=lambda share: (-(share.highest // _CLASSES_PER_FILE), -share.tokens),
    )


def _classify(connection: duckdb.DuckDBPyConnection, call_hash: str, table: str) -> None:
    """Create a table of a call's requests with the class of their expected tokens."""
    of_call = f"call_hash = {sql.literal(call_hash)}"
    connection.execute(f"""
        create temp table {table} as
        with expected as (
            select row, length, beginning, coalesce(
                e.tokens, (select tokens from {EXPECTED} where {of_call} and size is null)
            ) as tokens
            from {FRESH}
            left join (select size, tokens from {EXPECTED} where {of_call}) as e
            on e.size = {size_class("length")}
            where {of_call}
        ),
        classed as (
            select *, cast(floor(log2(greatest(1, tokens))) as integer) as own_class
            from expected
        )
        select
            row, length, beginning, tokens,
            case
                when count(*) over alike
                    <= least({_GROUP_ROWS}, (select count(*) from classed) // {_GROUP_SHARE})
                then max(own_class) over alike
                else own_class
            end as class
        from classed
        window alike as (partition by beginning)""")


def _bands(
    connection: duckdb.DuckDBPyConnection, call: Call, table: str, alone: bool
) -> list[Share]:
    """Return the files of a call; few requests go along with those of longer answers."""
    found = connection.execute(f"""
        select class // {_CLASSES_PER_FILE} as band, count(*), max(class), avg(tokens)
        from {table} group by band order by band desc""").fetchall()
    shares: list[Share] = []
    top = 0
    for band, rows, highest, tokens in found:
        joins = shares and (alone or rows < _LEAST_FILE_ROWS)
        top = top if joins else band
        within = f"class // {_CLASSES_PER_FILE} between {band:d} and {top:d}"
        share = Share(call, f"(select * from {table} where {within})", rows, highest, tokens)
        if joins:
            before = shares.pop()
            both = before.rows + rows
            mean = (before.rows * before.tokens + rows * tokens) / both
            share = replace(share, rows=both, highest=before.highest, tokens=mean)
        shares.append(share)
    return shares
