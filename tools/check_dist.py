"""Builds the wheel and the sdist, checks them, and plays a new user's first hour with the wheel.

    python -m tools.check_dist [--demo]

The wheel is built from the sdist, and the README in it is checked as a package index shows it;
`tools.first_hour` installs and uses the wheel.  `--demo`: with the real model, which is fetched if
it is missing, instead of a small random one.  The exit status is 0 if all checks pass.
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
    """Builds an sdist, and a wheel from it, with the build tools of this environment."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check(files: Sequence[Path]) -> None:
    """Checks an sdist and wheels without installing them."""
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    for wheel in (file for file in files if file.suffix == ".whl"):
        run(sys.executable, "-m", "check_wheel_contents", wheel)
        check_page(wheel)


def check_page(wheel: Path) -> None:
    """Checks that the README in a wheel has no relative links, which fail on a package index."""
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
