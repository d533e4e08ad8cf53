"""What a request says of the choice of tokens: log probabilities, penalties, biases and grammars,
by OpenAI's own client and by hand."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")  # which openai needs
pytest.importorskip("ostinato.serve.server")
pytest.importorskip("llguidance")

from ostinato import open_device
from ostinato.errors import NotAvailableError
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.models.sampling import log_probabilities
from ostinato.serve.engine import End, Job, ServingEngine
from ostinato.serve.grammar import GrammarCompiler
from ostinato.serve.server import Server
from tests.models.model_files import write_gguf
from tests.serve.serving import (
    MODEL,
    SPACES,
    Reply,
    alone,
    call,
    client,
    job,
    open_generator,
    running,
    submit,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "ab in 12?"}]}
TEXT = "the ab in 12"


@pytest.fixture(scope="module")
def server(generator: TextGenerator) -> Iterator[Server]:
    with running(generator) as started:
        yield started


def asked(server: Server, path: str, **fields: Any) -> Any:
    base = USER if path == CHAT else {"model": MODEL, "prompt": TEXT, "seed": 4}
    reply = call(server, "POST", path, {"max_tokens": 12, **base, **fields})
    assert reply.status == 200, reply
    return reply.json


def refused(server: Server, path: str, **fields: Any) -> Any:
    base = USER if path == CHAT else {"model": MODEL, "prompt": TEXT}
    reply = call(server, "POST", path, {**base, **fields})
    assert reply.status == 400, reply
    return reply.json["error"]


def events(reply: Reply) -> list[Any]:
    *found, end = re.findall(rb"data: (.*)\n\n", reply.body)
    assert end == b"[DONE]"
    return [json.loads(one) for one in found]


def of_prompt(
    generator: TextGenerator, tokens: tuple[int, ...], count: int
) -> list[tuple[float, list[float]]]:
    """The log probabilities of a prompt's tokens from the second on, each from the logits after a
    prefill of what is before it."""
    found = []
    for index in range(1, len(tokens)):
        generator.decoder.reset()
        generator.decoder.prefill(tokens[:index])
        logits = generator.decoder.logits()
        one, _, top = log_probabilities(logits, tokens[index], count)
        found.append((float(one), top.tolist()))
    return found


# ------------------------------------------------------------------------------- log probabilities


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 3.0, "seed": 7}])
def test_a_chat_has_the_log_probability_of_each_token(
    server: Server, fields: dict[str, Any]
) -> None:
    create = client(server).chat.completions.create
    given: dict[str, Any] = {**USER, **fields, "max_tokens": 12}
    plain = create(**given).choices[0]
    found = create(**given, logprobs=True, top_logprobs=3).choices[0]
    assert plain.logprobs is None and plain.message.content == found.message.content
    content = found.logprobs.content
    assert found.logprobs.refusal is None and 0 < len(content) <= 12
    spelt = b"".join(bytes(one.bytes) for one in content)
    assert spelt.decode("utf-8", "replace") == found.message.content
    for one in content:
        assert one.token == bytes(one.bytes).decode("utf-8", "replace")
        values = [each.logprob for each in one.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert all(-9999 <= value <= 0 for value in (*values, one.logprob))
        same = [each for each in one.top_logprobs if each.bytes == one.bytes]
        if not fields["temperature"]:
            assert one.top_logprobs[0].bytes == one.bytes
        assert all(each.logprob == one.logprob for each in same)
    assert create(**given, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    chunks = [*create(**given, logprobs=True, top_logprobs=3, stream=True)]
    streamed = [
        one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content
    ]
    assert streamed == content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == found.message.content


def test_the_end_token_is_not_in_the_list(server: Server) -> None:
    for path, number in ((CHAT, True), (COMPLETION, 0)):
        found = asked(server, path, logprobs=number, logit_bias={"2": 100}, temperature=0)
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
        assert found["usage"]["completion_tokens"] == 1


def test_values_are_those_of_the_library(server: Server, apart: TextGenerator) -> None:
    found = asked(server, COMPLETION, logprobs=2, temperature=0)["choices"][0]
    answer = apart.generate(TEXT, chat=False, max_tokens=12, logprobs=2)
    assert "".join(answer) == found["text"]
    wanted = [one for one in answer.logprobs if one.token not in apart.decoder.stop_tokens]
    logprobs = found["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([one.logprob for one in wanted], abs=1e-6)
    for top, one in zip(logprobs["top_logprobs"], wanted, strict=True):
        assert [*top.values()] == pytest.approx([value for _, value in one.top], abs=1e-6)


def test_an_echo_begins_with_the_prompt(server: Server, apart: TextGenerator) -> None:
    plain = asked(server, COMPLETION)["choices"][0]["text"]
    tokens = apart.encode(TEXT, chat=False)
    for prompt in (TEXT, tokens):
        found = asked(server, COMPLETION, prompt=prompt, echo=True)
        assert found["choices"][0]["text"] == TEXT + plain
        assert found["choices"][0]["logprobs"] is None
    reply = call(server, "POST", COMPLETION, {
        "model": MODEL, "prompt": [TEXT, "ab"], "n": 2, "echo": True, "stream": True,
        "max_tokens": 3, "seed": 4,
    })  # fmt: skip
    texts = dict.fromkeys(range(4), "")
    for event in events(reply):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [texts[i].startswith(TEXT) for i in range(4)] == [True, True, False, False]
    assert texts[2].startswith("ab") and texts[3].startswith("ab")


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 3.0, "seed": 7}])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    server: Server, apart: TextGenerator, fields: dict[str, Any]
) -> None:
    prompt = "ab in 12, the é is \U0001f600 in the ab"
    tokens = tuple(apart.encode(prompt, chat=False))
    wanted = of_prompt(apart, tokens, 2)
    plain = asked(server, COMPLETION, prompt=prompt, **fields)
    found = asked(server, COMPLETION, prompt=prompt, echo=True, logprobs=2, **fields)
    (choice,) = found["choices"]
    assert choice["text"] == prompt + plain["choices"][0]["text"]
    assert found["usage"]["prompt_tokens"] == len(tokens)
    assert found["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    count = len(tokens)
    got = logprobs["token_logprobs"][1:count]
    assert got == pytest.approx([one for one, _ in wanted], abs=2e-5)
    for index, (_, top) in enumerate(wanted, 1):
        assert [*logprobs["top_logprobs"][index].values()][:2] == pytest.approx(top, abs=2e-5)
    for index, (token, offset) in enumerate(
        zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    ):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token), index
    assert r"bytes:\xf0" in logprobs["tokens"]
    ours = asked(server, COMPLETION, prompt=prompt, logprobs=2, **fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"][count:] == ours["tokens"]
    assert logprobs["token_logprobs"][count:] == pytest.approx(ours["token_logprobs"], abs=2e-5)
    asks = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "echo": True, "logprobs": 2}
    streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
    text = ""
    for event in events(call(server, "POST", COMPLETION, {**asks, **fields, "stream": True})):
        for one in event["choices"]:
            text += one["text"]
            for name, values in (one["logprobs"] or {}).items():
                streamed[name] += values
    assert (text, streamed) == (choice["text"], logprobs)


def test_a_prompt_of_one_token_and_one_with_an_end_token(server: Server) -> None:
    found = asked(server, COMPLETION, prompt=[5], echo=True, logprobs=0)["choices"][0]
    assert found["logprobs"]["token_logprobs"][0] is None
    assert len(found["logprobs"]["tokens"]) > 1
    asked(server, COMPLETION, prompt=[2, 5], echo=True, logprobs=0)
    error = refused(server, COMPLETION, prompt=[5, 2, 7], echo=True, logprobs=0)
    assert error["param"] == "echo" and "has the end token 2" in error["message"]


def test_who_wants_its_prompts_log_probabilities_shares_the_steps_of_others(
    apart: TextGenerator,
) -> None:
    others = [job(apart, f"ab {n}", 30, seed=n, temperature=3.0) for n in range(2)]
    prompt = tuple(apart.encode("in the ab 12 " * 3, chat=False))
    scored = Job(prompt, 5, SamplingOptions(), logprobs=1, prompt_logprobs=True)
    wanted = [alone(apart, one) for one in others]
    apart.decoder.reset()
    with ServingEngine(apart).start() as engine:
        answers = [submit(engine, one)[1] for one in (others[0], scored, others[1])]
        updates = [answer.wait() for answer in answers]
        numbers = engine.statistics().result(60)
    assert [(one.text, one.tokens, one.end) for one in (updates[0], updates[2])] == wanted
    found = [one.token for one in updates[1].logprobs]
    assert found[: len(prompt) - 1] == [*prompt[1:]]
    assert len(found) == len(prompt) - 1 + updates[1].tokens - (updates[1].end is End.STOP)
    assert numbers.steps < len(prompt) + 5 + 30
    given = sum(len(one.tokens) for one in (*others, scored))
    assert numbers.prompt_tokens + numbers.cached_tokens == given


# ----------------------------------------------------------------------------- penalties and biases


@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": -2.0, "temperature": 3.0},
        {"logit_bias": {"200": 60, "7": -100}},
        {"frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {"9": 3.5}},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_penalties_and_biases_are_those_of_the_library(
    server: Server, apart: TextGenerator, path: str, options: dict[str, Any]
) -> None:
    given = {"temperature": 0.0, **options}
    found = asked(server, path, seed=4, **given)["choices"][0]
    biases = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    sampling = SamplingOptions(**{**given, "seed": 4, "logit_bias": biases})
    prompt = USER["messages"] if path == CHAT else TEXT
    answer = apart.generate(prompt, chat=path == CHAT, max_tokens=12, sampling=sampling)
    text = found["message"]["content"] if path == CHAT else found["text"]
    assert text == "".join(answer)
    plain = asked(server, path, seed=4, temperature=given["temperature"])["choices"][0]
    assert text != (plain["message"]["content"] if path == CHAT else plain["text"])


def test_options_of_the_choice_capture_nothing(apart: TextGenerator) -> None:
    loud = {"frequency_penalty": 1.0, "presence_penalty": 0.5, "logit_bias": {5: 2.0}}
    with ServingEngine(apart).start() as engine:
        submit(engine, job(apart, "ab", 9))[1].wait()
        before = engine.statistics().result(60).decoder
        for logprobs in (None, 5):
            one = job(apart, "the ab", 9, **loud)
            one = Job(one.tokens, 9, one.sampling, logprobs=logprobs)
            submit(engine, one)[1].wait()
        after = engine.statistics().result(60).decoder
    assert after.graphs_captured == before.graphs_captured
    assert after.launches_eager == before.launches_eager


# -------------------------------------------------------------------------------------- grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ab", "the 12"]},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
        "true": {"type": "boolean"},
    },
    "required": ["name", "size", "true"],
    "additionalProperties": False,
}


NO_SPACE = {str(token): -100 for token in (*(3 + byte for byte in b" \n\t\r"), 267)}
"""Biases against space between JSON's tokens, of which a model of random weights writes much."""


def check_schema(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "size", "true"}
    assert found["name"] in ("ab", "the 12") and 10 <= found["size"] <= 99
    assert type(found["true"]) is bool


def test_an_answer_matches_its_schema(server: Server) -> None:
    create = client(server).chat.completions.create
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    texts = set()
    for seed in range(4):
        given: dict[str, Any] = {**USER, "seed": seed, "temperature": 2, "logit_bias": NO_SPACE}
        found = create(**given, response_format=wanted, n=2)
        for choice in found.choices:
            assert choice.finish_reason == "stop"
            check_schema(choice.message.content or "")
            texts.add(choice.message.content)
        chunks = create(**given, response_format=wanted, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == found.choices[0].message.content
    assert len(texts) > 4


def test_the_client_parses_what_it_asked_for(server: Server) -> None:
    class Found(pydantic.BaseModel):
        name: Literal["ab", "the"]
        sound: bool
        parts: tuple[Literal[1, 2], Literal["x"]]

    ask = client(server)
    given: dict[str, Any] = {**USER, "temperature": 2, "seed": 3, "logit_bias": NO_SPACE}
    for parse in (ask.chat.completions.parse, ask.beta.chat.completions.parse):
        found = parse(**given, response_format=Found).choices[0].message.parsed
        assert isinstance(found, Found)


def test_a_response_matches_its_schema(server: Server) -> None:
    create = client(server).responses.create
    wanted: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    given: dict[str, Any] = {"model": MODEL, "input": "ab", "temperature": 2}
    found = create(**given, text=wanted, extra_body={"logit_bias": NO_SPACE, "seed": 1})
    assert found.status == "completed"
    check_schema(found.output_text)
    assert found.text.format.type == "json_schema" and found.text.format.name == "x"
    for text, words in (
        ({"format": {"type": "json_schema", "schema": {"type": "banana"}}}, "banana"),
        ({"format": {"type": "json_schema"}}, "needs a schema"),
        ({"verbosity": "high"}, '"format" alone'),
        (5, "must be an object"),
    ):
        reply = call(server, "POST", "/v1/responses", {**given, "text": text})
        assert reply.status == 400 and reply.error["param"] == "text"
        assert words in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 1}, r"\{"),
        ({"structured_outputs": {"regex": "a+b{2,3} [0-9]"}}, r"a+b{2,3} [0-9]"),
        ({"structured_outputs": {"regex": " x"}}, " x"),
        ({"structured_outputs": {"choice": ["the", 'a "b"\n']}}, r'the|a "b"\n'),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]+ "."'}}, r"x[0-9]+\."),
        ({"structured_outputs": {"json": '{"const": [1]}'}}, r"\[\s*1\s*\]"),
        ({"grammar": 'root ::= ("ab" | "12") "!"'}, "(ab|12)!"),
        ({"json_schema": {"enum": [12, "the"]}}, '12|"the"'),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_way_to_say_a_grammar(
    server: Server, path: str, fields: dict[str, Any], pattern: str
) -> None:
    for seed in range(3):
        bias = NO_SPACE if "json" in str(fields) else {str(3 + ord(".")): 5}
        given = {"seed": seed, "temperature": 2, "max_tokens": 100, "logit_bias": bias, **fields}
        found = asked(server, path, **given)["choices"][0]
        text = found["message"]["content"] if path == CHAT else found["text"]
        assert re.fullmatch(pattern, text), text
        assert found["finish_reason"] == ("length" if fields.get("max_tokens") == 1 else "stop")


def test_what_could_have_become_a_stop_text_is_said_at_the_end_of_a_grammar(
    server: Server,
) -> None:
    for stop, text in (("ex", "the"), ("he", "t")):
        found = asked(server, CHAT, structured_outputs={"choice": ["the"]}, stop=stop)
        assert found["choices"][0]["message"]["content"] == text
        assert found["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_of_a_tokenizer_that_adds_a_space_keeps_every_space(tmp_path: Path) -> None:
    """A chat's answer there drops the space that it begins with; a grammar's is kept to the byte,
    and its bytes may be tokens of their own."""
    path = write_gguf(tmp_path / "spaces.gguf", metadata=SPACES)
    with (
        open_device("host") as device,
        open_generator(device, path) as generator,
        running(generator) as server,
    ):
        for regex in (" x", "  y", "\u00e9x"):
            for seed in range(3):
                given = {"structured_outputs": {"regex": regex}, "seed": seed, "temperature": 2}
                found = asked(server, CHAT, **given)["choices"][0]
                assert found["message"]["content"] == regex


def test_who_has_a_grammar_changes_no_other_answer(apart: TextGenerator) -> None:
    """They join and leave in the middle; with logprobs of the prompt and a grammar at once."""
    others = [job(apart, f"ab {n}", 40, seed=n, temperature=3.0) for n in range(3)]
    wanted = [alone(apart, one) for one in others]
    compiler = GrammarCompiler(apart.tokenizer, 280, apart.decoder.stop_tokens)
    prompt = tuple(apart.encode("in the", chat=False))

    def bound(seed: int) -> Job:
        hot = SamplingOptions(2.0, seed=seed)
        grammar = compiler.compile("regex", "[a-c]{5,9} [0-9]{3}")
        return Job(prompt, 60, hot, logprobs=0, prompt_logprobs=seed == 1, grammar=grammar)

    apart.decoder.reset()
    with ServingEngine(apart).start() as engine:
        answers = [submit(engine, one)[1] for one in others]
        answers[0].first.wait(60)
        bounds = [submit(engine, bound(seed))[1] for seed in range(5)]
        updates = [answer.wait() for answer in answers]
        for answer in bounds:
            update = answer.wait()
            assert update.end is End.STOP and re.fullmatch("[a-c]{5,9} [0-9]{3}", update.text)
    assert [(one.text, one.tokens, one.end) for one in updates] == wanted
    found = [one.token for one in bounds[1].so_far.logprobs]
    assert found[: len(prompt) - 1] == [*prompt[1:]]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", 'with the type "text"'),
        ({"response_format": []}, "response_format", "must be an object with the type"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
        ({"json_schema": 5}, "json_schema", "must be a JSON schema"),
        ({"json_schema": {"type": "banana"}}, "json_schema", "Invalid type: banana"),
        ({"json_schema": {"pattern": "(?=x)"}}, "json_schema", "look-around"),
        ({"json_schema": {"$ref": "http://a.b/c"}}, "json_schema", "not present in a registry"),
        ({"json_schema": {"unevaluatedItems": False}}, "json_schema", "Unimplemented keys"),
        ({"grammar": "root ::= nope"}, "grammar", "nope"),
        ({"grammar": "x" * 300_000}, "grammar", "has 300000 characters"),
        ({"grammar": 5}, "grammar", "must be text"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "have one of"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not supported"),
        ({"structured_outputs": {"choice": "x"}}, "structured_outputs", "a list of texts"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs", "must be text"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "one too many beside"),
        ({"logprobs": 1}, "logprobs", "must be true or false"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be 0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "must be -2 to 2"),
        ({"presence_penalty": "1"}, "presence_penalty", "must be a number"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "must be -100 to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token 5 twice"),
        ({"logit_bias": {"280": 1}}, "logit_bias", "ids 0 to 279 only"),
        ({"logit_bias": [[5, 1]]}, "logit_bias", "must be an object"),
        ({"echo": True}, "echo", "is for completions"),
    ],
)
def test_what_makes_no_sense_is_named(
    server: Server, fields: dict[str, Any], param: str, words: str
) -> None:
    error = refused(server, CHAT, **fields)
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("value", [21, -1, True, 1.5, "2"])
def test_a_completion_wants_a_number_of_log_probabilities(server: Server, value: object) -> None:
    assert refused(server, COMPLETION, logprobs=value)["param"] == "logprobs"


def test_a_server_without_llguidance_says_so(
    apart: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(apart.tokenizer, 280, apart.decoder.stop_tokens)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "llguidance", None)
        with pytest.raises(NotAvailableError, match=r"pip install 'ostinato\[serve\]'"):
            compiler.compile("regex", "a")
        with running(apart) as server:
            error = refused(server, CHAT, response_format={"type": "json_object"})
            assert "grammars need llguidance" in error["message"]
            assert error["param"] == "response_format"
            asked(server, CHAT)
    assert compiler.compile("regex", "a").error == ""


def test_a_tokenizer_that_cannot_be_used_is_named(apart: TextGenerator) -> None:
    compiler = GrammarCompiler(apart.tokenizer, 280, ())
    with pytest.raises(NotAvailableError, match="has no end token"):
        compiler.compile("regex", "a")


def test_a_parser_that_gives_up_fails_its_answer_alone(
    apart: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(apart.tokenizer, 280, apart.decoder.stop_tokens)
    grammar = compiler.compile("regex", "[a-z]*")
    assert not grammar.take(3 + ord("A")) or grammar.error, "it takes what it did not allow"
    broken = Job((5, 6), 20, SamplingOptions(), grammar=grammar)
    other = job(apart, "ab", 20)
    wanted = alone(apart, other)
    apart.decoder.reset()
    with ServingEngine(apart).start() as engine:
        answers = [submit(engine, one)[1] for one in (broken, other)]
        failed, sound = (answer.wait() for answer in answers)
    assert failed.end is End.FAILED and failed.words.startswith("its grammar: ")
    assert (sound.text, sound.tokens, sound.end) == wanted
