"""Chat templates: what they may use, and that a hostile one is stopped in time and memory."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.errors import InputError, ModelError, ModelFormatError
from ostinato.models.text import chat
from ostinato.models.text.chat import DEFAULT_TEMPLATE, ChatTemplate
from ostinato.models.text.child import Child
from tests.models import record_tokenizers
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


def render_chat(source: str, messages: Any, **options: Any) -> str:
    return ChatTemplate(source).render(messages, **options)


RECORDED = json.loads(record_tokenizers.RECORD.read_text(encoding="utf-8"))
SPECIAL = RECORDED["folders"][list(record_tokenizers.folders())[-1]]["special_tokens"]


@pytest.mark.parametrize("index", range(len(record_tokenizers.VARIED)))
def test_variables_as_transformers_gives_them(index: int) -> None:
    template = ChatTemplate(record_tokenizers.VARIED[index], tokens=SPECIAL)
    text = template.render(record_tokenizers.MESSAGES, variables=record_tokenizers.VARIABLES)
    assert text == RECORDED["varied"][index]


@pytest.mark.parametrize("index", range(len(record_tokenizers.CALLING)))
def test_messages_of_clients_as_transformers_gives_them(index: int) -> None:
    """Many templates write None as a word, and read reasoning under one name of several."""
    text = render_chat(
        record_tokenizers.CALLING[index], record_tokenizers.CALLED, add_generation_prompt=False
    )
    assert text == RECORDED["called"][index]


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_variables_that_are_not_ones_own(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' of chat templates cannot be set"):
        render_chat(TEMPLATE, HELLO, variables={name: []})
    with pytest.raises(InputError, match="must be a mapping by name"):
        render_chat(TEMPLATE, HELLO, variables={1: 2})
    with pytest.raises(InputError, match="not what JSON can hold"):
        render_chat(TEMPLATE, HELLO, variables={"x": object()})


@pytest.mark.parametrize("index", range(len(record_tokenizers.CONTINUED)))
def test_the_last_message_is_gone_on_with_as_in_transformers(index: int) -> None:
    template = ChatTemplate(record_tokenizers.CONTINUED[index], tokens=SPECIAL)
    for text, theirs in zip(record_tokenizers.BEGUN, RECORDED["continued"][index], strict=True):
        messages = record_tokenizers.begun(text)
        if theirs is None:
            with pytest.raises(ModelError, match="leaves out the last message"):
                template.render(messages, continue_last=True)
        else:
            assert template.render(messages, continue_last=True) == theirs, text
        assert messages[-1]["content"] == text


@pytest.mark.parametrize("messages", [[], HELLO, [{"role": "assistant", "content": [1]}]])
def test_only_text_of_an_assistant_is_gone_on_with(messages: list[Any]) -> None:
    with pytest.raises(InputError, match="continue_last needs an assistant's message"):
        render_chat(TEMPLATE, messages, continue_last=True)


def test_chatml() -> None:
    assert render_chat(TEMPLATE, HELLO) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(TEMPLATE, HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")
    assert render_chat(DEFAULT_TEMPLATE, HELLO) == render_chat(TEMPLATE, HELLO)


def test_llama3() -> None:
    text = render_chat(
        LLAMA3, [{"role": "user", "content": " hi "}], variables={"bos_token": "<B>"}
    )
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
        ("{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% endgeneration %}"
         "{% endfor %}", "user1"),
        ("{% for i in range(9) %}{% if i % 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
         "02468"),
        ("{{ {'b': 1, 'a': [1, none]} | tojson(sort_keys=true, separators=(',', ':')) }}",
         '{"a":[1,null],"b":1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}{{ '\\N{BULLET}' }}", '"\\u00e9"•'),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}'.format('b') }}{{ 2 ** 3 }}", "a-007   b8"),
        ("{{ messages | pprint }}", "[{'content': 'hello', 'role': 'user'}]"),
        ("{{ lipsum(n=1) | length > 9 }}{{ 'ab' | center(6) }}|", "True  ab  |"),
        ("{{ messages[0]['content'][1:3] }}{{ messages[::-1][0].role }}", "eluser"),
        ("{{ undefined_one }}{{ tools is none and documents is none }}", "True"),
        ("{%- set x %}\n {{ 1 }}\n{% endset -%} {{ x | trim }}", "1"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}", "<a>"),
        ("{{ tools is none }}{{ bos_token }}{{ (1, 2)[1] }}{{ 7 % 2 == 1 }}", "True2True"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str) -> None:
    assert render_chat(source, HELLO) == expected


def test_date() -> None:
    before = datetime.datetime.now()
    text = render_chat("{{ strftime_now('%d %b %Y, %H:%M:%S.%f %Y年') }}", HELLO)
    found = datetime.datetime.strptime(text[:-6], "%d %b %Y, %H:%M:%S.%f")
    assert before <= found <= datetime.datetime.now(), "in the zone of this process"
    assert text.endswith("年")


def test_template_that_refuses_says_why() -> None:
    with pytest.raises(ModelError, match="roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", HELLO)


@pytest.mark.parametrize(
    "source", ["{% for", "{{ x | nofilter }}", "{{ " + "(" * 9999, "{% break %}", "{% extends x"]
)
def test_no_template(source: str) -> None:
    with pytest.raises(ModelFormatError, match="the chat template cannot be compiled"):
        render_chat(source, HELLO)


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
        "{{ '\\ud800' }}",
        "{{ raise_exception('x' * 10000000) }}",
    ],
)
def test_template_that_fails(source: str) -> None:
    with pytest.raises(ModelError, match=r"the chat template (failed|refused)") as caught:
        render_chat(source, HELLO)
    assert len(str(caught.value)) < 1100


def test_what_a_template_says_does_not_reach_the_terminal_as_it_is() -> None:
    with pytest.raises(ModelError, match=r"refused the messages: two\nlines \\u001b\[2J é 🎉$"):
        render_chat("{{ raise_exception('two\\nlines \\x1b[2J é 🎉') }}", HELLO)


def test_private_attributes_are_nothing() -> None:
    assert render_chat("{{ raise_exception.__globals__ }}", HELLO) == ""


LOOP = "{% for i in range(99999) %}"
TWICE = "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = MADE %}{% endfor %}"


def grown(start: str, made: str, use: str = "") -> str:
    return TWICE.replace("START", start).replace("MADE", made) + use


BOMBS = {
    "nested loops": LOOP + LOOP + "{% endfor %}{% endfor %}",
    "round": "{{ 1 | round(-1000000000) }}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "squares": grown("9", "n.x * n.x"),
    "shared": grown("1", "[n.x, n.x]", "{{ n.x }}"),
    "dicts": grown("1", "dict(a=n.x, b=n.x)", "{{ n.x | tojson }}"),
    "compiled": "{{ " + "9 ** " * 9 + "9 }}",
    "multiplied": "{{ 'a' * 10000000000 }}",
    "doubled": grown("'a'", "n.x ~ n.x"),
    "added": grown("'a'", "n.x + n.x"),
    "lists": grown("[1]", "n.x + n.x"),
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(range(99999) | map('string')) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "keys": "{{ {}.fromkeys(('a' * 10 ** 8), 1) }}",
    "map": "{{ (['a' * 10 ** 7] * 99) | map('upper') | list }}",
    "set block": "{% set x %}" + "{{ 'a' * 10 ** 8 }}" * 9 + "{% endset %}{{ x }}",
    "output": LOOP + "{{ 'a' * 99999 }}{% endfor %}",
    "much text": "{{ 'a' * 2000000 }}",
}
ENDLESS = ("nested loops", "round", "recursion")
"""Templates that only the limit of processor time ends; the others may meet either limit first."""


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A renderer of little patience, so that tests have more."""
    renderer = Child("ostinato.models.text.chat_child", seconds=0.3, memory=256 << 20)
    monkeypatch.setattr(chat, "_renderer", renderer)
    yield renderer
    renderer.close()


QUICK = (*ENDLESS, "multiplied", "doubled", "shared", "output", "much text")
"""One of each way to need time, memory or room for the answer; the limits are of the process."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BOMBS],
)
def test_bombs_are_stopped(hasty: Child, name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"the chat template was stopped: it (.*)") as caught:
            render_chat(BOMBS[name], HELLO)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if name in ENDLESS:
        assert "it takes longer than 0.3 s" in str(caught.value)
    assert peak < 16 << 20, "in this process"


def test_after_a_bomb_comes_the_next_template() -> None:
    with pytest.raises(ModelError):
        render_chat(BOMBS["multiplied"], HELLO)
    assert "hello" in render_chat(TEMPLATE, HELLO)


def test_ctrl_c_ends_a_bomb() -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        render_chat(BOMBS["round"], HELLO)
    timer.join()
    assert "hello" in render_chat(TEMPLATE, HELLO)


VALUES = ["messages", "messages[0].content", "'a' * 9", "range(99)", "1", "n.x", "{'a': 1}", "loop"]
FILTERS = ["upper", "list", "tojson", "string", "length", "join('x')", "map('upper')", "center(99)",
           "replace('a', 'bb')", "round(9)", "indent(3)", "first", "sort", "unique", "batch(2)",
           "trim", "attr('x')", "default(1)", "items", "pprint", "wordwrap(2)"]  # fmt: skip
values = st.sampled_from(VALUES)
expressions = st.recursive(
    values,
    lambda inner: st.one_of(
        st.builds("({} | {})".format, inner, st.sampled_from(FILTERS)),
        st.builds("({} {} {})".format, inner, st.sampled_from("+-*/~%"), inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds(
            "{}.{}".format, inner, st.sampled_from(["x", "split()", "items()", "join('ab')"])
        ),
        st.builds("namespace(x={})".format, inner),
    ),
    max_leaves=6,
)
programs = st.recursive(
    st.one_of(st.builds("{{{{ {} }}}}".format, expressions), st.text(max_size=9)),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for n in {} %}}{}{{% endfor %}}".format, expressions, inner),
        st.builds("{{% if {} %}}{}{{% else %}}{}{{% endif %}}".format, expressions, inner, inner),
        st.builds("{{% set n = {} %}}{}".format, expressions, inner),
        st.builds("{{% set n %}}{}{{% endset %}}{{{{ n }}}}".format, inner),
        st.builds("{{% macro f(n) %}}{}{{% endmacro %}}{{{{ f(1) }}}}".format, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    ),
    max_leaves=5,
)


@settings(suppress_health_check=list(HealthCheck))
@given(programs)
def test_any_program_gives_text_or_our_error(source: str) -> None:
    with contextlib.suppress(ModelError):
        assert isinstance(render_chat(source, HELLO), str)


def test_long_conversations_pass() -> None:
    many = [{"role": "user", "content": "word " * 2000} for _ in range(400)]
    assert len(render_chat(TEMPLATE, many)) > 4_000_000


def test_messages_may_be_any_mappings_and_sequences() -> None:
    message = MappingProxyType({"role": "user", "content": (1, OrderedDict(a="é"))})
    text = render_chat("{{ messages | tojson }}{{ x }}", (message,), variables={"x": (1, "two")})
    assert text == '[{"role": "user", "content": [1, {"a": "é"}]}][1, \'two\']'


@pytest.mark.parametrize(
    "content", [object(), b"bytes", {1, 2}, float], ids=lambda c: type(c).__name__
)
def test_what_json_cannot_hold(content: object) -> None:
    with pytest.raises(InputError, match="not what JSON can hold"):
        render_chat(TEMPLATE, [{"role": "user", "content": content}])


def test_messages_that_hold_themselves() -> None:
    message: dict[str, Any] = {"role": "user"}
    message["content"] = message
    with pytest.raises(InputError, match="not what JSON can hold"):
        render_chat(TEMPLATE, [message])


@pytest.mark.parametrize(
    "messages",
    [
        ["hi"],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "tool_calls": []}],
    ],
)
def test_messages_of_another_form(messages: list[object]) -> None:
    with pytest.raises(InputError, match="message 0"):
        render_chat(TEMPLATE, messages)  # type: ignore[arg-type]


def test_a_call_of_a_tool_needs_no_content() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    text = "{{ messages[0].tool_calls[0].function.name }}"
    assert render_chat(text, [message]) == "f"
    assert render_chat(text, [{**message, "content": None}]) == "f"


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": "x"}
    with pytest.raises(ModelError):
        render_chat("{{ messages[0].update({'content': 'y'}) }}", [message])
    assert message["content"] == "x"


def test_smollm2_as_transformers_renders_it(smollm2_path: Path) -> None:
    from ostinato.models.files.open import open_checkpoint
    from ostinato.models.text.tokenizer import load_tokenizer

    with open_checkpoint(smollm2_path) as checkpoint:
        template = load_tokenizer(checkpoint.tokenizer).chat_template
    for prompt in json.loads(REFERENCE.read_text())["prompts"]:
        if prompt["kind"] == "chat":
            assert template is not None
            assert render_chat(template, prompt["messages"]) == prompt["text"]
