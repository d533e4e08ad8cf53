"""Runs a model on several GPUs, one process for each, with any of several launchers.

    torchrun --nproc-per-node 2 examples/generate_ranks.py "Why is the sky blue?"
    mpirun -n 2 python examples/generate_ranks.py "Why is the sky blue?"
    srun -n 2 python examples/generate_ranks.py "Why is the sky blue?"
    torchrun --nproc-per-node 3 examples/generate_ranks.py --host        # on the CPU
    python examples/generate_ranks.py                                    # one device

The launcher's environment variables give the process' rank and the addresses of the others.  All
ranks do the same and get the same tokens; rank 0 prints them.  On several hosts mpirun needs
MASTER_ADDR and MASTER_PORT (`-x`).  The model's heads, inner width and vocabulary must be multiples
of the number of ranks: 3 for the default model.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

import ostinato as ost
from ostinato.distributed import Group, open_group, place_of
from ostinato.models import TextGenerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--host", action="store_true", help="on the CPU")
    options = parser.parse_args()

    place = place_of()  # None without a launcher
    with ExitStack() as stack:
        group: Group | None = None
        name = "host" if options.host else None
        if place is not None:
            # An exception in this block ends the group on all ranks, and so does a rank's death.
            group = stack.enter_context(open_group())
            name = name or place.device
        device = stack.enter_context(ost.open_device(name))
        generator = stack.enter_context(TextGenerator(device, options.model, group=group))
        answer = generator.generate(options.prompt, max_tokens=options.max_tokens)
        for piece in answer:
            if group is None or group.rank == 0:
                print(piece, end="", flush=True)
        if group is None or group.rank == 0:
            print(f"\n\n{answer.summary()}")


if __name__ == "__main__":
    main()
