"""Attacks a server of its own on this machine, while a healthy client uses it; not part of CI.

    python -m tests.serve.attack                       # all attacks, then all at once: six minutes
    python -m tests.serve.attack --only "idle connections" --seconds 20

The server is `ostinato serve` with a tiny model on the CPU, in a process of its own whose log lines
nobody reads.  Each attack runs three times, for some seconds, on the loopback interface.  Meanwhile
the healthy client asks for answers of four tokens, one after the other, and for /health.

Rules, after which the exit status is 1 if one is broken:
- every healthy answer is the one that the server gave before the attacks, within a second;
- /health is 200;
- the server's resident memory is not 16 MB larger after the last run than after the one before;
- no descriptor is left open;
- only failed answers get status 500: their model read a token whose embedding is NaN.

Prints a table, and one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import multiprocessing
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.cli import commands
from tests.models.model_files import CONFIG, weights, write_gguf
from tests.serve.tool_templates import HERMES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MODEL = "tiny"
HEALTHY = {"model": MODEL, "prompt": [5, 9, 200, 31], "max_tokens": 4, "temperature": 0}
DAMAGED = 70
"""A token whose embedding is NaN."""
MOST_SECONDS = 1.0
SLACK = 16 << 20
"""Bytes that the last run of an attack may add to the server's memory."""
SETTLE_SECONDS = 20.0
"""Time after an attack in which the server may close what it left, and read what has arrived."""
Address = tuple[str, int]


@dataclass
class Attack:
    """One attack under way.  `counts`: what was sent and what came of it, by any name."""

    address: Address
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    random: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def on(self) -> bool:
        return time.monotonic() < self.end

    def connect(self, buffer: int = 0) -> socket.socket:
        raw = socket.socket()
        if buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.settimeout(10.0)
        try:
            raw.connect(self.address)
        except OSError:
            raw.close()
            raise
        return raw

    def send(self, data: bytes, *, ends: bool = True) -> None:
        """Sends a request on a connection of its own, and counts the status of the answer."""
        with self.connect() as raw:
            with suppress(ConnectionError):  # it may be refused early
                raw.sendall(data)
                if ends:
                    raw.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                self.counts[status_of(raw.recv(1 << 16))] += 1
                while raw.recv(1 << 16):
                    pass


def status_of(came: bytes) -> str:
    found = re.match(rb"HTTP/1.1 (\d\d\d)", came)
    return found[1].decode() if found else "no answer"


def head(headers: str, path: str = CHAT, method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode("latin-1")


def request(body: object, path: str = CHAT) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sizes = (
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n"
    )
    return head(sizes, path) + data


def chat(**fields: object) -> dict[str, object]:
    message = {"role": "user", "content": "ab in 12?"}
    return {"model": MODEL, "messages": [message], "max_tokens": 3, **fields}


# ---------------------------------------------------------------------------------------- attacks


def nothing(attack: Attack) -> None:
    """No attack: what the machine does to the healthy client."""
    while attack.on:
        time.sleep(0.05)


def idle_connections(attack: Attack) -> None:
    """3,000 connections that say nothing."""
    with ExitStack() as stack:
        for _ in range(3000):
            stack.enter_context(attack.connect())
            attack.counts["connections"] += 1
            if not attack.on:
                return
        while attack.on:
            time.sleep(0.05)


def half_open(attack: Attack) -> None:
    """Connections whose head stops in its middle, and that close their side at once, or never."""
    with ExitStack() as stack:
        while attack.on:
            raw = stack.enter_context(attack.connect())
            raw.sendall(head("x: y\r\n")[: attack.random.randrange(60)])
            if attack.random.random() < 0.5:
                raw.shutdown(socket.SHUT_WR)
            attack.counts["connections"] += 1
            time.sleep(0.005)


def slow_senders(attack: Attack) -> None:
    """300 connections that send a byte at a time: of a head, of a body, of a chunk."""
    starts = (
        b"POST / HTTP/1.1\r\nhost: localhost\r\nx: ",
        head("content-type: application/json\r\ncontent-length: 60000\r\n"),
        head("content-type: application/json\r\ntransfer-encoding: chunked\r\n") + b"fff\r\n",
    )
    with ExitStack() as stack:
        raws = [stack.enter_context(attack.connect()) for _ in range(300)]
        for index, raw in enumerate(raws):
            with suppress(OSError):
                raw.sendall(starts[index % len(starts)])
        while attack.on:
            for raw in raws:
                with suppress(OSError):
                    raw.sendall(b"x")
                    attack.counts["bytes"] += 1
            time.sleep(0.02)


def one_byte_chunks(attack: Attack) -> None:
    """Bodies in chunks of one byte, which cost a parser most."""
    piece = 4000 * b"1\r\n \r\n"
    start = head("content-type: application/json\r\ntransfer-encoding: chunked\r\n")
    while attack.on:
        with attack.connect() as raw, suppress(OSError):
            raw.sendall(start)
            while attack.on:
                raw.sendall(piece)
                attack.counts["bytes"] += len(piece)
        attack.counts["connections"] += 1


@functools.cache
def huge_bodies() -> list[bytes]:
    size = 4_000_000
    kinds = [
        chat(messages=[{"role": "user", "content": size * "x"}]),
        chat(metadata={"a": size * "é"}),
        {**HEALTHY, "prompt": size // 3 * [5]},
        {**HEALTHY, "prompt": size // 5 * [[5]]},
        chat(**{f"f{number}": None for number in range(size // 16)}),
        chat(metadata={"a": 2 * size * "x"}),
    ]
    return [request(kind, COMPLETION if "prompt" in kind else CHAT) for kind in kinds]


def huge_json(attack: Attack) -> None:
    """Bodies up to the limit, of text, of numbers, and of names, and beyond it."""
    while attack.on:
        attack.send(attack.random.choice(huge_bodies()), ends=False)


def deep_json(attack: Attack) -> None:
    """Arrays and objects in each other."""
    depth = 100_000
    inner = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "%s": %s}'

    def nested(count: int) -> bytes:
        return count * b'{"a":' + b"1" + count * b"}"

    function = b'[{"type": "function", "function": {"name": "f", "parameters": %s}}]'
    bodies = [depth * b"[", depth * b'{"a":', depth * b"[" + depth * b"]"]
    for count in (100, 400, 480, 900, 960, 1000, 5000):
        bodies += [
            inner % (b"metadata", nested(count)),
            inner % (b"chat_template_kwargs", nested(count)),
            inner % (b"tools", function % nested(count)),
        ]
    while attack.on:
        attack.send(request(attack.random.choice(bodies)), ends=False)


def header_floods(attack: Attack) -> None:
    """Heads of many lines, of long lines, and without an end."""
    heads = [
        head("".join(f"x{number}: y\r\n" for number in range(5000)), "/health", "GET"),
        head(f"x: {1_000_000 * 'y'}\r\n", "/health", "GET"),
        head("", "/" + 500_000 * "y", "GET"),
        b"GET / HTTP/1.1\r\n" + 100_000 * b"x: y\r\n",
        head("x: y\r\n" * 90, "/health", "GET"),
    ]
    while attack.on:
        attack.send(attack.random.choice(heads))


def disconnects(attack: Attack) -> None:
    """Clients that leave after each byte of a request, and after each piece of its answer, with and
    without a reset."""
    sent = request(chat(max_tokens=100, stream=True))
    while attack.on:
        with attack.connect() as raw, suppress(OSError):
            if attack.random.random() < 0.5:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if attack.random.random() < 0.5:
                raw.sendall(sent[: attack.random.randrange(len(sent))])
            else:
                raw.sendall(sent)
                for _ in range(attack.random.randrange(8)):
                    if not raw.recv(attack.random.choice((1, 500))):
                        break
        attack.counts["connections"] += 1


def wrong_bytes(attack: Attack) -> None:
    """What is no UTF-8, no JSON and no HTTP, and requests with some bytes changed."""
    sound = request(chat())
    fixed = [
        request(b'{"model": "tiny", "prompt": "\xff\xfe"}', COMPLETION),
        request(b'{"model": "tiny", "prompt": "\\ud800"}', COMPLETION),
        request(chat(messages=[{"role": "user", "content": "\ud800"}])),
        request(chat(**{"\ud800": 1})),
        request(chat(temperature=float("nan"))),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        head("", "/v1/models/\xff%ff%00", "GET"),
        bytes(range(256)),
    ]
    while attack.on:
        data = bytearray(sound)
        for _ in range(attack.random.randrange(1, 4)):
            data[attack.random.randrange(len(data))] = attack.random.randrange(256)
        attack.send(attack.random.choice([*fixed, bytes(data)]))


def nan_rows(attack: Attack) -> None:
    """Prompts with a token whose embedding is NaN: these answers fail, and no others."""
    while attack.on:
        prompt = [attack.random.randrange(3, 60) for _ in range(attack.random.randrange(20))]
        asked = {**HEALTHY, "prompt": [*prompt, DAMAGED], "max_tokens": 20}
        attack.send(request(asked, COMPLETION), ends=False)


def unread_answers(attack: Attack) -> None:
    """Streams, and hundreds of requests sent ahead, whose answers nobody reads."""
    stream = request({**HEALTHY, "max_tokens": 120, "n": 2, "stream": True}, COMPLETION)
    ahead = 500 * head("", "/metrics", "GET")
    with ExitStack() as stack:
        while attack.on:
            with suppress(OSError):
                raw = stack.enter_context(attack.connect(4096))
                raw.sendall(attack.random.choice((stream, ahead)))
                attack.counts["connections"] += 1
            time.sleep(0.2)


def unwanted_bodies(attack: Attack) -> None:
    """Requests that are refused by their head, with bodies that go on."""
    starts = [
        head("transfer-encoding: chunked\r\n", "/nothing"),
        head("content-length: 99999999999\r\ncontent-type: application/json\r\n"),
        head("content-length: 50000000\r\n", CHAT, "PUT"),
        head("content-length: 50000000\r\ncontent-type: text/plain\r\n"),
        head("content-length: 50000000\r\ncontent-type: application/json\r\nhost: evil\r\n"),
    ]
    piece = bytes(1 << 16)
    while attack.on:
        with attack.connect() as raw, suppress(OSError):
            raw.sendall(attack.random.choice(starts))
            while attack.on:
                raw.sendall(piece)
                attack.counts["bytes"] += len(piece)
        attack.counts["connections"] += 1


def hostile_tools(attack: Attack) -> None:
    """Many tools, schemas of a megabyte or with hard patterns, which the answer must match, and
    prompts that have the words of calls in them."""
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": {**function, "name": f"f{n}"}} for n in range(128)]
    long = {"type": "function", "function": {**function, "description": 1_000_000 * "x"}}
    hard = {"type": "string", "pattern": "^(x?y?){99}(x+x+)+z$"}
    matched = {"name": "f", "parameters": {"properties": {"a": hard}, "required": ["a"]}}
    words = {"role": "user", "content": 200 * '<tool_call>{"'}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": 2000 * "["}}
    bodies = [
        request(chat(tools=tools)),
        request(chat(tools=[long])),
        request(chat(messages=[words], tools=tools[:1])),
        request(chat(messages=[words, {"role": "assistant", "tool_calls": [call]}])),
        request(chat(tools=tools[:1], stream=True, parallel_tool_calls=False)),
        request(chat(tools=tools[:1], tool_choice="required", stream=True)),
        request(chat(tools=[{"type": "function", "function": matched}], tool_choice="required")),
    ]
    while attack.on:
        attack.send(attack.random.choice(bodies), ends=False)


@dataclass(frozen=True)
class Kind:
    """An attack, and the number of threads that make it."""

    run: Callable[[Attack], None]
    threads: int = 1

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")


KINDS = (
    Kind(nothing),
    Kind(idle_connections),
    Kind(half_open),
    Kind(slow_senders),
    Kind(one_byte_chunks, 4),
    Kind(huge_json, 4),
    Kind(deep_json, 2),
    Kind(header_floods, 2),
    Kind(disconnects, 4),
    Kind(wrong_bytes, 2),
    Kind(nan_rows, 2),
    Kind(unread_answers),
    Kind(unwanted_bodies, 2),
    Kind(hostile_tools, 2),
)


def attacked(names: Sequence[str], address: Address, seconds: float) -> Counter[str]:
    """Makes attacks, all at once, and returns what came of them."""
    kinds = [kind for kind in KINDS if kind.name in names]
    huge_bodies()  # makes them, for seconds
    end = time.monotonic() + seconds
    attacks = [
        (kind, Attack(address, end, random=random.Random(number)))
        for kind in kinds
        for number in range(kind.threads)
    ]

    def run(kind: Kind, attack: Attack) -> None:
        while attack.on:
            try:
                kind.run(attack)
            except OSError as error:
                attack.counts[f"client: {error.strerror or error}"] += 1

    threads = [threading.Thread(target=run, args=one) for one in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum((attack.counts for _, attack in attacks), Counter())


# ----------------------------------------------------------------------- the server, and its users


@dataclass
class Healthy:
    """A client that uses the server as it is meant, until it is told to stop."""

    address: Address
    right: str = ""
    answers: int = 0
    slowest: float = 0.0
    slowest_health: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes, float]:
        began = time.monotonic()
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read(), time.monotonic() - began
        finally:
            connection.close()

    def answer(self) -> tuple[str, float]:
        status, body, seconds = self.ask("POST", COMPLETION, HEALTHY)
        return (json.loads(body)["choices"][0]["text"] if status == 200 else f"{status}"), seconds

    @contextmanager
    def at_work(self) -> Iterator[None]:
        stop = threading.Event()

        def run(work: Callable[[], None]) -> None:
            while not stop.wait(0.02):
                try:
                    work()
                except (OSError, http.client.HTTPException) as error:
                    self.wrong.append(repr(error))

        def answer() -> None:
            text, seconds = self.answer()
            self.answers += 1
            self.slowest = max(self.slowest, seconds)
            if text != self.right:
                self.wrong.append(f"answer {text!r}")

        def health() -> None:
            status, _, seconds = self.ask("GET", "/health")
            self.slowest_health = max(self.slowest_health, seconds)
            if status != 200:
                self.wrong.append(f"/health {status}")

        threads = [threading.Thread(target=run, args=(work,)) for work in (answer, health)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@contextmanager
def server(folder: Path) -> Iterator[tuple[Address, int]]:
    """A server's address and process id.  Its log lines are not read."""
    config = replace(CONFIG, tied_embeddings=False, context_length=512)
    values = weights(config)
    values["embed"][DAMAGED] = np.nan
    metadata = {"tokenizer.chat_template": HERMES}
    path = write_gguf(folder / "tiny.gguf", values, config=config, metadata=metadata)
    options = ("--model", str(path), "--port", "0", "--device", "host", "--log", "text")
    command = [*commands.COMMAND, "serve", *options, "--name", MODEL]
    process = subprocess.Popen(
        command, env=commands.environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, line
        yield ("127.0.0.1", int(found[1])), process.pid
        process.terminate()
        assert process.wait(30) == 0, "it does not end"
    finally:
        process.kill()
        process.wait()


def resident(pid: int, name: str = "VmRSS") -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(rf"^{name}:\s+(\d+) kB$", text, flags=re.M)[0]) << 10


def descriptors(pid: int) -> list[str]:
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile
            found.append(str(one.readlink()))
    return found


def opened(pid: int, before: list[str]) -> list[str]:
    return [*(Counter(descriptors(pid)) - Counter(before)).elements()]


def statuses(healthy: Healthy) -> Counter[str]:
    """How many requests got which status, and answers failed, as the server counts them."""
    _, body, _ = healthy.ask("GET", "/metrics")
    pattern = r'(?:total\{path="[^"]*",status|ended\{reason)="(\w+)"\} (\S+)'
    found = re.findall(pattern, body.decode())
    counts: Counter[str] = Counter()
    for status, count in found:
        counts[status] += int(float(count))
    return counts


def one(
    names: Sequence[str],
    address: Address,
    pid: int,
    text: str,
    seconds: float,
    attacker: ProcessPoolExecutor,
) -> dict[str, Any]:
    """Runs attacks three times; returns a row."""
    healthy = Healthy(address, text)
    status_before, counts = statuses(healthy), Counter[str]()
    time.sleep(0.5)  # the server has then closed what was closed here
    before = descriptors(pid)
    after: list[int] = []
    for _ in range(3):
        with healthy.at_work():
            counts += attacker.submit(attacked, names, address, seconds).result()
        end = time.monotonic() + SETTLE_SECONDS
        while (left := opened(pid, before)) and time.monotonic() < end:
            time.sleep(0.1)
        after.append(resident(pid))
    answered = statuses(healthy) - status_before
    failed = answered["500"] - answered["failed"]
    broken = [
        *({*healthy.wrong}),
        *[f"slowest answer {healthy.slowest:.2f} s"] * (healthy.slowest >= MOST_SECONDS),
        *[f"memory grew by {(after[2] - after[1]) >> 20} MB"] * (after[2] - after[1] > SLACK),
        *[f"{one} is left" for one in left],
        *[f"{failed} requests got 500"] * (failed > 0),
        *["no healthy answer"] * (not healthy.answers),
    ]
    return {
        "attack": names[0] if len(names) == 1 else "all at once",
        "healthy_answers": healthy.answers,
        "slowest_answer_ms": round(1000 * healthy.slowest),
        "slowest_health_ms": round(1000 * healthy.slowest_health),
        "memory_grew_kb": (after[2] - after[1]) >> 10,
        "statuses": {name: count for name, count in sorted(answered.items()) if name.isdecimal()},
        "sent": dict(sorted(counts.items())),
        "broken": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run of an attack")
    parser.add_argument("--only", choices=[kind.name for kind in KINDS], help="this attack alone")
    chosen = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 14), most))  # the server's too
    every = [kind.name for kind in KINDS]
    rounds = [[chosen.only]] if chosen.only else [*([name] for name in every), every]
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder)) as (address, pid),
        # A process of its own, so that making bodies does not keep the healthy client waiting.
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attacker,
    ):
        text, _ = Healthy(address).answer()
        attacker.submit(attacked, [], address, 0.0).result()
        for names in rounds:
            row = one(names, address, pid, text, chosen.seconds, attacker)
            rows.append(row)
            print(
                f"{row['attack']:18} {row['healthy_answers']:4} healthy, slowest "
                f"{row['slowest_answer_ms']:4} ms, /health {row['slowest_health_ms']:4} ms, memory "
                f"{row['memory_grew_kb']:+6} kB  {row['statuses']} {row['sent']}"
            )
            for words in row["broken"]:
                print(f"    BROKEN: {words}")
            sys.stdout.flush()
        peak = resident(pid, "VmHWM")
    print(f"the server's largest resident memory: {peak >> 20} MB")
    broken = sum(bool(row["broken"]) for row in rows)
    print(json.dumps({"peak_kb": peak >> 10, "broken": broken, "rows": rows}))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
