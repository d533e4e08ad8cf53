"""Tools at the chat endpoint, by OpenAI's own client and by hand: what the model is told, and its
calls as OpenAI writes them.  What the model says is given by the tests."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
openai = pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")

from ostinato.serve import app as app_module
from ostinato.serve import engine as engine_module
from ostinato.serve.engine import End
from ostinato.serve.server import Server
from tests.serve.serving import MODEL, Reply, Start, call, client, say, until
from tests.serve.tool_templates import TEMPLATES

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "How warm is it in Köln?"}
WARMTH = {
    "name": "warmth",
    "description": "Says how warm it is.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": WARMTH}]
ASK: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": TOOLS}
ARGUMENTS = '{"place": "Köln {\\"a\\"} \\u00e9", "n": [1.50, {}]}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "warmth", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "warmth", "arguments": {ARGUMENTS}}}]',
    "mistral, named": f"[TOOL_CALLS]warmth[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
    "llama": f'{{"name": "warmth", "parameters": {ARGUMENTS}}}',
}


@pytest.fixture(params=list(TEMPLATES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def answered(server: Server, **fields: Any) -> Any:
    return client(server).chat.completions.create(**{**ASK, **fields})


def streamed(server: Server, **fields: Any) -> tuple[str, list[list[Any]], str]:
    """The text, each call's deltas, and how it ended."""
    text, calls, ends = "", [], []
    for chunk in answered(server, stream=True, **fields):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for one in choice.delta.tool_calls or ():
            calls += [[]] * (one.index >= len(calls))
            calls[one.index] = [*calls[one.index], one]
        ends += [choice.finish_reason] * bool(choice.finish_reason)
    (end,) = ends
    return text, calls, end


# --------------------------------------------------------------------------------------- answers


def test_a_call_as_a_whole_and_as_a_stream(
    start: Start, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(name)
    say(monkeypatch, server, CALLS[name])
    (choice,) = answered(server).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (one,) = choice.message.tool_calls
    assert (one.type, one.function.name, one.function.arguments) == (
        "function",
        "warmth",
        ARGUMENTS,
    )
    text, calls, end = streamed(server)
    assert (text, end) == ("", "tool_calls")
    (deltas,) = calls
    assert (deltas[0].type, deltas[0].function.name) == ("function", "warmth")
    assert deltas[0].id and deltas[0].id != one.id and deltas[0].function.arguments == ""
    assert "".join(each.function.arguments for each in deltas) == ARGUMENTS
    assert [(each.id, each.function.name) for each in deltas[1:]] == [(None, None)]


def test_text_and_several_calls(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start("hermes")
    other = CALLS["hermes"].replace("Köln", "東京")
    say(monkeypatch, server, f"Let me see: 🌡\n{CALLS['hermes']}\n{other}")
    (choice,) = answered(server).choices
    places = [json.loads(one.function.arguments)["place"] for one in choice.message.tool_calls]
    assert choice.message.content == "Let me see: 🌡"
    assert [place[:2] for place in places] == ["Kö", "東京"]
    text, calls, end = streamed(server)
    assert (text, end, len(calls)) == (choice.message.content, "tool_calls", 2)
    for deltas, one in zip(calls, choice.message.tool_calls, strict=True):
        assert "".join(each.function.arguments for each in deltas) == one.function.arguments
    assert len({deltas[0].id for deltas in calls}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_reasoning_that_the_prompt_began_is_a_thought(
    start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As QwQ's template begins it; reported of other servers: the call was made."""
    begins = "{{- '<|im_start|>assistant\n' }}"
    assert TEMPLATES["hermes"].count(begins) == 1
    server = start(TEMPLATES["hermes"].replace(begins, begins[:-4] + "<think>\n' }}"))
    thought = f"Or {CALLS['hermes']}?</think>"
    for after, count in (("No.", 0), (CALLS["hermes"], 1)):
        say(monkeypatch, server, thought + after)
        if stream:
            text, calls, end = streamed(server)
        else:
            (choice,) = answered(server).choices
            text, end = choice.message.content, choice.finish_reason
            calls = choice.message.tool_calls or []
        assert (len(calls), end) == (count, ("stop", "tool_calls")[count])
        assert text == thought + after * (not count)
    say(monkeypatch, server, f"{CALLS['hermes']} and so on")
    (choice,) = answered(server).choices
    assert choice.message.tool_calls is None, "without its end all is a thought"


def test_the_clients_helper_for_streams(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start("hermes")
    say(monkeypatch, server, f"So: {CALLS['hermes']}")
    with client(server).chat.completions.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.message.content == "So:" and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_no_call_stays_text(
    start: Start, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(name)
    for text in (
        CALLS[name].replace("warmth", "cold"),
        CALLS[name].replace("1.50", "1.5.0"),
        CALLS[name][:-20],
        "It is warm.",
    ):
        say(monkeypatch, server, text)
        if stream:
            assert streamed(server) == (text, [], "stop")
        else:
            (choice,) = answered(server).choices
            assert (choice.message.content, choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_says_so(
    start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("hermes")
    say(monkeypatch, server, f"{CALLS['hermes']} and {CALLS['hermes']}")
    count = len(server.engine.generator.encode(CALLS["hermes"], chat=False)) + 30
    if stream:
        text, calls, end = streamed(server, max_tokens=count)
        assert len(calls) == 1
    else:
        (choice,) = answered(server, max_tokens=count).choices
        text, end = choice.message.content, choice.finish_reason
        assert len(choice.message.tool_calls) == 1
    assert text.startswith("and <tool_call>") and end == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_only_one_call_where_more_are_not_wanted(
    start: Start, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stops the answer with it, and what it says until then is dropped."""
    server = start("hermes")
    say(monkeypatch, server, 5 * CALLS["hermes"])
    before = server.engine._ended_by[End.CANCELLED]
    for _ in range(3):
        if stream:
            text, calls, end = streamed(server, parallel_tool_calls=False)
        else:
            (choice,) = answered(server, parallel_tool_calls=False).choices
            text, end = choice.message.content or "", choice.finish_reason
            calls = choice.message.tool_calls
        assert (text, len(calls), end) == ("", 1, "tool_calls")
    until(lambda: not server.engine._entries)
    assert before <= server.engine._ended_by[End.CANCELLED] <= before + 3
    (choice,) = answered(server, parallel_tool_calls=True).choices
    assert len(choice.message.tool_calls) == 5


def test_answers_to_one_request_have_their_own_calls(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("hermes")
    say(monkeypatch, server, CALLS["hermes"], "No.")
    whole = answered(server, n=2).choices
    assert [one.finish_reason for one in whole] == ["tool_calls", "stop"]
    assert [bool(one.message.tool_calls) for one in whole] == [True, False]
    # One that ended with its only call is told of its end again, while the other goes on.
    say(monkeypatch, server, 2 * CALLS["hermes"], 3 * CALLS["hermes"].replace("warmth", "cold"))
    for _ in range(3):
        whole = answered(server, n=2, parallel_tool_calls=False).choices
        assert [len(one.message.tool_calls or ()) for one in whole] == [1, 0]


def test_a_stream_is_not_silent_while_a_call_comes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("hermes")
    monkeypatch.setattr(app_module, "_COMMENT_SECONDS", 0.1)
    monkeypatch.setattr(engine_module, "_GATHER_SECONDS", 0.0)  # the engine is never silent
    say(monkeypatch, server, CALLS["hermes"], seconds=0.01)
    body = call(server, "POST", CHAT, {**ASK, "stream": True}).body.decode()
    _, _, after = body.partition('"role": "assistant"')
    assert after.partition("tool_calls")[0].count(": waiting\n\n") >= 3
    assert body.endswith("data: [DONE]\n\n")


# ------------------------------------------------------------------- what the model is told


def prompt_of(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str = CHAT, **fields: Any
) -> str:
    """What the model reads for a request."""
    say(monkeypatch, server, "x")
    seen: list[Any] = []
    submit = server.engine.submit
    monkeypatch.setattr(
        server.engine,
        "submit",
        lambda jobs, listeners: seen.extend(jobs) or submit(jobs, listeners),
    )
    reply = call(server, "POST", path, {**ASK, **fields} if path == CHAT else fields)
    assert reply.status == 200, reply
    return server.engine.generator.tokenizer.decode(seen[0].tokens, skip_special=False)


@pytest.mark.parametrize("content", [None, "", "I look."])
def test_calls_and_results_go_to_the_template(
    start: Start, name: str, content: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client sends them back, and as transformers would give them to it."""
    server = start(name)
    say(monkeypatch, server, CALLS[name])
    (choice,) = answered(server).choices
    message = {**choice.message.model_dump(), "content": content}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "21 °C"}
    messages = [USER, message, result]
    generator = server.engine.generator
    given = dict(message["tool_calls"][0])
    given["function"] = {"name": "warmth", "arguments": json.loads(ARGUMENTS)}
    for tools in (TOOLS, None):
        text = generator.chat_template.render(
            [
                USER,
                {"role": "assistant", "content": content or "", "tool_calls": [given]},
                result,
            ],
            variables={"tools": tools} if tools else {},
        )
        assert prompt_of(server, monkeypatch, messages=messages, tools=tools) == text
    assert "21 °C" in text and "warmth" in text


def test_a_template_of_its_own_for_tools(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start("apart")
    assert "warmth" in prompt_of(server, monkeypatch)
    assert "warmth" not in prompt_of(server, monkeypatch, tools=None)
    say(monkeypatch, server, CALLS["hermes"])
    (choice,) = answered(server).choices
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS


def test_tools_that_are_not_to_be_called_are_not_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("hermes")
    plain = prompt_of(server, monkeypatch, tools=None)
    assert prompt_of(server, monkeypatch, tool_choice="none") == plain
    assert prompt_of(server, monkeypatch, tool_choice="auto") != plain
    say(monkeypatch, server, CALLS["hermes"])
    (choice,) = answered(server, tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (CALLS["hermes"], "stop")
    (choice,) = answered(server, tools=openai.omit).choices
    assert (choice.message.content, choice.message.tool_calls) == (CALLS["hermes"], None)


# ---------------------------------------------------------------------------- the response endpoint

FLAT = {"type": "function", **WARMTH, "strict": False}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "How warm?", "tools": [FLAT]}


def test_calls_in_responses(start: Start, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(name)
    say(monkeypatch, server, CALLS[name], "It is 21 °C.")
    found = client(server).responses.create(**RESPONSE)
    (one,) = found.output
    assert (one.type, one.name, one.arguments) == ("function_call", "warmth", ARGUMENTS)
    assert (found.status, found.output_text) == ("completed", "")
    assert (found.tools[0].name, found.tool_choice, found.parallel_tool_calls) == (
        *("warmth", "auto"),
        True,
    )
    result = {"type": "function_call_output", "call_id": one.call_id, "output": "21 °C"}
    items = [{"role": "user", "content": "How warm?"}, one.model_dump(), result]
    assert client(server).responses.create(**{**RESPONSE, "input": items}).output_text == (
        "It is 21 °C."
    )


def test_a_stream_of_a_response_with_calls_is_the_whole_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("hermes")
    say(monkeypatch, server, f"So: {CALLS['hermes']}{CALLS['hermes']} and so on")
    whole = client(server).responses.create(**RESPONSE)
    kinds = [item.type for item in whole.output]
    assert kinds == ["message", "function_call", "function_call", "message"]
    assert whole.output_text == "So:and so on"
    with client(server).responses.stream(**RESPONSE) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    left = {"id", "call_id"}
    found, wanted = (
        [one.to_dict(exclude_none=True) for one in each.output] for each in (last, whole)
    )
    for one in (*found, *wanted):
        assert left & {*one}
        for name in left & {*one}:
            del one[name]
    assert found == wanted
    assert last.output_text == whole.output_text
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    assert [event.item.id for event in added] == [event.item.id for event in done]
    assert len({event.item.id for event in added}) == 4
    arguments = [one for one in events if one.type == "response.function_call_arguments.done"]
    assert [one.arguments for one in arguments] == [ARGUMENTS] * 2


def test_items_go_to_the_template_as_messages(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("hermes")
    called = {"id": "a", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": "So:", "tool_calls": [called, {**called, "id": "b"}]},
        {"role": "tool", "tool_call_id": "a", "content": "21"},
        {"role": "tool", "tool_call_id": "b", "content": "22"},
    ]
    call_item = {"type": "function_call", "name": "warmth", "arguments": "{}", "id": "fc_1"}
    parts = [{"type": "input_text", "text": "22"}]
    items = [
        USER,
        {"type": "message", "role": "assistant", "content": "So:"},
        {**call_item, "call_id": "a"},
        {**call_item, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "21"},
        {"type": "function_call_output", "call_id": "b", "output": parts},
    ]
    wanted = prompt_of(server, monkeypatch, messages=messages)
    asked = {**RESPONSE, "input": items}
    assert prompt_of(server, monkeypatch, "/v1/responses", **asked) == wanted
    plain = prompt_of(server, monkeypatch, "/v1/responses", **{**asked, "tool_choice": "none"})
    assert plain == prompt_of(server, monkeypatch, messages=messages, tools=None)


# ------------------------------------------------------------------------------- what is refused


def check(reply: Reply, words: str, param: str) -> None:
    assert reply.status == 400, reply
    assert re.search(words, reply.error["message"]), reply.error
    assert reply.error["param"] == param


def test_a_model_without_tools_says_so(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(None)
    words = "the chat template of this model has none"
    for choice in ("auto", "required"):
        check(call(server, "POST", CHAT, {**ASK, "tool_choice": choice}), words, "tools")
    called = {"id": "a", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "content": "21", "tool_call_id": "a"},
    ):
        asked = {"model": MODEL, "messages": [USER, message], "max_tokens": 3}
        check(call(server, "POST", CHAT, asked), words, "tools")
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        assert call(server, "POST", CHAT, {**ASK, "max_tokens": 3, **fields}).status == 200


def tool(**changes: object) -> dict[str, object]:
    return {"tools": [{"type": "function", "function": {**WARMTH, **changes}}]}


def called(**changes: object) -> dict[str, object]:
    one = {"id": "a", "type": "function", "function": {"name": "warmth", "arguments": "{}"}}
    return {"messages": [USER, {"role": "assistant", "tool_calls": [{**one, **changes}]}]}


def arguments(value: object) -> dict[str, object]:
    return called(function={"name": "warmth", "arguments": value})


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"tools": {}}, "tools", "must be a list of 128 functions at most"),
        ({"tools": 129 * TOOLS}, "tools", "must be a list of 128 functions at most"),
        ({"tools": 2 * TOOLS}, "tools", "a name of its own for each"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools", r"\[0\] must have the type fun"),
        ({"tools": [{"type": "function"}]}, "tools", r"\[0\] must have the type function"),
        ({"tools": [{**TOOLS[0], "x": 1}]}, "tools", r"\[0\] must have the type function"),
        (tool(name="a b"), "tools", r"\[0\]: name must be 1 to 64"),
        (tool(name=None), "tools", r"\[0\]: name must be 1 to 64"),
        (tool(description=5), "tools", "description must be text"),
        (tool(parameters=[]), "tools", "parameters must be an object"),
        (tool(strict=1), "tools", "strict must be true or false"),
        (tool(strict=True, parameters={"type": "string"}), "tools", "must have the type object"),
        (tool(colour="red"), "tools", "colour is no field of a function"),
        (tool(description="\ud800"), "messages", "the chat template"),
        (tool(description="x" * (1 << 19)), "messages", "longer than"),
        (
            {"tool_choice": "any"},
            "tool_choice",
            'must be "none", "auto", "required", or a function',
        ),
        ({"tool_choice": {"type": "function", "name": "warmth"}}, "tool_choice", "with its name"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "cold"}}},
            "tool_choice",
            "no such function in tools",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": []}}},
            "tool_choice",
            "no such function in tools",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no such function in tools"),
        (
            {"structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "must be a JSON schema, an object, where there are tools",
        ),
        ({"json_schema": True}, "json_schema", "must be a JSON schema, an object, where"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "must be a JSON schema"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "cannot set tools"),
        (
            {
                "messages": [USER, {"role": "assistant", "content": "x"}],
                "continue_final_message": True,
            },
            "tools",
            "cannot be used with continue_final_message",
        ),
        (called(id=None), "messages", r"\[1\]: tool_calls must be text"),
        (called(type="custom"), "messages", r"\[1\]: tool_calls must have calls with an id"),
        (called(function=5), "messages", r"\[1\]: tool_calls must have calls with an id"),
        (called(colour="red"), "messages", r"\[1\]: tool_calls must have calls with an id"),
        (arguments(None), "messages", r"\[1\]: tool_calls must be text"),
        (arguments({}), "messages", r"\[1\]: tool_calls must be text"),
        (arguments("{"), "messages", "arguments of warmth that are no JSON object"),
        (arguments("[]"), "messages", "arguments of warmth that are no JSON object"),
        (arguments('{"a": NaN}'), "messages", "arguments of warmth that are no JSON object"),
        (arguments("[" * 9000), "messages", "arguments of warmth that are no JSON object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id is missing"),
        (
            {"messages": [{**USER, "tool_calls": [{}]}]},
            "messages",
            r"\[0\]: tool_calls is no field of a message",
        ),
    ],
)
def test_a_wrong_field_is_named(
    start: Start, changes: dict[str, object], param: str, words: str
) -> None:
    check(call(start("hermes"), "POST", CHAT, {**ASK, **changes}), words, param)


def test_what_changes_nothing_is_taken(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start("hermes")
    wanted = prompt_of(server, monkeypatch)
    assert prompt_of(server, monkeypatch, **tool(strict=False)) == wanted
    assert prompt_of(server, monkeypatch, **tool(strict=None)) == wanted
    assert prompt_of(server, monkeypatch, messages=[{**USER, "tool_calls": []}]) == wanted
    sent = {**called(index=0), "max_tokens": 3}
    assert call(server, "POST", CHAT, {**ASK, **sent}).status == 200
    assert call(server, "POST", CHAT, {**ASK, **arguments("")}).status == 200
    assert call(server, "POST", CHAT, {**ASK, "tools": 128 * [], "max_tokens": 3}).status == 200
