"""Builds the wheel and the sdist, checks them, and plays a new user's first hour with the wheel.

    python -m tools.check_dist [--demo]

The wheel is built from the sdist, and its page for a package index is looked at; `tools.first_hour`
installs and uses it.  `--demo` does so with the real model, which is fetched if it is not there;
else it is a small random one.  Exit status 0 if all of it is so.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.first_hour import ROOT, run, use

__all__ = ["ROOT", "build", "check", "run", "use"]


def build(folder: Path) -> tuple[Path, Path]:
    """An sdist, and a wheel that is built from it, with what this environment has installed."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check(files: Sequence[Path]) -> None:
    """What can be said of an sdist and wheels without installing them."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for wheel in (file for file in files if file.suffix == ".whl"):
        run(sys.executable, "-m", "check_wheel_contents", wheel)
        check_page(wheel)


def check_page(wheel: Path) -> None:
    """The page that a package index makes of the README: its links lead out of it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = archive.read(name).decode()
    relative = re.findall(r"\]\((?!https://|#)([^)]+)\)", page)
    assert "ostinato captures" in page and not relative, relative


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="with the real model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = build(Path(folder))
        check(files)
        use(files[1], demo=options.demo)
        print(f"sound: {', '.join(path.name for path in files)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
