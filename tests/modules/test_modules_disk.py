"""Kernels on disk: whatever the folder holds, the right kernel or a recompile (C6)."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import files
from ostinato.errors import Status, driver_error
from ostinato.files import UntrustedError
from ostinato.modules import DiskStore
from ostinato.modules import disk as disk_module
from ostinato.modules.compiler import Compiled
from tests.modules.cubin_loader import kernel_text, make_cache, needs_nvrtc
from tests.modules.disk_worker import source
from tests.processes import child_environment

nvrtc = needs_nvrtc()
posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users and modes are POSIX's")
ROOT = Path(__file__).resolve().parents[2]

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
CODE = Compiled("cubin", b"code" * 50, log="a warning", lowered={"t<int>": "_Z1tIiEvv"})


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kernels")


def saved(store: DiskStore) -> Path:
    assert store.save(KEY, CODE, name="a.cu", arch="sm_90")
    return store.path(KEY)


# ------------------------------------------------------------------------------------------- whole


def test_what_is_saved_is_loaded(store: DiskStore) -> None:
    assert store.load(KEY) is None
    saved(store)
    assert store.load(KEY) == CODE
    assert DiskStore(store.folder).load(KEY) == CODE
    assert store.statistics().hits == 1 and store.statistics().misses == 1


def test_nothing_is_written_before_it_is_needed(store: DiskStore) -> None:
    store.load(KEY)
    store.entries()
    store.prune()
    assert not store.folder.exists()


def test_the_folder_is_that_of_the_settings(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path / "chosen"))
    assert DiskStore().folder == tmp_path / "chosen" / "kernels"


@posix
def test_only_the_user_can_read_what_is_written(store: DiskStore) -> None:
    path = saved(store)
    assert path.stat().st_mode & 0o077 == 0
    assert store.folder.stat().st_mode & 0o077 == 0


# ----------------------------------------------------------------------------------------- damaged


def test_every_flipped_bit_is_noticed(store: DiskStore) -> None:
    path = saved(store)
    whole = path.read_bytes()
    for at in range(len(whole)):
        torn = bytearray(whole)
        torn[at] ^= 1 << (at % 8)
        with pytest.raises(UntrustedError):
            disk_module._decode(bytes(torn), KEY)


def test_every_truncation_is_noticed(store: DiskStore) -> None:
    whole = saved(store).read_bytes()
    for size in range(len(whole)):
        with pytest.raises(UntrustedError):
            disk_module._decode(whole[:size], KEY)
    with pytest.raises(UntrustedError):
        disk_module._decode(whole + b"\0", KEY)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_noise_is_believed(noise: bytes) -> None:
    for data in (noise, b"OSTINATO" + noise):
        with pytest.raises(UntrustedError):
            disk_module._decode(data, KEY)


@settings(deadline=None, max_examples=30)
@given(st.binary(max_size=100), st.text(max_size=20), st.text(max_size=20))
def test_any_code_comes_back(code: bytes, log: str, name: str) -> None:
    compiled = Compiled("cubin", code, log, {name: log})
    data = disk_module._encode(KEY, compiled, name, "sm_90")
    assert disk_module._decode(data, KEY)[0] == compiled


DAMAGE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "torn": lambda whole, other: whole[:100],
    "another key": lambda whole, other: other,
    "damaged": lambda whole, other: other.replace(OTHER, KEY),
    "schema 99": lambda whole, other: whole[:8] + b"\x63" + whole[9:],
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_file_that_is_not_sound_counts_for_nothing(store: DiskStore, caplog, why: str) -> None:
    """It is warned of, and its place can be used again."""
    path = saved(store)
    store.save(OTHER, Compiled("cubin", b"other"))
    path.write_bytes(DAMAGE[why](path.read_bytes(), store.path(OTHER).read_bytes()))
    assert store.load(KEY) is None
    assert why in caplog.text and "compiling again" in caplog.text
    assert store.statistics().rejected == 1
    saved(store)
    assert store.load(KEY) == CODE


# -------------------------------------------------------------------------------------- unwritable


@nvrtc
def test_a_full_disk_costs_speed_alone(tmp_path: Path, monkeypatch, caplog) -> None:
    cache, _ = make_cache(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_open_private", full)
    for number in range(3):
        assert len(cache.get_or_compile(kernel_text(number), "k").info.parameters) == number + 1
    warned = [r for r in caplog.records if "not kept on disk" in r.message]
    assert len(warned) == 1 and "No space left" in warned[0].message
    assert "No space left" in cache.statistics().disk.off


def test_a_write_that_fails_half_way_leaves_nothing(store: DiskStore, monkeypatch) -> None:
    class Torn(io.FileIO):
        def write(self, data: bytes) -> int:
            super().write(data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", Torn, raising=False)
        assert not store.save(KEY, CODE)
    assert list(store.folder.iterdir()) == []


@nvrtc
def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    cache, _ = make_cache(tmp_path / "file" / "kernels")
    for number in range(2):
        assert cache.get_or_compile(kernel_text(number), "k").name == "k"
    assert sum("not kept on disk" in r.message for r in caplog.records) == 1


@posix
@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_still_read(store: DiskStore, caplog) -> None:
    saved(store)
    store.folder.chmod(0o500)
    try:
        again = DiskStore(store.folder)
        assert again.load(KEY) == CODE
        assert not again.save(OTHER, CODE)
        assert again.load(KEY) == CODE
        assert sum("not kept on disk" in r.message for r in caplog.records) == 1
    finally:
        store.folder.chmod(0o700)


@posix
def test_a_read_only_file_system_is_still_read(store: DiskStore, caplog, monkeypatch) -> None:
    saved(store)
    real = os.open

    def read_only(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest)

    monkeypatch.setattr(disk_module.os, "open", read_only)
    assert not store.save(OTHER, CODE)
    assert store.load(KEY) == CODE
    assert sum("not kept on disk" in r.message for r in caplog.records) == 1


@posix
@pytest.mark.parametrize("why", ["others may write", "another user"])
def test_a_folder_of_others(store: DiskStore, caplog, monkeypatch, why: str) -> None:
    store.folder.mkdir()
    me = os.getuid()
    if why == "another user":
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
    else:
        store.folder.chmod(0o777)
    assert not store.save(KEY, CODE)
    assert why in caplog.text


@nvrtc
def test_code_that_the_driver_refuses_is_compiled_again(tmp_path: Path, caplog) -> None:
    make_cache(tmp_path)[0].get_or_compile(kernel_text(1), "k")
    cache, loader = make_cache(tmp_path)
    loader.fail_with = [driver_error(Status.NO_BINARY_FOR_GPU, "module_load")]
    assert cache.get_or_compile(kernel_text(1), "k").name == "k"
    assert cache.statistics().compiles == 1 and "the driver refuses it" in caplog.text


# ----------------------------------------------------------------------------------------- pruning


def fill(store: DiskStore, count: int) -> list[bytes]:
    keys = [bytes([n]) * 32 for n in range(count)]
    for age, key in enumerate(keys):
        store.save(key, Compiled("cubin", bytes(1000)))
        os.utime(store.path(key), (1000 + age, 1000 + age))
    return keys


def test_the_least_recently_used_goes(store: DiskStore) -> None:
    keys = fill(store, 5)
    assert store.load(keys[0]) is not None  # used again: now the youngest
    size = store.path(keys[0]).stat().st_size
    assert store.prune(max_bytes=2 * size) == 3
    assert [k for k in keys if store.path(k).exists()] == [keys[0], keys[4]]


def test_saving_keeps_the_bound(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, max_bytes=3000)
    fill(store, 6)
    assert sum(f.stat().st_size for f in tmp_path.glob("*.kernel")) <= 3000
    assert not store.save(KEY, Compiled("cubin", bytes(4000)))


def test_clear_removes_the_stores_files_alone(store: DiskStore) -> None:
    fill(store, 3)
    (store.folder / "notes.txt").write_text("mine")
    assert store.clear() == 3
    assert (store.folder / "notes.txt").exists() and not store.entries()


def test_left_over_temporaries_go(store: DiskStore) -> None:
    saved(store)
    old, young = (store.folder / f".tmp-{n}-{'a' * 16}" for n in (1, 2))
    own = store.folder / ".tmp-draft.txt"
    for path in (old, young, own):
        path.write_text("half")
    for path in (old, own):
        os.utime(path, (1, 1))
    store.entries()
    assert old.exists(), "a list changes nothing"
    store.prune()
    assert not old.exists() and young.exists() and own.exists()


def test_a_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = DiskStore("kernels")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    saved(store)
    assert store.load(KEY) is not None and (tmp_path / "kernels").is_dir()


@nvrtc
def test_entries_describe_what_is_there(tmp_path: Path) -> None:
    make_cache(tmp_path)[0].get_or_compile(source(1), "k")
    (tmp_path / ("ab" * 32 + ".kernel")).write_bytes(b"junk")
    (tmp_path / "nonsense.kernel").write_bytes(b"junk")
    entries = {e.problem: e for e in DiskStore(tmp_path).entries()}
    sound = entries.pop(None)
    assert (sound.name, sound.arch, sound.entries) == ("worker 1", "sm_90", ("k",))
    assert sorted(entries) == ["it is torn (4 bytes)", "its name, 'nonsense.kernel', is not a key"]
    assert len(DiskStore(tmp_path).entries(check=False)) == 3


# ---------------------------------------------------------------------------------- two processes


def start_worker(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.modules.disk_worker", str(folder)],
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(worker: subprocess.Popen[str]) -> dict[str, object]:
    out, err = worker.communicate()
    assert worker.returncode == 0, err[-3000:]
    return json.loads(out.strip().splitlines()[-1])


@nvrtc
def test_two_processes_on_an_empty_folder(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path) for _ in range(2)]
    answers = [finish(w) for w in workers]
    assert answers[0]["digests"] == answers[1]["digests"]
    entries = DiskStore(tmp_path).entries()
    assert len(entries) == 4 and all(e.problem is None for e in entries)
    assert not list(tmp_path.glob(".tmp-*"))
    later = finish(start_worker(tmp_path))
    assert later["hits"] == later["answers"]


def vandalise(folder: Path, dice: random.Random) -> bool:
    """One random act of damage to one file of the store; whether there was one."""
    files = list(folder.glob("*.kernel"))
    if not files:
        return False
    path = dice.choice(files)
    act = dice.choice(["flip", "cut", "swap", "noise", "remove", "owner", "mode", "link"])
    try:
        data = path.read_bytes()
        if act == "flip" and data:
            at = dice.randrange(len(data))
            torn = bytearray(data)
            torn[at] ^= 1 << dice.randrange(8)
            path.write_bytes(torn)
        elif act == "cut":
            path.write_bytes(data[: dice.randrange(len(data) + 1)])
        elif act == "swap":
            path.write_bytes(dice.choice(files).read_bytes())
        elif act == "noise":
            path.write_bytes(dice.randbytes(dice.randrange(2000)))
        elif act == "remove":
            path.unlink()
        elif act == "owner" and os.getuid() == 0:
            os.chown(path, 12345, -1)
        elif act == "mode":
            path.chmod(dice.choice([0o000, 0o400, 0o666]))
        elif act == "link":
            path.unlink()
            path.symlink_to(dice.choice(files))
    except OSError:
        pass  # the workers write and remove meanwhile
    return True


@nvrtc
@posix
def test_a_vandalised_folder_under_two_processes(tmp_path: Path) -> None:
    dice = random.Random(7)
    workers = [start_worker(tmp_path) for _ in range(2)]
    acts = 0
    while acts < 80 and all(w.poll() is None for w in workers):
        acts += vandalise(tmp_path, dice)
        time.sleep(0.005)
    for path in tmp_path.glob("*.kernel"):
        with contextlib.suppress(OSError):
            os.truncate(path, 10)
    answers = [finish(w) for w in workers]
    assert acts == 80
    for number in map(str, range(4)):
        found = {d for a in answers for d in a["digests"][number]}
        assert len(found) == 1, "one source, one code, whatever the folder held"
    assert sum(a["rejected"] for a in answers) > 0
