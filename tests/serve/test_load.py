"""Under load: clients that come and go, and an end in the middle of it.

Every answer that ends is what `generate` gives alone.  On the host a batch, a prompt in pieces and
a cache that is used again give the same bits with the compiled kernels, so there tokens are the
same; without them only where no two tokens are nearly as likely (`Margin`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import typer

# Where these are missing there are tests of other things; `make test` installs them
# (tests/test_packaging.py).
openai = pytest.importorskip("openai")
pytest.importorskip("ostinato.serve.server")

from ostinato import open_device
from ostinato.cli.serve import _keys
from ostinato.models import SamplingOptions, TextGenerator
from ostinato.serve import app
from ostinato.serve.engine import End, Job
from ostinato.serve.server import ServeOptions, Server
from tests.cli import commands
from tests.serve.serving import (
    MODEL,
    SECONDS,
    alone,
    call,
    client,
    open_generator,
    opened,
    running,
    until,
)

SHARED = "in the same beginning of all, 12 and 34, "


@dataclass(frozen=True)
class Asked:
    """A request of the load.  `leaves`: after so many chunks its client goes away."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    leaves: int | None

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }

    def alone(self, generator: TextGenerator) -> tuple[str, End]:
        tokens = tuple(generator.encode(self.prompt, chat=False))
        sampling = SamplingOptions(self.temperature, seed=self.seed)
        text, _, end = alone(generator, Job(tokens, self.max_tokens, sampling))
        return text, end


def load(count: int, most: int, rng: random.Random) -> list[Asked]:
    """Half of them go away: some at once, some in the middle."""
    made = []
    for index in range(count):
        shared = SHARED if rng.random() < 0.6 else ""
        prompt = shared + " ".join(rng.choice(["ab", "the", "12", "er", "q"]) for _ in range(9))
        leaves = rng.randrange(4) if index % 2 else None
        temperature = rng.choice([0.0, 1.0, 3.0])
        made.append(Asked(prompt, rng.randint(1, most), temperature, rng.getrandbits(30), leaves))
    return made


def stream(api: Any, model: str, asked: Asked) -> tuple[str, str | None] | None:
    """What came of it, and how it ended; None for a client that went away."""
    text, end, chunks = "", None, 0
    answer = api.completions.create(model=model, stream=True, **asked.fields)
    with answer:
        for chunk in answer:
            if asked.leaves is not None and chunks >= asked.leaves:
                return None
            chunks += 1
            (choice,) = chunk.choices
            text += choice.text
            end = choice.finish_reason or end
    return text, end


def play(server: Server, model: str, asked: Sequence[Asked]) -> list[tuple[str, str | None] | None]:
    """All of them at once, by one client of OpenAI's with a thread for each."""
    api = client(server)
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda one: stream(api, model, one), asked))


def check_nothing_is_left(server: Server) -> None:
    """Once all is over: no request, no task, no connection that works for one."""
    engine = server.engine
    until(lambda: engine._scheduler.under_way == 0)
    assert not engine._entries and not engine._updates
    numbers = engine.statistics().result(SECONDS)
    assert numbers.submitted == sum(numbers.ended.values()), "none is lost"
    assert not numbers.ended["failed"] and not numbers.ended["deadline"]
    state = server._uvicorn.server_state
    until(lambda: not state.tasks)
    until(lambda: not left())


def left() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, app._Answering | app._Inbox)]


@pytest.mark.parametrize("lookup", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_fifty_clients_half_of_which_go_away(tiny_model: Path, lookup: int) -> None:
    rng = random.Random(11)
    with opened(tiny_model) as reference:
        rounds = [load(50, 30, rng) for _ in range(2)]
        wanted = [[one.alone(reference) for one in asked] for asked in rounds]
    assert len({text for text, _ in wanted[0]}) > 25
    with (
        open_device("host") as device,
        open_generator(device, tiny_model, sequences=8, lookup=lookup) as generator,
        running(generator, queue=50) as server,
    ):
        free = device.memory_info()[0]
        threads = threading.active_count()
        for asked, right in zip(rounds, wanted, strict=True):
            found = play(server, MODEL, asked)
            stayed = 0
            for one, answer, (text, end) in zip(asked, found, right, strict=True):
                if answer is not None:
                    assert answer == (text, end.value)
                    stayed += one.leaves is None
            assert stayed == 25
            check_nothing_is_left(server)
        assert device.memory_info()[0] == free
        pool = min(32, (os.cpu_count() or 1) + 4)  # of asyncio, where prompts are encoded
        assert threading.active_count() <= threads + pool
        numbers = server.engine.statistics().result(SECONDS)
        assert numbers.submitted == 100 and numbers.cached_tokens > 0
        assert numbers.step_rows / numbers.steps > 2, "they are decoded together"
        assert not numbers.decoder.quarantined


@pytest.mark.slow
def test_fifty_clients_of_the_real_model(smollm2_path: Path) -> None:
    rng = random.Random(3)
    asked = load(50, 12, rng)
    with open_device("host") as device, TextGenerator(device, smollm2_path) as reference:
        wanted = [one.alone(reference) for one in asked if one.leaves is None]
    options = {"sequences": 8, "max_context": 256}
    with (
        open_device("host") as device,
        TextGenerator(device, smollm2_path, **options) as generator,
        running(generator, queue=50) as server,
    ):
        found = play(server, MODEL, asked)
        stayed = [answer for one, answer in zip(asked, found, strict=True) if one.leaves is None]
        assert stayed == [(text, end.value) for text, end in wanted]
        check_nothing_is_left(server)


def test_tokens_in_ever_new_batches_leave_no_memory_behind(tiny_model: Path) -> None:
    """Short answers, one after the other: what is counted once more each time would be seen."""
    with (
        opened(tiny_model, ends=False) as generator,
        running(generator, queue=8) as server,
    ):
        asked = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0}

        def ask(_: int) -> Counter[int]:
            return Counter(call(server, "POST", "/v1/completions", asked).status for _ in range(12))

        def objects() -> int:
            until(lambda: not left())
            return len(gc.get_objects())

        with ThreadPoolExecutor(8) as pool:
            statuses: Counter[int] = sum(pool.map(ask, range(8)), Counter())
            before = objects()
            for _ in range(6):
                statuses += sum(pool.map(ask, range(8)), Counter())
            after = objects()
        assert statuses == {200: 672}
        # Up to eight connections that just ended have some 30 objects each.
        assert after < before + 500, "less than one object for each of 576 answers"
        check_nothing_is_left(server)


# ------------------------------------------------------------------------- the end of the process


def started(model: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """`ostinato serve` as a process of its own, which adds nothing to what requests name; where it
    is."""
    plain = ("--temperature", "1", "--min-p", "0", "--repetition-penalty", "1")
    arguments = ("serve", "--model", str(model), "--port", "0", "--device", "host", *plain)
    arguments += options
    process = commands.start(*arguments)
    assert process.stderr is not None
    line = process.stderr.readline().decode()
    found = re.search(r"is served at (http://127\.0\.0\.1:\d+) by ", line)
    assert found, line + process.stderr.read().decode()
    return process, found[1]


def ended(process: subprocess.Popen[bytes]) -> str:
    """Its last words; that it ended well."""
    assert process.stderr is not None and process.stdout is not None
    with process.stderr, process.stdout:
        process.wait(SECONDS)
        words, out = process.stderr.read().decode(), process.stdout.read()
    assert (process.returncode, out) == (0, b""), words
    return words


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_under_load_loses_none_that_was_accepted(
    tiny_model: Path, number: signal.Signals
) -> None:
    """Each client gets its whole answer, or is told that there is none; and the server counts as
    many whole ones as there are clients that have one."""
    asked = [Asked(f"the {index} ab", 100, 2.0, index, None) for index in range(20)]
    with opened(tiny_model) as reference:
        wanted = [one.alone(reference) for one in asked]
    process, url = started(tiny_model, "--slots", "4", "--queue", "100")
    try:
        api = client(url)
        begun = threading.Event()

        def ask(one: Asked) -> tuple[str, str | None] | None:
            text, end = "", None
            try:
                with api.completions.create(model="tiny", stream=True, **one.fields) as answer:
                    for chunk in answer:
                        begun.set()
                        text += chunk.choices[0].text
                        end = chunk.choices[0].finish_reason or end
            except openai.InternalServerError as error:
                assert error.status_code == 503 and "the server is stopping" in str(error)
                return None
            except openai.APIConnectionError:
                assert not text, "an answer was cut off"
                return None
            return text, end

        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(ask, one) for one in asked]
            assert begun.wait(SECONDS)
            process.send_signal(number)
            found = [answer.result(SECONDS) for answer in answers]
        words = ended(process)
    finally:
        process.kill()
    whole = 0
    for answer, (text, end) in zip(found, wanted, strict=True):
        if answer is not None:
            assert answer == (text, end.value)
            whole += 1
    assert whole > 0
    counted = re.search(r"(\d+) answers? begun \((.*)\), \d+ refused", words)
    assert counted and int(counted[1]) == whole
    assert set(re.findall(r"\d+ (\w+)", counted[2])) <= {"stop", "length"}, words


# --------------------------------------------------------------------------------- the command


def test_wrong_options_are_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    empty = tmp_path / "keys"
    empty.write_text("\n \n")
    for options, words in (
        (("--port", "70000"), "--port"),
        (("--slots", "0"), "--slots"),
        (("--temperature", "nan"), "temperature"),
        (("--top-p", "2"), "--top-p"),
        (("--host", "no such host"), "host"),
        (("--api-key", " x"), "a key is text without spaces around it"),
        (("--cors", "app.example"), "is no origin"),
        (("--cors", "https://app.example/page"), "is no origin"),
        (("--api-key-file", str(empty)), "has no keys"),
        (("--api-key-file", str(tmp_path / "none")), "No such file"),
    ):
        commands.refused(commands.here("serve", "--model", "none", *options), words)


def test_a_name_is_served_at_all_its_addresses_or_not_at_all(tiny_model: Path) -> None:
    """curl and browsers ask for `localhost` by IPv6 first, others by IPv4 alone."""
    names = {address[0] for *_, address in socket.getaddrinfo("localhost", 0)}
    there = []
    for name in names:
        with contextlib.suppress(OSError):  # a machine without IPv6 can have the name's address
            (one,) = Server.bind(name, 0)
            one.close()
            there.append(name)
    listeners = Server.bind("localhost", 0)
    ports = {one.getsockname()[1] for one in listeners}
    assert sorted(one.getsockname()[0] for one in listeners) == sorted(there) and len(ports) == 1
    with opened(tiny_model) as generator:
        server = Server(generator, ServeOptions(MODEL), listeners)
        assert server.local
        ready = threading.Event()
        thread = threading.Thread(target=server.run, args=(ready.set,))
        thread.start()
        try:
            assert ready.wait(SECONDS)
            for name in there:
                with socket.create_connection((name, *ports), SECONDS) as caller:
                    caller.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    assert caller.recv(64).startswith(b"HTTP/1.1 200")
        finally:
            server.stop()
            thread.join(SECONDS)
    for name in there:
        (taken,) = Server.bind(name, 0)
        with taken:
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match=f"localhost, port {port}: Address already in use"):
                Server.bind("localhost", port)


def test_a_piece_of_an_answer_does_not_wait_for_an_acknowledgement() -> None:
    """asyncio sets TCP_NODELAY for sockets that were made with the number of their protocol."""

    async def set_for_a_client() -> int:
        (listener,) = Server.bind("127.0.0.1", 0)
        asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(reader: object, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            asked.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await asked

    assert asyncio.run(set_for_a_client()) == 1


def test_the_command_drafts(tiny_model: Path) -> None:
    asked = [Asked("abab", 40, temperature, 3, None) for temperature in (0.0, 2.0, 0.0)]
    with opened(tiny_model) as reference:
        wanted = [one.alone(reference) for one in asked]
    process, url = started(tiny_model, "--slots", "2", "--lookup", "3")
    try:

        def drafted() -> list[float]:
            with urlopen(f"{url}/metrics") as answer:
                found = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines())
            names = ("tokens", "steps")
            return [float(found[f"ostinato_decoder_lookup_{name}"]) for name in names]

        def ask(one: Asked) -> tuple[str, str]:
            answer = client(url).completions.create(model="tiny", **one.fields)
            return answer.choices[0].text, answer.choices[0].finish_reason

        before = drafted()
        with ThreadPoolExecutor(3) as pool:
            assert [*pool.map(ask, asked)] == [(text, end.value) for text, end in wanted]
        tokens, steps = (now - then for now, then in zip(drafted(), before, strict=True))
        assert tokens > steps > 0
        process.terminate()
        ended(process)
    finally:
        process.kill()


def test_a_port_that_is_taken_is_said(tiny_model: Path) -> None:
    (listener,) = Server.bind("127.0.0.1", 0)
    with listener:
        listener.listen()
        port = str(listener.getsockname()[1])
        answer = commands.here("serve", "--model", str(tiny_model), "--port", port)
    assert answer.status == 1
    assert f"127.0.0.1, port {port}: Address already in use; choose another port" in answer.err


def test_without_the_extra_it_says_what_to_install() -> None:
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'uvicorn' else find(name)\n"
        "from ostinato.cli.main import run\n"
        "sys.exit(run(['serve']))\n"
    )
    done = subprocess.run(
        [*commands.COMMAND[:1], "-c", code], capture_output=True, check=False, text=True
    )
    assert done.returncode == 1
    assert "needs uvicorn, not installed here: pip install 'ostinato[llm,serve]'" in done.stderr


def test_a_file_of_keys_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n", encoding="utf-8-sig")
    assert _keys(file) == ["one"]
    file.write_text("".join(f"sk-{i:059d}\n" for i in range(20_000)))
    with pytest.raises(typer.BadParameter, match="more than 1048576 characters"):
        _keys(file)


def test_keys_come_from_a_file_and_the_model_has_the_name_that_is_wanted(
    tiny_model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    options = ("--api-key-file", str(keys), "--name", "mine/model", "--log", "json")
    process, url = started(tiny_model, *options)
    try:
        assert [model.id for model in client(url, "two").models.list()] == ["mine/model"]
        assert client(url, "one").models.retrieve("mine/model").id == "mine/model"
        with pytest.raises(openai.AuthenticationError):
            client(url, "three").models.list()
        process.terminate()
        *lines, last = ended(process).splitlines()
        assert "0 answers begun (none), 0 refused" in last
        facts = [json.loads(line) for line in lines]
        assert [(each["path"], each["status"]) for each in facts] == [
            ("/v1/models", 200),
            ("/v1/models/mine/model", 200),
            ("/v1/models", 401),
        ]
    finally:
        process.kill()
