"""Print some rows of the example project's tables, and the totals of its store of answers."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import duckdb
from deltalake import DeltaTable
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Seven tickets with a reply, picked by a hash so that every run shows the same ones, and one that
# failed.
SAMPLE = """
with rows as (
    select
        ticket_id,
        body,
        coalesce(summary, '(' || error_code || ')') as summary,
        reply,
        error_code
    from ticket_summaries
    left join ticket_replies using (ticket_id)
),
answered as (
    select * from rows where reply is not null and length(body) between 60 and 300
    order by md5(ticket_id::varchar) limit 7
),
failed as (
    select * from rows where error_code is not null order by ticket_id limit 1
)
select ticket_id, body, summary, reply
from (from answered union all from failed)
order by ticket_id
"""

TOTALS = """
select
    status,
    coalesce(error_code, '') as error_code,
    count(*) as requests,
    coalesce(sum(prompt_tokens), 0)::bigint as prompt_tokens,
    coalesce(sum(completion_tokens), 0)::bigint as completion_tokens
from generations
group by all
order by requests desc
"""


def main() -> None:
    """Parse the arguments and print the tables, or only the number of stored answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--database", type=Path, required=True, help="the DuckDB file of the project"
    )
    parser.add_argument("--store", type=Path, required=True, help="the folder of the store")
    parser.add_argument(
        "--count", action="store_true", help="print only how many answers are stored"
    )
    arguments = parser.parse_args()
    generations = str(arguments.store / "generations")
    stored = DeltaTable.is_deltatable(generations)

    if arguments.count:
        print(DeltaTable(generations).to_pyarrow_dataset().count_rows() if stored else 0)
        return
    console = Console(width=min(max(shutil.get_terminal_size().columns, 80), 100))
    show_sample(console, arguments.database)
    if stored:
        show_totals(console, generations)


def show_sample(console: Console, database: Path) -> None:
    """Print a few tickets with their summary and reply."""
    table = Table(title="ticket_summaries and ticket_replies", show_lines=True, expand=True)
    table.add_column("ticket", justify="right")
    for name in ("body", "summary", "reply"):
        table.add_column(name, ratio=1)
    with duckdb.connect(str(database), read_only=True) as connection:
        for ticket_id, *texts in connection.execute(SAMPLE).fetchall():
            table.add_row(str(ticket_id), *(shorten(text) for text in texts))
    console.print(table)


def show_totals(console: Console, generations: str) -> None:
    """Print the requests and tokens in the store, by status and error code."""
    table = Table(title="The store")
    for name in ("status", "error_code"):
        table.add_column(name)
    for name in ("requests", "prompt_tokens", "completion_tokens"):
        table.add_column(name, justify="right")
    with duckdb.connect() as connection:
        connection.register("generations", DeltaTable(generations).to_pyarrow_dataset())
        for status, error_code, *numbers in connection.execute(TOTALS).fetchall():
            table.add_row(status, error_code, *(f"{number:,}" for number in numbers))
    console.print(table)


def shorten(text: str | None, width: int = 75) -> str:
    """Put a text on one line of at most `width` characters, without what rich takes for markup."""
    line = " ".join((text or "").split())
    return escape(line if len(line) <= width else line[: width - 1] + "…")


if __name__ == "__main__":
    main()
