"""Builds the wheel and the sdist, checks them, and uses the wheel in an environment of its own.

    python tools/check_dist.py [--demo]

The wheel is built from the sdist.  Installed by itself: `import`, capture, patch and replay work,
the decoder and the command say which extra they lack, and nothing is installed that the graph layer
does not need.  With the `llm` extra added the command works; `--demo` also answers a prompt with
the real model, which is fetched if it is not there (93 MB).  Exit status 0 if all of it is so.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_PACKAGES = 9
"""In the bare environment: our four needs with theirs, and ourselves."""

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


def check_page(wheel: Path) -> None:
    """The page that a package index makes of the README: its links lead out of it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", page)
    relative = [link for link in links if not link.startswith(("https://", "#"))]
    assert links and not relative, relative
    if ".invalid/" in page:
        print("before a release: set the project's address in pyproject.toml, [project.urls]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="answer a prompt with the real model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        # With what `make setup` installed, which it compares with what pyproject.toml asks for.
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT)
        files = sorted((folder / "dist").iterdir())
        (wheel,) = (path for path in files if path.suffix == ".whl")
        run(sys.executable, "-m", "twine", "check", "--strict", *files)
        run(sys.executable, "-m", "check_wheel_contents", wheel)
        check_page(wheel)

        fresh = folder / "fresh"
        venv.create(fresh)
        pip(fresh, "install", "--quiet", str(wheel))
        run(fresh / "bin" / "python", "-c", BARE)
        command = fresh / "bin" / "ostinato"
        said = run(command, "--help", ok=1)
        assert "pip install 'ostinato[llm]'" in said, said
        packages = pip(fresh, "list", "--format=freeze").split()
        assert len(packages) <= MOST_PACKAGES, packages

        pip(fresh, "install", "--quiet", f"{wheel}[llm]")
        assert "Usage: ostinato" in run(command, "--help")
        assert "host" in run(command, "doctor", "--json")
        if options.demo:
            answer = run(command, "generate", "Why is the sky blue?", "--max-tokens=8")
            assert answer.strip(), "the demo said nothing"
        print(f"sound: {', '.join(path.name for path in files)}; bare: {', '.join(packages)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
