"""One rank of a group of processes, for tests: decodes, and fails as it is told.

    rank_program.py host|cuda DEADLINE FAULT
    rank_program.py host|cuda alone ""           the same on one device, without a group

FAULT: "", or "kill|stop|raise" and "start|prompt|between|loop".  Prints a line of JSON: the tokens,
and for each step that gave logits how far the best was from the next, and the logits' digest.
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
from ostinato.distributed import Group, open_group
from ostinato.models.decoder import Decoder
from tests.models.random_models import RandomModel, llama

MODELS = {
    "host": RandomModel(llama(6, 6, 16, hidden=64, inner=96, vocabulary=264, layers=2)),
    "cuda": RandomModel(llama(8, 4, 64, inner=1024, vocabulary=2048, layers=4)),
}


def main(kind: str, deadline: str, fault: str) -> None:
    what, _, moment = fault.partition(" ")
    model = MODELS[kind]

    def here(now: str) -> None:
        if now != moment:
            return
        if what == "raise":
            raise ValueError("broken")
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    with ExitStack() as stack:
        group: Group | None = None
        if deadline != "alone":
            group = stack.enter_context(open_group(deadline=float(deadline)))
        here("start")
        name = "host" if kind == "host" else f"cuda:{group.rank if group is not None else 0}"
        device = stack.enter_context(ost.open_device(name))
        decoder = stack.enter_context(
            Decoder(device, model.checkpoint(), stop_tokens=(), group=group, max_rows=8, threads=1)
        )
        here("prompt")
        tokens, margins, digests = [decoder.prefill(model.tokens(20))], [], []
        for _ in range(16):
            logits = decoder.logits()
            best = np.sort(logits)[-2:]
            margins.append(float(best[1] - best[0]) / float(logits.std()))
            digests.append(hashlib.sha256(logits.tobytes()).hexdigest()[:16])
            tokens.append(decoder.decode())
        here("between")
        for token in decoder.run(count=24, tokens_per_launch=4):
            tokens.append(token)
            if len(tokens) == 26:
                here("loop")
        numbers = decoder.statistics()
        found = {"tokens": tokens, "margins": margins, "digests": digests}
        found["eager"] = [*numbers.quarantined.values(), *numbers.one_by_one]
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
