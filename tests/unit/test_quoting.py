"""What comes from a config or from data cannot leave the place in SQL that it was put into."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import duckdb
import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbt_llm import sql
from dbt_llm.collector import Collector
from dbt_llm.functions import register_functions, register_macros
from tests.project import ROOT
from tests.unit.generations import LLMS, key

HOSTILE = ["\0", "a\0'b", "'; drop table t; --", "{{ x }}", "{% x %}", "$$", "\\'", "\u2019", "?"]
TEXT = st.text() | st.sampled_from(HOSTILE) | st.lists(st.sampled_from(HOSTILE)).map("".join)
FOLDERS = [
    *("a*b[1]", "axb1", "a?c", "abc", "[!a]", "[a-z]", "**", "a{b,c}", "{}", "~", "%20", "a%2Fb"),
    *("a=b", "prompt_hash=1", "hive=1", "$HOME", "it's", 'say "x"', ";", "--", "#1", "a b", "é"),
    *("e\u0301", "👩\u200d👩\u200d👧", "\u202e", "..a", "file:x", "s3:x", "a\nb", "a\\b"),
]


@pytest.fixture(scope="module")
def connection():
    with duckdb.connect() as connection:
        yield connection


@pytest.fixture(scope="module")
def functions():
    with duckdb.connect() as connection:
        register_functions(connection, Collector(LLMS))
        register_macros(connection)
        yield connection


@pytest.fixture(scope="module")
def to_literal():
    """The macro `_literal` of the package, as dbt renders it."""
    environment = jinja2.Environment(extensions=["jinja2.ext.do"])
    namespace = SimpleNamespace()
    # Jinja exports no name that begins with a line.
    text = (ROOT / "macros" / "_literal.sql").read_text().replace("macro _", "macro ")
    template = environment.from_string(text, globals={"tojson": json.dumps, "dbt_llm": namespace})
    namespace._literal = template.module.literal
    return namespace._literal


# The helpers (test_sql.py has more)


@given(value=TEXT)
def test_a_literal_is_a_constant_option(functions, value):
    query = f"select llm_prompt_hash('p', system := {sql.literal(value)})"
    assert functions.execute(query).fetchall() == [(key("p", system=value),)]


def test_exactly_the_named_files_are_read(connection, tmp_path):
    files = {}
    for folder in FOLDERS:
        # The same name in each, so that a pattern finds the others' files too.
        path = tmp_path / folder / "part-1.parquet"
        path.parent.mkdir()
        pq.write_table(pa.table({"v": [folder], "hive": ["own"]}), path)
        files[folder] = str(path)
    for folder, file in files.items():
        rows = connection.execute(f"select * from {sql.parquet([file])}").fetchall()
        assert rows == [(folder, "own")]
    rows = connection.execute(f"select v from {sql.parquet(list(files.values()))}").fetchall()
    assert rows == [(folder,) for folder in FOLDERS]


def test_a_file_that_is_gone_is_an_error_and_no_other_is_read_for_it(connection, tmp_path):
    pq.write_table(pa.table({"v": [1]}), tmp_path / "a1.parquet")
    with pytest.raises(duckdb.IOException):
        connection.execute(f"select * from {sql.parquet([str(tmp_path / 'a[1].parquet')])}")
    with pytest.raises(duckdb.IOException):
        connection.execute(f"select * from {sql.parquet([str(tmp_path / '*.parquet')])}")


# The macros


@given(value=TEXT)
def test_the_macro_quotes_any_text(connection, to_literal, value):
    query = f"select {to_literal(value).strip()}"
    assert connection.execute(query).fetchall() == [(value,)]
    assert to_literal(value).strip() == sql.literal(value)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=6,
    )
)
def test_the_macro_passes_any_mapping_as_json(connection, to_literal, value):
    ((text,),) = connection.execute(f"select {to_literal({'key': value}).strip()}").fetchall()
    assert json.loads(text) == {"key": value}


@given(values=st.lists(TEXT, min_size=1))
def test_the_macro_quotes_every_element_of_a_list(connection, to_literal, values):
    query = f"select {to_literal(values).strip()}"
    assert connection.execute(query).fetchall() == [(values,)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), (7, "7"), (0.5, "0.5"), (-1e-9, "-1e-09")]
)
def test_the_macro_writes_plain_values(to_literal, value, text):
    assert to_literal(value).strip() == text


# The code


def f_strings(path: Path) -> list[ast.JoinedStr]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]


def quoted_by_hand(path: Path) -> list[str]:
    """Return the f-strings of SQL in which a value stands between quotes."""
    found = []
    for node in f_strings(path):
        text = ast.unparse(node)
        words = "".join(part.value for part in node.values if isinstance(part, ast.Constant))
        is_sql = any(
            words.lstrip().lower().startswith(word)
            for word in ("select", "create", "copy", "load", "set ", "drop", "describe", "attach")
        )
        for before, value, after in zip(
            node.values, node.values[1:], [*node.values[2:], None], strict=False
        ):
            if is_sql and isinstance(value, ast.FormattedValue):
                left = getattr(before, "value", "")
                right = getattr(after, "value", "")
                if str(left)[-1:] in {"'", '"'} and str(right)[:1] in {"'", '"'}:
                    found.append(text)
    return found


def test_no_sql_is_quoted_by_hand():
    modules = sorted((ROOT / "dbt_llm").glob("*.py"))
    assert len(modules) > 40
    # The text of the functions holds names of our own alone.
    found = {path.name: quoted_by_hand(path) for path in modules if path.name != "functions.py"}
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_sql_that_is_quoted_by_hand_would_be_found(tmp_path):
    module = tmp_path / "m.py"
    module.write_text("a = f\"select '{x}' from t\"\nb = f'select {literal(x)}'\n")
    assert quoted_by_hand(module) == [ast.unparse(f_strings(module)[0])]
