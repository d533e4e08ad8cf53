"""Which compiler it is: told from its file, checked when it is loaded, never mistaken."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ostinato.errors import CompileError, NoCudaError
from ostinato.modules import CompileOptions, DiskStore, Source, ahead
from ostinato.modules import compiler as compiler_module
from ostinato.modules import nvrtc as nvrtc_module
from ostinato.modules.compiler import compile_plan, confirmed, plan_compilation
from ostinato.modules.nvrtc import CompilerFile, Opened, Toolchain, expected_file, locate
from tests.modules.cubin_loader import kernel_text, make_cache, needs_nvrtc
from tests.processes import printed

nvrtc = needs_nvrtc()
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files as on Linux")
TEXT = kernel_text(1)


def never() -> str:
    raise AssertionError("the compiler was loaded")


def key() -> bytes:
    return plan_compilation(Source(TEXT), CompileOptions(), (9, 0)).key


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Toolchain], Toolchain]:
    """Makes a toolchain that of the process, as a process of its own would have it."""

    def put(toolchain: Toolchain) -> Toolchain:
        monkeypatch.setattr(compiler_module, "toolchain", toolchain)
        return toolchain

    return put


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file that looks like a compiler from outside."""
    path = tmp_path / "other" / "libnvrtc.so.13"
    path.parent.mkdir()
    path.write_bytes(b"not really")
    return path


# -------------------------------------------------------------------------------- keys from a file


def test_a_key_needs_no_compiler_but_its_file(use, other: Path) -> None:
    use(Toolchain(never, lambda: CompilerFile.of(str(other))))
    assert key() == key()
    assert str(other) in compiler_module.toolchain.file().identity


def test_another_file_is_another_key(use, other: Path) -> None:
    def key_now() -> bytes:
        use(Toolchain(never, lambda: CompilerFile.of(str(other))))
        return key()

    keys = [key_now()]
    status = other.stat()
    other.write_bytes(b"not really, but longer")  # another size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    keys.append(key_now())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # another time
    keys.append(key_now())
    other.rename(other.with_name("libnvrtc.so.13.9"))  # another name, found through a link
    other.symlink_to("libnvrtc.so.13.9")
    keys.append(key_now())
    assert len(set(keys)) == 4


def test_a_file_is_looked_at_once_a_process(use, other: Path) -> None:
    toolchain = use(Toolchain(never, lambda: CompilerFile.of(str(other))))
    before = toolchain.file()
    other.write_bytes(b"changed")
    assert toolchain.file() is before


@nvrtc
def test_an_unknown_file_is_told_by_the_loaded_library(use) -> None:
    toolchain = use(Toolchain(locate, lambda: None))
    assert toolchain.file() == toolchain.library().file
    assert toolchain.file().nbytes > 1_000_000


# ---------------------------------------------------------------------------- what is really loaded

IN_A_FRESH_PROCESS = """
import sys
before = set(sys.modules)  # cuda-bindings 12.9 puts itself there at startup
from pathlib import Path
from tests.modules.cubin_loader import kernel_text, make_cache
from ostinato.modules.compiler import toolchain

cache, _ = make_cache(Path(sys.argv[1]))
expected = toolchain.file()
cache.get_or_compile(kernel_text(1), "k")
mapped = "libnvrtc" in Path("/proc/self/maps").read_text()
imported = any(name.split(".")[0] == "cuda" for name in set(sys.modules) - before)
print(cache.statistics().compiles, mapped, toolchain.loaded is not None, imported)
assert expected == toolchain.library().file, (expected, toolchain.library().file)
from cuda.pathfinder import load_nvidia_dynamic_lib
assert Path(load_nvidia_dynamic_lib("nvrtc").abs_path).samefile(expected.path)
"""


@nvrtc
@linux
def test_a_disk_hit_loads_no_compiler(tmp_path: Path) -> None:
    for said in ("1 True True True", "0 False False False"):
        cache = str(tmp_path / "cache")
        out = printed("-c", IN_A_FRESH_PROCESS, str(tmp_path), OSTINATO_CACHE_DIR=cache)
        assert out.strip() == said


LOADED_ALREADY = """
import ctypes, sys
from ostinato.modules.compiler import toolchain
from ostinato.modules.nvrtc import expected_file

kept = ctypes.CDLL(sys.argv[1])
assert toolchain.library().file.path == sys.argv[1], toolchain.library()
print(toolchain.file() == toolchain.library().file, expected_file())
"""


@nvrtc
@linux
def test_what_the_process_has_loaded_already_is_used(tmp_path: Path) -> None:
    real = Path(compiler_module.toolchain.library().file.path)
    copy = tmp_path / real.name
    try:
        os.link(real, copy)
    except OSError:
        pytest.skip("no hard links from the compiler's file system")
    cache = str(tmp_path / "cache")
    out = printed("-c", LOADED_ALREADY, str(copy), OSTINATO_CACHE_DIR=cache)
    assert out == "True None\n"


@nvrtc
def test_a_wrong_expectation_is_noticed(use, other: Path, tmp_path: Path) -> None:
    wrong = CompilerFile.of(str(other))
    store = DiskStore(tmp_path / "kernels")

    def ask(find: Callable[[], CompilerFile | None]) -> tuple[int, Toolchain, bytes]:
        toolchain = use(Toolchain(locate, find))
        before = key()
        cache, loader = make_cache(store.folder)
        kernel = cache.get_or_compile(TEXT, "k")
        assert len(kernel.info.parameters) == 2 and loader.loads == 1
        assert cache.get_or_compile(TEXT, "k") is kernel
        return cache.statistics().compiles, toolchain, before

    compiles, toolchain, wrong_key = ask(lambda: wrong)
    assert compiles == 1
    assert toolchain.file() != wrong  # it knows better now
    true_key = key()
    assert true_key != wrong_key
    # Written under the name of the compiler that made it, and under no other.
    assert store.load(true_key) is not None and store.load(wrong_key) is None
    assert len(store.entries()) == 1
    # Others that expect the wrong one load the compiler, and then find it.
    compiles, toolchain, _ = ask(lambda: wrong)
    assert compiles == 0 and toolchain.loaded is not None
    # Those that expect the right one do not even load it.
    use(Toolchain(never, lambda: CompilerFile.of(toolchain.file().path)))
    assert key() == true_key


@nvrtc
def test_a_plan_for_another_compiler_is_made_again(use, other: Path) -> None:
    use(Toolchain(locate, lambda: CompilerFile.of(str(other))))
    plan = plan_compilation(Source(TEXT), CompileOptions(), (9, 0))
    again = confirmed(plan)
    assert again.key != plan.key and again.compiler != plan.compiler
    assert confirmed(again) is again
    assert compile_plan(plan) == compile_plan(again)


@nvrtc
def test_a_worker_keeps_code_under_the_compiler_that_made_it(
    use, other: Path, tmp_path: Path
) -> None:
    use(Toolchain(locate, lambda: CompilerFile.of(str(other))))
    wrong_key = key()
    job = tmp_path / "job"
    job.write_text(ahead._job((9, 0), [(Source(TEXT), CompileOptions())]))
    store = DiskStore(tmp_path / "kernels")
    ahead._work(str(store.folder), str(job))
    true_key = key()
    assert true_key != wrong_key
    assert store.load(true_key) is not None and store.load(wrong_key) is None


@nvrtc
def test_many_threads_load_it_once() -> None:
    calls: list[int] = []

    def counted() -> str | None:
        calls.append(1)
        return locate()

    toolchain = Toolchain(counted)
    with ThreadPoolExecutor(8) as pool:
        libraries = {id(f.result()) for f in [pool.submit(toolchain.library) for _ in range(32)]}
    assert len(libraries) == len(calls) == 1


@nvrtc
@linux
def test_a_file_replaced_under_a_loaded_compiler_is_like_no_other(other: Path) -> None:
    path = str(other)
    before = CompilerFile.of(path)
    assert nvrtc_module._loaded_file(path, before) == before
    other.write_bytes(b"an upgrade")
    after = nvrtc_module._loaded_file(path, before)
    assert after.identity not in (before.identity, CompilerFile.of(path).identity)
    other.unlink()
    gone = nvrtc_module._loaded_file(path, before)
    assert gone != nvrtc_module._loaded_file(path, before)


@linux
def test_a_removed_library_that_is_still_mapped_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "libnvrtc.so.13"
    shutil.copy(np.random.bit_generator.__file__, copy)
    ctypes.CDLL(str(copy))
    assert nvrtc_module._loaded_file(str(copy), None) == CompilerFile.of(str(copy))
    copy.unlink()
    copy.write_bytes(b"an upgrade")
    assert nvrtc_module._loaded_file(str(copy), None).note


# ----------------------------------------------------------------------- where it was found before


@pytest.fixture
def around(other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of folders, in which pathfinder has found `other`; the folder of them."""
    for name in ("site", "conda/lib", "toolkit/lib64", "folder"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(nvrtc_module.site, "getsitepackages", lambda: [str(tmp_path / "site")])
    monkeypatch.setattr(nvrtc_module.site, "ENABLE_USER_SITE", False)
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path / 'folder'}")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert expected_file() is None
    finds(monkeypatch, other)
    assert locate() == str(other)
    assert expected_file() == CompilerFile.of(str(other))
    return tmp_path


def finds(monkeypatch: pytest.MonkeyPatch, path: Path, *, already: bool = False) -> None:
    """Pathfinder finds a file from here on."""
    found = SimpleNamespace(abs_path=str(path), was_already_loaded_from_elsewhere=already)
    module = SimpleNamespace(load_nvidia_dynamic_lib=lambda name: found)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "a package": lambda around, _: (around / "site" / "nvidia").mkdir(),
    "a library of conda": lambda around, _: (around / "conda" / "lib" / "a.so").touch(),
    "a library in a folder": lambda around, _: (around / "folder" / "libnvrtc.so.13").touch(),
    "a toolkit": lambda around, _: (around / "toolkit" / "lib64" / "a.so").touch(),
    "no toolkit": lambda around, _: (around / "toolkit" / "lib64").rmdir(),
    "other folders": lambda _, patch: patch.setenv("LD_LIBRARY_PATH", "/elsewhere"),
    "no conda": lambda _, patch: patch.delenv("CONDA_PREFIX"),
    "another Python": lambda _, patch: patch.setattr(
        nvrtc_module.site, "getsitepackages", lambda: ["/usr/lib/python3/dist-packages"]
    ),
    "the file is gone": lambda around, _: (around / "other" / "libnvrtc.so.13").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_counts_while_what_pathfinder_searched_is_the_same(
    around: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    os.utime(around / "site", (1, 1))  # so that no change can have the same time
    for name in ("conda/lib", "folder", "toolkit/lib64"):
        os.utime(around / name, (1, 1))
    assert expected_file() is None
    locate()
    assert expected_file() is not None
    CHANGES[change](around, monkeypatch)
    assert expected_file() is None


def test_a_file_that_was_replaced_is_expected_as_it_is_now(around: Path, other: Path) -> None:
    before = expected_file()
    other.write_bytes(b"an upgrade")
    assert expected_file() == CompilerFile.of(str(other)) != before


def test_what_another_library_loaded_is_not_remembered(
    around: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(monkeypatch, around / "site", already=True)
    assert locate() == str(around / "site")
    assert expected_file() == CompilerFile.of(str(other))


def memory(around: Path) -> Path:
    (path,) = (around / "cache" / "compilers").iterdir()
    return path


DAMAGE: dict[str, Callable[[Path], object]] = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "another list": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text("[" * 60_000),
    "no text": lambda path: path.write_bytes(b"\xff" * 100),
    "huge": lambda path: path.write_bytes(b" " * (1 << 22) + path.read_bytes()),
    "a zero in the path": lambda path: path.write_text(
        path.read_text().replace("libnvrtc", "\\u0000")
    ),
    "others may write to it": lambda path: path.chmod(0o666),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@linux
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_memory_that_cannot_be_believed_is_no_answer(around: Path, damage: str) -> None:
    DAMAGE[damage](memory(around))
    assert expected_file() is None


def test_without_a_folder_nothing_is_remembered(
    around: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (around / "file").touch()
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(around / "file"))
    assert locate() == str(other)
    assert expected_file() is None


# ------------------------------------------------------------------------------- without a compiler


@pytest.mark.parametrize("found", ["no file", "no library", "no compiler"])
def test_without_a_compiler_the_error_says_how_to_install_it(found, tmp_path, other) -> None:
    answers = {
        "no file": str(tmp_path / "libnvrtc.so.13"),
        "no library": str(other),
        "no compiler": ctypes.util.find_library("m"),
    }
    toolchain = Toolchain(lambda: answers[found], lambda: None)
    for ask in (toolchain.file, toolchain.library):
        with pytest.raises(NoCudaError, match="pip install"):
            ask()


def test_pathfinders_own_words_are_kept() -> None:
    def fail() -> str:
        raise RuntimeError("looked everywhere")

    with pytest.raises(NoCudaError, match="looked everywhere"):
        Toolchain(fail, lambda: None).library()


def test_without_pathfinder_the_error_says_so(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(NoCudaError, match=r"cuda\.pathfinder.*pip install"):
        Toolchain().library()


# ------------------------------------------------------------------------- what the compiler opened


def listed(*lines: str) -> bytes:
    return "\n".join(("__nv_nvrtc_builtin_header.h", *lines, "__nv_name_map", "")).encode()


def test_a_listing_says_who_includes_what() -> None:
    listing = listed(
        "/a.h", " /b.h", " /c.h", "  /b.h", "m.h", " /proc/ostinato-memory/0", "  /d.h"
    )
    found = nvrtc_module._opened(listing, {"m.h": ""}, whole=True)
    assert found == (
        Opened("/a.h", None),
        Opened("/b.h", "/a.h"),
        Opened("/c.h", "/a.h"),
        Opened("/b.h", "/c.h"),
        Opened("/d.h", None),
    )


def test_what_is_no_listing_is_none() -> None:
    assert nvrtc_module._opened(b"", {}, whole=False) is None
    assert nvrtc_module._opened(b"error: 1\n", {}, whole=False) is None
    assert nvrtc_module._opened(listed(), {}, whole=True) == ()


def test_a_listing_that_a_full_disk_cut_is_none() -> None:
    listing = listed("/a.h", " /b.h")
    for size in range(len(listing)):
        assert nvrtc_module._opened(listing[:size], {}, whole=True) is None
    assert nvrtc_module._opened(listing, {}, whole=True) is not None


@nvrtc
def test_a_compiler_that_lists_nothing_still_compiles(monkeypatch, caplog) -> None:
    # As one would do that does not know the flags any more.
    real = nvrtc_module.Nvrtc._compile

    def older(self, text, name, headers, flags, *rest):
        known = tuple(flag.replace("-Xcudafe", "--no-such-flag") for flag in flags)
        return real(self, text, name, headers, known, *rest)

    monkeypatch.setattr(nvrtc_module.Nvrtc, "_compile", older)
    cache, loader = make_cache()
    for loads in (1, 2):  # nobody can tell whether a header has changed meanwhile
        assert cache.get_or_compile(TEXT, "k").name == "k"
        assert loader.loads == loads
    assert caplog.text.count("does not tell which headers it reads") == 1


@nvrtc
def test_without_a_folder_for_the_listing_it_still_compiles(monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    answer = compile_plan(plan_compilation(Source(TEXT), CompileOptions(), (9, 0)))
    assert answer.kind == "cubin" and answer.inputs.unknown


@nvrtc
def test_flags_that_are_wrong_are_still_said() -> None:
    with pytest.raises(CompileError, match="no-such-flag"):
        compile_plan(
            plan_compilation(Source(TEXT), CompileOptions(extra=["--no-such-flag"]), (9, 0))
        )
