"""Lives of any seed and length: `python -m tests.property --seeds 0 20 --steps 10000`."""

from __future__ import annotations

import argparse
import logging
import time

from tests.property.engine import live
from tests.property.threads import ThreadRules

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.property", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 20), metavar=("FIRST", "LAST"))
    parser.add_argument("--steps", type=int, default=10_000, help="of one life")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # keys are quarantined and faults injected all the time
    for seed in range(given.seeds[0], given.seeds[1] + 1):
        begun = time.perf_counter()
        live(ThreadRules, seed, given.steps)
        print(f"seed {seed}: {given.steps} steps, {time.perf_counter() - begun:.1f} s", flush=True)
