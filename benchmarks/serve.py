"""`ostinato serve` under load, beside the same batches decoded without a server.

    python -m benchmarks.serve [--shape 1B] [--clients 1,8,32,64] [--soak 100000]

The weights are random, in the model's shape; prompts are token ids, so that no text is encoded.
Clients run in a process of their own.  Each requests one answer after the other, with a prompt of
its own, as a stream; all answers have the same length.  Upper bounds: decoding as many sequences
without a server (`decode`, called capture by `ostinato bench`), and the same including the reading
of prompts (`prompts and decode`), both with the decoder that then serves.

`--ranks`: GPUs of one host that share the model, with a process each.  Rank 0 has the server, and
the other ranks repeat what its decoder does, in the upper bounds too.

`--soak`: the number of answers of four tokens that 64 clients request afterwards; the growth of
memory in the second half is measured.  The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import ostinato as ost
from benchmarks import common
from benchmarks.serve_clients import Load, Outcome
from benchmarks.soak import resident
from ostinato.bench.random_weights import random_checkpoint
from ostinato.bench.shapes import SHAPES, shape_named
from ostinato.bench.ways import DecoderWay, LaunchMode, random_tokens
from ostinato.distributed import Group, join_group, new_group_id, open_group
from ostinato.models import Decoder, SamplingOptions, TextGenerator, Tokenizer
from ostinato.models.text.tokenizer_parts import TokenizerParts
from ostinato.serve.server import ServeOptions, Server

_SOAK_TOKENS = 4
_SECONDS = 600.0


@dataclass
class RandomGenerator:
    """The part of a `TextGenerator` that the server uses; the tokenizer's words are numbers."""

    device: ost.Device
    decoder: Decoder

    def __post_init__(self) -> None:
        texts = [f"\u2581{token}" for token in range(self.decoder.config.vocabulary)]
        none = frozenset[int]()
        parts = TokenizerParts(
            "random", lambda text, special: [1], texts, False, False, none, none, None, (), {}
        )
        self.tokenizer = Tokenizer(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--clients", default="1,8,32,64")
    parser.add_argument("--prompt", type=int, default=20, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--requests", type=int, default=4, help="of each client")
    parser.add_argument("--soak", type=int, default=0, help="so many short answers after that")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the model")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.clients, chosen.tokens, chosen.requests = "1,3", 12, 2
        chosen.prompt, chosen.soak = 5, 20
    clients = [int(number) for number in chosen.clients.split(",")]
    config = shape_named(chosen.shape)
    rows: list[dict[str, object]] = []
    with ExitStack() as opened:
        group: Group | None = None
        if "OSTINATO_GROUP" in os.environ:
            group = opened.enter_context(open_group())
        elif chosen.ranks > 1:
            again = sys.argv[1:] if arguments is None else [*arguments]
            group = opened.enter_context(first_of(chosen.ranks, again))
        name = chosen.device
        if group is not None and name != "host":
            name = f"cuda:{group.rank}"
        device = opened.enter_context(ost.open_device(name))
        decoder = opened.enter_context(
            Decoder(
                device,
                random_checkpoint(config, chosen.shape),
                sequences=max(clients),
                max_context=chosen.prompt + chosen.tokens + 1,
                stop_tokens=(),
                group=group,
                leads=group is not None and group.rank == 0,
            )
        )
        if group is not None and group.rank:
            decoder.follow()
            return 0
        bounds = {count: bound(decoder, count, chosen.prompt, chosen.tokens) for count in clients}
        generator = cast(TextGenerator, RandomGenerator(device, decoder))
        with served(generator, max(clients)) as server:
            for count in clients:
                load = Load(server.url, count, chosen.requests, chosen.prompt, chosen.tokens,
                            config.vocabulary)  # fmt: skip
                ask(load.with_requests(1))  # the first requests of a process are slower
                rows.append(row(server, load, bounds[count]))
                print(rows[-1], file=sys.stderr, flush=True)
            if chosen.soak:
                rows.append(soak(server, device, chosen.soak, config.vocabulary, max(clients)))
        columns = ("what", "clients", "tokens_per_second", "requests_per_second",
                   "first_token_ms", "first_token_p90_ms", "of_decode", "of_prompts_and_decode",
                   "rows_per_step")  # fmt: skip
        print(common.table(f"serving {chosen.shape} on {device.name}", rows, columns))
        common.emit(
            f"serve-{chosen.shape}" + (f"-{chosen.ranks}-ranks" if chosen.ranks > 1 else ""),
            device,
            chosen.out,
            ceiling={
                "what": "tokens a second of the same batches without a server, by clients",
                "tokens_per_second": {str(count): one.decode for count, one in bounds.items()},
                "with_prompts": {str(count): one.both for count, one in bounds.items()},
            },
            settings={
                "shape": chosen.shape,
                "prompt": chosen.prompt,
                "tokens": chosen.tokens,
                "requests": chosen.requests,
                "ranks": chosen.ranks,
                "collectives": decoder.collectives,
                "library": decoder.statistics().library,
            },
            rows=rows,
            skipped={},
        )
    return 0


@contextmanager
def first_of(size: int, arguments: Sequence[str]) -> Iterator[Group]:
    """Starts this program for each other rank, and yields the first one's group."""
    group_id = new_group_id(size)
    command = [sys.executable, "-m", "benchmarks.serve", *arguments]
    others = [
        subprocess.Popen(command, env=os.environ | {"OSTINATO_GROUP": f"{rank}/{size}/{group_id}"})
        for rank in range(1, size)
    ]
    try:
        with join_group(group_id, rank=0, size=size) as group:
            yield group
    finally:
        for process in others:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True)
class Bound:
    """Tokens a second of all sequences together, without a server."""

    decode: float
    both: float


def bound(decoder: Decoder, count: int, prompt: int, tokens: int) -> Bound:
    """Measures the bounds: the median of three runs, after one that captures."""
    way = DecoderWay(LaunchMode("capture"), decoder, owns=False)
    decode, both = [], []
    for _ in range(4):
        way.place(count, prompt)
        decode.append(count * tokens / way.decode(tokens).seconds)
        decoder.reset()
        prompts = [random_tokens(decoder.config.vocabulary, prompt, (7, s)) for s in range(count)]
        begin = time.perf_counter()
        for sequence, one in enumerate(prompts):
            decoder.prefill(one, sequence)
        for _item in decoder.run_batch(range(count), count=tokens - 1):
            pass
        both.append(count * tokens / (time.perf_counter() - begin))
        decoder.reset()
    return Bound(statistics.median(decode[1:]), statistics.median(both[1:]))


@contextmanager
def served(generator: TextGenerator, slots: int) -> Iterator[Server]:
    """Runs a server in a thread of this process until the end of the block."""
    options = ServeOptions(
        model="random", queue=slots, reuse=False, grace_seconds=10, sampling=SamplingOptions()
    )
    server = Server(generator, options, Server.bind("127.0.0.1", 0))
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), name="server")
    thread.start()
    try:
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise RuntimeError("the server ended before it was ready")
        yield server
    finally:
        server.stop()
        thread.join()


def ask(load: Load) -> Outcome:
    """Makes the requests of all clients in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.serve_clients", json.dumps(asdict(load))]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the clients failed: {done.stderr[-2000:]}")
    return Outcome(**json.loads(done.stdout))


def row(server: Server, load: Load, bound: Bound) -> dict[str, object]:
    before = server.engine.statistics().result(_SECONDS)
    found = ask(load)
    after = server.engine.statistics().result(_SECONDS)
    wanted = load.clients * load.requests * load.tokens
    if found.tokens != wanted or after.ended["length"] - before.ended["length"] != len(found.first):
        raise AssertionError(f"{found.tokens} tokens came of {wanted}: an answer is lost")
    steps = after.steps - before.steps
    speed = found.tokens / found.seconds
    ordered = sorted(found.first)
    return {
        "what": "serve",
        "clients": load.clients,
        "tokens_per_second": speed,
        "requests_per_second": len(found.first) / found.seconds,
        "first_token_ms": 1e3 * statistics.median(ordered),
        "first_token_p90_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "decode_tokens_per_second": bound.decode,
        "of_decode": speed / bound.decode,
        "of_prompts_and_decode": speed / bound.both,
        "steps": steps,
        "rows_per_step": (after.step_rows - before.step_rows) / steps,
        "events": found.events,
    }


def soak(
    server: Server, device: ost.Device, answers: int, vocabulary: int, slots: int
) -> dict[str, object]:
    """Runs the soak in two halves, and reads memory after each."""
    clients = min(slots, answers)
    each = max(1, answers // (2 * clients))
    load = Load(server.url, clients, each, 4, _SOAK_TOKENS, vocabulary)
    outcomes, free, used = [], [], []
    for _ in range(2):
        outcomes.append(ask(load))
        device.synchronize()
        free.append(device.memory_info()[0])
        used.append(resident())
    numbers = server.engine.statistics().result(_SECONDS)
    total = sum(len(one.first) for one in outcomes)
    if numbers.under_way or sum(one.tokens for one in outcomes) != total * _SOAK_TOKENS:
        raise AssertionError("an answer is lost")
    return {
        "what": "soak",
        "clients": clients,
        "answers": total,
        "tokens_per_second": _SOAK_TOKENS * total / sum(one.seconds for one in outcomes),
        "requests_per_second": total / sum(one.seconds for one in outcomes),
        "device_grew_bytes": free[0] - free[1],
        "process_grew_bytes": used[1] - used[0],
    }


if __name__ == "__main__":
    sys.exit(main())
