"""A process that asks for kernels through one disk folder, again and again, for the disk tests.

python disk_worker.py FOLDER: once, and again until its standard input ends; prints a JSON object.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from ostinato.modules import Source
from tests.modules.cubin_loader import kernel_text, make_cache

KERNELS = 4


def source(number: int) -> Source:
    return Source(kernel_text(number), name=f"worker {number}")


def main(folder: str) -> None:
    waiting = threading.Thread(target=sys.stdin.read)
    waiting.start()
    digests: dict[str, list[str]] = {str(n): [] for n in range(KERNELS)}
    answers = disk_hits = rejected = 0
    more = True
    while more:
        more = waiting.is_alive()  # what was done to the folder before the end is seen
        cache, loader = make_cache(Path(folder))
        for number in range(KERNELS):
            kernel = cache.get_or_compile(source(number), "k")
            assert len(kernel.info.parameters) == number + 1, "a wrong kernel"
            digest = loader.digests[kernel.module._handle]
            if digest not in digests[str(number)]:
                digests[str(number)].append(digest)
            answers += 1
        seen = cache.statistics().disk
        disk_hits += seen.hits
        rejected += seen.rejected
    print(
        json.dumps(
            {"answers": answers, "digests": digests, "hits": disk_hits, "rejected": rejected}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
