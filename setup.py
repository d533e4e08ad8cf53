"""Build settings beyond pyproject.toml: optional extension modules, and the README's links.

`src/ostinato/driver/_launch.c` makes replays and launches faster,
`src/ostinato/interop/reading/_recheck.c` calls of graphed functions, and the C files in
`src/ostinato/models/native` decode on a CPU from packed weights (x86-64 and 64-bit Arm).  Without a
C compiler the package installs and works without them (`ostinato doctor` reports that), and its
wheel fits any machine.
The README's links are relative, so that they work in every copy of the repository; for a package
index the project's address is put before them.
"""

import re
import sys
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

LAUNCH = Extension(
    "ostinato.driver._launch",
    ["src/ostinato/driver/_launch.c"],
    optional=True,
    py_limited_api=True,
)
RECHECK = Extension(
    "ostinato.interop.reading._recheck",
    ["src/ostinato/interop/reading/_recheck.c"],
    optional=True,
    py_limited_api=True,
)
NATIVE = Extension(
    "ostinato.models._native",
    [
        "src/ostinato/models/native/module.c",
        "src/ostinato/models/native/pool.c",
        "src/ostinato/models/native/avx512.c",
        "src/ostinato/models/native/avx2.c",
        "src/ostinato/models/native/neon.c",
    ],
    depends=[str(path) for path in sorted(Path("src/ostinato/models/native").glob("*.h"))],
    # The compiler must not fuse products and sums; the code does so explicitly.
    extra_compile_args=[
        "-std=c11",
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    optional=True,
    py_limited_api=True,
)
# The modules use the limited API of CPython with the GIL, which guards the state of a Launcher.
# Free-threaded Pythons use the implementations in Python, which are safe there.
BUILD = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")


class BdistWheel(bdist_wheel):
    """A wheel command that tags wheels without extensions as py3-none-any."""

    def run(self) -> None:
        if self.distribution.ext_modules:
            self.run_command("build_ext")
            built = self.get_finalized_command("build_ext").get_outputs()
            if not any(Path(path).exists() for path in built):
                self.distribution.ext_modules = []
                self.root_is_pure = True
        super().run()


def page() -> str:
    """Returns the README for a package index, with the project's address before relative links.
    Without an address, links become their text, and pictures are left out."""
    here = Path(__file__).parent
    project = tomllib.loads((here / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    text = (here / "README.md").read_text(encoding="utf-8")
    picture, link = (
        r"!(\[[^]]*\])\((?!https?:|#)([^)]*)\)",
        r"(?<!!)\[([^]]*)\]\((?!https?:|#)([^)]*)\)",
    )
    if address is None:
        return re.sub(link, r"\1", re.sub(picture, "", text))
    text = re.sub(picture, rf"!\1({address}/raw/main/\2)", text)
    return re.sub(link, rf"[\1]({address}/blob/main/\2)", text)


setup(
    long_description=page(),
    long_description_content_type="text/markdown",
    ext_modules=[LAUNCH, RECHECK, NATIVE] if BUILD else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if BUILD else {},
    cmdclass={"bdist_wheel": BdistWheel},
)
