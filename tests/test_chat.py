"""Chat templates run in a sandbox, and what they do wrong is one clear error."""

from __future__ import annotations

import tracemalloc

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


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for m in messages recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ ['x'] * 999999999 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ 'x'.ljust(999999999) }}",
        "{{ 'x'|center(999999999) }}",
        "{{ messages|batch(999999999, 'x')|list }}",
        "{% set ns = namespace(t='x') %}{% for i in range(64) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for i in range(64) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{% set ns = namespace(t=[1]) %}{% for i in range(64) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        "{% set x = 'x' * 65536 %}{% for i in range(9999) %}{{ x }}{% endfor %}",
    ],
)
def test_a_template_that_wants_too_much_is_stopped_before_it_has_it(template: str):
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError, match=r"it wants|recursion"):
            render(template, HELLO)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_bounds_are_of_each_rendering_and_not_of_all_together():
    template = "{% for a in range(60000) %}{% endfor %}done"
    assert {render(template, HELLO) for _ in range(20)} == {"done"}


def test_loops_know_where_they_are_as_in_any_jinja():
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '!' if loop.last }}"
        "{{ loop.previtem.content if not loop.first }}{% else %}none{% endfor %}"
    )
    two = [*HELLO, {"role": "user", "content": "b"}]
    assert render(template, two) == "1/22/2!hello"
    assert render(template, []) == "none"
    assert render("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", HELLO) == (
        "role=user;content=hello;"
    )
    assert render(
        "{% for m in messages if m.role == 'user' %}{{ m.content ~ 1 ~ none }}{% endfor %}", HELLO
    ) == ("hello1None")
