"""Turns a prompt and the words of its call into the tokens of a chat, with the model's template."""

from pathlib import Path
from typing import Any

from dbt_llm.call import user_turn
from dbt_llm.errors import EngineError


class ChatTemplate:
    """The chat template of a model, or one that the profile gives instead.

    Some templates refuse the system role, and some leave out what it says. There the system
    prompt leads the user's turn.
    """

    def __init__(self, tokenizer: Any, given: str | None, options: dict[str, Any]) -> None:
        """Check the template; `given` is the text of one of the profile's, `options` are variables.

        Raises:
            EngineError: there is no template, or it fails on a plain message.
        """
        from jinja2.exceptions import TemplateError

        self._tokenizer = tokenizer
        self._given = given
        self._options = options
        if given is None and tokenizer.chat_template is None:
            raise EngineError(
                f"The model {tokenizer.name_or_path} has no chat template. Give one with "
                "engine_args: {chat_template: FILE}, or use an instruction-tuned model."
            )
        try:
            untold = self._apply(_user("Hello."))
        except TemplateError as error:
            raise EngineError(f"The chat template fails on a plain message: {error}") from error
        try:
            told = self._apply(_system("Be brief."), _user("Hello."))
        except TemplateError:
            told = untold
        self.has_system_role = told != untold

    def tokens(self, call: dict[str, Any], prompt: str) -> list[int]:
        """Return the token ids of the whole request."""
        system, text = call.get("system"), user_turn(call, prompt)
        if not system:
            return self._apply(_user(text))
        if self.has_system_role:
            return self._apply(_system(system), _user(text))
        return self._apply(_user(f"{system}\n\n{text}"))

    def _apply(self, *messages: dict[str, str]) -> list[int]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages),
            chat_template=self._given,
            add_generation_prompt=True,
            tokenize=True,
            **self._options,
        )
        ids: list[int] = encoded["input_ids"] if hasattr(encoded, "keys") else encoded
        return ids


def read_template(given: str | None) -> str | None:
    """Return the text of a template that is given as a file or, as it holds a brace, as its text.

    Raises:
        EngineError: there is no such file.
    """
    if given is None or "{" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_file():
        raise EngineError(
            f"The chat template {given!r} does not exist (seen from {Path.cwd()}). "
            "Put the file there, or change engine_args.chat_template in the profile."
        )
    return path.read_text(encoding="utf-8")


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
