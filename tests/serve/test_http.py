"""The HTTP layer, by OpenAI's own client and by hand."""

from __future__ import annotations

import errno
import gzip
import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
openai = pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")

from ostinato import open_device
from ostinato.errors import LogitsError, ModelError
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve import app as app_module
from ostinato.serve import connection as connection_module
from ostinato.serve import engine as engine_module
from ostinato.serve import server as server_module
from ostinato.serve.app import HttpLimits
from ostinato.serve.engine import End, Job
from ostinato.serve.server import Server
from tests.models.model_files import CONFIG, THINKING, weights, write_gguf
from tests.serve.serving import (
    MODEL,
    SECONDS,
    Reply,
    alone,
    call,
    client,
    open_generator,
    running,
    until,
)

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
MESSAGES = [{"role": "user", "content": "ab in 12?"}]
ASK = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3}


@pytest.fixture(scope="module")
def server(generator: TextGenerator) -> Iterator[Server]:
    limits = HttpLimits(body_bytes=20_000, max_tokens=100, choices=6)
    with running(generator, limits=limits, queue=4) as started:
        yield started


def wanted(
    apart: TextGenerator, tokens: list[int], max_tokens: int, *stop: str, **sampling: Any
) -> tuple[str, int, End]:
    return alone(apart, Job(tuple(tokens), max_tokens, SamplingOptions(**sampling), stop))


# --------------------------------------------------------------------------------- OpenAI's client


def test_a_chat(server: Server, apart: TextGenerator) -> None:
    tokens = apart.encode(MESSAGES)
    text, count, end = wanted(apart, tokens, 30, temperature=2.0, top_p=0.9, seed=5)
    answer = client(server).chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=30, temperature=2, top_p=0.9, seed=5
    )  # type: ignore[call-overload]
    assert answer.object == "chat.completion" and answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", text)
    assert choice.finish_reason == end.value
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens == count
    assert answer.usage.total_tokens == len(tokens) + count
    again = client(server).chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=30, temperature=2, top_p=0.9, seed=5
    )  # type: ignore[call-overload]
    assert again.choices[0].message.content == text and again.id != answer.id
    assert again.usage.prompt_tokens_details.cached_tokens == len(tokens) - 1


def test_a_chat_as_a_stream(server: Server, apart: TextGenerator) -> None:
    text, count, end = wanted(apart, apart.encode(MESSAGES), 40, temperature=2.0, seed=9)
    stream = client(server).chat.completions.create(
        model=MODEL,
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=40,
        temperature=2,
        seed=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *parts, usage = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        end.value
    ]
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == count
    assert all(part.usage is None for part in parts)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_several_times(
    server: Server, apart: TextGenerator, stream: bool
) -> None:
    tokens = [apart.encode("ab the", chat=False), [5, 9, 200]]
    asked: Any = ["ab the", "in"] if stream else tokens
    if stream:
        tokens[1] = apart.encode("in", chat=False)
    answer = client(server).completions.create(
        model=MODEL,
        prompt=asked,
        max_tokens=12,
        n=2,
        seed=3,
        temperature=1.5,
        stop=["th", "zz"],
        stream=stream,
    )
    found = [""] * 4
    ends: list[str | None] = [None] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found[choice.index] += choice.text
            ends[choice.index] = ends[choice.index] or choice.finish_reason
    for index in range(4):
        text, _, end = wanted(
            apart, tokens[index // 2], 12, "th", "zz", temperature=1.5, seed=3 + index
        )
        assert (found[index], ends[index]) == (text, end.value)
    assert len(set(found)) > 2


def test_without_a_seed_answers_differ(server: Server) -> None:
    texts = {
        choice.text
        for choice in client(server)
        .completions.create(model=MODEL, prompt="ab", max_tokens=20, temperature=2, n=4)
        .choices
    }
    assert len(texts) == 4


def test_completions_are_short_and_chats_as_long_as_they_may(server: Server) -> None:
    """As at OpenAI: 16 tokens, and up to the limit or the context."""
    api = client(server)
    answer = api.completions.create(model=MODEL, prompt="ab", temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens <= 16
    chat = api.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    assert chat.usage is not None and 16 < chat.usage.completion_tokens <= 100


def test_the_list_of_models(server: Server) -> None:
    api = client(server)
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).owned_by == "ostinato"
    with pytest.raises(openai.NotFoundError, match="no model 'other' here"):
        api.models.retrieve("other")


def test_the_code_in_the_docs_runs(
    apart: TextGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
    (sample,) = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), flags=re.S | re.M)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    text, _, _ = wanted(apart, apart.encode(messages), 40)
    with running(apart, model="smollm2-135m") as server:
        assert sample.count("http://127.0.0.1:8000") == 1
        names: dict[str, Any] = {}
        exec(sample.replace("http://127.0.0.1:8000", server.url), names)
        names["client"].close()
    assert capsys.readouterr().out == text


# ------------------------------------------------------------------------ how tokens are chosen


def test_what_a_request_does_not_name_is_the_models(tmp_path: Path) -> None:
    """The model's files decide, then the server's options; what a request names wins."""
    advice = {"general.sampling.temp": 2.5, "general.sampling.top_k": 40}
    path = write_gguf(tmp_path / "tiny.gguf", metadata=advice)
    ask = {"model": MODEL, "prompt": "the ab", "max_tokens": 30, "seed": 4}
    own = SamplingOptions(2.5, 40, seed=4)
    set_by_server = SamplingOptions(1.5, top_p=0.5, repetition_penalty=1.5)
    with open_device("host") as device, open_generator(device, path) as generator:
        assert generator.default_sampling == SamplingOptions(2.5, 40)
        tokens = tuple(generator.encode("the ab", chat=False))
        cases = [
            (None, {}, own),
            (None, {"temperature": 1.5}, own.with_named(temperature=1.5)),
            (None, {"top_k": 0, "min_p": 0.2}, own.with_named(top_k=0, min_p=0.2)),
            (None, {"temperature": 0}, SamplingOptions()),
            (set_by_server, {}, set_by_server.with_named(seed=4)),
            (set_by_server, {"top_p": 0.9}, set_by_server.with_named(seed=4, top_p=0.9)),
            (set_by_server, {"temperature": 0.0}, SamplingOptions()),
        ]
        texts = [alone(generator, Job(tokens, 30, sampling))[0] for _, _, sampling in cases]
        assert len(set(texts)) == len(texts) - 1, "the cases say nothing"
        for sampling in (None, set_by_server):
            with running(generator, sampling=sampling) as server:
                for (given, fields, _), text in zip(cases, texts, strict=True):
                    if given == sampling:
                        reply = call(server, "POST", COMPLETION, {**ask, **fields})
                        assert json.loads(reply.body)["choices"][0]["text"] == text, fields


def test_variables_of_the_template_and_the_last_message(tmp_path: Path) -> None:
    """With vLLM's names of the fields."""
    path = write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.chat_template": THINKING})
    args = {"think": False, "more": "ab"}
    begun = [*MESSAGES, {"role": "assistant", "content": "the in"}]
    with open_device("host") as device, open_generator(device, path) as generator:
        plain = generator.encode(MESSAGES)
        given = generator.encode(MESSAGES, template_args=args)
        going = generator.encode(begun, continue_last=True)
        assert len({*map(len, (plain, given, going))}) == 3
        with running(generator) as server:

            def asked(**fields: object) -> int:
                reply = call(server, "POST", CHAT, {**ASK, **fields})
                assert reply.status == 200, reply
                return int(reply.json["usage"]["prompt_tokens"])

            assert asked() == asked(add_generation_prompt=True) == len(plain)
            assert asked(chat_template_kwargs={}) == len(plain)
            assert asked(chat_template_kwargs=args) == len(given)
            last = {"messages": begun, "continue_final_message": True}
            assert asked(**last) == asked(**last, add_generation_prompt=False) == len(going)
            both = {**ASK, **last, "add_generation_prompt": True}
            check(
                call(server, "POST", CHAT, both), 400, "must be true, or", "add_generation_prompt"
            )


def test_a_byte_order_mark_is_no_text(server: Server) -> None:
    plain = {"model": MODEL, "prompt": "the ab", "max_tokens": 12, "seed": 4}
    chat = {**ASK, "seed": 4}

    def said(path: str, body: object) -> object:
        reply = call(server, "POST", path, body)
        assert reply.status == 200, reply
        choice = json.loads(reply.body)["choices"][0]
        return choice.get("text") or choice["message"]["content"]

    wanted = said(COMPLETION, plain)
    assert said(COMPLETION, {**plain, "prompt": "\ufeffthe ab"}) == wanted
    assert said(COMPLETION, {**plain, "prompt": ["\ufeffthe ab"]}) == wanted
    assert said(COMPLETION, b"\xef\xbb\xbf" + json.dumps(plain).encode()) == wanted
    wanted = said(CHAT, chat)
    part = {"type": "text", "text": "\ufeffab in 12?"}
    for content in ("\ufeffab in 12?", [part]):
        assert said(CHAT, {**chat, "messages": [{"role": "user", "content": content}]}) == wanted


# ------------------------------------------------------------------------------- what is refused


def check(reply: Reply, status: int, words: str, param: str | None = None) -> None:
    assert reply.status == status, reply
    assert re.search(words, reply.error["message"]), reply.error
    assert reply.error["param"] == param


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b'{"model": "tiny", "messages"', "no JSON"),
        (b"\xff\xfe", "no UTF-8: byte 0"),
        (b"[" * 9000, "no JSON"),
        (b'{"temperature": NaN}', "NaN is no JSON number"),
        (b'{"n": ' + b"9" * 5000 + b"}", "no JSON"),
        (b'{"max_tokens": 3, "max_tokens": 50}', "the field 'max_tokens' is there twice"),
        (b'{"messages": [{"role": "user", "role": "system"}]}', "'role' is there twice"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
    ],
)
def test_what_is_no_request(server: Server, body: bytes, words: str) -> None:
    for path in (CHAT, COMPLETION):
        check(call(server, "POST", path, body), 400, words)


def message(**changes: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "x", **changes}]}


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"model": None}, "model", "model is missing"),
        ({"model": 3}, "model", "model must be text"),
        ({"messages": None}, "messages", "missing"),
        ({"messages": []}, "messages", "one at the least"),
        ({"messages": "x"}, "messages", "must be a list"),
        ({"messages": ["x"]}, "messages", r"\[0\] must be an object"),
        (message(role="function"), "messages", r"\[0\]: role must be one of"),
        (message(role=[]), "messages", r"\[0\]: role must be one of"),
        (message(content=None), "messages", r"\[0\]: content must be text"),
        (message(content=[{"type": "image_url"}]), "messages", "of the type text alone"),
        (message(content=[{"type": "text", "text": "x", "image": 1}]), "messages", "no field of a"),
        (message(content="\ud800"), "messages", "a lone surrogate"),
        (message(function_call={}), "messages", "function_call is not supported"),
        (message(colour="red"), "messages", "colour is no field of a message"),
        (message(**{"\ud800": 1}), "messages", "\ud800 is no field of a message"),
        ({"temperature": -1}, "temperature", "must be 0"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "must be a finite number"),
        ({"top_p": -1}, "top_p", "must be above 0"),
        ({"top_k": -2}, "top_k", "must be 0 or more"),
        ({"min_p": 2}, "min_p", "must be 0"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be 0.01"),
        ({"seed": 1.5}, "seed", "must be a whole number"),
        ({"n": 0}, "n", "must be 1 or more"),
        ({"n": 7}, "n", "6 answers at most"),
        ({"max_tokens": 0}, "max_tokens", "must be 1 or more"),
        ({"max_tokens": 101}, "max_tokens", "100 at most"),
        ({"max_tokens": 2.0}, "max_tokens", "must be a whole number"),
        ({"stop": 5}, "stop", "must be text"),
        ({"stop": [""]}, "stop", "1 to 1024 characters"),
        ({"stop": ["x"] * 17}, "stop", "16 texts at most"),
        ({"stream": 1}, "stream", "must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": 1}, "stream_options", "must be an object"),
        ({"stream": True, "stream_options": {"include_usage": 0}}, "stream_options", "or false"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "cannot set messages"),
        ({"continue_final_message": 1}, "continue_final_message", "must be true or false"),
        ({"continue_final_message": True}, "continue_final_message", "needs a message of the"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "must be true, or false with"),
        ({"temprature": 0.5}, "temprature", "unknown field 'temprature'"),
        ({"\ud800": 0.5}, "\ud800", r"unknown field '\\ud800'"),
    ],
)
def test_a_wrong_field_is_named(
    server: Server, changes: dict[str, object], param: str, words: str
) -> None:
    check(call(server, "POST", CHAT, {**ASK, **changes}), 400, words, param)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "it has no tokens"),
        ([], "must be text, token ids"),
        ([[]], "must be text, token ids"),
        ([5, "x"], "must be a whole number"),
        ([280], "ids 0 to 279 only"),
        ([-1], "ids 0 to 279 only"),
        ([10**30], "ids 0 to 279 only"),
        ([5] * 129, "129 tokens, more than the context of 128"),
        ([""] * 4097, "4096 prompts at most"),
        ({}, "must be text"),
    ],
)
def test_a_wrong_prompt(server: Server, prompt: object, words: str) -> None:
    asked = {"model": MODEL, "prompt": prompt}
    check(call(server, "POST", COMPLETION, asked), 400, words, "prompt")


def test_fields_that_ask_for_nothing_are_taken(server: Server) -> None:
    more = {
        "logprobs": False,
        "n": 1,
        "presence_penalty": 0.0,
        "tools": [],
        "response_format": {"type": "text"},
        "user": "someone",
        "metadata": {"a": "b"},
        "seed": None,
        "seed_": None,
        "stop": None,
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None},
        *MESSAGES,
    ]
    greedy = {**ASK, "messages": messages, "temperature": 0}
    reply = call(server, "POST", CHAT, {**greedy, **more})
    assert reply.status == 200, reply
    messages[0]["content"] = "a\nb"
    whole = call(server, "POST", CHAT, greedy)
    assert reply.json["choices"] == whole.json["choices"]
    assert reply.json["usage"]["prompt_tokens"] == whole.json["usage"]["prompt_tokens"]


def test_another_model_path_method_or_type(server: Server) -> None:
    check(call(server, "POST", CHAT, {**ASK, "model": "gpt"}), 404, "no model 'gpt' here", "model")
    check(call(server, "GET", "/v1/nothing"), 404, "GET /v1/nothing: Not Found")
    for path in (f"{CHAT}/", "/health/"):
        check(call(server, "POST", path, ASK, host="evil.example"), 404, f"{path}: Not Found")
    check(call(server, "GET", CHAT), 405, "Method Not Allowed")
    typed = {"content-type": "text/plain"}
    check(call(server, "POST", CHAT, ASK, **typed), 415, "must be application/json")
    packed = {"content-encoding": "gzip"}
    check(call(server, "POST", CHAT, gzip.compress(b"{}"), **packed), 415, "'gzip' is not read")
    assert call(server, "POST", CHAT, ASK, **{"content-encoding": "identity"}).status == 200
    typed = {"content-type": "Application/JSON; charset=utf-8"}
    assert call(server, "POST", CHAT, ASK, **typed).status == 200


def test_a_body_that_is_too_large(server: Server) -> None:
    large = {**ASK, "messages": [{"role": "user", "content": "x" * 30_000}]}
    check(call(server, "POST", CHAT, large), 413, "20000 bytes at most")
    check(call(server, "POST", CHAT, b"{}", **{"content-length": "20001"}), 413, "20000 bytes")

    with socket.create_connection(server._listeners[0].getsockname(), SECONDS) as raw:
        head = "transfer-encoding: chunked\r\ncontent-type: application/json\r\nhost: localhost"
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n".encode())
        raw.sendall(b"7530\r\n" + b"x" * 30_000 + b"\r\n")  # and more to come
        assert b"413" in raw.recv(100)


def test_a_body_that_is_far_too_large_is_taken_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends all of it before it reads would know of a broken connection alone."""
    monkeypatch.setattr(connection_module, "_DROP_SECONDS", SECONDS)
    large = b"x" * 20_000_000  # more than sockets hold
    check(call(server, "POST", CHAT, large), 413, "20000 bytes")


def test_a_text_that_is_far_too_long_is_not_made_into_tokens(
    server: Server, generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer has one process, and others wait for it."""
    monkeypatch.setattr(generator, "encode", lambda *_, **__: pytest.fail("it is"))
    long, words = "x" * 8193, "longer than 8192 characters, too much for the context of 128 tokens"
    completion = {"model": MODEL, "prompt": [long]}
    check(call(server, "POST", COMPLETION, completion), 400, words, "prompt")
    named = {"role": "user", "content": "x", "name": long}
    for messages in ([{"role": "user", "content": long}], [named], MESSAGES * 129):
        reply = call(server, "POST", CHAT, {**ASK, "messages": messages})
        check(reply, 400, words, "messages")
        assert reply.error["code"] == "context_length_exceeded"
    monkeypatch.undo()
    reply = call(server, "POST", COMPLETION, {"model": MODEL, "prompt": long[:-1]})
    check(reply, 400, "tokens, more than the context of 128", "prompt")


def test_without_a_key_only_this_machine_asks(server: Server) -> None:
    """A page of another name, which leads here (DNS rebinding), has its own name in the request."""
    for name in ("127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:80", "[::1]"):
        assert call(server, "GET", "/v1/models", host=name).status == 200, name
    for name in ("evil.example", "evil.example:8000", "localhost.evil.example", ""):
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/health"),
            ("GET", "/"),
            ("POST", CHAT),
        ):
            body = ASK if method == "POST" else None
            check(call(server, method, path, body, host=name), 403, "answers at 127.0.0.1 alone")


def test_a_key_is_wanted_where_there_is_one(apart: TextGenerator) -> None:
    with running(apart, keys=("first", "secönd")) as server:
        for key in ("first", "secönd"):
            bearer = {"authorization": f"Bearer {key}".encode().decode("latin-1")}
            assert call(server, "POST", CHAT, ASK, **bearer).status == 200
            assert call(server, "GET", "/metrics", **bearer, host="any.name").status == 200
            for name in ("X-Api-Key", "api-key"):
                named = {name: key.encode().decode("latin-1")}
                assert call(server, "GET", "/v1/models", **named).status == 200
        assert client(server, "first").models.list().data
        with pytest.raises(openai.AuthenticationError, match="a key is needed"):
            client(server, "wrong").models.list()
        for path in ("/v1/models", "/metrics"):
            for headers in (
                *({}, {"authorization": "first"}, {"authorization": "Bearer "}),
                *({"x-api-key": "wrong"}, {"api-key": ""}),
            ):
                reply = call(server, "GET", path, **headers)
                check(reply, 401, "a key is needed")
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.error["code"] == "invalid_api_key"
        check(call(server, "POST", CHAT, b"{"), 401, "a key is needed")
        for path in ("/health", "/ready"):
            assert call(server, "GET", path).status == 200


def test_web_pages_of_named_origins(apart: TextGenerator) -> None:
    page, wanted = {"origin": "https://app.example"}, "access-control-allow-origin"
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, x-api-key",
    }
    with running(apart, keys=("key",), origins=(page["origin"],)) as server:
        assert call(server, "OPTIONS", CHAT, **page, **asks).status == 200
        for key, status in (("key", 200), ("wrong", 401)):
            reply = call(server, "POST", CHAT, ASK, **page, **{"x-api-key": key})
            assert (reply.status, reply.headers[wanted]) == (status, page["origin"])
        other = {"origin": "https://other.example"}
        assert call(server, "OPTIONS", CHAT, **other, **asks).status == 400
        reply = call(server, "POST", CHAT, ASK, **other, **{"x-api-key": "key"})
        assert reply.status == 200 and wanted not in reply.headers
    with running(apart) as server:
        assert call(server, "OPTIONS", CHAT, **page, **asks).status == 405
        assert wanted not in call(server, "POST", CHAT, ASK, **page).headers


def test_each_request_is_logged_once_it_was_answered(apart: TextGenerator) -> None:
    facts: list[Mapping[str, Any]] = []
    with running(apart, log=facts.append, keys=("key",)) as server:
        key = {"x-api-key": "key"}
        usage = json.loads(call(server, "POST", CHAT, ASK, **key).body)["usage"]
        call(server, "POST", CHAT, {**ASK, "stream": True}, **key)
        call(server, "POST", CHAT, b"{", **key)
        call(server, "GET", "/v1/nothing", **key)
        call(server, "GET", "/v1/models")
        until(lambda: len(facts) == 5)
    assert [(each["method"], each["path"], each["status"]) for each in facts] == [
        *[("POST", CHAT, status) for status in (200, 200, 400)],
        *[("GET", "/v1/nothing", 404), ("GET", "/v1/models", 401)],
    ]
    assert facts[0]["prompt_tokens"] == facts[1]["prompt_tokens"] == usage["prompt_tokens"]
    assert facts[0]["completion_tokens"] == usage["completion_tokens"]
    assert "prompt_tokens" not in facts[2]
    for each in facts:
        assert each["client"] == "127.0.0.1" and 0 <= each["seconds"] < SECONDS
        assert datetime.fromisoformat(each["time"]).tzinfo is not None


# ---------------------------------------------------------------------------- how the server is


def number(text: str, name: str) -> float:
    (found,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, flags=re.M)
    return float(found)


def test_metrics_are_those_of_every_layer(server: Server) -> None:
    before = call(server, "GET", "/metrics").body.decode()
    for _ in range(3):
        assert call(server, "POST", CHAT, ASK).status == 200
    call(server, "POST", CHAT, b"{")
    reply = call(server, "GET", "/metrics")
    text = reply.body.decode()
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")

    def more(name: str) -> float:
        return number(text, name) - (number(before, name) if f"\n{name} " in before else 0)

    answered = 'ostinato_http_requests_total{path="/v1/chat/completions",status="%s"}'
    assert more(answered % 200) == 3 and more(answered % 400) == 1
    assert more("ostinato_engine_submitted") == 3
    ends = [more(f'ostinato_engine_ended{{reason="{end}"}}') for end in ("stop", "length")]
    assert sum(ends) == 3
    assert more("ostinato_time_to_first_token_seconds_count") == 3
    assert more("ostinato_answer_seconds_count") == 3
    assert more("ostinato_engine_answer_tokens") == more("ostinato_decoder_decoded_tokens") + 3
    assert more('ostinato_step_calls{step="decode"}') > 0
    assert number(text, "ostinato_graph_cache_graphs") > 3
    assert number(text, "ostinato_modules_modules") > 0
    assert number(text, "ostinato_engine_memory_total") > 0
    assert number(text, "ostinato_engine_under_way") == 0


def test_health_and_readiness(apart: TextGenerator) -> None:
    with running(apart) as server:
        assert call(server, "GET", "/health").json == {"status": "ok"}
        assert call(server, "GET", "/ready").json == {"status": "ready"}
        server.engine.ready = False
        reply = call(server, "GET", "/ready")
        assert (reply.status, reply.json) == (503, {"status": "starting"})
        server.engine.ready = True
        server.engine.stopping = True
        reply = call(server, "GET", "/ready")
        assert (reply.status, reply.json) == (503, {"status": "stopping"})
        assert call(server, "GET", "/health").status == 200
        reply = call(server, "POST", CHAT, ASK)
        check(reply, 503, "the server is stopping")
        assert reply.headers["connection"] == "close"


def test_an_engine_that_fails_is_said_and_ends_the_server(
    apart: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("broken")

    with running(apart) as server:
        monkeypatch.setattr(apart.decoder, "set_sampling", broken)
        reply = call(server, "POST", CHAT, ASK)
        check(reply, 500, "the answer failed: broken")
        until(lambda: server._uvicorn.should_exit)
    with pytest.raises(RuntimeError, match="broken"):
        raise server.engine.failure or AssertionError


def test_too_many_are_told_to_come_again(apart: TextGenerator) -> None:
    """Every one is answered or refused; while four are answered and one waits, that is all."""
    decode = apart.decoder.run_batch
    hold = threading.Event()

    def held(*arguments: Any, **options: Any) -> Any:
        if server.engine.ready:
            hold.wait(SECONDS)
        return decode(*arguments, **options)

    asked = {**ASK, "max_tokens": 5, "temperature": 0}
    with running(apart, queue=1) as server, ThreadPoolExecutor(5) as pool:
        apart.decoder.run_batch = held  # type: ignore[method-assign]
        try:
            answers = [pool.submit(call, server, "POST", CHAT, asked) for _ in range(5)]
            until(lambda: server.engine._scheduler.under_way == 5)
            with pytest.raises(openai.RateLimitError, match="the server is full"):
                client(server).chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
            reply = call(server, "POST", CHAT, asked)
            check(reply, 429, "the server is full")
            assert reply.headers["retry-after"] == "1" and reply.error["code"] == "queue_full"
            hold.set()
            replies = [answer.result(SECONDS) for answer in answers]
        finally:
            hold.set()
            del apart.decoder.run_batch
        assert [reply.status for reply in replies] == [200] * 5
        assert len({reply.json["choices"][0]["message"]["content"] for reply in replies}) == 1
        assert call(server, "POST", CHAT, asked).status == 200


def test_more_answers_than_there_is_ever_room_for_are_no_matter_of_time(
    apart: TextGenerator,
) -> None:
    """A client that is told to come again would do so for ever."""
    with running(apart, queue=1) as server:
        most = apart.decoder.plan.sizes.sequences + 1
        asked = {**ASK, "max_tokens": 2}
        check(call(server, "POST", CHAT, {**asked, "n": most + 1}), 400, f"{most} answers", "n")
        assert call(server, "POST", CHAT, {**asked, "n": most}).status == 200


def test_a_full_server_refuses_before_a_prompt_is_made_into_tokens(
    apart: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose prompts are being made into tokens take room, so no more of them are at it
    than there is room for."""
    encode, hold, at_it = apart.encode, threading.Event(), []

    def held(*arguments: Any, **options: Any) -> list[int]:
        at_it.append(1)
        assert hold.wait(SECONDS)
        return encode(*arguments, **options)

    monkeypatch.setattr(apart, "encode", held)
    asked = {**ASK, "max_tokens": 5, "temperature": 0}
    with running(apart, queue=1) as server, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(call, server, "POST", CHAT, asked) for _ in range(4)]
        try:
            until(lambda: len(at_it) == 4)
            check(call(server, "POST", CHAT, {**asked, "n": 2}), 429, "the server is full")
            assert len(at_it) == 4
        finally:
            hold.set()
        assert [answer.result(SECONDS).status for answer in answers] == [200] * 4
        assert server.engine.statistics().result(SECONDS).refused["full"] == 2
        assert call(server, "POST", CHAT, asked).status == 200


def test_a_deadline(apart: TextGenerator) -> None:
    with running(apart, seconds=1e-6) as server:
        reply = call(server, "POST", CHAT, ASK)
        check(reply, 504, "not complete in time")
        assert reply.error["type"] == "timeout_error"


def test_a_deadline_in_the_middle_of_a_stream(apart: TextGenerator) -> None:
    apart.decoder.set_stop_tokens(())
    decode = apart.decoder.run_batch

    def slow(*arguments: Any, **options: Any) -> Any:
        if server.engine.ready:
            assert late.wait(SECONDS)  # the first token is there before
            for request in server.engine._scheduler._requests.values():
                request.deadline = 0.0
        return decode(*arguments, **{**options, "count": 1})

    late = threading.Event()
    with running(apart) as server:
        replaced = mock.patch.object(apart.decoder, "run_batch", slow)
        with replaced, begin(server, {**ASK, "max_tokens": 100, "stream": True}) as raw:
            came = b""
            while piece := raw.recv(1 << 16):
                came += piece
                if b"data: " in came:
                    late.set()
                if came.endswith(b"\r\n0\r\n\r\n"):
                    break
        assert server.engine._ended_by[End.DEADLINE] == 1
    events = re.findall(rb"data: (.*)\n\n", came)
    assert json.loads(events[0])["choices"] and b"[DONE]" not in came
    assert json.loads(events[-1])["error"]["code"] == "deadline"


def test_an_answer_that_fails_in_its_middle_says_so_in_the_stream(
    apart: TextGenerator,
) -> None:
    apart.decoder.set_stop_tokens(())
    decode, calls = apart.decoder.run_batch, 0
    begun = threading.Event()

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            begun.wait(60)  # an answer that fails before its first piece is an error by itself
            raise ModelError("the logits hold NaN")
        return decode(*arguments, **{**options, "count": 2})

    with running(apart) as server:
        with mock.patch.object(apart.decoder, "run_batch", fails):
            stream = client(server).chat.completions.create(
                model=MODEL,
                messages=MESSAGES,  # type: ignore[arg-type]
                max_tokens=50,
                stream=True,
            )
            failed = pytest.raises(openai.APIError, match="the answer failed: the logits hold NaN")
            with stream, failed:
                for _ in stream:
                    begun.set()
        body = call(server, "POST", CHAT, {**ASK, "stream": True}).body
        assert body.endswith(b"data: [DONE]\n\n")


def test_a_row_of_nan_ends_its_own_answer_alone(tmp_path: Path) -> None:
    """Some tokens' embeddings are damaged: whose prompt holds one, or who draws one, fails."""
    config = replace(CONFIG, tied_embeddings=False)
    values = weights(config)
    values["embed"][[7, 70, 170]] = np.nan
    model = write_gguf(tmp_path / "damaged.gguf", values, config=config)
    rng = random.Random(5)
    asked = [
        {
            "prompt": [rng.randrange(3, 280) for _ in range(rng.randrange(1, 30))],
            "max_tokens": 24,
            "temperature": 3.0,
            "seed": seed,
        }
        for seed in range(40)
    ]
    right: list[str | None] = []
    sound = 0
    with open_device("host") as device, open_generator(device, model) as apart:
        for one in asked:
            answer = apart.generate(
                one["prompt"],
                max_tokens=one["max_tokens"],
                sampling=SamplingOptions(one["temperature"], seed=one["seed"]),
            )
            try:
                right.append("".join(answer))
            except LogitsError:
                right.append(None)
                sound += bool(answer.token_ids)
    assert sound > 3 and right.count(None) > sound + 3 and len(asked) - right.count(None) > 10
    with (
        open_device("host") as device,
        open_generator(device, model, sequences=8) as generator,
        running(generator, queue=50) as server,
        ThreadPoolExecutor(len(asked)) as pool,
    ):
        found = pool.map(
            lambda one: call(server, "POST", COMPLETION, {"model": MODEL, **one}), asked
        )
        for reply, text in zip(found, right, strict=True):
            if text is None:
                assert reply.status == 500
                message = json.loads(reply.body)["error"]["message"]
                assert re.search(r"sequence \d, position \d+: the logits hold NaN", message)
                assert message.count("position") == 1
            else:
                assert reply.status == 200, reply.body
                assert json.loads(reply.body)["choices"][0]["text"] == text
        numbers = server.engine.statistics().result(SECONDS)
        assert numbers.ended["failed"] == right.count(None)


# ------------------------------------------------------------------------- clients that go away


def begin(server: Server, body: dict[str, object], path: str = CHAT) -> socket.socket:
    raw = socket.create_connection(server._listeners[0].getsockname(), SECONDS)
    data = json.dumps(body).encode()
    head = f"content-length: {len(data)}\r\ncontent-type: application/json\r\nhost: localhost"
    raw.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n\r\n".encode() + data)
    return raw


ENDLESS: dict[str, dict[str, object]] = {
    CHAT: {**ASK, "max_tokens": 100},
    "/v1/responses": {"model": MODEL, "input": "ab in 12?", "max_output_tokens": 100},
}


@pytest.mark.parametrize("path", ENDLESS)
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_computed_for_who_went_away(
    apart: TextGenerator, path: str, stream: bool
) -> None:
    """In the middle of a stream, and while a whole answer is waited for."""
    apart.decoder.set_stop_tokens(())
    decode = apart.decoder.run_batch

    def slow(*arguments: Any, **options: Any) -> Any:
        if server.engine.ready:
            time.sleep(0.01)
            options["count"] = 1
        return decode(*arguments, **options)

    with running(apart) as server:
        with mock.patch.object(apart.decoder, "run_batch", slow):
            for _ in range(3):
                with begin(server, {**ENDLESS[path], "stream": stream}, path) as raw:
                    if stream:
                        while b"data:" not in (came := raw.recv(1 << 16)):
                            assert came, "the connection was closed"
                    else:
                        until(lambda: server.engine._entries)
                until(lambda: server.engine._scheduler.under_way == 0)
        numbers = server.engine.statistics().result(SECONDS)
        assert numbers.ended["cancelled"] == 3
        assert numbers.answer_tokens < 3 * 100
        metrics = call(server, "GET", "/metrics").body.decode()
        gone = f'ostinato_http_requests_total{{path="{path}",status="{200 if stream else 499}"}}'
        assert number(metrics, gone) == 3


# --------------------------------------------------------------- clients that get no further


@pytest.fixture
def impatient(
    apart: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, tuple[str, int]]]:
    """A server that does not wait long, and its address."""
    for module, name in (
        (server_module, "_KEEP_ALIVE_SECONDS"),
        (server_module, "_LOOK_SECONDS"),
        (app_module, "_BODY_SECONDS"),
        (connection_module, "_SEND_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(engine_module, "_GATHER_SECONDS", 0.0)  # an event for each token
    apart.decoder.set_stop_tokens(())
    with running(apart) as started:
        listener = started._listeners[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield started, listener.getsockname()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nx: y"])
def test_who_sends_no_whole_head_is_cut_off(
    impatient: tuple[Server, tuple[str, int]], sent: bytes
) -> None:
    server, address = impatient
    with socket.create_connection(address, SECONDS) as raw, suppress(ConnectionError):
        raw.sendall(sent)
        assert raw.recv(1 << 16) == b""
    until(lambda: not server._uvicorn.server_state.connections)


def test_who_sends_a_head_byte_by_byte_is_cut_off(
    impatient: tuple[Server, tuple[str, int]],
) -> None:
    server, address = impatient
    with socket.create_connection(address, SECONDS) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /hea")
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")

        def cut_off() -> bool:
            try:
                raw.sendall(b"l")
            except ConnectionError:
                return True
            time.sleep(0.02)
            return False

        until(cut_off)
    until(lambda: not server._uvicorn.server_state.connections)


def test_who_sends_a_body_slowly_is_told(impatient: tuple[Server, tuple[str, int]]) -> None:
    _, address = impatient
    with socket.create_connection(address, SECONDS) as raw:
        raw.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n".encode())
        raw.sendall(b"content-type: application/json\r\ncontent-length: 500\r\n\r\n{")
        came = b""
        while piece := raw.recv(1 << 16):
            came += piece
    assert came.startswith(b"HTTP/1.1 408") and b"did not arrive in time" in came


def test_a_lack_of_file_descriptors_is_said_once(
    apart: TextGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    """Of connections that cannot be accepted asyncio speaks two thousand times a second."""
    lack = {"message": "out of system resource", "exception": OSError(errno.EMFILE, "Too many")}
    other = {"message": "something else", "exception": ValueError("odd")}
    with running(apart) as server:
        loop, done = server._loop, threading.Event()
        assert loop is not None
        for context in [lack] * 9 + [other]:
            loop.call_soon_threadsafe(loop.call_exception_handler, context)
        loop.call_soon_threadsafe(done.set)
        assert done.wait(SECONDS)
    assert caplog.text.count("no connection can be accepted now: Too many") == 1
    assert "out of system resource" not in caplog.text and "something else" in caplog.text


@pytest.mark.parametrize("path", [COMPLETION, "/metrics"])
def test_who_never_reads_is_cut_off(impatient: tuple[Server, tuple[str, int]], path: str) -> None:
    server, address = impatient
    asked = {"model": MODEL, "prompt": [5], "max_tokens": 128, "n": 4, "stream": True}
    data = json.dumps(asked).encode()
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + data
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(address)
        if path == COMPLETION:
            raw.sendall(3 * request)
            until(lambda: server.engine._counts["submitted"])
        else:
            raw.sendall(200 * f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            until(lambda: server._uvicorn.server_state.connections)
        until(lambda: not server._uvicorn.server_state.connections)
    until(lambda: server.engine._scheduler.under_way == 0)


def test_a_second_ctrl_c_ends_it_at_once(apart: TextGenerator) -> None:
    """Python waits for the connections of a server that is closed, from 3.12 on."""
    apart.decoder.set_stop_tokens(())
    decode = apart.decoder.run_batch

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return decode(*arguments, **{**options, "count": 1})

    with running(apart) as server, mock.patch.object(apart.decoder, "run_batch", slow):
        asked = {**ASK, "max_tokens": 100, "stream": True}
        raws = [begin(server, asked) for _ in range(12)]
        until(lambda: server.engine._scheduler.under_way == 12)
        server._uvicorn.handle_exit(signal.SIGINT, None)
        server._uvicorn.handle_exit(signal.SIGINT, None)
        for raw in raws:
            with raw, suppress(ConnectionError):
                while raw.recv(1 << 16):
                    pass
        until(lambda: not server.engine._entries)
    assert server.engine._ended_by[End.CANCELLED] >= 8, "it waits for the answers"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_before_it_listens_is_not_lost(number: signal.Signals) -> None:
    came: list[int] = []
    with server_module._process(lambda: came.append(1)):
        signal.raise_signal(number)
    assert came
