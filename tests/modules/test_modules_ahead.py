"""Workers that compile into the disk store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.modules import CompileOptions, CompilerPool, DiskStore, Source
from ostinato.modules.compiler import plan_compilation

CAPABILITY = (9, 0)
SOURCE = Source(
    '#include "twice.h"\nextern "C" __global__ void scale(float* x) { *x = twice(*x) * FACTOR; }\n',
    headers={"twice.h": "__device__ float twice(float v) { return v + v; }\n"},
    name="scale.cu",
)


def variant(factor: object, **options: object) -> tuple[Source, CompileOptions]:
    return SOURCE, CompileOptions(defines={"FACTOR": str(factor)}, **options)  # type: ignore[arg-type]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CompilerPool]:
    with CompilerPool(CAPABILITY, folder=tmp_path / "kernels", processes=2) as made:
        yield made


def stored(pool: CompilerPool, tmp_path: Path, one: tuple[Source, CompileOptions]) -> bool:
    store = DiskStore(tmp_path / "kernels")
    return store.load(plan_compilation(*one, CAPABILITY).key) is not None


def test_what_workers_compiled_is_found_under_our_own_key(
    pool: CompilerPool, tmp_path: Path
) -> None:
    wanted = [variant(n) for n in range(3)]
    assert pool.compile([*wanted, wanted[0]]) == 3
    assert all(stored(pool, tmp_path, one) for one in wanted)
    assert pool.compile(wanted) == 0
    more = [variant(n) for n in range(3, 5)]  # the same workers, which have the source
    assert pool.compile(wanted + more) == 2
    assert all(stored(pool, tmp_path, one) for one in more)


def test_workers_import_nothing_from_the_folder_they_are_started_in(
    pool: CompilerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not ours')\n")
    monkeypatch.chdir(tmp_path)
    wanted = [variant(1), variant(2)]
    assert pool.compile(wanted) == 2
    assert all(stored(pool, tmp_path, one) for one in wanted)


def test_what_does_not_compile_stops_nothing(pool: CompilerPool, tmp_path: Path) -> None:
    bad, good = variant("no such thing"), [variant(1), variant(2)]
    assert pool.compile([bad, *good]) == 3
    assert not stored(pool, tmp_path, bad)
    assert all(stored(pool, tmp_path, one) for one in good)


def test_workers_that_die_are_no_error(pool: CompilerPool, tmp_path: Path) -> None:
    assert pool.compile([variant(1), variant(2)]) == 2
    for worker in pool._workers:
        worker.process.kill()
        worker.process.wait()
    more = [variant(3), variant(4)]
    assert pool.compile(more) == 2
    assert all(stored(pool, tmp_path, one) for one in more)  # others took their place


def test_an_interrupt_ends_the_workers_and_the_next_call_starts_others(
    pool: CompilerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.compile([variant(n) for n in range(20)])
    assert not pool._workers
    more = [variant(n) for n in range(20, 24)]
    assert pool.compile(more) == 4
    assert all(stored(pool, tmp_path, one) for one in more)
    assert all(entry.problem is None for entry in DiskStore(tmp_path / "kernels").entries())


def test_other_options_are_left_alone(pool: CompilerPool, tmp_path: Path) -> None:
    other = [variant(n, fast_math=True) for n in range(2)]
    ptx = Source(data=".version 8.0\n.target sm_90\n", kind="ptx", name="ready.ptx")
    assert pool.compile([*other, (ptx, CompileOptions())]) == 0
    assert not stored(pool, tmp_path, other[0])


def test_a_closed_pool_starts_nothing(tmp_path: Path) -> None:
    pool = CompilerPool(CAPABILITY, folder=tmp_path / "kernels", processes=2)
    pool.close()
    pool.close()
    assert pool.compile([variant(1), variant(2)]) == 2
    assert not stored(pool, tmp_path, variant(1))
