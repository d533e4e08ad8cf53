"""The compiled kernels: every instruction set gives the bits written down here, as the extension
was built, and built without Python for this processor and for others, as far as compilers and
emulators are installed.

`native_check.c` prints a digest of all results, which is the same for all sets.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ostinato
from ostinato.models.host import packed_kernels as kernels_packed

NATIVE = Path(ostinato.__file__).parent / "models" / "native"
CHECK = Path(__file__).parent / "native_check.c"
EXPECTED = "5e99b1e39bf1d6f0"

COMPILER = shutil.which("cc")
ARM_COMPILER = shutil.which("aarch64-linux-gnu-gcc")
X86_EMULATOR = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
ARM_EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def build(compiler: str, out: Path) -> Path:
    sources = [NATIVE / f"{name}.c" for name in ("avx512", "avx2", "neon")]
    flags = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-static"]
    subprocess.run(
        [compiler, *flags, f"-I{NATIVE}", *sources, CHECK, "-lm", "-o", out],
        check=True,
    )
    return out


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("there is no C compiler here")
    return build(COMPILER, tmp_path_factory.mktemp("native") / "check")


def digests(*command: str | Path) -> dict[str, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return dict(line.split() for line in done.stdout.splitlines())


def assert_right(found: dict[str, str]) -> None:
    assert set(found.values()) <= {EXPECTED}
    if kernels_packed.compiled():
        assert tuple(found) == kernels_packed._extension.INSTRUCTIONS


IN_THE_EXTENSION = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
ctypes.CDLL(sys.argv[2]).main()
"""


@pytest.mark.skipif(
    COMPILER is None or not kernels_packed.compiled() or sys.platform != "linux",
    reason="needs a C compiler, the extension, and Linux's way to share symbols",
)
def test_every_set_of_the_extension_gives_the_same_bits(tmp_path: Path) -> None:
    check = tmp_path / "check.so"
    subprocess.run(
        [COMPILER, "-std=c11", "-shared", "-fPIC", f"-I{NATIVE}", CHECK, "-o", check], check=True
    )
    extension = kernels_packed._extension.__file__
    assert_right(digests(sys.executable, "-c", IN_THE_EXTENSION, extension, check))


@pytest.mark.slow
def test_every_set_of_this_processor_gives_the_same_bits(program: Path) -> None:
    assert_right(digests(program))


@pytest.mark.slow
@pytest.mark.skipif(X86_EMULATOR is None, reason="needs qemu-user")
@pytest.mark.parametrize(("processor", "found"), [("Haswell", {"avx2": EXPECTED}), ("Nehalem", {})])
def test_older_x86_processors(program: Path, processor: str, found: dict[str, str]) -> None:
    assert X86_EMULATOR is not None
    assert digests(X86_EMULATOR, "-cpu", processor, program) == found


@pytest.mark.slow
@pytest.mark.skipif(
    ARM_COMPILER is None or ARM_EMULATOR is None, reason="needs an Arm compiler and qemu-user"
)
def test_arm(tmp_path: Path) -> None:
    assert ARM_COMPILER is not None and ARM_EMULATOR is not None
    found = digests(ARM_EMULATOR, build(ARM_COMPILER, tmp_path / "check"))
    assert found == {"neon": EXPECTED}
