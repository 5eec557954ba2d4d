"""What an engine has answered, in numbers; it travels from the engine actor to the driver."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Tally:
    """Answers and what they took; tokens are those of answers for which something was generated."""

    rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of prompts and completions."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.rows + other.rows,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


def tally_of(answers: "pa.Table") -> Tally:
    """Count answers or generations."""
    import pyarrow.compute as pc

    used = answers.filter(answers["completion_tokens"].is_valid())
    prompt_tokens, completion_tokens = (
        pc.sum(used[name]).as_py() or 0 for name in ("prompt_tokens", "completion_tokens")
    )
    return Tally(answers.num_rows, prompt_tokens, completion_tokens)
