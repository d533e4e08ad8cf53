"""Chat templates: what they may use, and that a hostile one is stopped in time and memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from ostinato.errors import InputError, ModelError, ModelFormatError
from ostinato.models import chat_sandbox
from ostinato.models.chat import ChatTemplate, render_chat
from tests.models.model_files import TEMPLATE

REFERENCE = Path(__file__).parent.parent / "data" / "reference_smollm2.json"
HELLO = [{"role": "user", "content": "hello"}]

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt }}"
)


def test_chatml() -> None:
    assert render_chat(TEMPLATE, HELLO) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(TEMPLATE, HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")
    assert render_chat(None, HELLO) == render_chat(TEMPLATE, HELLO)


def test_llama3() -> None:
    text = render_chat(LLAMA3, [{"role": "user", "content": " hi "}], bos_token="<B>")
    assert text == (
        "<B><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}\n", "x\n"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hello"}]'),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% set n = namespace(c=0) %}{% for m in messages %}{% set n.c = n.c + 1 %}{% endfor %}"
         "{{ n.c }}", "1"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ ', '.join(['a', 'b']) ~ '-' ~ 1 }}", "a, b-1"),
        ("{{ 'abcb'.replace('b', 'xx') ~ ('a b' | replace(' ', '')) }}", "axxcxxab"),
        ("{{ 'a=b'.split('=')[1].strip().upper() }}", "B"),
        ("{% for k, v in messages[0].items() %}{{ k }}{{ loop.last }}{% endfor %}",
         "roleFalsecontentTrue"),
        ("{{ loop is defined }}{{ messages[0].role in ['user'] }}{{ 'x' * 3 }}", "FalseTruexxx"),
        ("{% generation %}said{% endgeneration %}", "said"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", "<a>"),
        ("{{ tools is none }}{{ bos_token }}{{ (1, 2)[1] }}{{ 7 % 2 == 1 }}", "True2True"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str) -> None:
    assert render_chat(source, HELLO) == expected


def test_date() -> None:
    year = time.strftime("%Y")
    assert render_chat("{{ strftime_now('%Y') }}", HELLO) in (year, str(int(year) + 1))


def test_template_that_refuses_says_why() -> None:
    with pytest.raises(ModelError, match="roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", HELLO)


OPEN = "{{ " + "(" * 9999


@pytest.mark.parametrize("source", ["{% for", "{{ x | nofilter }}", OPEN, "x" * 300_000])
def test_no_template(source: str) -> None:
    with pytest.raises(ModelFormatError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[3].content }}",
        "{{ none.x.y }}",
        "{% include 'other' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''['__class__'] | attr('__base__') }}{{ 1/0 }}",
    ],
)
def test_template_that_fails(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        render_chat(source, HELLO)


def test_private_attributes_are_nothing() -> None:
    assert render_chat("{{ raise_exception.__globals__ }}", HELLO) == ""


LOOP = "{% for i in range(99999) %}"
BOMBS = {
    "nested loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "multiplied": "{{ 'a' * 10000000000 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}"
    "{% endfor %}",
    "doubled": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "added": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "shared": "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "dicts": "{% set n = namespace(x=1) %}{% for i in range(99) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "endless": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replace filter": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "date": "{{ strftime_now('%9999999999d') }}",
}


# Those that take seconds to come to the limits; besides with limits they come to at once.
LONG_FUSES = ("lists", "shared", "dicts", "recursion")


@pytest.mark.parametrize(
    ("name", "small_limits"),
    [
        pytest.param(name, False, marks=pytest.mark.slow if name in LONG_FUSES else ())
        for name in BOMBS
    ]
    + [(name, True) for name in LONG_FUSES],
)
def test_bombs_are_stopped(name: str, small_limits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small_limits:
        monkeypatch.setattr(chat_sandbox, "_MAX_TEXT", 1 << 15)
        monkeypatch.setattr(chat_sandbox, "_MAX_SECONDS", 0.2)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="chat template"):
            render_chat(BOMBS[name], HELLO)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 256 << 20


def test_long_conversations_pass() -> None:
    many = [{"role": "user", "content": "word " * 2000} for _ in range(400)]
    assert len(render_chat(TEMPLATE, many)) > 4_000_000


@pytest.mark.parametrize("messages", [["hi"], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_messages_of_another_form(messages: list[object]) -> None:
    with pytest.raises(InputError, match="message 0"):
        render_chat(TEMPLATE, messages)  # type: ignore[arg-type]


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": "x"}
    with pytest.raises(ModelError):
        render_chat("{{ messages[0].update({'content': 'y'}) }}", [message])
    assert message["content"] == "x"


def test_smollm2_as_transformers_renders_it(smollm2_path: Path) -> None:
    from ostinato.models.checkpoint import open_checkpoint
    from ostinato.models.tokenizer import load_tokenizer

    with open_checkpoint(smollm2_path) as checkpoint:
        template = load_tokenizer(checkpoint.tokenizer).chat_template
    for prompt in json.loads(REFERENCE.read_text())["prompts"]:
        if prompt["kind"] == "chat":
            assert render_chat(template, prompt["messages"]) == prompt["text"]
