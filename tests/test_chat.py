"""Chat templates run in a sandbox, and what they do wrong is one clear error."""

from __future__ import annotations

import pytest

from knot.chat import ChatTemplateError, render

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def test_messages_become_the_text_of_the_template():
    assert render(CHATML, HELLO) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_without_generation_prompt_the_text_ends_with_the_last_message():
    assert render(CHATML, HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_template_that_raises_is_an_error_with_its_own_words():
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10000000000) %}{% endfor %}",
        "{{ messages.append({}) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox_or_loop_for_ever(template: str):
    with pytest.raises(ChatTemplateError):
        render(template, HELLO)


@pytest.mark.parametrize(
    "template", ["{{", "{% if %}", "{{ messages[7]['content'] + 1 }}", "{{ 1 / 0 }}", "{% include 'x' %}"]
)
def test_a_broken_template_is_a_clear_error(template: str):
    with pytest.raises(ChatTemplateError):
        render(template, HELLO)


def test_content_in_parts_is_refused_by_a_template_that_takes_text_only():
    with pytest.raises(ChatTemplateError):
        render(CHATML, [{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
