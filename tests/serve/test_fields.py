"""What requests and answers look like: every field of a request that docs/serve.md lists does what
stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

# Where this is missing there are tests of other things; `make test` installs it
# (tests/test_packaging.py).
pytest.importorskip("ostinato.serve.protocol")

from ostinato import open_device
from ostinato.models import SamplingOptions
from ostinato.serve import protocol
from ostinato.serve.protocol import (
    ApiError,
    Chat,
    CompletionRequest,
    Kind,
    event_text,
    read_request,
)
from tests.models.model_files import write_gguf
from tests.serve.serving import MODEL, call, open_generator, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
PLAIN = SamplingOptions(temperature=1.0)
ODD = ({"a": 1}, ["odd"], "odd", 0.123, 17, True, False)


def listed(mark: str = "") -> dict[str, str]:
    """What stands there, by field."""
    (table,) = re.findall(
        rf"<!-- {mark}read by tests/serve/test_fields.py -->\n(.*?)\n\n", PAGE.read_text(), re.S
    )
    found: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        names, _, what = (cell.strip() for cell in row.strip("|").split(" | "))
        for name in re.findall(r"`(\w+)`", names):
            assert name not in found
            found[name] = what
    return found


LISTED: dict[Kind, dict[str, str]] = {
    "chat": listed(),
    "response": listed("fields of responses, "),
}
EACH = [(kind, name, what) for kind, fields in LISTED.items() for name, what in fields.items()]


def read(
    kind: Kind = "chat", sampling: SamplingOptions = PLAIN, **fields: object
) -> CompletionRequest:
    prompt: dict[str, object] = {"prompt": "x"}
    if kind == "chat":
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    elif kind == "response":
        prompt = {"input": "x"}
    return read_request({"model": MODEL, **prompt, **fields}, kind, sampling)


def refusal(kind: Kind, **fields: object) -> str | None:
    try:
        assert read(kind, **fields) == read(kind), "it changes the answer"
    except ApiError as error:
        assert error.status == 400 and error.param in fields
        return error.code
    return None


def test_the_page_lists_what_the_server_knows() -> None:
    ignored = {*protocol._IGNORED}
    ours: dict[Kind, set[str]] = {
        "chat": {*protocol._NEUTRAL, *ignored},
        "response": {*protocol._NEUTRAL_IN_RESPONSES, *protocol._STORED, *ignored - {"metadata"}},
    }
    for kind, fields in LISTED.items():
        unused = {name for name, what in fields.items() if not re.match(r"used|1 turns", what)}
        assert unused == ours[kind]


@pytest.mark.parametrize(
    ("kind", "name", "what"),
    [one for one in EACH if one[2].startswith(("only", "refused"))],
)
def test_a_field_that_would_change_the_answer_is_refused(kind: Kind, name: str, what: str) -> None:
    right = [json.loads(value) for value in re.findall(r"`(.*?)`", what)]
    assert bool(right) == what.startswith("only")
    for value in (None, *right):
        assert refusal(kind, **{name: value}) is None, value
    for value in ODD:
        if not any(type(value) is type(one) and value == one for one in right):
            assert refusal(kind, **{name: value}) == "unsupported_parameter", value


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, name, what in EACH if what == "no effect"]
)
def test_a_field_without_effect_may_be_anything(kind: Kind, name: str) -> None:
    for value in ODD:
        assert refusal(kind, **{name: value}) is None


def test_values_that_turn_something_off() -> None:
    loud = SamplingOptions(2.0, 40, 0.5, min_p=0.1, repetition_penalty=1.3)

    def chosen(**fields: object) -> SamplingOptions:
        return read(sampling=loud, seed=0, **fields).sampling

    assert chosen(top_k=-1) == chosen(top_k=0) == loud.with_named(top_k=0)
    assert chosen(top_p=0) == chosen(top_p=0.0, temperature=1.5) == SamplingOptions()
    named = chosen(top_p=0, repetition_penalty=1.2)
    assert named == SamplingOptions(repetition_penalty=1.2), "what is named stays"
    assert chosen(repeat_penalty=1.0) == loud.with_named(repetition_penalty=1.0)
    assert chosen(repeat_penalty=1, repetition_penalty=1.2).repetition_penalty == 1.2
    for wrong in ({"top_k": -2}, {"top_p": -0.1}, {"repeat_penalty": 1.1}, {"top_k": True}):
        with pytest.raises(ApiError, match=next(iter(wrong))):
            read(**wrong)  # type: ignore[arg-type]


def test_no_limit_of_tokens() -> None:
    assert read("completion").max_tokens == 16
    assert read("completion", max_tokens=-1).max_tokens is None
    assert read(max_tokens=-1).max_tokens is read().max_tokens is None
    assert read(max_tokens=5, max_completion_tokens=-1).max_tokens is None
    for wrong in (-2, 0, True, -1.5):
        with pytest.raises(ApiError, match="max_tokens"):
            read(max_tokens=wrong)


def test_what_messages_may_have_besides_text() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "a", **cached}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [part, part], **cached},
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "assistant", "content": "c", "reasoning_content": None},
    ]
    (chat,) = read(messages=messages).prompts
    assert chat == Chat(
        (
            {"role": "user", "content": "a\na"},
            {"role": "assistant", "content": "b", "reasoning_content": "why"},
            {"role": "assistant", "content": "c"},
        )
    )
    with pytest.raises(ApiError, match=r"\[0\]: reasoning_content must be text"):
        read(messages=[{"role": "user", "content": "x", "reasoning_content": 5}])


def test_reasoning_goes_to_the_template_and_counts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    path = write_gguf(tmp_path / "tiny.gguf", metadata={"tokenizer.chat_template": template})
    asked = {"model": MODEL, "max_tokens": 9, "temperature": 0}

    def said(**message: str) -> dict[str, Any]:
        messages = [{"role": "assistant", **message}]
        reply = call(server, "POST", "/v1/chat/completions", {**asked, "messages": messages})
        return {"status": reply.status, **reply.json}

    with (
        open_device("host") as device,
        open_generator(device, path) as generator,
        running(generator) as server,
    ):
        both = said(reasoning_content="ab", content="12")
        one = said(reasoning_content="", content="ab12")
        assert both["choices"] == one["choices"] == said(reasoning="ab", content="12")["choices"]
        assert both["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
        long = said(reasoning_content="x" * 8193, content="12")
        assert long["status"] == 400 and "longer than 8192 characters" in long["error"]["message"]


def test_an_event_is_one_line_wherever_lines_are_split() -> None:
    said = {"text": "".join(map(chr, range(0x3000))) + "é\U0001f600"}
    line, *rest = event_text(said).splitlines()
    assert rest == [""] and json.loads(line.removeprefix("data: ")) == said
    assert "é\U0001f600" in line, "other text stays short"
