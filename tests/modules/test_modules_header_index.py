"""What was read of headers is believed by later processes only as long as it is so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.modules import header_index, headers
from ostinato.modules.header_index import HeaderIndex
from ostinato.modules.headers import Dependencies, find_dependencies

posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users and modes are POSIX's")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "toolkit"
    root.mkdir()
    write(root / "a.h", '#include "b.h"\n#include <none.h>\n')
    write(root / "b.h", "#define B 1\n")
    return root


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    new_process(monkeypatch)


def write(path: Path, text: str, *, settled: bool = True) -> None:
    path.write_text(text)
    if settled:
        now = path.stat().st_mtime_ns
        os.utime(path, ns=(now, now - 10_000_000_000))


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before: dict[str, headers.Read] = {}
    monkeypatch.setattr(headers, "read_before", before)
    monkeypatch.setattr(header_index, "read_before", before)


def ask(root: Path) -> Dependencies:
    return find_dependencies('#include "a.h"\n', {}, [str(root)])


def index(root: Path) -> HeaderIndex:
    return HeaderIndex(str(root), root.parent / "cache")


def remembered(root: Path, monkeypatch: pytest.MonkeyPatch) -> Dependencies:
    """A process reads and remembers; then another begins."""
    found = ask(root)
    index(root).remember()
    new_process(monkeypatch)
    return found


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    real = headers._scan
    monkeypatch.setattr(headers, "_scan", lambda text: (reads.append(text), real(text))[1])
    return reads


def test_what_was_read_is_not_read_again(root: Path, monkeypatch) -> None:
    before = remembered(root, monkeypatch)
    index(root).recall()
    reads = count_reads(monkeypatch)
    assert ask(root) == before
    assert reads == ['#include "a.h"\n']  # the source itself


@pytest.mark.parametrize("name", ["a.h", "b.h"])
def test_a_changed_header_is_read_again(name: str, root: Path, monkeypatch) -> None:
    before = remembered(root, monkeypatch)
    write(root / name, (root / name).read_text() + "// changed\n")
    index(root).recall()
    after = ask(root)
    assert [f.digest for f in after.files] != [f.digest for f in before.files]


def test_a_removed_header_is_gone(root: Path, monkeypatch) -> None:
    remembered(root, monkeypatch)
    (root / "b.h").unlink()
    index(root).recall()
    assert ask(root).missing == ("b.h", "none.h")


def test_a_header_that_was_just_written_is_not_remembered(root: Path, monkeypatch) -> None:
    # It may change again within the grain of its clock, and nobody could tell.
    write(root / "b.h", "#define B 2\n", settled=False)
    remembered(root, monkeypatch)
    index(root).recall()
    assert list(headers.read_before) == [str(root / "a.h")]


def test_others_headers_are_not_remembered(root: Path, tmp_path: Path, monkeypatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    write(own / "b.h", "")
    find_dependencies('#include "a.h"\n', {}, [str(own), str(root)])
    index(root).remember()
    new_process(monkeypatch)
    index(root).recall()
    assert set(headers.read_before) == {str(root / "a.h"), str(root / "b.h")}


def test_it_grows_and_is_written_only_then(root: Path, monkeypatch) -> None:
    remembered(root, monkeypatch)
    second = index(root)
    second.recall()
    ask(root)
    second.path.unlink()
    second.remember()
    assert not second.path.exists()
    write(root / "c.h", "")
    find_dependencies('#include "c.h"\n', {}, [str(root)])
    second.remember()
    assert len(json.loads(second.path.read_text())["files"]) == 3
    assert not list(second.path.parent.glob(".*"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=80))
def test_a_damaged_index_is_no_index(root: Path, noise: bytes) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        new_process(monkeypatch)
        before = remembered(root, monkeypatch)
        path = index(root).path
        whole = path.read_bytes()
        for data in (noise, whole[: len(noise)], noise + whole, whole[: -len(noise) or None]):
            path.write_bytes(data)
            new_process(monkeypatch)
            index(root).recall()
            assert ask(root) == before


@pytest.mark.parametrize(
    "damage",
    [
        {"schema": 0},
        {"root": "/elsewhere"},
        {"files": {"a.h": [1, 2]}},
        {"files": {"a.h": [1, 2, 3, "zz", True, []]}},
        {"files": {"a.h": [1, 2, 3, "00", True, []]}},
        {"files": []},
    ],
)
def test_an_index_that_does_not_fit_is_none(damage: dict[str, object], root, monkeypatch) -> None:
    remembered(root, monkeypatch)
    path = index(root).path
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    index(root).recall()
    assert not headers.read_before


@posix
def test_an_index_that_others_may_write_is_not_read(root: Path, monkeypatch) -> None:
    remembered(root, monkeypatch)
    index(root).path.chmod(0o666)
    index(root).recall()
    assert not headers.read_before


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(root: Path, monkeypatch) -> None:
    (root.parent / "cache").write_text("in the way")
    before = remembered(root, monkeypatch)
    index(root).recall()
    assert ask(root) == before
