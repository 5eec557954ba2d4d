"""The SQL functions: the text of the macros, and the two Python functions beneath them.

`llm_generate(prompt, ...)` becomes, for one row:

1. `dbt_llm_call(token, options)` turns the constant options into the call's hash. DuckDB folds it
   while it plans, so it runs once per call site and bad options are refused before any row.
2. `sha256(call_hash || prompt)` is the key.
3. The key is looked up in the view `temp.main.dbt_llm_generations`, which every cursor has, among
   the generations of the call: by their statistics DuckDB skips the files of other calls.
4. Where nothing is found, `dbt_llm_collect(token, call_hash, prompt_hash, prompt)` takes the
   prompt and yields NULL.

Where the key of each row is a column already (see `key_columns.py`), three more macros do the same
in parts: `dbt_llm_key_llm_generate` is the key, `dbt_llm_stored_...` the table of the call's
answers, and `dbt_llm_answer_...` the result of what was found there.

Why the macros look as they do (each was seen to matter, on DuckDB 1.5 and 2.0):

- `unnest([prompt])` in a subquery is a barrier: DuckDB would otherwise evaluate a literal prompt
  while it plans, and a prompt expression once per mention.
- `getvariable(concat(model, hash(...)))` refuses options that are not constant, which DuckDB
  does not do by itself.
- `where true or (prompt) is null` is dropped by the optimizer, but not by the binder: it refuses
  window functions, and aggregates without a column such as `count(*)`, which would otherwise be
  computed over the one row within the macro and give wrong prompts.
- The subquery gives back what an answer needs, and the prompt and its key only where there is no
  answer: DuckDB carries all of it through a join with the rows, once per call of the query.
- All internal names are qualified or start with `dbt_llm_`, so no column or CTE of a user can
  take their place.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dbt_llm import sql

if TYPE_CHECKING:
    import pyarrow as pa

GENERATIONS_VIEW = "temp.main.dbt_llm_generations"
TOKEN_VARIABLE = "dbt_llm_token"
COUNT_VARIABLE = "dbt_llm_count"
# What the names of a function's other macros begin with.
KEY_MACRO = "dbt_llm_key_"
STORED_MACRO = "dbt_llm_stored_"
ANSWER_MACRO = "dbt_llm_answer_"

_SHARED = {
    "model": "'default'",
    "system": "null",
    "max_tokens": "null",
    "temperature": "null",
    "top_p": "null",
    "seed": "null",
    "stop": "null",
    "extra": "null",
}
_GENERATE = {**_SHARED, "choices": "null", "json_schema": "null"}

# What llm_details returns, in this order; all but prompt_hash come from the stored generation.
DETAILS = {
    "output": "VARCHAR",
    "status": "VARCHAR",
    "error_code": "VARCHAR",
    "error": "VARCHAR",
    "finish_reason": "VARCHAR",
    "prompt_tokens": "BIGINT",
    "completion_tokens": "BIGINT",
    "cost_usd": "DOUBLE",
    "prompt_hash": "VARCHAR",
    "created_at": "TIMESTAMP WITH TIME ZONE",
}

# The columns of the generations view.
COLUMNS = {**DETAILS, "embedding": "FLOAT[]", "call_hash": "VARCHAR"}

# The view before any store exists.
NO_GENERATIONS = "select {} where false".format(
    ", ".join(f"null::{type_} as {name}" for name, type_ in COLUMNS.items())
)


@dataclass(frozen=True)
class Function:
    """A public SQL function: its first argument is the prompt, all others are constants."""

    name: str
    kind: str
    """The `function` of the call's options (see `call.py`)."""
    prompt: str
    """The name of the first parameter."""
    required: tuple[str, ...]
    """Options without a default, in their order."""
    optional: dict[str, str]
    """Options with the SQL text of their default."""
    columns: tuple[str, ...] = ()
    """What is looked up; none where the key alone is the result."""
    answer: str = ""
    """The result, where `{hit}` stands for the structure of the looked-up columns."""

    @property
    def options(self) -> list[str]:
        """The names of all options."""
        return [*self.required, *self.optional]


FUNCTIONS = (
    Function("llm_generate", "generate", "prompt", (), _GENERATE, ("output",), "{hit}.output"),
    Function("llm_details", "generate", "prompt", (), _GENERATE, tuple(DETAILS), "{hit}"),
    Function("llm_prompt_hash", "generate", "prompt", (), _GENERATE),
    Function(
        "llm_classify",
        "classify",
        "text",
        ("labels",),
        {"instruction": "null", **_SHARED},
        ("output",),
        "{hit}.output",
    ),
    Function(
        "llm_filter",
        "filter",
        "text",
        ("question",),
        _SHARED,
        ("output",),
        "{hit}.output = 'yes'",
    ),
    Function(
        "llm_extract",
        "extract",
        "text",
        ("fields",),
        {"instruction": "null", **_SHARED},
        ("output",),
        "from_json({hit}.output, fields)",
    ),
    Function(
        "llm_embed",
        "embed",
        "text",
        (),
        {"model": "'default'"},
        ("embedding",),
        "{hit}.embedding",
    ),
)


class Collecting(Protocol):
    """What the functions need from the collector (see `collector.py`)."""

    def call_hash(self, token: str, options_json: str) -> str:
        """Return the hash of the call with these options, and note that it is asked."""

    def key_call_hash(self, token: str, options_json: str) -> str:
        """Return the hash of such a call, and note that it is there."""

    def known_call_hash(self, token: str, options_json: str) -> str:
        """Return the hash of such a call."""

    def collect(
        self, token: str, call_hashes: "pa.Array", prompt_hashes: "pa.Array", prompts: "pa.Array"
    ) -> None:
        """Take the prompts that have no stored answer."""

    def count(self, token: str, prompt_hashes: "pa.Array") -> None:
        """Take note of all keys that the query looks up."""


def register_functions(connection: Any, collector: Collecting) -> None:
    """Register the Python functions on a DuckDB database; a second time replaces them."""

    # DuckDB evaluates annotations, so they name nothing that is not imported here.
    def of_each(find: Callable[[str, str], str]) -> Callable[[Any, Any], Any]:
        def hashes(tokens: Any, options: Any) -> Any:
            import pyarrow as pa

            rows = zip(tokens.to_pylist(), options.to_pylist(), strict=True)
            return pa.array([find(token, json) for token, json in rows], pa.string())

        return hashes

    def collect(tokens: Any, call_hashes: Any, prompt_hashes: Any, prompts: Any) -> Any:
        import pyarrow as pa

        if len(prompts) > prompts.null_count:
            token = tokens[0].as_py()
            collector.collect(token, _flat(call_hashes), _flat(prompt_hashes), _flat(prompts))
        return pa.nulls(len(prompts), pa.string())

    def count(tokens: Any, prompt_hashes: Any) -> Any:
        flat = _flat(prompt_hashes)
        collector.count(tokens[0].as_py(), flat)
        return flat

    functions = {
        "dbt_llm_call": (of_each(collector.call_hash), 2),
        "dbt_llm_known_call": (of_each(collector.known_call_hash), 2),
        "dbt_llm_key_call": (of_each(collector.key_call_hash), 2),
        "dbt_llm_collect": (collect, 4),
        "dbt_llm_count": (count, 2),
    }
    names = ", ".join(map(sql.literal, functions))
    # Listing DuckDB's functions takes some 10 ms, and every run does it.
    known = connection.execute(
        f"select distinct function_name from duckdb_functions() where function_name in ({names})"
    )
    for (name,) in known.fetchall():
        connection.remove_function(name)
    for name, (function, arity) in functions.items():
        connection.create_function(
            name, function, ["VARCHAR"] * arity, "VARCHAR", type="arrow", null_handling="special"
        )


def register_macros(cursor: Any) -> None:
    """Create the SQL functions and an empty generations view on a cursor; both are temporary."""
    cursor.execute(f"create or replace temp view dbt_llm_generations as {NO_GENERATIONS}")
    for statement in macro_statements():
        cursor.execute(statement)


def macro_statements() -> list[str]:
    """Return the `create macro` statements of all public functions, and of what they consist of."""
    return [
        f"create or replace temp macro {head} as {body}"
        for function in FUNCTIONS
        for head, body in _macros(function)
    ]


def _macros(function: Function) -> Iterator[tuple[str, str]]:
    given = _parameters(function, function.prompt)
    if not function.columns:
        yield f"{function.name}({given})", f"({_key(function)})"
        return
    yield f"{function.name}({given})", _lookup(function)
    yield f"{KEY_MACRO}{function.name}({given})", _sha256(function, function.prompt)
    yield f"{STORED_MACRO}{function.name}({_parameters(function)})", f"table {_stored(function)}"
    found = _parameters(function, "dbt_llm_found", "dbt_llm_hash", function.prompt)
    yield f"{ANSWER_MACRO}{function.name}({found})", _answer_found(function)


def _parameters(function: Function, *first: str) -> str:
    optional = (f"{name} := {default}" for name, default in function.optional.items())
    return ", ".join([*first, *function.required, *optional])


def _key(function: Function) -> str:
    return f"select dbt_llm_hash from ({_hashed(function, 'dbt_llm_key_call')})"


def _lookup(function: Function) -> str:
    found = "dbt_llm_g.dbt_llm_hit is not null"
    # The list of one element and the lambda bind the subquery's result to a name. What is in the
    # lambda is an expression of the user's own query, so a CASE around the call guards it.
    result = _result(
        function,
        "struct_extract(dbt_llm_s, 'hit')",
        "struct_extract(dbt_llm_s, 'call_hash')",
        "struct_extract(dbt_llm_s, 'hash')",
        "struct_extract(dbt_llm_s, 'prompt')",
    )
    return f"""
        list_transform(
            [(
                select struct_pack(
                    prompt := case when not ({found}) then dbt_llm_prompt end,
                    call_hash := case when not ({found}) then dbt_llm_call_hash end,
                    hash := case when not ({found}) or {_COUNTING} then dbt_llm_h.dbt_llm_hash end,
                    hit := dbt_llm_g.dbt_llm_hit
                )
                from ({_hashed(function)}) as dbt_llm_h
                left join ({_stored(function)}) as dbt_llm_g
                on dbt_llm_g.dbt_llm_hash = dbt_llm_h.dbt_llm_hash
            )],
            lambda dbt_llm_s: {result}
        )[1]"""


def _answer_found(function: Function) -> str:
    call_hash = _known_call(function)
    return _result(function, "dbt_llm_found", call_hash, "dbt_llm_hash", function.prompt)


def _result(function: Function, hit: str, call_hash: str, hash_: str, prompt: str) -> str:
    answer = function.answer.format(hit=hit)
    # The last branch never holds, since dbt_llm_collect yields NULL; it keeps the optimizer from
    # dropping the call, and gives the result its type.
    return f"""case
        when {_COUNTING} and dbt_llm_count({_TOKEN}, {hash_}) is null then null
        when {hit} is not null then {answer}
        when dbt_llm_collect({_TOKEN}, {call_hash}, {hash_}, {prompt}) is not null then {answer}
    end"""


def _stored(function: Function) -> str:
    fields = ", ".join(f"{name} := dbt_llm_v.{name}" for name in function.columns)
    return f"""
        select dbt_llm_v.prompt_hash as dbt_llm_hash, struct_pack({fields}) as dbt_llm_hit
        from {GENERATIONS_VIEW} as dbt_llm_v
        where dbt_llm_v.call_hash = {_known_call(function)}"""


def _known_call(function: Function) -> str:
    return f"dbt_llm_known_call({_TOKEN}, {_options(function)})"


def _sha256(function: Function, prompt: str) -> str:
    return f"sha256(dbt_llm_call({_TOKEN}, {_options(function)}) || {prompt})"


def _options(function: Function) -> str:
    names = ", ".join(function.options)
    constant = f"getvariable(concat('dbt_llm_constant_', model, hash({names})))::varchar"
    pairs = ", ".join(f"'{name}': {name}" for name in function.options)
    return f"coalesce({constant}, to_json({{'function': '{function.kind}', {pairs}}})::varchar)"


def _hashed(function: Function, call_hash: str = "dbt_llm_call") -> str:
    return f"""
        select
            dbt_llm_prompt, dbt_llm_call_hash,
            sha256(dbt_llm_call_hash || dbt_llm_prompt) as dbt_llm_hash
        from (
            select
                unnest([cast({function.prompt} as varchar)]) as dbt_llm_prompt,
                {call_hash}({_TOKEN}, {_options(function)}) as dbt_llm_call_hash
            where true or ({function.prompt}) is null
        )"""


_COUNTING = f"getvariable('{COUNT_VARIABLE}') is not null"
_TOKEN = f"coalesce(getvariable('{TOKEN_VARIABLE}')::varchar, '')"


def _flat(array: "pa.Array") -> "pa.Array":
    import pyarrow as pa

    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
