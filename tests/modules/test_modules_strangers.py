"""Whatever lies in the store's folder: listing, lookup and clearing end, and answer rightly."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from typer.testing import CliRunner

from ostinato.cli.cache import app
from ostinato.modules import DiskStore
from ostinato.modules.compiler import Compiled
from ostinato.modules.disk import _encode

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="files as on Unix")

T = TypeVar("T")
SOUND, CODE = b"s" * 32, Compiled("ptx", b"code" * 50)
PATIENCE = 120.0  # only against hangs


def in_time(call: Callable[[], T]) -> T:
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert answers, "it hangs, or has failed"
    return answers[0]


def bind(path: Path) -> None:
    """A socket, whose names are short: bound from its folder."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
        Path("s").rename(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path, nbytes: int) -> None:
    path.touch()
    os.truncate(path, nbytes)


def long_ago(path: Path, seconds: float) -> None:
    path.write_bytes(_encode(bytes.fromhex(path.name[:64]), CODE, "a.cu", "sm_90"))
    os.utime(path, (seconds, seconds))


# Each makes something at a path; what it is called in the listing's "problem".
STRANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "not a regular file"),
    "socket": (bind, "not a regular file"),
    "folder": (Path.mkdir, "not a regular file"),
    "filled folder": (lambda p: (p.mkdir(), (p / "x").write_text("kept")), "not a regular file"),
    "device link": (lambda p: p.symlink_to("/dev/zero"), "not a regular file"),
    "loop": (lambda p: p.symlink_to(p.name), "not a regular file"),
    "dangling": (lambda p: p.symlink_to("nowhere"), "not a regular file"),
    "link": (lambda p: p.symlink_to(p.parent / "precious"), "not a regular file"),
    "empty": (Path.touch, "torn"),
    "huge": (lambda p: sparse(p, 1 << 40), "it has 1099511627776 bytes"),
    "others may write": (lambda p: (p.touch(), p.chmod(0o666)), "other users may write"),
}
if hasattr(os, "getuid") and os.getuid() == 0:
    STRANGERS |= {
        "another's": (lambda p: (p.touch(), os.chown(p, 12345, -1)), "another user"),
    }
else:
    STRANGERS |= {"unreadable": (lambda p: (p.touch(), p.chmod(0)), "Permission denied")}
ODD_NAMES = [b"\xff\xfe.kernel", b"[red]x.kernel", b"\x1b[2J.kernel", b"a\nb.kernel", b".kernel"]


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    made = DiskStore(tmp_path / "kernels")
    assert made.save(SOUND, CODE, name="sound.cu", arch="sm_90")
    (made.folder / "precious").write_text("precious")
    return made


def key_of(number: int) -> bytes:
    return bytes([number + 1]) * 32


def fill(store: DiskStore) -> dict[str, str]:
    """All strangers, under keys and under other names; the problem of each key."""
    problems = {}
    for number, (make, problem) in enumerate(STRANGERS.values()):
        make(store.path(key_of(number)))
        problems[key_of(number).hex()] = problem
    for raw in ODD_NAMES:
        Path(os.fsdecode(os.fsencode(store.folder) + b"/" + raw)).write_bytes(b"junk")
    return problems


def test_they_are_listed_with_what_is_wrong(store: DiskStore) -> None:
    problems = fill(store)
    entries = in_time(store.entries)
    assert len(entries) == 1 + len(problems) + len(ODD_NAMES)
    by_key = {entry.key: entry for entry in entries}
    assert by_key[SOUND.hex()].problem is None and by_key[SOUND.hex()].name == "sound.cu"
    for key, problem in problems.items():
        assert problem in (by_key[key].problem or "")
    nameless = [entry for entry in entries if not entry.key]
    assert len(nameless) == len(ODD_NAMES)
    assert all(
        (e.problem or "").isprintable() and "not a key" in (e.problem or "") for e in nameless
    )


def test_the_command_lists_them(store: DiskStore) -> None:
    problems = fill(store)
    words = ["list", "--folder", str(store.folder)]
    text = in_time(lambda: CliRunner().invoke(app, words))
    assert text.exit_code == 0 and "sound.cu" in text.output and "\x1b[2J" not in text.output
    found = in_time(lambda: CliRunner().invoke(app, [*words, "--json"]))
    rows = json.loads(found.output)["kernels"]
    assert len(rows) == 1 + len(problems) + len(ODD_NAMES)


@pytest.mark.parametrize("when", [-1e9, 0.0, 2.0**33, 2.0**34 - 1])
def test_times_of_another_age_are_listed(store: DiskStore, when: float) -> None:
    long_ago(store.path(OLD := b"o" * 32), when)
    words = ["list", "--folder", str(store.folder), "--json"]
    found = in_time(lambda: CliRunner().invoke(app, words))
    assert found.exit_code == 0 and OLD.hex() in found.output
    assert "a.cu" in in_time(lambda: CliRunner().invoke(app, words[:-1])).output


def test_a_lookup_ends_and_the_place_can_be_used_again(store: DiskStore, caplog) -> None:
    problems = fill(store)
    for number, (key, problem) in enumerate(problems.items()):
        caplog.clear()
        assert in_time(lambda n=number: store.load(key_of(n)) is None), problem
        assert key in caplog.text and problem in caplog.text and "compiling again" in caplog.text
        assert store.statistics().rejected == number + 1
    for number, name in enumerate(STRANGERS):  # not before: what is saved prunes
        assert store.save(key_of(number), CODE) == (name != "filled folder"), name
        assert store.load(key_of(number)) == (CODE if name != "filled folder" else None), name
    assert "a folder has its name; remove it" in caplog.text
    assert (store.folder / "precious").read_text() == "precious"
    assert (store.path(key_of(list(STRANGERS).index("filled folder"))) / "x").exists()
    assert store.statistics().off is None


def test_clearing_removes_them_and_follows_nothing(store: DiskStore) -> None:
    problems = fill(store)
    removed = in_time(store.clear)
    assert removed == len(problems)  # with the sound one, without the filled folder
    left = {os.fsencode(path.name) for path in store.folder.iterdir()}
    filled = store.path(key_of(list(STRANGERS).index("filled folder"))).name
    assert left == {b"precious", filled.encode(), *ODD_NAMES}  # others' names are others' files
    assert (store.folder / filled / "x").read_text() == "kept"


def test_pruning_prefers_what_is_of_no_use(store: DiskStore) -> None:
    fill(store)
    os.utime(store.path(SOUND), (1, 1))  # the oldest of all
    in_time(store.prune)
    assert store.load(SOUND) == CODE


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for name, make in {
        "file": Path.touch,
        "fifo": os.mkfifo,
        "loop": lambda p: p.symlink_to(p.name),
        "device": lambda p: p.symlink_to("/dev/zero"),
    }.items():
        make(tmp_path / name)
        store = DiskStore(tmp_path / name)
        assert in_time(lambda s=store: (s.entries(), s.prune(), s.clear(), s.load(SOUND))) == (
            *((), 0, 0),
            None,
        )
        assert not in_time(lambda s=store: s.save(SOUND, CODE))
