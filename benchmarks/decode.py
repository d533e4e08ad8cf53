"""Decoding, by `ostinato bench`: our ways beside the libraries that are installed here, in turns.

    python -m benchmarks.decode                     the shapes 135M and 1B (135M alone on the host)
    python -m benchmarks.decode --shape 8B          another one of `ostinato.bench.shapes`

Each shape has a result file of its own.  More to choose from: `ostinato bench --help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

import ostinato as ost
from benchmarks import common
from ostinato.bench.shapes import SHAPES
from ostinato.cli.bench import bench


def main(arguments: Sequence[str] | None = None) -> int:
    parser = common.options(__doc__)
    parser.add_argument("--shape", choices=SHAPES)
    chosen = parser.parse_args(arguments)
    with ost.open_device(chosen.device) as device:
        slow = device.capabilities.host_memory_is_device_memory
    failed = 0
    for shape in [chosen.shape] if chosen.shape else ["135M"] if slow else ["135M", "1B"]:
        try:
            bench(
                shape=shape,
                quick=chosen.quick,
                device=chosen.device,
                out=chosen.out,
            )
        except typer.Exit as ended:
            failed += ended.exit_code
    return failed


if __name__ == "__main__":
    sys.exit(main())
