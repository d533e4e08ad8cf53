"""Compiles many variants at once, in processes of their own.

NVRTC compiles one program at a time per process, whatever the number of threads, so a sweep over
hundreds of variants would use one core.  Workers compile into the disk store, where
`get_or_compile` finds the code; it compiles what a worker could not, and raises the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ostinato.errors import OstinatoError
from ostinato.modules.compiler import compile_plan, confirmed, plan_compilation
from ostinato.modules.disk import DiskStore
from ostinato.modules.source import CompileOptions, Source

Variant = tuple[Source, CompileOptions]


def compile_ahead(
    variants: Sequence[Variant],
    capability: tuple[int, int],
    *,
    folder: Path | None = None,
    processes: int | None = None,
) -> int:
    """Compiles the variants that are not in the disk store, for a compute capability; returns their
    number.

    `folder`: of the store; None for the one of the settings.  `processes`: at most so many; None
    for the number of cores, at most 16.  Skips variants with options other than macros and the
    architecture.  Does not raise for a variant that does not compile, nor for workers that cannot
    start or that die: `get_or_compile` compiles what is missing, and raises the error.
    """
    store = DiskStore(folder)
    wanted: list[Variant] = []
    for source, options in dict.fromkeys(variants):
        simple = CompileOptions(defines=options.defines, arch=options.arch)
        if source.cuda is None or options != simple:
            continue
        if not store.path(plan_compilation(source, options, capability).key).exists():
            wanted.append((source, options))
    count = min(processes or min(16, os.cpu_count() or 1), len(wanted))
    if count < 2:  # as fast here
        return len(wanted)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ostinato-") as jobs:
        try:
            with suppress(OSError):
                for first in range(count):
                    job = Path(jobs, str(first))
                    job.write_text(_job(capability, wanted[first::count]), encoding="utf-8")
                    # -P: workers import what this process imports, and no file of the current
                    # folder.
                    command = [sys.executable, "-P", "-m", __name__, str(store.folder), str(job)]
                    workers.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL,
                            env=os.environ | {"PYTHONPATH": path},
                        )
                    )
            for worker in workers:
                worker.wait()
        finally:
            for worker in workers:
                worker.kill()  # after an error; loses nothing: complete files are renamed
                worker.wait()
    return len(wanted)


def _job(capability: tuple[int, int], variants: Sequence[Variant]) -> str:
    sources = list({source: None for source, _ in variants})
    return json.dumps(
        {
            "capability": capability,
            "sources": [[s.cuda, dict(s.headers), s.name] for s in sources],
            "variants": [
                [sources.index(source), list(dict(options.defines).items()), options.arch]
                for source, options in variants
            ],
        }
    )


def _work(folder: str, file: str) -> None:
    store, job = DiskStore(folder), json.loads(Path(file).read_text(encoding="utf-8"))
    sources = [Source(cuda, headers=headers, name=name) for cuda, headers, name in job["sources"]]
    major, minor = job["capability"]
    for source, defines, arch in job["variants"]:
        options = CompileOptions(defines=dict(defines), arch=arch)
        with suppress(OstinatoError):
            expected = plan_compilation(sources[source], options, (major, minor))
            plan = confirmed(expected)  # code is stored under the compiler that made it
            compiled = compile_plan(plan)
            if compiled.inputs.unknown is None:
                store.save(plan.key, compiled, name=plan.source.name, arch=plan.arch)


if __name__ == "__main__":
    _work(*sys.argv[1:])
