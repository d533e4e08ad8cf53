"""One rank of a group of processes, for tests: decodes, and fails as it is told.

    rank_program.py host|cuda|RECIPE DEADLINE FAULT
    rank_program.py host|cuda|RECIPE alone ""    the same on one device, without a group
    rank_program.py host|cuda|RECIPE DEADLINE plain    without loops on the device

RECIPE: packed weights of `random_weights.RECIPES`, on CUDA.

FAULT: "", or "kill|stop|raise|key|build" and "start|prompt|between|loop"; "key" is another call or
setting than the other ranks', "build" another version's code.  Prints a line of JSON: the tokens,
and for each step that gave logits how far the best was from the next, and the logits' digest.  Then
the token after a prompt that is read in one step of many rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from contextlib import ExitStack

import numpy as np

import ostinato as ost
from ostinato.bench.random_weights import random_checkpoint
from ostinato.distributed import Group, open_group
from ostinato.models import ranks
from ostinato.models.decoder import Decoder
from tests.models.random_models import RandomModel, llama

MODELS = {
    "host": RandomModel(llama(6, 6, 16, hidden=64, inner=96, vocabulary=264, layers=2)),
    "cuda": RandomModel(llama(8, 4, 64, inner=1024, vocabulary=2048, layers=4)),
}
PACKED = llama(16, 4, 64, inner=12288, vocabulary=2048, layers=2)  # large enough to stay packed


def main(kind: str, deadline: str, fault: str) -> None:
    what, _, moment = fault.partition(" ")
    model = MODELS.get(kind, MODELS["cuda"])

    def here(now: str) -> bool:
        """Has the fault now, if it is time; whether this rank is to make another call."""
        if now != moment:
            return False
        if what == "raise":
            raise ValueError("broken")
        if what == "build":
            codes = ranks.Ranks.code_of
            ranks.Ranks.code_of = lambda self, bound: [*codes(self, bound), "another build"]
            ranks._sources = lambda: "another build"
        elif what != "key":
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        return what == "key"

    with ExitStack() as stack:
        group: Group | None = None
        if deadline != "alone":
            group = stack.enter_context(open_group(deadline=float(deadline)))
        sequences = 2 if here("start") else 1
        name = "host" if kind == "host" else f"cuda:{group.rank if group is not None else 0}"
        device = stack.enter_context(ost.open_device(name))
        decoder = stack.enter_context(
            Decoder(
                device,
                random_checkpoint(PACKED, recipe=kind)
                if kind not in MODELS
                else model.checkpoint(),
                stop_tokens=(),
                group=group,
                max_rows=512,
                sequences=sequences,
                threads=1,
            )
        )
        length = 21 if here("prompt") else 20
        tokens, margins, digests = [decoder.prefill(model.tokens(length))], [], []

        def look() -> None:
            logits = decoder.logits()
            best = np.sort(logits)[-2:]
            margins.append(float(best[1] - best[0]) / float(logits.std()))
            digests.append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])

        for _ in range(16):
            look()
            tokens.append(decoder.decode())
        per_launch = 1 if what == "plain" else 2 if here("between") else 4
        for token in decoder.run(count=24, tokens_per_launch=per_launch):
            tokens.append(token)
            if len(tokens) == 26 and here("loop"):
                break
        for token in decoder.run(count=6, tokens_per_launch=1 if what == "plain" else 3):
            tokens.append(token)
        decoder.reset()
        last = decoder.prefill(model.tokens(300))
        look()
        numbers = decoder.statistics()
        found = {"tokens": tokens, "last": last, "margins": margins, "digests": digests}
        found["weights"] = numbers.weights
        found["eager"] = [*numbers.quarantined.values(), *numbers.one_by_one]
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
