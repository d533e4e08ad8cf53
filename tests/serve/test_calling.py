"""Calls of tools that a grammar makes: an answer that must be a call, arguments that must match
their schema, and a schema for what is no call.  The model has random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
openai = pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")
pytest.importorskip("llguidance")

from ostinato import open_device
from ostinato.models import Tokenizer
from ostinato.serve.calls import FORMATS, arguments_schema
from ostinato.serve.grammar import GrammarCompiler, fill_masks
from ostinato.serve.server import Server
from tests.models.model_files import CONFIG, SPECIAL, write_gguf
from tests.serve.conftest import MARKS
from tests.serve.serving import MODEL, SPACES, Start, call, client, open_generator, running
from tests.serve.tool_templates import TEMPLATES

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
END = 2
CALLS = 277
"""The special token `[TOOL_CALLS]`; the other formats of the tests mark calls by text."""


def schema(*values: object, **more: object) -> dict[str, object]:
    """Of an object with one field."""
    return {
        "properties": {"x": {"$ref": "#/$defs/x"}},
        "required": ["x"],
        "additionalProperties": False,
        "$defs": {"x": {"enum": [*values]}},
        **more,
    }


# Names that begin like others, values that look like marks, references that name the root.
MARKED = ["[ARGS]", "</tool_call>", "[TOOL_CALLS]", '"']
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get": {"parameters": schema(1, 2, type="object")},
    "get_more": {"parameters": schema(*MARKED, type=["object", "null"])},
    "call": {"parameters": schema(7)},
    "nothing": {},
    "null": {"parameters": None},
}
RIGHT: dict[str, list[object]] = {
    "get": [{"x": 1}, {"x": 2}],
    "get_more": [{"x": one} for one in MARKED],
    "call": [{"x": 7}],
    "nothing": [{}],
    "null": [{}],
}
TOOLS = [{"type": "function", "function": {"name": name, **one}} for name, one in FUNCTIONS.items()]
NAMED: Any = {"type": "function", "function": {"name": "get"}}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "x"}],
    "tools": TOOLS,
    "temperature": 2,
    "max_tokens": 900,
}
NO_SPACE = {str(len(SPECIAL) + byte): -100 for byte in b"\n\t\r"}
"""Biases against space between JSON's tokens, of which a model of random weights writes much."""
NO_BLANK = {**NO_SPACE, str(len(SPECIAL) + ord(" ")): -100, "267": -100}
"""The same against blanks, which some formats have."""


@pytest.fixture(params=list(TEMPLATES))
def server(request: pytest.FixtureRequest, start: Start) -> Server:
    return start(request.param, ends=True)


@pytest.fixture
def marked(start: Start) -> Server:
    """A server whose model begins calls with one token, so that a bias makes it call, or not."""
    return start("mistral", ends=True)


def answered(server: Server, **fields: Any) -> Any:
    reply = call(server, "POST", CHAT, {**ASK, **fields})
    assert reply.status == 200, reply
    return reply.json


def made(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message, which fit."""
    found = [
        (one["function"]["name"], json.loads(one["function"]["arguments"]))
        for one in message.get("tool_calls", ())
    ]
    assert all(arguments in RIGHT[name] for name, arguments in found), found
    return found


# ------------------------------------------------------------------------- an answer that is a call


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_an_answer_that_must_call_calls(server: Server, choice: object) -> None:
    fields: dict[str, Any] = {"tool_choice": choice, "seed": 0, "n": 2, "logit_bias": NO_BLANK}
    found = answered(server, **fields)["choices"]
    # A stream says the same.
    with client(server).chat.completions.stream(**{**ASK, **fields}) as stream:
        streamed = stream.get_final_completion().to_dict()["choices"]
    seen = set()
    for one, other in zip(found, streamed, strict=True):
        calls = made(one["message"])
        assert calls and one["message"]["content"] is None
        assert made(other["message"]) == calls and not other["message"].get("content")
        assert one["finish_reason"] == other["finish_reason"] == "tool_calls"
        if choice == NAMED:
            assert [name for name, _ in calls] == ["get"]
        seen |= {name for name, _ in calls}
    assert choice == NAMED or len(seen) > 1


def test_several_calls_only_where_they_are_wanted(server: Server) -> None:
    fields: dict[str, Any] = {"tool_choice": "required", "seed": 0, "n": 3}
    found = answered(server, **fields, logit_bias={str(END): -2})["choices"]
    assert any(len(made(one["message"])) > 1 for one in found)
    # What ends the answer is that nothing may follow.
    fields |= {"parallel_tool_calls": False, "logit_bias": {**NO_BLANK, str(END): -100}}
    for one in answered(server, **fields)["choices"]:
        assert len(made(one["message"])) == 1 and one["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("most", [3, 40])
def test_a_call_that_is_cut_off_is_no_call(server: Server, most: int) -> None:
    """Reported of others: its end was "tool_calls", in streams alone."""
    fields: dict[str, Any] = {"tool_choice": NAMED, "max_tokens": most, "seed": 3}
    long = {"name": "get", "parameters": {"properties": {"x": {"type": "string", "minLength": 90}},
                                          "required": ["x"]}}  # fmt: skip
    fields["tools"] = [{"type": "function", "function": long}]
    (found,) = answered(server, **fields)["choices"]
    assert found["finish_reason"] == "length" and "tool_calls" not in found["message"]
    chunks = [*client(server).chat.completions.create(**{**ASK, **fields}, stream=True)]
    assert (
        "".join(one.choices[0].delta.content or "" for one in chunks)
        == (found["message"]["content"])
    )
    assert not any(one.choices[0].delta.tool_calls for one in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_call_begins_with_the_token_that_marks_it(marked: Server) -> None:
    """As the model has learned it, and not spelt out."""
    found = answered(marked, tool_choice="required", logprobs=True)["choices"][0]
    assert found["logprobs"]["content"][0]["token"] == "[TOOL_CALLS]"


def test_a_prompt_that_begins_the_reasoning_hides_no_call(start: Start) -> None:
    template = TEMPLATES["hermes"] + "{%- if add_generation_prompt %}{{- '<think>\n' }}{%- endif %}"
    found = answered(start(template, ends=True), tool_choice=NAMED, seed=1)["choices"][0]
    assert made(found["message"]) and found["finish_reason"] == "tool_calls"


def test_each_answer_has_a_grammar_of_its_own(server: Server) -> None:
    found = answered(server, n=3, tool_choice="required", parallel_tool_calls=False, seed=1)
    for choice in found["choices"]:
        assert len(made(choice["message"])) == 1 and choice["finish_reason"] == "tool_calls"


def test_a_response_that_must_call_calls(server: Server) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "input": "x",
        "tools": [{"type": "function", "name": name, **one} for name, one in FUNCTIONS.items()],
        "temperature": 2,
        "max_output_tokens": 900,
        "extra_body": {"seed": 1, "logit_bias": NO_BLANK},
    }
    named: Any = {"type": "function", "name": "call"}
    for choice in ("required", named):
        found = client(server).responses.create(**ask, tool_choice=choice).to_dict()
        assert found["tool_choice"] == choice and found["status"] == "completed"
        output: Any = found["output"]
        for one in output:
            assert one["type"] == "function_call"
            assert json.loads(one["arguments"]) in RIGHT[one["name"]]
        assert choice == "required" or [one["name"] for one in output] == ["call"]
        with client(server).responses.stream(**ask, tool_choice=choice) as stream:
            streamed: Any = stream.get_final_response().to_dict()["output"]
        assert [one["arguments"] for one in streamed] == [one["arguments"] for one in output]


# ------------------------------------------------------------------ an answer that may be a call


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_schema_of_the_answer_leaves_room_for_calls(
    marked: Server, path: str, calls: bool
) -> None:
    """Reported of others: the model, which was told of tools, could not call any."""
    form = {"type": "json_schema", "schema": {"enum": [5]}}
    bias = {**NO_SPACE, str(CALLS): 100 if calls else -100}
    sent: dict[str, Any] = {**ASK, "logit_bias": bias, "parallel_tool_calls": False, "seed": 1}
    if path == CHAT:
        sent["response_format"] = {**form, "json_schema": {"schema": form.pop("schema")}}
        (found,) = answered(marked, **sent)["choices"]
        text, reason = found["message"]["content"], found["finish_reason"]
        assert (text, reason) == ((None, "tool_calls") if calls else ("5", "stop"))
        assert bool(found["message"].get("tool_calls")) is calls
    else:
        sent |= {"input": "x", "text": {"format": form}, "max_output_tokens": 900}
        sent["tools"] = [{"type": "function", **one["function"]} for one in TOOLS]
        del sent["messages"], sent["max_tokens"]
        reply = call(marked, "POST", path, sent)
        assert reply.status == 200, reply
        (item,) = reply.json["output"]
        assert item["type"] == ("function_call" if calls else "message")
        assert calls or item["content"][0]["text"] == "5"


def test_an_answer_of_a_schema_may_begin_like_a_call(start: Start) -> None:
    """In Llama's format both are objects."""
    server = start("llama", ends=True)
    form = {"type": "json_schema", "json_schema": {"schema": schema("a", type="object")}}
    fields: dict[str, Any] = {"response_format": form, "seed": 0, "n": 12, "logit_bias": NO_BLANK}
    fields["parallel_tool_calls"] = False
    seen = set()
    for found in answered(server, **fields)["choices"]:
        content = found["message"]["content"]
        seen.add(content is None)
        assert content is None or json.loads(content) == {"x": "a"}
    assert len(seen) == 2


@pytest.mark.parametrize("strict", [True, False])
def test_strict_arguments_fit_where_the_model_calls_freely(marked: Server, strict: bool) -> None:
    (tool, *_) = TOOLS
    tools = [{**tool, "function": {**tool["function"], "strict": strict}}]
    found = answered(
        marked,
        tools=tools,
        seed=0,
        n=4,
        logit_bias={**NO_BLANK, str(CALLS): 100},
        parallel_tool_calls=False,
        max_tokens=100,
    )["choices"]
    assert [
        bool(made(one["message"])) and one["finish_reason"] == "tool_calls" for one in found
    ] == [strict] * 4


def test_the_space_that_a_tokenizer_adds_is_dropped_beside_strict_functions(
    tmp_path: Path,
) -> None:
    path = write_gguf(
        tmp_path / "spaces.gguf",
        config=replace(CONFIG, context_length=2048),
        metadata={**SPACES, "tokenizer.chat_template": TEMPLATES["hermes"]},
    )
    space_x = SPACES["tokenizer.ggml.tokens"].index("\u2581x")
    (tool, *_) = TOOLS
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    with (
        open_device("host") as device,
        open_generator(device, path, max_context=2048) as generator,
        running(generator) as server,
    ):
        for tools in ([tool], [strict]):
            bias = {str(space_x): 100}
            found = answered(server, tools=tools, logit_bias=bias, max_tokens=3)["choices"][0]
            assert found["message"]["content"] == "x x x"


# ---------------------------------------------------------------------------------- the grammars


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """True if the text is a whole answer."""
    place = compiler.compile("lark", grammar)
    over = False
    for token in [*tokenizer.encode(text, add_special=False), END]:
        words = np.empty((1, 9), np.uint32)
        fill_masks({0: place}, words)
        if over or not words[0, token // 32] >> (token % 32) & 1:
            return over and token == END
        over = place.take(token)
    return True


CALL, WRONG = '{"x": 1}', '{"x": 3}'
HERMES = '<tool_call>\n{"name": "get", "arguments": %s}\n</tool_call>'
LIST = '{"name": "get", "arguments": %s}'
LLAMA = '{"name": "get", "parameters": %s}'
ANSWERS: list[tuple[str, str, str]] = [  # a format; a text with calls; where it is an answer
    ("hermes", HERMES, "must may"),
    ("hermes", f"{HERMES}\n{HERMES}", "must may"),
    ("hermes", f"So: {HERMES} and {HERMES}.", "may"),
    ("hermes", f"<tool_call>\n{HERMES}", ""),
    ("hermes", HERMES.replace("get", "got"), ""),
    ("mistral", f"[TOOL_CALLS][{LIST}]", "must may"),
    ("mistral", f"[TOOL_CALLS] [{LIST}, {LIST}]", "must may"),
    ("mistral", f"So: [TOOL_CALLS][{LIST}] and [TOOL_CALLS][{LIST}].", "may"),
    ("mistral, named", "[TOOL_CALLS]get[ARGS]%s", "must may"),
    ("mistral, named", "[TOOL_CALLS]get[CALL_ID]abc123XYZ[ARGS]%s", "must may"),
    ("mistral, named", "[TOOL_CALLS]get[CALL_ID]abc[ARGS]%s", ""),
    ("mistral, named", "[TOOL_CALLS]get[ARGS]%s[TOOL_CALLS]get[ARGS]%s", "must may"),
    ("mistral, named", "So: [TOOL_CALLS]get[ARGS]%s and [TOOL_CALLS]get[ARGS]%s.", "may"),
    ("llama", LLAMA, "must may"),
    ("llama", f"{LLAMA}; {LLAMA}", "must may"),
    ("llama", f"So: {LLAMA}", "text"),
    ("llama", " \n[%s]", ""),
]


@pytest.mark.parametrize(("name", "text", "where"), ANSWERS)
@pytest.mark.parametrize("spelt", [False, True])
def test_what_a_grammar_of_calls_takes(
    marked: Server, name: str, text: str, where: str, spelt: bool
) -> None:
    """`spelt`: the words that mark calls are other ones, which are text and no tokens."""
    generator = marked.engine.generator
    tokenizer = generator.tokenizer
    compiler = GrammarCompiler(tokenizer, 280, generator.decoder.stop_tokens)
    form = dict(zip(TEMPLATES, FORMATS, strict=True))[name]
    words = {word: CALLS + n for n, word in enumerate(MARKS) if word in form.words}
    if spelt:

        def other(given: str) -> str:
            for word in MARKS:
                given = given.replace(word, word.replace("]", "_]"))
            return given

        words, text = {}, other(text)
        form = replace(form, words=tuple(map(other, form.words)), call=other(form.call))
    schemas = {"get": arguments_schema({"name": "get", **FUNCTIONS["get"]})}
    for free in (False, True):
        grammar = form.grammar(schemas, words, one=False, free=free, answer=None)
        right = ("may" in where or where == "text") if free else "must" in where
        for arguments, fits in (
            (CALL, right),
            (CALL.replace(" ", 33 * " "), right and where == "text"),
            (WRONG, right and where == "text"),
        ):
            filled = text.replace("%s", arguments)
            assert takes(compiler, tokenizer, grammar, filled) is fits, (free, filled)
        for plain in ("", "It is [warm] {today}, <tool_cal or [TOOL_CALL. \n"):
            assert takes(compiler, tokenizer, grammar, plain) is free


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"parameters": {"uniqueItems": True}, "strict": True}, "tools", "uniqueItems"),
        ({"parameters": {"uniqueItems": True}}, "tool_choice", "uniqueItems"),
        ({"parameters": {"type": ["string", "null"]}}, "tools", "must have the type object"),
    ],
)
def test_parameters_that_cannot_be_kept_are_named(
    marked: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    tools = [{"type": "function", "function": {"name": "get", **fields}}]
    choice = "auto" if "strict" in fields else "required"
    reply = call(marked, "POST", CHAT, {**ASK, "tools": tools, "tool_choice": choice})
    assert reply.status == 400 and words in reply.error["message"], reply
    assert reply.error["param"] == param
    # Where nothing has to keep them, they are the model's own business.
    tools[0]["function"].pop("strict", None)
    answered(marked, tools=tools, max_tokens=3)
    answered(marked, tools=tools, max_tokens=3, response_format={"type": "json_object"})
    wrong = {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}
    reply = call(marked, "POST", CHAT, {**ASK, "tools": tools, "response_format": wrong})
    assert reply.status == 400 and reply.error["param"] == "response_format"
