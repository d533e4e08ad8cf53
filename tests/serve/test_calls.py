"""Calls of tools in answers: each known format, however the text is cut, and what is no call."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

# Where this is missing there are tests of other things; `make test` installs it
# (tests/test_packaging.py).
pytest.importorskip("ostinato.serve.calls")

from ostinato.models.text.chat import ChatTemplate
from ostinato.serve import calls
from ostinato.serve.calls import FORMATS, CallReader, ToolCall, ToolFormat, find_format
from tests.models.model_files import TEMPLATE
from tests.serve.tool_templates import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, TEMPLATES

HERMES_FORMAT, MISTRAL_FORMAT, NAMED_FORMAT, LLAMA_FORMAT = FORMATS
NAMES = ("f", "look_up")


def pieces(text: str, size: int) -> Iterator[str]:
    yield from (text[at : at + size] for at in range(0, len(text), size))


def read(form: ToolFormat, text: str, size: int = 1 << 20, **options: Any) -> list[Any]:
    """What a reader finds: texts that follow each other are one; calls are pairs, without ids."""
    reader = CallReader(form, NAMES, **options)
    found: list[Any] = []
    for piece in [*pieces(text, size), None]:
        for one in reader.push(piece or "", last=piece is None):
            if isinstance(one, ToolCall):
                assert len(one.id) == 9 and one.id.isalnum()
                found.append((one.name, one.arguments))
            elif found and isinstance(found[-1], str):
                found[-1] += one
            else:
                found.append(one)
    return found


HARD = (
    r'{"text": "a } \" { ] </tool_call> [ \\", "é": "\u00e9\ud800", "n": [{"x": 1e400}, {}], '
    '"日": null}'
)
"""Arguments that a reader by braces or by another spelling would break."""
F = ("f", "{}")

READS: list[tuple[ToolFormat, str, list[Any]]] = [
    (HERMES_FORMAT, "", []),
    (HERMES_FORMAT, "plain <text> {\n ", ["plain <text> {\n "]),
    (HERMES_FORMAT, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [F]),
    (HERMES_FORMAT, '<tool_call>{"arguments":{}, "name":"f"}</tool_call>\n', [F]),
    (HERMES_FORMAT, '<tool_call>{"name": "f"}</tool_call>', [F]),
    (HERMES_FORMAT, f'<tool_call>{{"name": "f", "arguments": {HARD}}}</tool_call>', [("f", HARD)]),
    (
        HERMES_FORMAT,
        'Let me see.\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>\n{"name": "look_up", '
        '"arguments": {"a": {"b": [1, 2.50]}}}\n</tool_call>\nDone. ',
        ["Let me see.", F, ("look_up", '{"a": {"b": [1, 2.50]}}'), "Done. "],
    ),
    # The end of the answer may stand for the word.
    (HERMES_FORMAT, '<tool_call>{"name": "f"}\n', [F]),
    (HERMES_FORMAT, '<tool_call>{"name": "f"}</tool', [F]),
    # Calls in the reasoning are thoughts.
    (
        HERMES_FORMAT,
        '\n<think>or <tool_call>{"name": "f"}</tool_call>?</think>\n<tool_call>{"name": "f"}',
        ['\n<think>or <tool_call>{"name": "f"}</tool_call>?</think>', F],
    ),
    (HERMES_FORMAT, '<think><tool_call>{"name": "f"}', ['<think><tool_call>{"name": "f"}']),
    (MISTRAL_FORMAT, 'so [TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a"}]', ["so", F]),
    (
        MISTRAL_FORMAT,
        f'[TOOL_CALLS][{{"name": "f", "arguments": {HARD}}},\n{{"name": "look_up"}}]',
        [("f", HARD), ("look_up", "{}")],
    ),
    (NAMED_FORMAT, f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{HARD}", [("f", HARD)]),
    (NAMED_FORMAT, '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]look_up[ARGS]{"a": 1}', [
        F, ("look_up", '{"a": 1}')
    ]),
    (LLAMA_FORMAT, '\n{"name": "f", "parameters": {}}\n', [F]),
    (LLAMA_FORMAT, f'{{"type": "function", "name": "f", "parameters": {HARD}}}', [("f", HARD)]),
    (LLAMA_FORMAT, '{"name": "f", "arguments": {"a": 1}}; {"name": "f"}', [("f", '{"a": 1}'), F]),
]  # fmt: skip

STAYS: list[tuple[ToolFormat, str]] = [
    (HERMES_FORMAT, '<tool_call>{"name": "g"}</tool_call>'),  # no tool of the request
    (HERMES_FORMAT, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    (HERMES_FORMAT, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    (HERMES_FORMAT, '<tool_call>{"name": "f", "name": "f"}</tool_call>'),
    (HERMES_FORMAT, "<tool_call>{'name': 'f'}</tool_call>"),
    (HERMES_FORMAT, '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    (HERMES_FORMAT, '<tool_call>{"name": "f"} and more</tool_call>'),
    (HERMES_FORMAT, '<tool_call>{"name": "f", "arguments": {"a": 1}'),
    (HERMES_FORMAT, '<tool_call>{"name": "f", "arguments": {]}</tool_call>'),
    (HERMES_FORMAT, '<tool_call>{"name" "f"}</tool_call>'),
    (HERMES_FORMAT, '<tool_call>["f"]</tool_call>'),
    (HERMES_FORMAT, "<tool_call>" + 5000 * '{"a":' + 5000 * "}" + "</tool_call>"),
    (HERMES_FORMAT, '<tool_call>{"name": "f", "arguments": {"a": ' + 9999 * "9" + "}}</tool_call>"),
    (HERMES_FORMAT, '{"name": "f", "arguments": {}}'),
    (HERMES_FORMAT, " \n<tool_call> \n"),
    (MISTRAL_FORMAT, "[TOOL_CALLS]"),
    (MISTRAL_FORMAT, "[TOOL_CALLS][]"),
    (MISTRAL_FORMAT, '[TOOL_CALLS][{"name": "f"}, {"name": "g"}]'),
    (MISTRAL_FORMAT, '[TOOL_CALLS][{"name": "f"} {"name": "f"}]'),
    (NAMED_FORMAT, "[TOOL_CALLS]f[ARGS]{,}"),
    (NAMED_FORMAT, '[TOOL_CALLS]f[ARGS]{"a": 1,}'),
    (NAMED_FORMAT, "[TOOL_CALLS]f[ARGS][1]"),
    (NAMED_FORMAT, "[TOOL_CALLS]f" + 300 * " " + "[ARGS]{}"),
    (LLAMA_FORMAT, 'I call {"name": "f", "parameters": {}}'),
    (LLAMA_FORMAT, '{"name": "f", "parameters": {}} calls it.'),
    (LLAMA_FORMAT, '{"name": "f", "parameters": {}}; and'),
    (LLAMA_FORMAT, '{"name": "Ada", "age": 36}'),
    (LLAMA_FORMAT, "{\n  int x;\n}"),
    (LLAMA_FORMAT, '{"name": "f", "parameters": {'),
]


@pytest.mark.parametrize(("form", "text", "found"), READS)
def test_calls_are_found_however_the_text_is_cut(
    form: ToolFormat, text: str, found: list[Any]
) -> None:
    for size in (1, 2, 3, 7, 1 << 20):
        assert read(form, text, size) == found, size
    for one in found:
        if isinstance(one, tuple):
            json.loads(one[1])


@pytest.mark.parametrize(("form", "text"), STAYS)
def test_what_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    sound = {
        HERMES_FORMAT: '<tool_call>{"name": "f"}</tool_call>',
        MISTRAL_FORMAT: '[TOOL_CALLS][{"name": "f"}]',
        NAMED_FORMAT: "[TOOL_CALLS]f[ARGS]{}",
    }
    for size in (1, 3, 1 << 20):
        assert read(form, text, size) == [text], size
        if form in sound:
            assert read(form, f"{text}x{sound[form]}", size) == [f"{text}x", F], "it is found after"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_an_answer_with_one_call_ends_with_it(size: int) -> None:
    for form, text, rest in (
        (HERMES_FORMAT, 'so <tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}'),
        (NAMED_FORMAT, "so [TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[ARGS]{}"),
        (MISTRAL_FORMAT, 'so [TOOL_CALLS][{"name": "f"}, {"name": "f"}]', " and"),
        (LLAMA_FORMAT, '{"name": "f"}; {"name": "look_up"}', ""),
    ):
        expected = [F] if form is LLAMA_FORMAT else ["so", F]
        assert read(form, text + rest, size, one=True) == expected


def test_text_does_not_wait_for_more_than_it_must() -> None:
    reader = CallReader(HERMES_FORMAT, NAMES)
    assert reader.push("It is <to") == ["It is"]
    assert reader.push("day> ") == [" <today>"]
    assert reader.push("x <tool_call>") == [" x"]
    assert reader.push('{"name": "f"}') == []
    (call,) = reader.push("</tool_call>")
    assert isinstance(call, ToolCall)
    llama = CallReader(LLAMA_FORMAT, NAMES)
    assert llama.push("No") == ["No"] and llama.push(" {") == [" {"]
    llama = CallReader(LLAMA_FORMAT, NAMES)
    assert llama.push('{"name": "Ada"') == [] and llama.push("} is") == ['{"name": "Ada"} is']


@pytest.mark.parametrize(
    ("form", "unit"),
    [
        (HERMES_FORMAT, '<tool_call>{"'),
        (HERMES_FORMAT, '<tool_call>{"a": ['),
        (HERMES_FORMAT, '<tool_call>{"","'),
        (MISTRAL_FORMAT, "[TOOL_CALLS]["),
        (MISTRAL_FORMAT, '[TOOL_CALLS]["'),
        (NAMED_FORMAT, '[TOOL_CALLS]f[ARGS]{"'),
        (LLAMA_FORMAT, '{"'),
    ],
)
def test_calls_that_never_end_take_time_that_grows_with_the_text_alone(
    form: ToolFormat, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who makes a model repeat itself must not hold up the answers to others."""
    searches: list[int] = []

    def counted(pattern: re.Pattern[str]) -> SimpleNamespace:
        def search(text: str, at: int) -> re.Match[str] | None:
            searches.append(at)
            return pattern.search(text, at)

        return SimpleNamespace(search=search)

    for name in ("_IN_STRING", "_OUTSIDE"):
        monkeypatch.setattr(calls, name, counted(getattr(calls, name)))
    assert read(form, 500 * unit, 16) == [500 * unit]
    assert len(searches) < 500 * 10


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "f"}', '{"name": "f", "arguments": ', "{", "}", "[", "]", '"', "\\", ",", ":", ";"),
    *(" ", "\n", "f", "é", "1"),
]


@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS), max_size=24).map("".join),
    st.integers(1, 9),
)
def test_no_cut_changes_what_is_found_and_no_text_is_lost(
    form: ToolFormat, text: str, size: int
) -> None:
    found = read(form, text)
    assert read(form, text, size) == found
    kept = "".join(one if isinstance(one, str) else one[1] for one in found)
    if all(isinstance(one, str) for one in found):
        assert kept == text
    for one in found:
        if isinstance(one, tuple):
            assert one[0] in NAMES and isinstance(json.loads(one[1]), dict)


# ------------------------------------------------------------------------- what a template implies


def found_in(source: str) -> ToolFormat | None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return find_format(ChatTemplate(source, tokens=tokens).render, ("</s>", "<|im_end|>"))


def test_the_format_is_that_of_the_template() -> None:
    assert {name: found_in(source) for name, source in TEMPLATES.items()} == {
        "hermes": HERMES_FORMAT,
        "mistral": MISTRAL_FORMAT,
        "mistral, named": NAMED_FORMAT,
        "llama": LLAMA_FORMAT,
    }


@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,  # knows no tools
        HERMES.replace("tools", "functions"),  # does not tell the model of them
        HERMES.replace("<tool_response>' + message.content", "'"),  # leaves results out
        HERMES.replace('"arguments": ', '"input": '),  # writes them otherwise
        MISTRAL.replace("[TOOL_CALLS]", "[CALLS]"),
        MISTRAL_NAMED.replace("[ARGS]", "[INPUT]"),
        LLAMA.replace("parameters", "input"),
        LLAMA.replace("{{- message.content", "{{- raise_exception('no results') ~ message.content"),
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_without_tools_or_with_other_calls(source: str) -> None:
    assert source not in TEMPLATES.values()
    assert found_in(source) is None
