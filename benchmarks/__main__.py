"""`python -m benchmarks [NAME …] [--out DIR] [--device cuda:0|host] [--quick]`

Runs all benchmarks, or those named, each in a process of its own, so that none inherits another's
allocator, contexts or clocks.  Each benchmark prints a table, and one line of JSON at the end.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks import common

NAMES = (
    "replay_cost",
    "streams",
    "launch_cost",
    "join",
    "change_cost",
    "black_box",
    "divergences",
    "soak",
    "modules",
    "decode",
    "generate",
    "host",
    "startup",
    "cold_start",
    "load",
    "torch_graphed",
    "weights",
    "prompt_attention",
    "serve",
    "choice",
    "lookup",
    "tuning",
    "node_times",
)


def main() -> int:
    parser = common.options(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    chosen = parser.parse_args()
    unknown = [name for name in chosen.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    options = ["--out", str(chosen.out), "--device", chosen.device, *["--quick"] * chosen.quick]
    failed = []
    for name in chosen.names or NAMES:
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
