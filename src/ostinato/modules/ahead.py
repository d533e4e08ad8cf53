"""Compiling many variants at once, in processes of their own.

NVRTC compiles one program at a time however many threads ask it, so a sweep over hundreds of
variants waits for one core.  Here workers compile into the disk store, where `get_or_compile` finds
the code; what a worker cannot do is left to it, error messages included.

    python -m ostinato.modules.ahead FOLDER    a worker: a job a line, answered by an empty line
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ostinato.driver.closeable import Closeable
from ostinato.errors import OstinatoError
from ostinato.modules.compiler import compile_plan, plan_compilation
from ostinato.modules.disk import DiskStore
from ostinato.modules.options import CompileOptions
from ostinato.modules.source import Source

__all__ = ["CompilerPool"]

Variant = tuple[Source, CompileOptions]


class CompilerPool(Closeable):
    """Worker processes that compile CUDA sources for a compute capability into a disk store.

    `folder`: of the store, that of the settings if None.  `processes`: as many as there are cores,
    16 at most, if None; they start with the first variants and end with `close()` or `with`.  Not
    for several threads.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        *,
        folder: Path | None = None,
        processes: int | None = None,
    ) -> None:
        self.capability = capability
        self.processes = processes or min(16, os.cpu_count() or 1)
        self._store = DiskStore(folder)
        self._workers: list[subprocess.Popen[bytes]] = []
        self._sent: list[set[Source]] = []
        """Sources that each worker has."""
        self._closed = False

    def compile(self, variants: Sequence[Variant]) -> int:
        """Returns when all of these are in the store that can be; how many were not before.

        Only macros and the architecture are handed on; variants with other options are left alone.
        Never raises for what does not compile, nor for workers that cannot be started or die:
        what is missing is compiled, and said, when it is asked for.
        """
        wanted: queue.SimpleQueue[Variant] = queue.SimpleQueue()
        count = 0
        for source, options in dict.fromkeys(variants):
            simple = CompileOptions(defines=options.defines, arch=options.arch)
            if source.cuda is None or options != simple:
                continue
            if not self._store.path(
                plan_compilation(source, options, self.capability).key
            ).exists():
                wanted.put((source, options))
                count += 1
        if count > 1 and self.processes > 1 and not self._closed:  # else nothing is gained
            self._start()
            threads = [
                threading.Thread(target=self._serve, args=(index, wanted), daemon=True)
                for index in range(min(count, len(self._workers)))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return count

    def _start(self) -> None:
        if self._workers:
            return
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: they import what this process does, and no files of the folder it happens to be in.
        module = ["-m", "ostinato.modules.ahead"]
        command = [sys.executable, "-P", *module, str(self._store.folder)]
        with suppress(OSError):
            for _ in range(self.processes):
                self._workers.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env=os.environ | {"PYTHONPATH": path},
                    )
                )
                self._sent.append(set())

    def _serve(self, index: int, wanted: queue.SimpleQueue[Variant]) -> None:
        """Gives one worker variants until there are no more."""
        worker, sent = self._workers[index], self._sent[index]
        assert worker.stdin is not None and worker.stdout is not None
        with suppress(queue.Empty, OSError):
            while True:
                source, options = wanted.get_nowait()
                job: dict[str, Any] = {
                    "capability": self.capability,
                    "source": hash(source),
                    "defines": list(dict(options.defines).items()),
                    "arch": options.arch,
                }
                if source not in sent:
                    job |= {"cuda": source.cuda, "headers": dict(source.headers)}
                    job["name"] = source.name
                    sent.add(source)
                worker.stdin.write(json.dumps(job).encode() + b"\n")
                worker.stdin.flush()
                if not worker.stdout.readline():
                    return  # it died

    def close(self) -> None:
        """Ends the workers.  Idempotent."""
        self._closed = True
        for worker in self._workers:
            worker.kill()  # it holds nothing: files are renamed into place when they are whole
            for pipe in (worker.stdin, worker.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            worker.wait()
        self._workers.clear()


def _work(folder: str) -> None:
    store = DiskStore(folder)
    sources: dict[int, Source] = {}
    for line in sys.stdin:
        job = json.loads(line)
        if "cuda" in job:
            made = Source(job["cuda"], headers=job["headers"], name=job["name"])
            sources[job["source"]] = made
        options = CompileOptions(defines=dict(job["defines"]), arch=job["arch"])
        major, minor = job["capability"]
        with suppress(OstinatoError):
            plan = plan_compilation(sources[job["source"]], options, (major, minor))
            store.save(plan.key, compile_plan(plan), name=plan.source.name, arch=plan.arch)
        print(flush=True)


if __name__ == "__main__":
    _work(sys.argv[1])
