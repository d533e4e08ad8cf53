"""Workers that compile into the disk store."""

from __future__ import annotations

import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ostinato.modules import CompileOptions, DiskStore, Source, ahead, compile_ahead
from ostinato.modules.compiler import plan_compilation

CAPABILITY = (9, 0)
SOURCE = Source(
    '#include "twice.h"\nextern "C" __global__ void scale(float* x) { *x = twice(*x) * FACTOR; }\n',
    headers={"twice.h": "__device__ float twice(float v) { return v + v; }\n"},
    name="scale.cu",
)


def variant(factor: object, **options: object) -> tuple[Source, CompileOptions]:
    return SOURCE, CompileOptions(defines={"FACTOR": str(factor)}, **options)  # type: ignore[arg-type]


def stored(tmp_path: Path, *variants: tuple[Source, CompileOptions]) -> list[bool]:
    store = DiskStore(tmp_path / "kernels")
    keys = [plan_compilation(*one, CAPABILITY).key for one in variants]
    return [store.load(key) is not None for key in keys]


def compiled(tmp_path: Path, *variants: tuple[Source, CompileOptions]) -> int:
    return compile_ahead(variants, CAPABILITY, folder=tmp_path / "kernels", processes=2)


def test_what_workers_compiled_is_found_under_our_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They import nothing from the folder they are started in, and what does not compile stops
    nothing."""
    (tmp_path / "queue.py").write_text("raise SystemExit('not ours')\n")
    monkeypatch.chdir(tmp_path)
    bad, good = variant("no such thing"), [variant(n) for n in range(3)]
    assert compiled(tmp_path, bad, *good, good[0]) == 4
    assert stored(tmp_path, bad, *good) == [False, True, True, True]
    assert compiled(tmp_path, *good) == 0


@pytest.mark.parametrize("how", ["killed", "interrupted", "not started"])
def test_workers_that_do_not_end_leave_nothing_but_whole_files(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    interrupts: list[subprocess.Popen[bytes]] = []

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            if how == "not started" and started:
                raise OSError("no more processes")
            super().__init__(*args, **options)
            started.append(self)
            if how == "killed":
                self.kill()

        def wait(self, timeout: float | None = None) -> int:
            if how == "interrupted" and not interrupts:
                interrupts.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    wanted = [variant(n) for n in range(4)]
    monkeypatch.setattr(ahead.subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt) if how == "interrupted" else nullcontext():
        assert compiled(tmp_path, *wanted) == 4
    assert all(process.poll() is not None for process in started)
    assert all(entry.problem is None for entry in DiskStore(tmp_path / "kernels").entries())
    monkeypatch.undo()
    compiled(tmp_path, *wanted)
    assert all(stored(tmp_path, *wanted))


def test_other_options_are_left_alone(tmp_path: Path) -> None:
    other = [variant(n, fast_math=True) for n in range(2)]
    ptx = Source(data=".version 8.0\n.target sm_90\n", kind="ptx", name="ready.ptx")
    assert compiled(tmp_path, *other, (ptx, CompileOptions())) == 0
    assert stored(tmp_path, other[0]) == [False]
