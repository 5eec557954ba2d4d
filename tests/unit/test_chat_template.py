import pytest

from dbt_llm.chat_template import ChatTemplate, read_template
from dbt_llm.errors import EngineError

CALL = {"system": "Be kind.", "wrap": {"before": "Say: ", "after": "!"}}
WITH_SYSTEM = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
REFUSES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + WITH_SYSTEM
)
LEAVES_OUT = "{% for m in messages if m.role == 'user' %}<user>{{ m.content }}{% endfor %}<bot>"


class Tokenizer:
    """Makes one token of each character, as transformers applies a template."""

    name_or_path = "weights/small"

    def __init__(self, chat_template=None):
        self.chat_template = chat_template

    def apply_chat_template(
        self, messages, chat_template, add_generation_prompt, tokenize, **variables
    ):
        assert (add_generation_prompt, tokenize) == (True, True)
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(text):
            raise TemplateError(text)

        environment = ImmutableSandboxedEnvironment()
        environment.globals["raise_exception"] = raise_exception
        template = environment.from_string(chat_template or self.chat_template)
        text = template.render(messages=messages, **variables)
        return {"input_ids": [ord(character) for character in text]}


def said(template, call, prompt):
    return "".join(map(chr, template.tokens(call, prompt)))


def test_the_system_prompt_has_a_turn_of_its_own():
    template = ChatTemplate(Tokenizer(WITH_SYSTEM), None, {})
    assert template.has_system_role
    assert said(template, CALL, "hi") == "<system>Be kind.<user>Say: hi!<assistant>"


@pytest.mark.parametrize(("text", "bot"), [(REFUSES, "<assistant>"), (LEAVES_OUT, "<bot>")])
def test_without_a_system_role_the_system_prompt_leads_the_users_turn(text, bot):
    template = ChatTemplate(Tokenizer(text), None, {})
    assert not template.has_system_role
    assert said(template, CALL, "hi") == f"<user>Be kind.\n\nSay: hi!{bot}"
    assert said(template, {}, "hi") == f"<user>hi{bot}"


def test_a_template_of_the_profile_counts_before_that_of_the_model(tmp_path):
    file = tmp_path / "a template.jinja"
    file.write_text(LEAVES_OUT)
    for given in (str(file), LEAVES_OUT):
        template = ChatTemplate(Tokenizer(WITH_SYSTEM), read_template(given), {})
        assert said(template, {}, "hi") == "<user>hi<bot>"


def test_options_are_variables_of_the_template():
    template = ChatTemplate(Tokenizer(WITH_SYSTEM + "{{ more }}"), None, {"more": "!"})
    assert said(template, {}, "hi") == "<user>hi<assistant>!"


@pytest.mark.parametrize(
    ("own", "given", "message"),
    [
        (None, None, "The model weights/small has no chat template. Give one with engine_args"),
        (WITH_SYSTEM, "no/such.jinja", "The chat template 'no/such.jinja' does not exist"),
        (WITH_SYSTEM, "{{ raise_exception('no') }}", "fails on a plain message: no"),
        (WITH_SYSTEM, "{% for %}", "fails on a plain message: "),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(own, given, message):
    with pytest.raises(EngineError) as raised:
        ChatTemplate(Tokenizer(own), read_template(given), {})
    assert message in str(raised.value)
