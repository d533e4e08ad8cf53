"""A kernel is never older than what it was compiled from: headers, and headers that were not there.

Every test asks twice: the cache that compiled before the change, and a new cache on the same disk
folder (as a new process would).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ostinato.errors import CompileError
from ostinato.models.cuda import lowering
from ostinato.modules import CompileOptions, Source
from ostinato.modules import headers as inputs_module
from ostinato.modules.nvrtc import Answer, Nvrtc
from tests.modules.cubin_loader import make_cache, needs_nvrtc

pytestmark = needs_nvrtc()

KERNEL = '\nextern "C" __global__ void k(COUNT) {}\n'
ONE, TWO = "#define COUNT int a\n", "#define COUNT int a, int b\n"


@dataclass
class Asked:
    """A question asked before and after a change of the files under `folder`."""

    folder: Path
    text: str
    options: CompileOptions
    headers: dict[str, str] = field(default_factory=dict)
    name: str = "kernels.cu"

    def __post_init__(self) -> None:
        self.store = self.folder / "store"
        self.cache, _ = make_cache(self.store)

    def answer(self, cache) -> int | str:
        source = Source(self.text, headers=self.headers, name=self.name)
        try:
            return len(cache.get_or_compile(source, "k", options=self.options).info.parameters)
        except CompileError:
            return "does not compile"

    def before(self) -> int | str:
        return self.answer(self.cache)

    def after(self) -> int | str:
        """From memory and from disk."""
        memory, disk = self.answer(self.cache), self.answer(make_cache(self.store)[0])
        assert memory == disk
        return memory


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Asked]:
    def make(text: str, *folders: str, headers: dict[str, str] | None = None, **options) -> Asked:
        include = [tmp_path / name for name in (folders or ("inc",))]
        text = text.replace("TMP", str(tmp_path))
        options["extra"] = [flag.replace("TMP", str(tmp_path)) for flag in options.get("extra", ())]
        chosen = CompileOptions(include=include, **options)
        return Asked(tmp_path, text + KERNEL, chosen, headers or {})

    return make


# ---------------------------------------------------------------------- a header whose text changes

SPELLINGS = {
    "plain": '#include "a.h"',
    "angle": "#include <a.h>",
    "macro": '#define NAME "a.h"\n#include NAME',
    "absolute": '#include "TMP/inc/a.h"',
    "up and down": '#include "sub/../a.h"',
    "next": "#include <sub/next.h>",
    "from memory": '#include "memory.h"',
    "from a header": '#include "outer.h"',
}
"""The compiler itself lists what it opens: how a line is spelt otherwise decides nothing here."""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_changed_header_is_another_kernel(ask, tmp_path: Path, spelling: str) -> None:
    write(tmp_path / "inc/a.h", ONE)
    write(tmp_path / "inc/sub/any.h", "")
    write(tmp_path / "inc/outer.h", '#define X "a.h"\n#include X\n')
    write(tmp_path / "other/sub/next.h", "#include_next <a.h>\n")
    headers = {"memory.h": "%: include <a.h>\n"} if "memory.h" in SPELLINGS[spelling] else None
    asked = ask(SPELLINGS[spelling], "other", "inc", headers=headers)
    assert asked.before() == 1
    write(tmp_path / "inc/a.h", TWO)
    assert asked.after() == 2


@pytest.mark.parametrize(
    "flags",
    [
        ["-include", "TMP/inc/a.h"],
        ["--pre-include=TMP/inc/a.h"],
        ["--pre-include", "a.h"],
        ["-I", "TMP/inc", "-include=a.h"],
        ["-I TMP/inc", "-include=a.h"],
        ["-ITMP/inc", "-include", "a.h"],
    ],
)
def test_a_changed_pre_include_is_another_kernel(ask, tmp_path: Path, flags: list[str]) -> None:
    write(tmp_path / "inc/a.h", ONE)
    asked = ask("", "inc" if "a.h" in flags else "other", extra=flags)
    assert asked.before() == 1
    write(tmp_path / "inc/a.h", TWO)
    assert asked.after() == 2


def test_a_pre_include_of_the_current_folder(ask, tmp_path: Path, monkeypatch) -> None:
    for name, text in (("one", ONE), ("two", TWO)):
        write(tmp_path / name / "a.h", text)
    asked = ask("", extra=["-include", "a.h"])
    monkeypatch.chdir(tmp_path / "one")
    assert asked.before() == 1
    monkeypatch.chdir(tmp_path / "two")
    assert asked.after() == 2
    write(tmp_path / "two/a.h", ONE)
    assert asked.after() == 1


def test_relative_folders_are_those_of_now(ask, tmp_path: Path, monkeypatch) -> None:
    for name, text in (("one", ONE), ("two", TWO)):
        write(tmp_path / name / "inc/a.h", text)
    asked = ask('#include "a.h"', "none", extra=["-Iinc"])
    monkeypatch.chdir(tmp_path / "one")
    assert asked.before() == 1
    monkeypatch.chdir(tmp_path / "two")
    assert asked.after() == 2


# ------------------------------------------------------------------------ a header that was missing

PROBES = {
    "literal": '#if __has_include("b.h")',
    "angle": "#if __has_include(<b.h>)",
    "macro name": '#define B "b.h"\n#if __has_include(B)',
    "macro call": "#define HAS(x) __has_include(x)\n#if HAS(<b.h>)",
    "alias": "#define HAS __has_include\n#if HAS(<b.h>)",
    "pasted": "#define HAS(x) __has_##x\n#if HAS(include)(<b.h>)",
    "pasted of many": "#define P(a, b) a##b\n#define Q(a, b) P(a, b)\n"
    "#if Q(Q(Q(_, _h), as_), include)(<b.h>)",
    "splice": "#if __has_\\\ninclude(<b\\\n.h>)",
    "comment inside": "#if __has_include/* ( */( /**/ <b.h>)",
    "absolute": '#if __has_include("TMP/inc/b.h")',
    "in an argument": "#define ID(x) x\n#define z b\n#if ID(__has_include(<z.h>))",
    "elif": "#if 0\n#elif defined(__has_include) && __has_include(<b.h>)",
    "renumbered": '#line 7 "x.h"\n#if __has_include("b.h")',
    "renumbered onto another": "#define HAS(x) __has_include(x)\n#if __has_include(<o.h>)\n#endif\n"
    "#line 2\n#if HAS(<b.h>)",
    "from memory": '#include "memory.h"\n#if FOUND',
    "from a header": '#include "sub/asks.h"\n#if FOUND',
    "plain of a header": '#include "sub/asks_plainly.h"\n#if FOUND',
    "no pieces of the word": "#define P(a, b) a##b // of _, __has and __has_##include\n"
    """#define TEXT "_ \\" /*", R"(\n__has" _ ")"\n#define SLASHES '"' //\n"""
    '/* \n __has_include " */\n#if __has_include(<b.h>) // __has_include(<it>)',
}
FOLLOWED = {"literal", "angle", "splice", "comment inside", "absolute", "elif", "renumbered"}
FOLLOWED |= {"plain of a header", "no pieces of the word"}
"""The ways to ask whose answers are known, so that the code is kept on disk."""


@pytest.mark.parametrize("probe", PROBES)
def test_a_header_that_appears_or_goes(ask, tmp_path: Path, probe: str) -> None:
    write(tmp_path / "inc/sub/asks.h", "#define N <b.h>\n#define FOUND __has_include(N)\n")
    plainly = '#if __has_include("../b.h") && !0 // beside it\n#define FOUND 1\n#endif\n'
    write(tmp_path / "inc/sub/asks_plainly.h", plainly)
    text = f"{PROBES[probe]}\n{TWO}#else\n{ONE}#endif\n"
    headers = {"memory.h": "#define FOUND __has_include(<b.h>)\n"} if "memory" in text else None
    asked = ask(text, headers=headers)
    assert asked.before() == 1
    assert len(list(asked.store.glob("*"))) == (probe in FOLLOWED)
    write(tmp_path / "inc/b.h", "")
    assert asked.after() == 2
    (tmp_path / "inc/b.h").unlink()
    assert asked.after() == 1


def test_the_decoders_kernels_are_kept_on_disk(ask) -> None:
    folder = Path(lowering.__file__).parent / "kernels"
    texts = {path.name: path.read_text() for path in folder.glob("*.cu*")}
    assert len(texts) > 20
    asked = ask(ONE, headers=texts)
    assert asked.before() == 1
    assert len(list(asked.store.glob("*"))) == 1


def test_a_header_of_the_name_of_one_in_memory(ask, tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "inc/a.h", ONE)
    monkeypatch.chdir(tmp_path)
    asked = ask('#include "a.h"', "none", extra=["-Iinc"], headers={"inc/a.h": TWO})
    assert asked.before() == 1
    write(tmp_path / "inc/a.h", TWO)
    assert asked.after() == 2


def test_a_header_of_the_name_of_the_source(ask, tmp_path: Path) -> None:
    asked = ask(f'#if __has_include("b.h")\n{TWO}#else\n{ONE}#endif')
    asked.name = "b.h"
    assert asked.before() == 1
    write(tmp_path / "inc/b.h", "")
    assert asked.after() == 2


def test_a_header_that_comes_to_stand_before_another(ask, tmp_path: Path) -> None:
    write(tmp_path / "second/deep/a.h", ONE)
    asked = ask("#define NAME <deep/a.h>\n#include NAME", "first", "second")
    assert asked.before() == 1
    write(tmp_path / "first/deep/a.h", TWO)
    assert asked.after() == 2


def test_spaces_before_folders_in_flags(ask, tmp_path: Path) -> None:
    write(tmp_path / "second/a.h", ONE)
    write(tmp_path / "first/other.h", "")
    asked = ask("#include <a.h>", extra=["-I", " TMP/first", "-I", " TMP/second"])
    assert asked.before() == 1
    write(tmp_path / "first/a.h", TWO)
    assert asked.after() == 2


@pytest.mark.parametrize("flag", ["--include-path= inc", "--pre-include= inc/a.h"])
def test_names_that_begin_with_a_space(ask, tmp_path: Path, monkeypatch, flag: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / " inc/a.h", f"#pragma once\n{ONE}")
    write(tmp_path / "inc/a.h", "not this\n")
    asked = ask("#include <a.h>" if "path" in flag else "", "none", extra=[flag])
    assert asked.before() == 1
    write(tmp_path / " inc/a.h", TWO)
    assert asked.after() == 2


def test_a_header_that_comes_before_one_beside_its_includer(ask, tmp_path: Path) -> None:
    write(tmp_path / "second/out.h", "#include <in.h>\n")  # in angles: not beside it first
    write(tmp_path / "second/in.h", ONE)
    asked = ask('#include "out.h"', "first", "second")
    assert asked.before() == 1
    write(tmp_path / "first/in.h", TWO)
    assert asked.after() == 2


@pytest.mark.parametrize("include", ['"in.h"', '"../sub/in.h"', '"./in.h"'])
def test_a_header_that_comes_to_stand_beside_its_includer(ask, tmp_path: Path, include) -> None:
    write(tmp_path / "inc/sub/out.h", f"#define NAME {include}\n#include NAME\n")
    write(tmp_path / "inc/in.h", ONE)
    write(tmp_path / "sub/in.h", ONE)
    asked = ask('#include "sub/out.h"')
    assert asked.before() == 1
    write(tmp_path / "inc/sub/in.h", TWO)
    assert asked.after() == 2


def test_a_header_that_comes_to_stand_before_the_toolkits(ask, tmp_path: Path) -> None:
    asked = ask(f"#include <cuda_fp16.h>\n#ifdef OWN\n{TWO}#else\n{ONE}#endif\n")
    assert asked.before() == 1
    write(tmp_path / "inc/cuda_fp16.h", "#define OWN\n")
    assert asked.after() == 2


def test_a_link_that_points_elsewhere(ask, tmp_path: Path) -> None:
    for name, text in (("one", ONE), ("two", TWO)):
        write(tmp_path / name / "a.h", text)
    (tmp_path / "inc").symlink_to("one")
    asked = ask('#include "a.h"')
    assert asked.before() == 1
    (tmp_path / "inc").unlink()
    (tmp_path / "inc").symlink_to("two")
    assert asked.after() == 2


# ----------------------------------------------------------------- changes while the compiler runs


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until what was written counts as written long ago."""
    grain = 0.05
    monkeypatch.setattr(inputs_module, "_SETTLED_NS", int(grain * 1e9))
    return lambda: time.sleep(2 * grain)


def during_the_next_run(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> list[int]:
    """Calls `change` when the compiler has read everything; counts its runs."""
    real = Nvrtc._compile
    runs: list[int] = []

    def run(*arguments: object) -> Answer:
        answer = real(*arguments)
        runs.append(1)
        if len(runs) == 1:
            change()
        return answer

    monkeypatch.setattr(Nvrtc, "_compile", run)
    return runs


def replaced(path: Path, text: str) -> None:
    """By another file of the same size and modification time."""
    other = path.with_name("other")
    other.write_text(text.ljust(path.stat().st_size))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda inc: (inc / "a.h").write_text(TWO),
    "replaced": lambda inc: replaced(inc / "a.h", TWO),
    "before it": lambda inc: write(inc / "first/a.h", TWO),
    "probed": lambda inc: write(inc / "b.h", ""),
}


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_under_the_compiler(
    ask, tmp_path: Path, monkeypatch, settled, change: str, slow: bool
) -> None:
    write(tmp_path / "inc/a.h", f"{ONE.strip()}     ")
    write(tmp_path / "inc/first/any.h", "")
    asked = ask(
        f"#include <a.h>\n#if __has_include(<b.h>)\n#undef COUNT\n{TWO}#endif", "inc/first", "inc"
    )
    if slow:
        settled()
    with monkeypatch.context() as patch:
        runs = during_the_next_run(patch, lambda: CHANGES[change](tmp_path / "inc"))
        assert asked.before() == 2
    assert len(runs) > 1
    assert asked.after() == 2


def test_a_settled_header_is_compiled_once_and_looked_at_by_its_stamp(
    ask, tmp_path: Path, monkeypatch, settled
) -> None:
    write(tmp_path / "inc/a.h", ONE)
    asked = ask("#include <a.h>")
    settled()
    runs = during_the_next_run(monkeypatch, lambda: None)
    assert asked.before() == asked.before() == 1
    assert len(runs) == 1
    monkeypatch.setattr(inputs_module, "_content_digest", lambda data: b"never read")
    assert asked.before() == asked.answer(make_cache(asked.store)[0]) == 1
    assert len(runs) == 1
    monkeypatch.undo()
    settled()
    replaced(tmp_path / "inc/a.h", TWO)
    assert asked.after() == 2


def test_a_header_that_never_stays_is_not_kept(ask, tmp_path: Path, monkeypatch, caplog) -> None:
    write(tmp_path / "inc/a.h", ONE)
    asked = ask("#include <a.h>")
    real, count = Nvrtc._compile, itertools.count()

    def run(*arguments: object) -> Answer:
        write(tmp_path / "inc/a.h", f"{ONE}// {next(count)}\n")
        return real(*arguments)

    monkeypatch.setattr(Nvrtc, "_compile", run)
    assert asked.before() == 1
    assert "change all the time" in caplog.text and not list(asked.store.glob("*"))


# ----------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("text", ['#include "a.h"', '#include "TMP/inc/a.h"', "#include A"])
def test_a_missing_or_wrong_header_that_is_mended(ask, tmp_path: Path, text: str) -> None:
    asked = ask('#define A "a.h"\n' + text)
    assert asked.before() == "does not compile"
    write(tmp_path / "inc/a.h", "#error not yet\n")
    assert asked.after() == "does not compile"
    write(tmp_path / "inc/a.h", TWO)
    assert asked.after() == 2


def test_a_wrong_file_of_flags_that_is_mended(ask, tmp_path: Path) -> None:
    asked = ask(ONE, extra=["-Xptxas=--options-file=TMP/o"])
    write(tmp_path / "o", "--no-such-flag")
    assert asked.before() == "does not compile"
    write(tmp_path / "o", "--verbose")
    assert asked.after() == 1
