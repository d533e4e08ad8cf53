"""Generates text with a real model through captured graphs, then prints times.

    python examples/generate.py "Why is the sky blue?" --max-tokens 60
    python examples/generate.py "Once upon a time" --raw --temperature 0.8 --seed 7
    python examples/generate.py "Hello" --no-graphs      # the same answer, launch by launch

The model (93 MB) is fetched on first use; `--model` takes a GGUF file or a folder instead.
"""

from __future__ import annotations

import argparse

import ostinato as ost
from ostinato.models import SamplingOptions, TextGenerator, describe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument("--no-graphs", action="store_true", help="launch by launch")
    parser.add_argument("--program", action="store_true", help="print what a step launches")
    options = parser.parse_args()

    sampling = SamplingOptions(temperature=options.temperature, seed=options.seed)
    with (
        ost.open_device() as device,
        TextGenerator(device, options.model, graphs=not options.no_graphs) as generator,
    ):
        if options.program:
            print(describe(generator.decoder.program()))
        answer = generator.generate(
            options.prompt,
            max_tokens=options.max_tokens,
            sampling=sampling,
            chat=False if options.raw else None,
        )
        try:
            for piece in answer:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass  # the summary covers the tokens so far
        print("\n")
        print(answer.summary())


if __name__ == "__main__":
    main()
