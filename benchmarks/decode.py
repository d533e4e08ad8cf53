"""Decoding in turns: our ways (`ostinato bench`) beside other libraries that are installed.

    python -m benchmarks.decode                     the shapes 135M and 1B (on the host only 135M)
    python -m benchmarks.decode --shape 8B          another one of `ostinato.bench.shapes`
    python -m benchmarks.decode --shape 1B --batch 1,8,32 --peers torch.compile --seconds 600
    python -m benchmarks.decode --device host --model smollm2-135m      a real model

Each shape has a result file of its own.  The other options are those of `ostinato bench`; with an
empty `--peers` only ours is measured.  Peers: transformers' Llama in bfloat16 with a static cache,
eagerly, captured by `torch.cuda.graph`, and compiled; llama.cpp on the CPU, on a GGUF file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import ostinato as ost
from benchmarks import common
from benchmarks.peers import PEERS, Peers
from ostinato.bench.decode import measure
from ostinato.bench.options import DecodeOptions
from ostinato.bench.shapes import SHAPES
from ostinato.cli.bench import Output, compare, numbers, status, subject_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--model")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--context", default="20")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--prompt")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--plot", type=Path)
    chosen = parser.parse_args(arguments)
    failed = 0
    with ost.open_device(chosen.device) as device:
        options = DecodeOptions.usual(
            device,
            batches=numbers(chosen.batch, "--batch"),
            contexts=numbers(chosen.context, "--context"),
            tokens=chosen.tokens,
            prompts=numbers(chosen.prompt, "--prompt"),
            quick=chosen.quick,
            rounds=chosen.rounds,
            seconds=chosen.seconds,
        )
        run = partial(measure, open_others=partial(Peers, device, chosen.peers))
        output = Output(chosen.out, chosen.plot, False)
        slow = device.capabilities.host_memory_is_device_memory
        shapes = [chosen.shape] if chosen.shape or chosen.model else ["135M", *["1B"] * (not slow)]
        for shape in shapes:
            subject, opened = subject_of(shape, chosen.model)
            with status() as log:
                failed += not compare(run, device, subject, opened, options, output, log)
    return failed


if __name__ == "__main__":
    sys.exit(main())
