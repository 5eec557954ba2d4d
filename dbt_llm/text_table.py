"""Lays rows of text out as a table for a terminal."""

from collections.abc import Collection, Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> str:
    """Return a header, a rule and the rows; columns with a name in `left` begin at the left."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])
