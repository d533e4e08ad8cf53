"""The clients of `benchmarks.serve`: a process that sends requests, and prints times as JSON.

The clients do as little work as possible, so that the server is measured: bytes are searched, but
not parsed, and connections are kept open.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from urllib.parse import urlsplit

_DONE = b"data: [DONE]\n\n"
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Load:
    """The load: `clients` at once, each with `requests` requests in sequence, and the numbers of
    tokens of a request."""

    url: str
    clients: int
    requests: int
    prompt: int
    tokens: int
    vocabulary: int

    def with_requests(self, requests: int) -> Load:
        return replace(self, requests=requests)


@dataclass
class Outcome:
    """`seconds`: time of all requests.  `first`: seconds to each answer's first token.  `events`:
    number of events received."""

    seconds: float = 0.0
    tokens: int = 0
    events: int = 0
    first: list[float] = field(default_factory=list)


async def one_client(load: Load, number: int, outcome: Outcome, begin: asyncio.Event) -> None:
    host = urlsplit(load.url)
    rng = random.Random(number)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    await begin.wait()
    for _ in range(load.requests):
        body = json.dumps(
            {
                "model": "random",
                "prompt": [rng.randrange(load.vocabulary) for _ in range(load.prompt)],
                "max_tokens": load.tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host.netloc}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        asked = time.perf_counter()
        writer.write(head.encode() + body)
        first, came = 0.0, b""
        while _DONE not in came or not came.endswith(b"0\r\n\r\n"):
            piece = await reader.read(1 << 16)
            if not piece:
                raise RuntimeError(f"the connection was closed after {came[-300:]!r}")
            came += piece
            if not first and b"data: " in came:
                first = time.perf_counter() - asked
            if came.startswith(b"HTTP/1.1") and not came.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"refused: {came[:500]!r}")
        found = _TOKENS.findall(came)
        outcome.tokens += int(found[-1])
        outcome.events += came.count(b"data: ")
        outcome.first.append(first)
    writer.close()
    await writer.wait_closed()


async def all_clients(load: Load) -> Outcome:
    outcome, begin = Outcome(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(load.clients):
            group.create_task(one_client(load, number, outcome, begin))
        await asyncio.sleep(0.2)  # until all are connected
        start = time.perf_counter()
        begin.set()
    outcome.seconds = time.perf_counter() - start
    return outcome


def main() -> int:
    load = Load(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(asyncio.run(all_clients(load)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
