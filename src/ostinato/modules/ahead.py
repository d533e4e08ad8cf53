"""Compiles many variants at once, in worker processes.

NVRTC compiles one program at a time per process, whatever the number of threads, so a sweep over
hundreds of variants would use one core.  Workers compile into the disk store, where
`get_or_compile` finds the code; it compiles what a worker could not, and raises the error.

    python -m ostinato.modules.ahead FOLDER    a worker: reads a job a line, answers an empty line
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.driver.closeable import Closeable
from ostinato.errors import OstinatoError
from ostinato.modules.compiler import compile_plan, confirmed, plan_compilation
from ostinato.modules.disk import DiskStore
from ostinato.modules.source import CompileOptions, Source

Variant = tuple[Source, CompileOptions]


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    sent: dict[Source, int] = field(default_factory=dict)
    """The sources that were sent to the process, each with its number."""

    def end(self) -> None:
        self.process.kill()  # loses nothing: complete files are renamed into place
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        self.process.wait()


class CompilerPool(Closeable):
    """Worker processes that compile CUDA sources for a compute capability into a disk store.

    `folder`: of the store; None for the one of the settings.  `processes`: None for the number of
    cores, at most 16.  They start with the first variants and end with `close()` or `with`.  Only
    one thread at a time may use a pool.
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
        self._workers: list[_Worker] = []
        self._closed = False

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<CompilerPool of {self.processes} processes, {len(self._workers)} started{state}>"

    def compile(self, variants: Sequence[Variant]) -> int:
        """Compiles the variants that are not in the store; returns their number.

        Skips variants with options other than macros and the architecture.  Does not raise for a
        variant that does not compile, nor for workers that cannot start or that die:
        `get_or_compile` compiles what is missing, and raises the error.  An interrupt
        (KeyboardInterrupt) ends the workers; the next call starts new ones.
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
        if count > 1 and self.processes > 1 and not self._closed:  # one source is as fast here
            try:
                self._start()
                threads = [
                    threading.Thread(target=self._serve, args=(worker, wanted), daemon=True)
                    for worker in self._workers[:count]
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException:
                self._end()  # ends their threads too, before another call starts new ones
                raise
        return count

    def _start(self) -> None:
        """Starts missing workers and replaces those that died."""
        for worker in list(self._workers):
            if worker.process.poll() is not None:
                self._workers.remove(worker)
                worker.end()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: workers import what this process imports, and no file of the current folder.
        module = ["-m", "ostinato.modules.ahead"]
        command = [sys.executable, "-P", *module, str(self._store.folder)]
        with suppress(OSError):
            while len(self._workers) < self.processes:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": path},
                )
                self._workers.append(_Worker(process))

    def _serve(self, worker: _Worker, wanted: queue.SimpleQueue[Variant]) -> None:
        """Gives variants to one worker until there are no more."""
        stdin, stdout = worker.process.stdin, worker.process.stdout
        assert stdin is not None and stdout is not None
        with suppress(queue.Empty, OSError, ValueError):  # ValueError: the pipe is closed
            while True:
                source, options = wanted.get_nowait()
                known = source in worker.sent
                job: dict[str, Any] = {
                    "capability": self.capability,
                    "source": worker.sent.setdefault(source, len(worker.sent)),
                    "defines": list(dict(options.defines).items()),
                    "arch": options.arch,
                }
                if not known:
                    job |= {"cuda": source.cuda, "headers": dict(source.headers)}
                    job["name"] = source.name
                stdin.write(json.dumps(job).encode() + b"\n")
                stdin.flush()
                if not stdout.readline():
                    return  # the worker died

    def close(self) -> None:
        """Ends the workers.  Idempotent."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        while self._workers:
            self._workers.pop().end()


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
            expected = plan_compilation(sources[job["source"]], options, (major, minor))
            plan = confirmed(expected)  # code is stored under the compiler that made it
            compiled = compile_plan(plan)
            if compiled.inputs.unknown is None:
                store.save(plan.key, compiled, name=plan.source.name, arch=plan.arch)
        print(flush=True)


if __name__ == "__main__":
    _work(sys.argv[1])
