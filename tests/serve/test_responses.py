"""The response endpoint, by OpenAI's own client and by hand."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
openai = pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")

from ostinato.errors import ModelError
from ostinato.models import TextGenerator
from ostinato.serve import app as app_module
from ostinato.serve.app import HttpLimits
from ostinato.serve.server import Server
from tests.serve.serving import MODEL, SECONDS, call, client, opened, running

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "input": "ab in 12?", "temperature": 0}
USER = {"role": "user", "content": "ab in 12?"}


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Iterator[TextGenerator]:
    with opened(tiny_model, ends=False) as generator:  # every answer is as long as it may be
        yield generator


@pytest.fixture(scope="module")
def server(generator: TextGenerator) -> Iterator[Server]:
    with running(generator, limits=HttpLimits(max_tokens=100)) as started:
        yield started


def chat(server: Server, messages: list[dict[str, str]], **fields: object) -> Any:
    asked = {"model": MODEL, "messages": messages, "temperature": 0, **fields}
    reply = call(server, "POST", "/v1/chat/completions", asked)
    assert reply.status == 200, reply
    return reply.json


def said(reply: Any) -> str:
    return str(reply["choices"][0]["message"]["content"])


# --------------------------------------------------------------------------------------- answers


def test_the_text_is_that_of_a_chat(server: Server) -> None:
    wanted = chat(server, [USER], max_tokens=20)
    found = client(server).responses.create(**ASK, max_output_tokens=20, metadata={"a": "b"})
    assert found.output_text == said(wanted) != ""
    assert re.fullmatch(r"resp_[0-9a-f]{24}", found.id) and found.object == "response"
    assert (found.model, found.metadata, found.max_output_tokens) == (MODEL, {"a": "b"}, 20)
    assert (found.temperature, found.top_p, found.tools, found.error) == (0, 1, [], None)
    (item,) = found.output
    assert (item.type, item.role) == ("message", "assistant")
    assert found.usage is not None
    assert found.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    assert found.usage.output_tokens == 20
    assert found.usage.total_tokens == wanted["usage"]["total_tokens"]
    assert found.usage.input_tokens_details.cached_tokens == found.usage.input_tokens - 1


def test_how_an_answer_ends(server: Server) -> None:
    text = client(server).responses.create(**ASK, max_output_tokens=12).output_text
    for more, status, reason in (
        ({}, "incomplete", "max_output_tokens"),
        ({"stop": [text[3:5]]}, "completed", None),
    ):
        found = client(server).responses.create(**ASK, max_output_tokens=12, extra_body=more)
        assert found.status == status and found.output[0].status == status
        details = found.incomplete_details
        assert (details and details.reason) == reason
        assert (found.completed_at is None) == (status == "incomplete")
    assert found.output_text == text.partition(text[3:5])[0]


def test_a_list_of_messages_and_instructions(server: Server) -> None:
    first = client(server).responses.create(**ASK, max_output_tokens=5)
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "the"},
        {"type": "message", "role": "user", "content": parts},
        *(item.model_dump() for item in first.output),
        USER,
    ]
    asked = {**ASK, "input": messages, "instructions": "in 12", "max_output_tokens": 10}
    found = client(server).responses.create(**asked)
    assert found.instructions == "in 12"
    wanted = [
        {"role": "system", "content": "in 12"},
        {"role": "system", "content": "the"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": first.output_text},
        USER,
    ]
    assert found.output_text == said(chat(server, wanted, max_tokens=10))
    assert found.output_text != said(chat(server, wanted[1:], max_tokens=10))


def test_options_work_as_in_a_chat(server: Server) -> None:
    options = {"seed": 5, "top_k": 9, "min_p": 0.01, "repetition_penalty": 1.4}
    asked = {**ASK, "temperature": 2, "top_p": 0.9, "max_output_tokens": 30}
    found = client(server).responses.create(**asked, extra_body=options)
    more = {"temperature": 2, "top_p": 0.9, "max_tokens": 30}
    assert found.output_text == said(chat(server, [USER], **more, **options))
    assert (found.temperature, found.top_p) == (2, 0.9)


# --------------------------------------------------------------------------------------- streams


def test_a_stream_is_the_whole_answer(server: Server) -> None:
    asked = {**ASK, "max_output_tokens": 40, "instructions": "the"}
    whole = client(server).responses.create(**asked)
    events = list(client(server).responses.create(**asked, stream=True))
    names = [event.type for event in events if event.type != "response.output_text.delta"]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text
    assert events[-4].text == events[-3].part.text == whole.output_text
    last = events[-1].response
    assert last.output == [events[-2].item] and last.output_text == whole.output_text
    assert last.incomplete_details == whole.incomplete_details
    assert last.usage.output_tokens == 40
    assert {event.item_id for event in events[3:-2]} == {last.output[0].id}
    assert events[0].response.id == last.id != whole.id
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])


@pytest.mark.parametrize("some", [True, False])
def test_the_clients_helper_for_streams(server: Server, some: bool) -> None:
    text = client(server).responses.create(**ASK, max_output_tokens=12).output_text
    end = text[3:5] if some else text[:1]
    with client(server).responses.stream(
        **ASK, max_output_tokens=12, extra_body={"stop": end}
    ) as stream:
        found = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(found) == stream.get_final_response().output_text == text.partition(end)[0]
    assert bool(found) == some, "an empty answer has no delta"


def test_each_event_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = server.engine.generator.decoder.run_batch

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return decode(*arguments, **options)

    monkeypatch.setattr(app_module, "_COMMENT_SECONDS", 0.02)
    asked = {**ASK, "max_output_tokens": 3, "stream": True}
    with mock.patch.object(server.engine.generator.decoder, "run_batch", slow):
        reply = call(server, "POST", RESPONSES, asked)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, nothing = reply.body.decode().split("\n\n")
    assert nothing == "" and ": waiting" in events
    for event in events:
        if event != ": waiting":
            name, data = event.split("\n")
            assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]
    assert name == "event: response.incomplete"


def test_an_answer_that_fails_says_so_in_its_stream(
    generator: TextGenerator, server: Server
) -> None:
    decode, begun, calls = generator.decoder.run_batch, threading.Event(), 0

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 8:
            assert begun.wait(SECONDS), "an answer that fails before its first event is no stream"
            raise ModelError("the logits hold NaN")
        return decode(*arguments, **{**options, "count": 1})

    with mock.patch.object(generator.decoder, "run_batch", fails):
        text = ""
        for event in client(server).responses.create(**ASK, stream=True):
            begun.set()
            if event.type == "response.output_text.delta":
                text += event.delta
        reply = call(server, "POST", RESPONSES, ASK)
    assert event.type == "response.failed" and event.response.status == "failed"
    assert event.response.error.code == "server_error"
    assert event.response.error.message == "the answer failed: the logits hold NaN"
    assert event.response.output_text == text
    assert reply.status == 500 and reply.error["code"] == "failed"


# ------------------------------------------------------------------------------- what is refused


def item(**fields: object) -> dict[str, object]:
    return {"input": [{**USER, **fields}]}


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"model": None}, "model", "model is missing"),
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "one at the least"),
        ({"input": 5}, "input", "must be text, or a list of messages"),
        ({"input": ["x"]}, "input", r"\[0\] must be an object"),
        ({"input": "x" * 8193}, "input", "longer than 8192 characters"),
        ({"input": "ab " * 200}, "input", "more than the context of 128"),
        (item(type="reasoning"), "input", r"\[0\]: items of the types message, function_call and"),
        (item(type="function_call_output"), "input", r"\[0\]: call_id is missing"),
        (item(type="function_call_output", call_id="a"), "input", r"\[0\]: output is missing"),
        (item(type="function_call", x=1), "input", r"\[0\]: a call has a call_id, a name and arg"),
        (item(role="tool"), "input", r"\[0\]: role must be one of"),
        (item(phase="commentary"), "input", "phase is no field of a message"),
        (item(content=None), "input", "content must be text"),
        (item(content=[{"type": "text", "text": "x"}]), "input", "input_text or output_text alone"),
        (item(content=[{"type": "input_image"}]), "input", "input_text or output_text alone"),
        (item(content=[{"type": "input_text", "text": "\ud800"}]), "input", "a lone surrogate"),
        ({"instructions": ["x"]}, "instructions", "must be text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be 1 or more"),
        ({"max_output_tokens": 101}, "max_output_tokens", "100 at most"),
        ({"metadata": "x"}, "metadata", "must be an object of 16 texts"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "must be an object of 16"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "texts of 512 characters at most"),
        ({"metadata": {"a": 1}}, "metadata", "must be text"),
        ({"metadata": {"\ud800": "a"}}, "metadata", "a lone surrogate"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "this server stores nothing"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "this server stores nothing"),
        ({"text": {"format": {"type": "xml"}}}, "text", "must be an object with the type"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools", "must have the type function"),
        (
            {"tools": [{"type": "function", "name": "f", "strict": 1}]},
            "tools",
            "strict must be true",
        ),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", "chat template of this model"),
        ({"tool_choice": "required"}, "tool_choice", "no such function in tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "or a function with its name",
        ),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"temperature": -1}, "temperature", "must be 0"),
        ({"max_tokens": 5}, "max_tokens", "unknown field"),
        ({"messages": [USER]}, "messages", "unknown field"),
        ({"n": 2}, "n", "unknown field"),
    ],
)
def test_a_wrong_field_is_named(
    server: Server, changes: dict[str, object], param: str, words: str
) -> None:
    reply = call(server, "POST", RESPONSES, {**ASK, **changes})
    assert reply.status == 400, reply
    assert re.search(words, reply.error["message"]) and reply.error["param"] == param
