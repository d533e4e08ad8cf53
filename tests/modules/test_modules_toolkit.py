"""The compiler's own headers: unpacked once, and whole whenever something is compiled with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import CompileError
from ostinato.modules import CompileOptions, Source
from ostinato.modules import compiler as compiler_module
from ostinato.modules.compiler import compile_plan, is_current, plan_compilation
from ostinato.modules.headers import Toolkit, bundled_headers
from ostinato.modules.nvrtc import Answer, CompilerFile, Nvrtc
from tests.modules.cubin_loader import kernel_text, make_cache, needs_nvrtc

pytestmark = needs_nvrtc()
posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users and modes are POSIX's")

ARCHITECTURE = "--gpu-architecture=sm_90"
USES_THEM = "#include <cuda_fp16.h>\n#include <math_constants.h>\n" + kernel_text(1)


def choose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder / "temporary"))
    (folder / "temporary").mkdir(exist_ok=True)
    return folder / "cache"


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where headers are unpacked to; nothing is there yet."""
    return choose(tmp_path, monkeypatch)


def unpacked(*, unpack: bool = True) -> Toolkit | None:
    return bundled_headers(compiler_module.toolchain.library(), unpack=unpack)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toolkit")


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what the compiler unpacks, the headers that these tests include."""
    whole, few = (tmp_path_factory.mktemp(name) for name in ("whole", "few"))
    library = compiler_module.toolchain.library()
    library.compile("", "unpack.cu", {}, (f"--use-bundled-headers={whole}", ARCHITECTURE))
    shutil.copytree(whole, few, ignore=shutil.ignore_patterns("cccl"), dirs_exist_ok=True)
    if (whole / "cccl").is_dir():  # CUDA 13; thousands of files
        shutil.copytree(whole / "cccl/nv", few / "cccl/nv")
    shutil.rmtree(whole)
    return few


@pytest.fixture
def toolkit(shared: Path, few: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """Headers that are whole, in one folder for all tests, which may damage them.

    They are few: the compiler needs a second and a half for all, each time.
    """
    choose(shared, monkeypatch)
    really = Nvrtc.compile

    def unpacks_few(self: Nvrtc, *program: Any, **options: Any) -> Answer:
        (flag, *_), unpack = program[3], "--use-bundled-headers="
        if not flag.startswith(unpack) or not any(few.iterdir()):
            return really(self, *program, **options)
        shutil.copytree(few, flag.removeprefix(unpack))
        return Answer(0, "")

    monkeypatch.setattr(Nvrtc, "compile", unpacks_few)
    found = unpacked()
    if found is None:
        pytest.skip("this NVRTC brings no headers of its own")
    return found


def compiled(text: str = USES_THEM, **options: object):
    return compile_plan(plan_compilation(Source(text), CompileOptions(**options), (9, 0)))


made_once = cache(compiled)
"""What the headers give while they are whole."""


def test_they_are_unpacked_once(toolkit: Toolkit, shared: Path) -> None:
    header = Path(toolkit.root, "cuda_fp16.h")
    before = header.stat()
    assert header.is_relative_to(shared / "cache")
    assert unpacked() == unpacked(unpack=False) == toolkit and not toolkit.damaged()
    assert header.stat() == before


def test_they_are_unpacked_only_if_they_are_wanted(cache_folder: Path) -> None:
    assert compiled(kernel_text(1)).kind == "cubin"
    assert unpacked(unpack=False) is None and not cache_folder.exists()


def test_they_are_there_for_has_include_too(cache_folder: Path) -> None:
    text = "#if !__has_include(<cuda_fp16.h>)\n#error none\n#endif\n" + kernel_text(1)
    assert compiled(text).kind == "cubin"


def test_they_are_searched_last(cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/math_constants.h").write_text("#define OWN\n")
    text = USES_THEM + "#ifndef OWN\n#error the toolkit's\n#endif\n"
    assert compiled(text, include=[tmp_path / "own"]).kind == "cubin"


def test_code_made_of_them_alone_stays_right(toolkit: Toolkit) -> None:
    inputs = compiled().inputs
    assert inputs.fixed and not inputs.files and not inputs.missing


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda root: os.truncate(root / "cuda_fp16.h", 5000),
    "empty": lambda root: (root / "cuda_fp16.h").write_text(""),
    "zeros": lambda root: (root / "math_constants.h").write_bytes(
        bytes((root / "math_constants.h").stat().st_size)
    ),
    "still compiles": lambda root: (root / "math_constants.h").write_text("#define CHANGED\n"),
    "gone": lambda root: (root / "math_constants.h").unlink(),
    "a folder": lambda root: (
        (root / "math_constants.h").unlink(),
        (root / "math_constants.h").mkdir(),
    ),
    "a fifo": lambda root: ((root / "math_constants.h").unlink(), os.mkfifo(root / "crt/x.fifo")),
    "all gone": shutil.rmtree,
    "a file": lambda root: (shutil.rmtree(root), root.write_text("")),
    "a link": lambda root: (root.rename(root.with_name("moved")), root.symlink_to("moved")),
    "digests torn": lambda root: os.truncate(root / ".digests", 1000),
    "digests empty": lambda root: (root / ".digests").write_text("{}"),
    "digests wrong": lambda root: (root / ".digests").write_text("[1, 2]"),
    "digests others'": lambda root: (root / ".digests").chmod(0o666),
    "digests a folder": lambda root: ((root / ".digests").unlink(), (root / ".digests").mkdir()),
    "digests a fifo": lambda root: ((root / ".digests").unlink(), os.mkfifo(root / ".digests")),
}


@posix
@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_headers_are_noticed_and_replaced(toolkit: Toolkit, what: str) -> None:
    right = made_once()
    DAMAGE[what](Path(toolkit.root))
    assert compiled() == right
    repaired = unpacked(unpack=False)
    assert repaired is not None and not repaired.damaged()
    assert compiled() == right
    assert not [path for path in Path(toolkit.root).parent.iterdir() if ".n" in path.name[40:]]


def test_what_the_process_holds_already_is_not_believed_either(toolkit: Toolkit) -> None:
    text = "#include <cuda_fp16.h>\n#ifdef CHANGED\n#error changed\n#endif\n" + kernel_text(1)
    cache, _ = make_cache()
    assert cache.get_or_compile(text, "k").name == "k"
    with Path(toolkit.root, "cuda_fp16.h").open("a") as header:
        header.write("#define CHANGED\n")
    assert cache.get_or_compile(text + "// another\n", "k").name == "k"


def test_a_header_that_nobody_has_is_still_a_compile_error(toolkit: Toolkit) -> None:
    with pytest.raises(CompileError, match="no_such_header"):
        compiled("#include <no_such_header.h>\n")


def test_they_go_elsewhere_if_the_cache_folder_cannot_be_written(cache_folder: Path) -> None:
    cache_folder.write_text("in the way")
    found = unpacked()
    assert found is None or found.root.startswith(str(cache_folder.with_name("temporary")))


@posix
def test_anothers_folder_is_not_used(toolkit: Toolkit, monkeypatch) -> None:
    me = os.getuid()
    if me == 0:
        os.chown(toolkit.root, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
    try:
        found = unpacked(unpack=False)
        assert found is None or found.root != toolkit.root
    finally:
        if me == 0:
            os.chown(toolkit.root, 0, -1)


# --------------------------------------------------------------------------- compilers without them


class NoHeaders:
    """A compiler that has no headers of its own."""

    file = CompilerFile("/old/libnvrtc.so.12", 1, 1)

    def compile(self, *_: object) -> Answer:
        return Answer(5, "unrecognized option")  # NVRTC_ERROR_INVALID_OPTION


def test_a_compiler_may_have_none(cache_folder: Path) -> None:
    assert bundled_headers(NoHeaders(), unpack=True) is None
    assert not [path for path in cache_folder.rglob("*") if path.is_file()]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The compiler has no headers of its own; the folder of an installed toolkit can be chosen."""
    found: dict[str, str | None] = {"root": None}
    monkeypatch.setattr(compiler_module, "bundled_headers", lambda library, unpack=False: None)
    monkeypatch.setattr(compiler_module, "installed_headers", lambda: found["root"])
    return found


def test_an_installed_toolkits_headers_are_used(installed, tmp_path: Path) -> None:
    for name, text in (("one", "#define P int a"), ("two", "#define P int a, int b")):
        (tmp_path / name / "cccl").mkdir(parents=True)
        (tmp_path / name / "cccl/toolkit.h").write_text(text)
    source = Source('#include <toolkit.h>\nextern "C" __global__ void k(P) {}\n')
    cache, _ = make_cache(tmp_path / "kernels")
    with pytest.raises(CompileError, match=r"toolkit\.h"):
        cache.get_or_compile(source, "k")
    installed["root"] = str(tmp_path / "one")
    kernel = cache.get_or_compile(source, "k")
    assert len(kernel.info.parameters) == 1
    assert cache.get_or_compile(source, "k") is kernel
    assert cache._fast  # within a process an installed toolkit does not change
    installed["root"] = str(tmp_path / "two")  # another is installed, or found
    again, _ = make_cache(tmp_path / "kernels")
    assert len(again.get_or_compile(source, "k").info.parameters) == 2
    (tmp_path / "two/cccl/toolkit.h").write_text("#define P int a, int b, int c")
    last, _ = make_cache(tmp_path / "kernels")
    assert len(last.get_or_compile(source, "k").info.parameters) == 3


def test_headers_of_another_cuda_are_not_used(installed, tmp_path: Path) -> None:
    """NVRTC 12.9 cannot read the cuda_fp8.hpp of 13.0, which was found in /usr/local."""
    major, minor = compiler_module.toolchain.library().version
    (tmp_path / "toolkit.h").write_text("#define P int a")
    source = Source('#include <toolkit.h>\nextern "C" __global__ void k(P) {}\n')
    cache, _ = make_cache(tmp_path / "kernels")
    installed["root"] = str(tmp_path)
    (tmp_path / "cuda.h").write_text(f"#define CUDA_VERSION {(major + 1) * 1000}\n")
    with pytest.raises(CompileError, match=rf"headers of CUDA {major}\.{minor} are not installed"):
        cache.get_or_compile(source, "k")
    (tmp_path / "cuda.h").write_text(f"#define CUDA_VERSION {major * 1000 + 10}\n")
    assert len(cache.get_or_compile(source, "k").info.parameters) == 1


def test_where_it_is_installed_is_cuda_pathfinders_to_say() -> None:
    found = compiler_module.installed_headers()
    assert found is None or Path(found).is_dir()


def test_without_any_toolkit_has_include_is_asked_each_time(installed, tmp_path: Path) -> None:
    text = "#if __has_include(<toolkit.h>)\n#error\n#endif\n" + kernel_text(1)
    answer = compiled(text)
    assert not is_current(answer.inputs)
