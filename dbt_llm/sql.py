"""The one place where a value becomes SQL text."""


def literal(value: str) -> str:
    """Return `value` as a single-quoted SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def literal_list(values: list[str]) -> str:
    """Return `values` as a SQL list of string literals."""
    return "[" + ", ".join(literal(value) for value in values) + "]"


def identifier(name: str) -> str:
    """Return `name` as a double-quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
