"""What pyproject.toml cannot say: one extension module, that may be missing.

`src/ostinato/driver/_launch.c` makes replays and launches cheaper.  Without a C compiler the
package installs and works without it (`ostinato doctor` says so), and its wheel is one for any
machine.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

LAUNCH = Extension(
    "ostinato.driver._launch",
    ["src/ostinato/driver/_launch.c"],
    optional=True,
    py_limited_api=True,
)
# The limited API that it keeps to is that of CPython with the GIL.
BUILD = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")


class BdistWheel(bdist_wheel):
    """A wheel without the extension carries a name that says so: py3-none-any."""

    def run(self) -> None:
        if self.distribution.ext_modules:
            self.run_command("build_ext")
            built = self.get_finalized_command("build_ext").get_outputs()
            if not any(Path(path).exists() for path in built):
                self.distribution.ext_modules = []
                self.root_is_pure = True
        super().run()


setup(
    ext_modules=[LAUNCH] if BUILD else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if BUILD else {},
    cmdclass={"bdist_wheel": BdistWheel},
)
