"""Everything that dbt-llm raises.

    DbtLLMError
    ├── ConfigError          the profile or a dbt variable is wrong
    ├── CallError            the constants of a call in SQL are wrong
    ├── SchemaChangeError    the query has other columns than its table, which dbt would refuse
    ├── UnresolvedError      a prompt has no stored answer where nothing may be asked
    ├── NotSettledError      the query asks for new prompts every time it is evaluated
    ├── BudgetError          a budget is too small for what is to be asked
    ├── SpoolError           requests could not be written to dbt's target folder
    ├── StoreError           the generation store could not be read or written
    ├── LakehouseError       a lakehouse table could not be written, or its keys are not unique
    ├── EngineError          an engine did not start, or died and could not be restarted
    ├── EndpointError        an endpoint refuses every request alike, or is not there
    ├── TooManyErrorsError   more rows failed than `max_error_ratio` allows
    └── CancelledError       the run was interrupted

A failed row is not an exception: it is a generation with status `error`.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class DbtLLMError(Exception):
    """The base of all errors of this package; the text says what happened and what to do."""


class ConfigError(DbtLLMError):
    """The profile or a dbt variable is wrong; all problems are listed together."""


class CallError(DbtLLMError):
    """An option of an LLM function in SQL is wrong; nothing was asked."""


class SchemaChangeError(DbtLLMError):
    """The query has other columns than its table, which dbt would refuse; nothing was asked."""


class UnresolvedError(DbtLLMError):
    """A prompt has no stored answer, and this is no place to ask for one."""


class NotSettledError(DbtLLMError):
    """Every evaluation of the query yields new prompts, for example through `random()`."""


class BudgetError(DbtLLMError):
    """A budget is too small for what is to be asked, or is used up."""


class SpoolError(DbtLLMError):
    """Requests could not be written to dbt's target folder; they were not asked."""


class StoreError(DbtLLMError):
    """The generation store could not be read or written, or lost what was committed."""


class LakehouseError(DbtLLMError):
    """A lakehouse table could not be read or written, or the new rows do not fit it."""


class EngineError(DbtLLMError):
    """An engine did not start, or it died more often than it may."""


class EndpointError(DbtLLMError):
    """An endpoint refuses every request for the same reason, or cannot be reached."""


class TooManyErrorsError(DbtLLMError):
    """More rows of one model failed than `max_error_ratio` allows; the good ones are stored."""


class CancelledError(DbtLLMError):
    """The run was interrupted; what was answered before is stored."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise the panics of libraries in Rust, such as delta-rs, as errors.

    They are no `Exception`, so they would end dbt's thread, and dbt would wait for it for ever.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise DbtLLMError(f"A library failed, which is a fault of its own: {error}") from error
        raise
