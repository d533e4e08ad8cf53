"""Ctrl-C at any line of get_or_compile: no key is dead, nobody hangs, nothing half is on disk.

An interrupt is raised by a trace function at the n-th line, for every n, but where
`tests.interrupted` leaves lines out, and before the interpreter's own call that leaves a `with`
after an exception.
"""

from __future__ import annotations

import dis
import functools
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import ostinato.modules
from ostinato.errors import CompileError
from ostinato.modules import CompileOptions, DiskStore, ModuleCache, Source, headers
from ostinato.modules import compiler as compiler_module
from ostinato.modules.nvrtc import Answer, Nvrtc
from tests.interrupted import left_out
from tests.modules.cubin_loader import make_cache, needs_nvrtc

pytestmark = [
    needs_nvrtc(),
    # A file that was just opened is closed when the exception is dropped, with a warning.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

FOLDER = str(Path(ostinato.modules.__file__).parent)
PATIENCE = 60.0  # only against hangs
TEXT = '#include "a.h"\nextern "C" __global__ void k(COUNT) {}\n'


class Interrupted(KeyboardInterrupt):
    """Ours, and not the user's who runs the tests."""


@functools.cache
def leaves_a_with(code: CodeType, at: int) -> bool:
    """Whether the instruction begins the call of __exit__ after an exception."""
    found = [i for i in dis.get_instructions(code) if i.offset >= at][:2]
    return [i.opname for i in found] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]


def run_until(line: int | None, call: Callable[[], object]) -> list[int]:
    """Interrupts a call at the n-th line of the package's modules, or at none.

    The numbers of the lines that were run, each where it is met first and second: loops need not be
    interrupted in every round.
    """
    count = 0
    met: Counter[tuple[CodeType, int]] = Counter()
    lines: list[int] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER):
            return None
        at = frame.f_lasti
        if event == "line" and at not in left_out(code) and not leaves_a_with(code, at):
            count += 1
            met[code, frame.f_lineno] += 1
            if met[code, frame.f_lineno] <= 2:
                lines.append(count)
            if count == line:
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except (Interrupted, CompileError):
        pass
    finally:
        sys.settrace(before)
    return lines


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[], object] | None]]:
    """The compiler answers from memory; what is put in as "meanwhile" is called as it runs."""
    real, answers = Nvrtc._compile, {}
    meanwhile: dict[str, Callable[[], object] | None] = {"call": None}

    def remembered(
        self: Nvrtc, text: str, name: str, headers: Any, flags: Any, *rest: Any
    ) -> Answer:
        call, meanwhile["call"] = meanwhile["call"], None
        if call is not None:
            call()
        # What it lists, where it is asked for a list; what it reads decides on the answer.
        listing = Path(next(f for f in flags if f.startswith("--error_output=")).partition("=")[2])
        folders = [f.partition("=")[2] for f in flags if f.startswith("--include-path=")]
        on_disk = [h.read_text() for f in folders if (h := Path(f, "a.h")).exists()]
        key = (text, *on_disk, *(f for f in flags if "output=" not in f))
        if key not in answers:
            answer = real(self, text, name, headers, flags, *rest)
            answers[key] = answer, listing.read_bytes()
        answer, content = answers[key]
        listing.write_bytes(content)
        return answer

    monkeypatch.setattr(Nvrtc, "_compile", remembered)
    yield meanwhile


def asked(cache: ModuleCache, source: Source, options: CompileOptions) -> int | str:
    try:
        return len(cache.get_or_compile(source, "k", options=options).info.parameters)
    except CompileError:
        return "does not compile"


@pytest.mark.parametrize(
    "stride",
    [pytest.param(1, marks=pytest.mark.slow, id="each"), pytest.param(11, id="every 11th")],
)
@pytest.mark.parametrize("what", ["compiled", "from disk", "header changed", "fails"])
def test_at_every_line(tmp_path: Path, quick, monkeypatch, what: str, stride: int) -> None:
    monkeypatch.setattr(headers, "_SETTLED_NS", -(10**18))  # else it is compiled twice
    text = "nonsense" if what == "fails" else TEXT
    source, options = Source(text), CompileOptions(include=[tmp_path])
    header = tmp_path / "a.h"
    header.write_text("#define COUNT int a\n")
    right: int | str = "does not compile" if what == "fails" else 1
    lines: list[int | None] = [None]
    for line in lines:  # the first round says which there are
        store = DiskStore(tmp_path / "store")
        cache, _ = make_cache(store)
        if what == "header changed":
            header.write_text("#define COUNT int a\n")
            assert asked(cache, source, options) == 1
            header.write_text("#define COUNT int a, int b\n")
            right = 2
        elif what == "from disk":
            assert asked(make_cache(store)[0], source, options) == 1
        answers: list[int | str] = []
        other = threading.Thread(
            target=lambda c=cache, a=answers: a.append(asked(c, source, options)), daemon=True
        )

        def meanwhile(cache: ModuleCache = cache, other: threading.Thread = other) -> None:
            """Another thread comes to wait for the key that is under way."""
            waits = cache.statistics().waits
            other.start()
            while cache.statistics().waits == waits and other.is_alive():
                other.join(0.0005)

        quick["call"] = meanwhile
        run = run_until(line, lambda c=cache: asked(c, source, options))
        quick["call"] = None
        if other.ident is None:
            other.start()
        other.join(PATIENCE)
        assert answers == [right], f"another thread, after an interrupt at line {line}: {answers}"
        assert asked(cache, source, options) == right
        assert not list(store.folder.glob(".tmp-*"))
        assert all(entry.problem is None for entry in store.entries())
        store.clear()
        cache.close()
        if line is None:
            lines += run[::stride]
    assert len(lines) > 100 // stride, "it was traced"


@pytest.mark.slow
def test_while_headers_are_unpacked(tmp_path: Path, monkeypatch) -> None:
    library = compiler_module.toolchain.library()
    from ostinato.modules.headers import bundled_headers

    folder = tmp_path / "headers"
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    lines = run_until(None, lambda: bundled_headers(library, unpack=True))
    if bundled_headers(library) is None:
        pytest.skip("this NVRTC brings no headers of its own")
    for line in lines[:: len(lines) // 10]:  # each costs up to a second
        shutil.rmtree(folder)
        run_until(line, lambda: bundled_headers(library, unpack=True))
        found = bundled_headers(library)
        assert found is None or not found.damaged()
        assert not list(folder.glob("*.*")), "something half is left"
        folder.mkdir(exist_ok=True)
    found = bundled_headers(library, unpack=True)
    assert found is not None and not found.damaged()
