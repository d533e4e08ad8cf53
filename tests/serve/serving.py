"""What the tests of the server share: a tiny model whose answers are as varied as a real one's."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ostinato import Device, open_device
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve.engine import End, Job, Rejection, ServingEngine, Update
from tests.models.model_files import write_gguf

if TYPE_CHECKING:
    import pytest
    from openai import OpenAI

    from ostinato.serve.server import Server

SECONDS = 120.0
"""Against hangs alone."""
MODEL = "tiny"
_PIECES = ["\u2581", "x", "\u2581x", "y", *(f"<unused{index}>" for index in range(17))]
SPACES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES,
    ],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(_PIECES))],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES),
    "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip
"""A file's tokenizer that adds a space before all text."""
clients: list[OpenAI] = []
Start: TypeAlias = "Callable[..., Server]"
"""Starts the server of a tiny model with the template of that name, once; None for ChatML."""


def tiny(folder: Path) -> Path:
    return write_gguf(folder / "tiny.gguf")


def open_generator(device: Device, model: Path, **options: Any) -> TextGenerator:
    return TextGenerator(device, model, **{"sequences": 4, **options})


@contextmanager
def opened(model: Path, *, ends: bool = True, **options: Any) -> Iterator[TextGenerator]:
    """A generator on a device of its own.  `ends`: whether tokens of the model end an answer."""
    with open_device("host") as device, open_generator(device, model, **options) as generator:
        if not ends:
            generator.decoder.set_stop_tokens(())
        yield generator


@dataclass
class Answer:
    """A listener that keeps everything, and looks for what must not be."""

    updates: list[Update] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    first: threading.Event = field(default_factory=threading.Event)

    def __call__(self, update: Update) -> None:
        assert not self.over.is_set(), "something is said after the end"
        self.updates.append(update)
        if update.tokens:
            self.first.set()
        if update.end is not None:
            self.over.set()

    def wait(self) -> Update:
        assert self.over.wait(SECONDS), "the answer does not end"
        return self.so_far

    @property
    def so_far(self) -> Update:
        return sum(self.updates, Update())

    @property
    def end(self) -> End | None:
        return self.so_far.end


def job(
    generator: TextGenerator, prompt: str, max_tokens: int = 16, *, stop: tuple[str, ...] = (),
    **sampling: Any,
) -> Job:  # fmt: skip
    tokens = tuple(generator.encode(prompt, chat=False))
    return Job(tokens, max_tokens, SamplingOptions(**sampling), stop)


def submit(engine: ServingEngine, one: Job) -> tuple[int, Answer]:
    answer = Answer()
    numbers = engine.submit([one], [answer])
    assert not isinstance(numbers, Rejection), numbers
    return numbers[0], answer


def alone(generator: TextGenerator, one: Job) -> tuple[str, int, End]:
    """What `generate` gives: text, how many tokens, how it ends."""
    answer = generator.generate(
        one.tokens, max_tokens=one.max_tokens, sampling=one.sampling, stop=one.stop
    )
    text = "".join(answer)
    reason = answer.finish_reason
    return text, len(answer.token_ids), End.STOP if reason == "stop" else End.LENGTH


@contextmanager
def running(generator: TextGenerator, **options: Any) -> Iterator[Server]:
    """A server on a free port, in a thread; it is stopped gracefully at the end.  By default it
    draws from all tokens at temperature 1.  No other one may have the generator meanwhile."""
    from ostinato.serve.server import ServeOptions, Server

    plain = SamplingOptions(temperature=1.0)
    chosen = ServeOptions(**{"model": MODEL, "sampling": plain, **options})
    server = Server(generator, chosen, Server.bind("127.0.0.1", 0))
    failed: list[BaseException] = []
    ready = threading.Event()

    def run() -> None:
        try:
            server.run(ready.set)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="server")
    thread.start()
    try:
        until(lambda: failed or ready.is_set())
        assert not failed, failed
        yield server
    finally:
        server.stop()
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server does not stop"


def say(monkeypatch: pytest.MonkeyPatch, server: Server, *texts: str, seconds: float = 0.0) -> None:
    """Makes a server's model say these texts, one for each answer in turn, whatever it is asked.
    `seconds`: how long each token takes.  The decoder has no stop tokens."""
    engine = server.engine
    encode = engine.generator.tokenizer.encode
    took, given = ServingEngine._took, cycle(texts)
    answers: dict[int, list[int]] = {}

    def said(self: ServingEngine, chosen: Mapping[int, int]) -> None:
        scripted, ended = dict(chosen), []
        for slot in chosen:
            number = self._scheduler.request_in(slot)
            if number is not None:
                if number not in answers:
                    answers[number] = encode(next(given), add_special=False)
                scripted[slot] = answers[number].pop(0)
                ended += [number] * (not answers[number])
        time.sleep(seconds)
        took(self, scripted)
        for number in ended:
            self._end(number, End.STOP)

    monkeypatch.setattr(engine, "_took", partial(said, engine))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def client(server: Server | str, key: str = "none") -> OpenAI:
    """It is closed at the end of the test.  There is no TLS, whose certificates each client would
    read."""
    from openai import DefaultHttpxClient, OpenAI

    url = server if isinstance(server, str) else server.url
    http = DefaultHttpxClient(verify=False)
    made = OpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=SECONDS, http_client=http
    )
    clients.append(made)
    return made


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose form is checked."""
        (name,) = self.json
        assert name == "error" and self.headers["content-type"] == "application/json"
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        assert self.json["error"]["message"]
        return dict(self.json["error"])


def call(server: Server, method: str, path: str, body: object = None, **headers: str) -> Reply:
    """A request as no client library would make it: `body` is bytes, or becomes JSON."""
    with closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as connection:
        connection.timeout = SECONDS
        if body is not None:
            headers = {"content-type": "application/json", **headers}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, answer.read())
