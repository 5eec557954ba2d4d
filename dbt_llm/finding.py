"""What a check of `dbt-llm doctor` comes to, and how it is printed."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from dbt_llm.errors import DbtLLMError

_WIDTH = 100


class State(StrEnum):
    """What a check comes to; the text is printed."""

    OK = "ok"
    NOTE = "note"
    """Nothing stops a run, and yet it is worth to be known."""
    SKIPPED = "-"
    FAIL = "FAIL"


_COLOURS = {State.OK: "32", State.NOTE: "33", State.SKIPPED: "2", State.FAIL: "1;31"}


class Problem(Exception):
    """Something is not as a run needs it."""

    def __init__(self, words: str, advice: str, state: State = State.FAIL) -> None:
        super().__init__(words)
        self.words = words
        self.advice = advice
        self.state = state


class Unknown(Problem):
    """It cannot be looked at before something else is put right."""

    def __init__(self, before: str) -> None:
        super().__init__(f"not looked at: {before}", "", State.SKIPPED)


@dataclass(frozen=True)
class Finding:
    """What one check saw."""

    name: str
    state: State
    words: str
    """On one or several lines."""
    advice: str = ""
    """What to do, on lines of its own."""

    def text(self, name_width: int, colour: bool = False) -> str:
        """Return it as people read it."""
        state = self.state.value.ljust(4)
        if colour:
            state = f"\033[{_COLOURS[self.state]}m{state}\033[0m"
        indent = 4 + 2 + name_width + 2
        lines = [
            part
            for line in [*self.words.split("\n"), *filter(None, self.advice.split("\n"))]
            for part in _wrapped(line, _WIDTH - indent)
        ]
        first, *others = lines
        head = f"{state}  {self.name.ljust(name_width)}  {first}"
        return "\n".join([head, *(" " * indent + line for line in others)])


def _wrapped(line: str, width: int) -> list[str]:
    # What is indented is to be pasted.
    if line.startswith(" "):
        return [line]
    options = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, max(40, width), **options) or [""]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Check:
    """One thing to look at."""

    name: str
    look: Callable[[], str]

    def finding(self) -> Finding:
        """Look at it; whatever goes wrong is the finding."""
        try:
            return Finding(self.name, State.OK, self.look())
        except Problem as problem:
            return Finding(self.name, problem.state, problem.words, problem.advice)
        except DbtLLMError as error:
            return Finding(self.name, State.FAIL, *_split(str(error)))
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
            return Finding(self.name, State.FAIL, *_split(text))


def _split(text: str) -> tuple[str, str]:
    """Tell the first line from the lines below."""
    words, _, advice = text.strip().partition("\n")
    return words, advice
