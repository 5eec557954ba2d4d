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

# What was extracted from the angriest tickets, and the subjects that are most alike.
FACTS = """
select ticket_id, body, about, days_waited, amount
from ticket_facts
order by ticket_id
limit 6
"""

PAIRS = """
select subject, most_similar, similarity
from similar_subjects
where subject < most_similar or not exists (
    from similar_subjects as other
    where other.subject = similar_subjects.most_similar
        and other.most_similar = similar_subjects.subject
)
order by similarity desc, subject
limit 6
"""

TOPICS = """
select topic, sum(tickets)::bigint as tickets, string_agg(subject, ', ' order by tickets desc)
from ticket_topics
group by topic
order by tickets desc
"""

TOTALS = """
select
    llm,
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
    with duckdb.connect(str(arguments.database), read_only=True) as connection:
        show_sample(console, connection)
        show_rest(console, connection)
    if stored:
        show_totals(console, generations)


def show_sample(console: Console, connection: duckdb.DuckDBPyConnection) -> None:
    """Print a few tickets with their summary and reply."""
    table = Table(title="ticket_summaries and ticket_replies", show_lines=True, expand=True)
    table.add_column("ticket", justify="right")
    for name in ("body", "summary", "reply"):
        table.add_column(name, ratio=1)
    for ticket_id, *texts in connection.execute(SAMPLE).fetchall():
        table.add_row(str(ticket_id), *(shorten(text) for text in texts))
    console.print(table)


def show_rest(console: Console, connection: duckdb.DuckDBPyConnection) -> None:
    """Print a few rows of the models with typed columns and vectors."""
    topics = Table(title="ticket_topics: llm_classify", expand=True)
    topics.add_column("topic")
    topics.add_column("tickets", justify="right")
    topics.add_column("subjects", ratio=1)
    for topic, tickets, subjects in connection.execute(TOPICS).fetchall():
        topics.add_row(topic, str(tickets), shorten(subjects))
    console.print(topics)

    facts = Table(title="ticket_facts: llm_filter, then llm_extract", expand=True)
    facts.add_column("ticket", justify="right")
    facts.add_column("body", ratio=1)
    facts.add_column("about", ratio=1)
    for name in ("days waited", "amount"):
        facts.add_column(name, justify="right")
    for ticket_id, *values in connection.execute(FACTS).fetchall():
        facts.add_row(str(ticket_id), *(shorten(value) for value in values))
    console.print(facts)

    pairs = Table(title="similar_subjects: llm_embed", expand=True)
    for name in ("subject", "most_similar"):
        pairs.add_column(name, ratio=1)
    pairs.add_column("similarity", justify="right")
    for subject, other, similarity in connection.execute(PAIRS).fetchall():
        pairs.add_row(shorten(subject), shorten(other), f"{similarity:.3f}")
    console.print(pairs)


def show_totals(console: Console, generations: str) -> None:
    """Print the requests and tokens in the store, by LLM, status and error code."""
    table = Table(title="The store")
    for name in ("llm", "status", "error code"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "prompt tokens", "completion tokens"):
        table.add_column(name, justify="right")
    with duckdb.connect() as connection:
        connection.register("generations", DeltaTable(generations).to_pyarrow_dataset())
        for llm, status, error_code, *numbers in connection.execute(TOTALS).fetchall():
            table.add_row(llm, status, error_code, *(f"{number:,}" for number in numbers))
    console.print(table)


def shorten(value: object, width: int = 75) -> str:
    """Put a value on one line of at most `width` characters, without what rich takes for markup."""
    line = "" if value is None else " ".join(str(value).split())
    return escape(line if len(line) <= width else line[: width - 1] + "…")


if __name__ == "__main__":
    main()
